"""Computes the plan of a loop.

The tiers are planned from the top down, each in the same way (`loop_tiers`): the groups that a tier
has to fetch are requested from the tier below. So the tiers share no group except while it moves: a
group that stays on the device needs no copy in host memory. Groups stay whole; on the way to the
fastest tier, only single tiles of a group are in memory.

The best size of the rings depends on the speeds: a larger ring evens out more variation, but leaves
less space for groups that stay. The planner tries a few ring sizes, and a few amounts that stay for
good, on a virtual clock (`loop_timing`), and takes the best. Speeds affect nothing else, so a plan
is correct whatever the speeds turn out to be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.model import shares
from tierstore.model.outline import TILE, tiles
from tierstore.model.tiers import Tier, in_memory
from tierstore.plan.loop_plan import Loop, LoopPlan
from tierstore.plan.loop_tiers import TierDraft
from tierstore.plan.loop_timing import seconds_per_pass
from tierstore.plan.loop_waits import TierRequest, TiledGroup

WORTH = 0.002
"""Fraction of a pass that a larger ring must save to be worth its bytes."""
RING_GROWTH = 1.3
"""Factor between one ring size and the next that is tried."""
NEARBY = (0.88, 0.94, 1.06, 1.12)
"""Further sizes to try for the ring of the fastest tier, as multiples of the best so far."""
USUAL_LOWER_RING = 4
"""First size to try for the rings below the fastest tier, in tiles."""
LOWER_RINGS = (0.5, 1.5, 2.0, 3.0, 5.0)
"""Further sizes to try for the lower rings, as multiples of the best so far."""
NEIGHBOURS = 1
"""Largest distance in steps at which two uses of a shared group count as one request."""


def plan_loop(
    loop: Loop,
    budgets: Mapping[Tier, int | None],
    bandwidth: Mapping[tuple[Tier, Tier], float],
    tile: int = TILE,
    whole: Collection[int] = (),
) -> LoopPlan | None:
    """Plan a loop for these budgets (bytes; None: no limit), at these speeds (bytes per second).

    Groups move in tiles of up to `tile` bytes, a multiple of a page; the groups in `whole` (by
    number) move in one piece. Returns None if the budgets are too small for any plan: then the
    general planner handles the loop, use by use.
    """
    memory = in_memory(budgets)
    sources = [*memory[1:], Tier.DISK]
    speeds = [bandwidth.get((src, dst)) for src, dst in zip(sources, memory, strict=True)]
    every = loop.nbytes(range(len(loop.sizes)))
    limits = [every if budgets[tier] is None else budgets[tier] or 0 for tier in memory]
    groups = [
        TiledGroup(((0, nbytes),) if number in whole else tuple(tiles(nbytes, tile)))
        for number, nbytes in enumerate(loop.sizes)
    ]
    return _Drafter(loop, groups, memory, limits, speeds).best()


class _Drafter:
    """Drafts plans of one loop with rings of different sizes."""

    def __init__(
        self,
        loop: Loop,
        groups: Sequence[TiledGroup],
        tiers: Sequence[Tier],
        limits: Sequence[int],
        speeds: Sequence[float | None],
    ) -> None:
        self._loop = loop
        self._groups = groups
        self._tiers = tiers
        self._limits = limits
        self._speeds = speeds
        self._tile = max(nbytes for group in groups for _, nbytes in group.tiles)

    def best(self) -> LoopPlan | None:
        """Return the plan with the shortest passes; near-ties go to the one that moves less."""
        found: _Timed | None = None
        for for_good in self._shares_for_good():
            found = _better(found, self._with_best_rings(for_good))
        return None if found is None else found.plan

    def _shares_for_good(self) -> list[int]:
        """Return the numbers of bytes to try that stay on the fastest tier for good.

        The tier's whole limit lets each step fetch its share. Zero fetches the fewest bytes to that
        tier. The bytes for which the other tiers have no space avoid reads from disk. If each group
        is used once in a pass, all waits are equally long, and only the first makes sense.
        """
        uses = [group for step in self._loop.steps for group in step.groups]
        every, limit = sum(self._loop.sizes), self._limits[0]
        if len(uses) == len(set(uses)):
            return [limit]
        beside = min(max(every - sum(self._limits[1:]), 0), limit)
        return list(dict.fromkeys((limit, 0, beside)))

    def _with_best_rings(self, for_good: int) -> _Timed | None:
        lower = [min(USUAL_LOWER_RING * self._tile, limit) for limit in self._limits[1:]]
        found: _Timed | None = None
        for ring in self._top_rings():
            if found is not None and ring > self._usual_ring(0):
                break
            tried = self._timed(_Choice((ring, *lower), for_good), found)
            if found is not None and tried is not None and self._least(tried.plan) > found.seconds:
                break  # a larger ring moves even more bytes
            found = _better(found, tried)
            if found is not None and found.seconds <= (1 + WORTH) * self._loop.seconds:
                break  # no step waits
        if found is None or not found.plan.top.copies:
            return found
        for level, nearby in [(level, LOWER_RINGS) for level in range(1, len(lower) + 1)] + [
            (0, NEARBY)
        ]:
            rings = found.choice.rings
            most = max(self._usual_ring(level), rings[level])
            for share in nearby:
                ring = min(int(rings[level] * share), most)
                choice = _Choice((*rings[:level], ring, *rings[level + 1 :]), for_good)
                found = _better(found, self._timed(choice, found)) or found
        return found

    def _top_rings(self) -> Iterator[int]:
        """Yield ring sizes for the fastest tier, the smallest first.

        The size needed depends on what stays for good, so all sizes are tried for each amount.
        """
        ring, most = float(max(self._loop.sizes)), self._usual_ring(0)
        while ring < self._limits[0]:
            yield int(ring)
            if ring < most < ring * RING_GROWTH:
                yield most
            ring *= RING_GROWTH
        yield self._limits[0]

    def _usual_ring(self, level: int) -> int:
        """Return the largest ring, in bytes, to use unless only a larger one gives a plan."""
        return self._limits[level] // shares.RING

    def _least(self, plan: LoopPlan) -> float:
        """Return a lower bound on the seconds of a pass that moves the bytes of this plan."""
        speeds = zip(plan.tiers, self._speeds, strict=True)
        return max(tier.moved / speed if speed else 0.0 for tier, speed in speeds)

    def _timed(self, choice: _Choice, like: _Timed | None) -> _Timed | None:
        """Draft and time a plan with this choice, at the pace of a similar plan `like`."""
        pace = [speed or 1.0 for speed in self._speeds] if like is None else like.pace
        plan = self.draft(choice, pace)
        if plan is None:
            return None
        return _Timed(plan, choice, seconds_per_pass(plan, self._speeds))

    def draft(self, choice: _Choice, pace: Sequence[float]) -> LoopPlan | None:
        """Draft the plan with this choice. Returns None if its rings are too small.

        `pace` has the bytes copied into each tier per second, averaged over a pass.
        """
        loop, groups = self._loop, self._groups
        seconds = [step.seconds for step in loop.steps]
        if not any(seconds):
            seconds = [float(loop.nbytes(step.groups)) for step in loop.steps]
        requests = requests_of(loop, groups)
        users, drafts = len(loop.steps), list[TierDraft]()
        for tier, limit, ring, each in zip(
            self._tiers, self._limits, choice.rings, pace, strict=True
        ):
            draft = TierDraft(tier, requests, users, groups, is_fastest=not drafts)
            for_good = 0 if drafts else choice.for_good
            if not draft.fill(limit, ring, [each * spent for spent in seconds], for_good):
                return None
            if drafts:
                drafts[-1].read_from(draft)
            drafts.append(draft)
            seconds = draft.seconds_with_copies(seconds, each)
            requests, users = draft.fetched(), draft.count
        return LoopPlan(loop, drafts[0].steps(loop), tuple(draft.plan() for draft in drafts))


@dataclass(frozen=True)
class _Choice:
    """Bytes of the ring on each tier, and bytes that stay on the fastest tier for good."""

    rings: tuple[int, ...]
    for_good: int


@dataclass(frozen=True)
class _Timed:
    """A plan, its choice of sizes, and the seconds of a pass."""

    plan: LoopPlan
    choice: _Choice
    seconds: float

    @property
    def moved(self) -> tuple[int, ...]:
        """Bytes copied into each tier, the slowest tier first."""
        return tuple(tier.moved for tier in reversed(self.plan.tiers))

    @property
    def pace(self) -> list[float]:
        """Bytes copied into each tier per second."""
        return [max(tier.moved, 1) / max(self.seconds, 1e-9) for tier in self.plan.tiers]


def _better(one: _Timed | None, other: _Timed | None) -> _Timed | None:
    if one is None or other is None:
        return one or other
    if abs(one.seconds - other.seconds) <= WORTH * one.seconds:
        return min(one, other, key=lambda each: each.moved)
    return min(one, other, key=lambda each: each.seconds)


def requests_of(loop: Loop, groups: Sequence[TiledGroup]) -> list[TierRequest]:
    """Return the steps' requests to the fastest tier.

    A group that is used again within `NEIGHBOURS` steps is requested once: it stays where it is.
    """
    found: list[TierRequest] = []
    latest: dict[int, int] = {}
    for number, step in enumerate(loop.steps):
        for group in step.groups:
            users = [number] * len(groups[group].tiles)
            before = latest.get(group)
            if before is not None and number - found[before].last <= NEIGHBOURS:
                found[before] = replace(found[before], last=number, last_users=users)
            else:
                latest[group] = len(found)
                found.append(TierRequest(group, number, number, users, users))
    return found
