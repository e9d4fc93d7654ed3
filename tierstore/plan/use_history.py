"""The latest uses of a schedule's keys, and what they foretell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.plan.matching import NOWHERE, Numbers, best_matches

Ranks = npt.NDArray[np.float64]


class UseHistory:
    """The latest uses, by the numbers of the keys, and the place in them that matches the present.

    What followed that place is expected again. A `rival` is an older place that fits as well. Both
    are negative where nothing matches. `last` is by number the last place of a key, negative if
    there is none.
    """

    def __init__(self, room: int) -> None:
        self.length = 0
        self.place = self.rival = NOWHERE
        self.last = np.full(room, NOWHERE)
        self._uses: Numbers = np.zeros(0, dtype=np.int64)
        self._following = self._uses  # place -> where its key comes next
        self._next: Ranks | None = None  # by number, the next place ahead; made on demand

    def make_room(self) -> None:
        """For twice as many numbers."""
        self.last = np.append(self.last, np.full(len(self.last), NOWHERE))
        self._next = None

    @property
    def full(self) -> bool:
        """Whether there is no room for another use."""
        return self.length == len(self._uses)

    def forget_the_oldest(self, kept: int) -> None:
        """Make room for as many uses as are `kept`, the newest."""
        gone = max(self.length - kept, 0)
        uses, following = np.zeros((2, 2 * kept), dtype=np.int64)
        self.length -= gone
        uses[: self.length] = self._uses[gone:]
        following[: self.length] = self._following[gone:] - gone
        self._uses, self._following = uses, following
        self.last -= gone
        self.place -= gone
        self.rival -= gone
        self._next = None

    def foretells(self, place: int, number: int) -> bool:
        """Whether the place is one, and a use of `number` followed it."""
        return place >= 0 and self._uses.item(place + 1) == number

    def add(self, number: int) -> bool:
        """A use. Returns whether the places foretell other uses than they did before it."""
        foreseen, both = self.foretells(self.place, number), self.foretells(self.rival, number)
        changed = not foreseen or (self.rival >= 0 and not both)
        before, here = self.last.item(number), self.length
        if before >= 0:
            self._following[before] = here
        self._uses[here] = number
        self.last[number] = here
        self.length += 1
        if foreseen:
            self.place += 1
            self.rival = self.rival + 1 if both else NOWHERE
        elif before >= 0:
            self.place, self.rival = best_matches(self._uses[: self.length])
        else:
            self.place = self.rival = NOWHERE
        if changed:
            self._next = None
        elif self._next is not None:
            self._next[number] = self._place_again()
        return changed

    def _place_again(self) -> int:
        """The place of the next use of the key in use."""
        place, rival = self.place, self.rival
        again = self._following.item(place)
        return again if rival < 0 else min(again, self._following.item(rival) + place - rival)

    def next_places(self) -> Ranks:
        """For every number, the place of its next use in the history that repeats itself: seen from
        the place that matches, or from the rival, whichever is sooner; infinity for never."""
        if self._next is None:
            self._next = self._places_after(self.place)
            if self.rival >= 0:
                nearer = self._places_after(self.rival) + (self.place - self.rival)
                np.minimum(self._next, nearer, out=self._next)
        return self._next

    def _places_after(self, place: int) -> Ranks:
        found = np.full(len(self.last), np.inf)
        future = self._uses[place + 1 : self.length]
        # Assigned backwards, so that the first occurrence is what remains.
        found[future[::-1]] = np.arange(self.length - 1, place, -1)
        return found

    def following(self, count: int) -> Numbers:
        """The numbers of the uses that are expected, so many at most."""
        return self._uses[self.place + 1 : min(self.place + 1 + count, self.length)]
