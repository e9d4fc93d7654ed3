"""The plan of a loop: every copy of one pass, decided once and the same in every pass.

A *loop* is a sequence of steps that repeats. A step is one use of a unit: it needs some groups on
the fastest tier while it computes. A group is contiguous there, because its tensors must be; it
moves in *tiles* of about equal size.

A plan is data. Following it takes three rules and no decisions:

1. A step begins once the first `PlannedStep.arrivals` copies into the fastest tier have ended. Its
   groups are then at `PlannedStep.addresses`.
2. The copies into a tier are made in order, one after the other. A copy into the fastest tier may
   begin once step `TileCopy.after` has ended; a copy into a lower one, once the copy of that number
   into the tier above has ended.
3. A copy reads from `TileCopy.source` on the tier below, once copy number `TileCopy.source_ready`
   into that tier has ended. If `source` is None, it reads from the group's file.

Steps and the copies into each tier are numbered from 0 in each pass. Negative numbers refer to the
previous pass: -1 is its last. So copies run ahead into the next pass as far as these rules allow,
and a follower needs one count for the steps and one for each tier.

Every tier is one piece of memory of `TierPlan.nbytes`, and addresses count from its first byte.
Before the first pass, the groups of `TierPlan.start` are moved to their addresses. They are there
again at the beginning of every pass. No other memory is used, so budgets hold by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tierstore.model.tiers import Tier


@dataclass(frozen=True, slots=True)
class Step:
    """One use of a unit: the numbers of its groups, and its seconds of computing."""

    unit: str
    groups: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Loop:
    """The steps of one pass, and the bytes of each group, by number.

    Raises ValueError if a step names a group twice, or one that has no size.
    """

    steps: tuple[Step, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        for step in self.steps:
            known = all(0 <= group < len(self.sizes) for group in step.groups)
            if not known or len(set(step.groups)) < len(step.groups):
                raise ValueError(f"step {step.unit!r} names a group that is unknown, or one twice")

    @property
    def seconds(self) -> float:
        """Seconds of computing in a pass."""
        return sum(step.seconds for step in self.steps)

    def nbytes(self, groups: Iterable[int]) -> int:
        """Return the total bytes of these groups."""
        return sum(self.sizes[group] for group in groups)


@dataclass(frozen=True, slots=True)
class TileCopy:
    """A copy of `nbytes` bytes of a group, from `offset`, to byte `target` of a tier's memory.

    `after`, `source` and `source_ready` are explained in the module's docstring.
    """

    group: int
    offset: int
    nbytes: int
    target: int
    after: int
    source: int | None = None
    source_ready: int | None = None


@dataclass(frozen=True, slots=True)
class Resident:
    """`nbytes` bytes of a group, from `offset`, and their address in a tier's memory."""

    group: int
    offset: int
    nbytes: int
    address: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The plan of one tier, which takes `nbytes` bytes of memory.

    `start` has the complete groups that are there at the beginning of every pass. `copies` are the
    copies of one pass into this tier. For each step (or each copy into the tier above), `released`
    has the number of copies, counted from the first of the pass, that may have begun when it ends;
    numbers beyond the copies of a pass refer to the next pass.
    """

    tier: Tier
    nbytes: int
    start: tuple[Resident, ...]
    copies: tuple[TileCopy, ...]
    released: tuple[int, ...]

    @property
    def moved(self) -> int:
        """Bytes copied into the tier in each pass."""
        return sum(copy.nbytes for copy in self.copies)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The addresses of a step's groups, in the step's order, and the copies it waits for.

    `arrivals` is the number of copies of its pass into the fastest tier that must end first.
    """

    addresses: tuple[int, ...]
    arrivals: int


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The plan of a loop, for the tiers in memory, the fastest first."""

    loop: Loop
    steps: tuple[PlannedStep, ...]
    tiers: tuple[TierPlan, ...]

    @property
    def top(self) -> TierPlan:
        """The fastest tier, where steps find their groups."""
        return self.tiers[0]

    @property
    def ways(self) -> list[tuple[Tier, Tier]]:
        """Source and destination tier of the copies into each tier."""
        tiers = [*(planned.tier for planned in self.tiers), Tier.DISK]
        return [(src, dst) for dst, src in pairwise(tiers)]

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk in each pass."""
        return self.tiers[-1].moved

    @property
    def tiled_groups(self) -> set[int]:
        """Groups that are copied in several tiles."""
        copies = (copy for tier in self.tiers for copy in tier.copies)
        return {copy.group for copy in copies if copy.nbytes < self.loop.sizes[copy.group]}

    def timed(self, seconds: Sequence[float]) -> LoopPlan:
        """Return the same plan with these seconds of computing, one for each step."""
        steps = zip(self.loop.steps, seconds, strict=True)
        timed = tuple(replace(step, seconds=spent) for step, spent in steps)
        return replace(self, loop=replace(self.loop, steps=timed))

    def missing(self, there: Mapping[int, Sequence[Tier]]) -> dict[tuple[Tier, Tier], int]:
        """Return the bytes to move over each hop before the first pass.

        `there` has the tiers of each group that is resident. A group is not copied to a tier that
        it is on, and never from a faster tier to a slower one.
        """
        moved = dict.fromkeys(self.ways, 0)
        for level, planned in enumerate(self.tiers):
            for each in planned.start:
                tiers = there.get(each.group, ())
                for src, dst in self.ways[level:]:
                    if dst in tiers:
                        break
                    moved[src, dst] += each.nbytes
        return moved
