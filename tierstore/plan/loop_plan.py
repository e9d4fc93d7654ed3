"""The plan of a loop: every copy of one pass, decided once and the same in every pass.

A *loop* is a row of steps that repeats. A step is one use of a unit: it needs some groups on the
fastest tier while it computes. A group is contiguous there, as its tensors have to be; it moves in
*tiles* of about the same size.

A plan is data. Three rules say how it is followed, and nothing else has to be decided:

1. A step begins once the first `PlannedStep.arrivals` copies into the fastest tier have ended. Its
   groups are then at `PlannedStep.addresses`.
2. The copies into a tier are made in their order, one after the other. Of the fastest tier, copy
   number k may begin once step `TileCopy.after` has ended; of a lower one, once the copy of that
   number into the tier above has ended.
3. A copy reads from `TileCopy.source` on the tier below, once copy number `TileCopy.source_ready`
   into that tier has ended. If `source` is None, it reads from the group's file.

Steps and the copies into each tier are numbered from 0 in each pass. A negative number is one of
the pass before: -1 is its last. So copies run ahead into the next pass as far as these rules let
them, and whoever follows the plan keeps one count for the steps and one for each tier.

Every tier is one piece of memory of `TierPlan.nbytes`, and addresses count from its first byte.
Before the first pass, the groups of `TierPlan.start` are brought to their addresses. They are there
at the beginning of every pass. No other memory is used: budgets are kept by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tierstore.model.tiers import Tier


@dataclass(frozen=True, slots=True)
class Step:
    """One use of a unit: the numbers of the groups it needs, and the seconds it computes."""

    unit: str
    groups: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Loop:
    """The steps of one pass, and the bytes of each group, by number.

    Raises ValueError if a step names a group twice or one that has no size.
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
        """Seconds of computing of a pass."""
        return sum(step.seconds for step in self.steps)

    def nbytes(self, groups: Iterable[int]) -> int:
        """Bytes of these groups."""
        return sum(self.sizes[group] for group in groups)


@dataclass(frozen=True, slots=True)
class TileCopy:
    """Bytes of a group, from byte `offset` of it on, that go to byte `target` of a tier's memory.

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
    """Bytes of a group, from byte `offset` of it on, and where they are in a tier's memory."""

    group: int
    offset: int
    nbytes: int
    address: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What happens on one tier. It takes `nbytes` of memory there.

    `start` is there at the beginning of every pass, each group as a whole. `copies` are those of
    one pass into this tier. `released` tells, for each step (or each copy into the tier above), how
    many of the copies may have begun when it ends, counted from the first of this pass; more than
    there are in a pass means copies of the next one.
    """

    tier: Tier
    nbytes: int
    start: tuple[Resident, ...]
    copies: tuple[TileCopy, ...]
    released: tuple[int, ...]

    @property
    def moved(self) -> int:
        """Bytes that are copied into the tier in each pass."""
        return sum(copy.nbytes for copy in self.copies)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Where the groups of a step are while it computes, in the order in which the step names them,
    and how many copies of its pass must have arrived on the fastest tier before."""

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
        """Where the copies into each tier come from, and where they go."""
        tiers = [*(planned.tier for planned in self.tiers), Tier.DISK]
        return [(src, dst) for dst, src in pairwise(tiers)]

    @property
    def bytes_read(self) -> int:
        """Bytes that are read from disk in each pass."""
        return self.tiers[-1].moved

    @property
    def cut_groups(self) -> set[int]:
        """The groups of which only tiles are copied."""
        copies = (copy for tier in self.tiers for copy in tier.copies)
        return {copy.group for copy in copies if copy.nbytes < self.loop.sizes[copy.group]}

    def timed(self, seconds: Sequence[float]) -> LoopPlan:
        """Return the same plan of steps that compute for so long."""
        steps = zip(self.loop.steps, seconds, strict=True)
        timed = tuple(replace(step, seconds=spent) for step, spent in steps)
        return replace(self, loop=replace(self.loop, steps=timed))

    def missing(self, there: Mapping[int, Sequence[Tier]]) -> dict[tuple[Tier, Tier], int]:
        """Bytes that have to be moved before the first pass, where groups are `there` already: so
        many over each way. What is on a tier is not copied from a slower one, nor back to one."""
        moved = dict.fromkeys(self.ways, 0)
        for level, planned in enumerate(self.tiers):
            for each in planned.start:
                tiers = there.get(each.group, ())
                for src, dst in self.ways[level:]:
                    if dst in tiers:
                        break
                    moved[src, dst] += each.nbytes
        return moved
