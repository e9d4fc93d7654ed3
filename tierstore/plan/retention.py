"""Which groups should stay, so that the others stream evenly.

In a loop that does not fit, as many bytes are read per round whichever groups stay. But it matters
when they are read. Where groups that follow each other all stay, the disk soon has nothing to do,
as it may only run so far ahead; where many that follow each other are missing, computing waits for
it. Farthest next use is blind to this: of a loop, it keeps what happened to be there. So, where a
round waits much longer than it had to, the groups that stay are chosen to leave the disk an even
load. One walks through a round with an account of bytes that the disk could have read meanwhile.
Computing fills it, up to what may be fetched ahead; each read is charged to it; and a group that
finds too little in it stays. How fast it fills is found by bisection, so that as much stays as
there is room for. (Error diffusion, Floyd and Steinberg, 1976, in time instead of on paper.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.model import shares
from tierstore.plan.matching import Numbers
from tierstore.plan.schedule import Schedule

WORTH = 0.9
"""An even load is worth its while if it takes at most this share of the time a round takes now."""
SETTLED = 0.8
"""A round that waits no less than this share of what the one before it waited has settled: what
stays by itself gets no better."""
FIRM = 0.7
"""From one round to the next, the groups that should stay count as needed so many times sooner: who
is there instead leaves little by little, and hardly a round reads more than the others."""
AHEAD_GROUPS = 3
"""Room for so many of the largest groups is left to what streams."""
BISECTIONS = 10
STEEPEST = 8.0
"""The fastest that the account fills, compared with what an even load needs on average."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Visits:
    """One round of a loop: which groups it needs, in this order; and for each visit the bytes of
    the group, and the seconds of computing until the next one."""

    order: list[int]
    nbytes: list[int]
    seconds: list[float]


@dataclass(frozen=True)
class EvenLoad:
    """The groups that stay, and the bytes that are then missed in each round."""

    staying: list[int]
    missed: int


class RetentionSet:
    """Says once per round of a loop which groups should stay in a tier of `budget` bytes, and of as
    many `beside` it as others allow at that time.

    Groups go by the numbers of the schedule. Tell it of every use, and of the seconds that pass.
    `staying` are the groups; they should count as if their next use were `nearer` times as far.
    """

    def __init__(self, schedule: Schedule, budget: int | None) -> None:
        self.staying: list[int] = []
        self.nearer = 1.0
        self.beside = 0
        self._schedule = schedule
        self._budget = budget
        self._latest: int | None = None
        self._uses = 0
        self._round_began = 0  # the use with which the latest round that counts began
        self._length = 0  # of that round, in uses
        self._look_again = 0
        self._computed = 0.0
        self._waited = 0.0
        self._waited_before = np.inf
        # Rounds until the choice may change once more, and how many of them are left.
        self._patience: int
        self._rounds_left: int

    def passed(self, *, computed: float = 0.0, waited: float = 0.0) -> None:
        """So many seconds passed."""
        self._computed += computed
        self._waited += waited

    def round_of(self, number: int) -> int:
        """After a use: the uses of the round that now begins, or 0 if none does that counts."""
        if number == self._latest or self._budget is None:
            return 0
        self._latest = number
        self._uses += 1
        since = self._uses - self._round_began
        length = self._schedule.round(number)
        begins = 0 < length <= since and self._uses >= self._look_again
        begins = begins and self._schedule.repeats(length)
        if begins:
            self._look_again = self._uses + length  # one that does not count is not looked at twice
        if not begins and self.staying and since > 2 * self._length:
            self._choose([])  # the loop is over
        return length if begins else 0

    def begin_round(self, order: Numbers, nbytes: Numbers, seconds: Seconds, speed: float) -> None:
        """A round begins: see who should stay. For each use of it, the group and its bytes, and the
        seconds of computing that follow; `speed` is that of the disk, in bytes per second."""
        assert self._budget is not None
        budget = self._budget + self.beside
        ahead = AHEAD_GROUPS * int(nbytes.max())
        total = sum(dict(zip(order.tolist(), nbytes.tolist(), strict=True)).values())
        if total <= budget // shares.LOOP or ahead > budget // shares.STREAMED:
            return  # a loop within a loop: the larger one counts; or groups too large to stream
        took = self._take_meters(len(order))
        self.nearer *= FIRM
        if total <= budget or set(self.staying).difference(order.tolist()):
            self._choose([])
        if (
            total > budget
            and took is not None
            and took[0] <= WORTH * sum(took)
            and self._rounds_left <= 0
        ):
            loop = visits(order, nbytes, seconds, budget // shares.LOOP)
            found = even_load(loop, room=budget - ahead, ahead=ahead)
            if found is not None and max(took[0], found.missed / speed) <= WORTH * sum(took):
                self._choose(found.staying)
                self._patience *= 2  # what was not right twice may never be
                self._rounds_left = self._patience

    def _choose(self, staying: list[int]) -> None:
        self.staying, self.nearer = staying, FIRM

    def _take_meters(self, length: int) -> tuple[float, float] | None:
        """The seconds that the last round computed and waited; None if they say nothing yet."""
        since = self._uses - self._round_began
        computed, waited = self._computed, self._waited
        settled = since <= 1.5 * length and waited >= SETTLED * self._waited_before
        if length != self._length:
            self._patience = self._rounds_left = 1
        self._rounds_left -= 1
        self._round_began, self._length = self._uses, length
        self._computed, self._waited, self._waited_before = 0.0, 0.0, waited
        return (computed, waited) if settled else None


def visits(order: Numbers, nbytes: Numbers, seconds: Seconds, near: int) -> Visits:
    """What a round of uses visits. A group that comes again before `near` other bytes did is still
    there: that is the same visit."""
    found = Visits([], [], [])
    passed, left = 0, dict[int, int]()  # left: what had passed when the group was used last
    for number, size, computing in zip(
        order.tolist(), nbytes.tolist(), seconds.tolist(), strict=True
    ):
        if number in left and passed - left[number] <= near:
            found.seconds[-1] += computing
        else:
            passed += size
            found.order.append(number)
            found.nbytes.append(size)
            found.seconds.append(computing)
        left[number] = passed
    return found


def even_load(loop: Visits, *, room: int, ahead: int) -> EvenLoad | None:
    """Choose who stays, of at most `room` bytes, if `ahead` bytes may be fetched early.

    What is visited more often in a round goes before what is visited less often; the even load
    decides among equals. None if all fit, or if there is no computing to spread reading over.
    """
    numbers, first, often = np.unique(np.array(loop.order), return_index=True, return_counts=True)
    nbytes = np.array(loop.nbytes)[first]
    computing = sum(loop.seconds)
    if computing <= 0 or nbytes.sum() <= room:
        return None
    ranked = np.argsort(-often, kind="stable")
    limit = often[ranked[np.searchsorted(np.cumsum(nbytes[ranked]), room, side="right")]]
    always = often > limit
    room -= int(nbytes[always].sum())
    missed = int((nbytes * often)[~always].sum()) - room * int(limit)
    walk = RoundWalk(loop, set(numbers[always].tolist()), set(numbers[often == limit].tolist()))
    low, high, found = 0.0, STEEPEST * missed / computing, set[int]()
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        staying, held = walk.staying(rate, ahead)
        if held > room:
            low = rate
        else:
            high, found = rate, staying
    return EvenLoad([*numbers[always].tolist(), *found], missed)


@dataclass(frozen=True)
class RoundWalk:
    """Walks through a round for one rate after another: who may stay, and who stays always."""

    loop: Visits
    always: set[int]
    eligible: set[int]

    def staying(self, rate: float, most: float) -> tuple[set[int], int]:
        """Who stays, and their bytes, if each second of computing earns `rate` bytes of reading,
        and `most` can be saved up."""
        *_, left = self._round(rate, most, most)  # a round begins with what the one before it left
        staying, held, _ = self._round(rate, most, left)
        return staying, held

    def _round(self, rate: float, most: float, account: float) -> tuple[set[int], int, float]:
        """Who stays, their bytes, and what is left in the account."""
        staying, held = set[int](), 0
        for number, nbytes, seconds in zip(
            self.loop.order, self.loop.nbytes, self.loop.seconds, strict=True
        ):
            if number not in self.always and number not in staying:
                if account < nbytes and number in self.eligible:
                    staying.add(number)
                    held += nbytes
                else:
                    account = max(account - nbytes, 0.0)
            account = min(most, account + seconds * rate)
        return staying, held, account
