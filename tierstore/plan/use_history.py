"""The latest uses of a schedule's keys, and the uses expected from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.plan.matching import NOWHERE, Numbers, best_matches

Ranks = npt.NDArray[np.float64]


class UseHistory:
    """The latest uses, by number of the key, and the `place` that best matches the newest ones.

    The uses that followed that place are expected again. `rival` is an older place that matches as
    well. Both are negative if nothing matches. `last` has the last place of each number, negative
    if there is none.
    """

    def __init__(self, size: int) -> None:
        self.length = 0
        self.place = self.rival = NOWHERE
        self.last = np.full(size, NOWHERE)
        self._uses: Numbers = np.zeros(0, dtype=np.int64)
        self._following = self._uses  # place -> where its key comes next
        self._next: Ranks | None = None  # by number, the next place ahead; made on demand

    def grow(self) -> None:
        """Double the number of keys."""
        self.last = np.append(self.last, np.full(len(self.last), NOWHERE))
        self._next = None

    @property
    def full(self) -> bool:
        """True if there is no space for another use."""
        return self.length == len(self._uses)

    def drop_oldest(self, kept: int) -> None:
        """Keep the newest `kept` uses, and make space for as many more."""
        dropped = max(self.length - kept, 0)
        uses, following = np.zeros((2, 2 * kept), dtype=np.int64)
        self.length -= dropped
        uses[: self.length] = self._uses[dropped:]
        following[: self.length] = self._following[dropped:] - dropped
        self._uses, self._following = uses, following
        self.last -= dropped
        self.place -= dropped
        self.rival -= dropped
        self._next = None

    def expects(self, place: int, number: int) -> bool:
        """Return whether `place` is valid and a use of `number` followed it."""
        return place >= 0 and self._uses.item(place + 1) == number

    def add(self, number: int) -> bool:
        """Append a use. Returns whether the expected uses have changed."""
        is_expected, both = self.expects(self.place, number), self.expects(self.rival, number)
        changed = not is_expected or (self.rival >= 0 and not both)
        before, here = self.last.item(number), self.length
        if before >= 0:
            self._following[before] = here
        self._uses[here] = number
        self.last[number] = here
        self.length += 1
        if is_expected:
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
        """Return the place at which the key just used is expected next."""
        place, rival = self.place, self.rival
        again = self._following.item(place)
        return again if rival < 0 else min(again, self._following.item(rival) + place - rival)

    def next_places(self) -> Ranks:
        """Return the place of each number's next expected use; infinity for never.

        Uses after the matching place and after the rival are considered; the sooner one counts.
        """
        if self._next is None:
            self._next = self._places_after(self.place)
            if self.rival >= 0:
                nearer = self._places_after(self.rival) + (self.place - self.rival)
                np.minimum(self._next, nearer, out=self._next)
        return self._next

    def _places_after(self, place: int) -> Ranks:
        found = np.full(len(self.last), np.inf)
        future = self._uses[place + 1 : self.length]
        # Assigned backwards, so the first occurrence remains.
        found[future[::-1]] = np.arange(self.length - 1, place, -1)
        return found

    def following(self, count: int) -> Numbers:
        """Return the numbers of the next expected uses, at most `count`."""
        return self._uses[self.place + 1 : min(self.place + 1 + count, self.length)]
