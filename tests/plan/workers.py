"""Workers that share host memory, on a virtual clock: each uses its groups in a loop.

A worker demands a group, computes with it for some seconds, and releases the one that it has held
for longest. Demanded groups arrive at once, so counts are exact. `missed` has the number of groups
that had to be fetched, by worker and by pass.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Instruction
from tierstore.model.tiers import Access, Tier
from tierstore.plan.planner import NEXT_USE_WITHOUT_PREFETCH, Planner, planner_for


@dataclass
class Worker:
    """Uses `keys` in a loop, as one of several workers.

    Each use takes `seconds` (plus up to `jitter` times that), from `start` on (seconds), for
    `passes` passes. The worker has `holds` leases at once, and acquires `burst` groups at once:
    then it computes with all of them.
    """

    stream: int
    keys: Sequence[str]
    seconds: float = 1.0
    start: float = 0.0
    passes: int = 10**9
    holds: int = 1
    burst: int = 1
    jitter: float = 0.0
    used: int = 0
    held: list[GroupId] = field(default_factory=list)


class Workers:
    """A planner with `room` bytes of host memory, and its users. All groups are on disk."""

    def __init__(
        self, groups: Mapping[str, int], room: int, planner: Planner | None = None, seed: int = 1
    ) -> None:
        budgets = {Tier.HOST: room, Tier.DISK: None}
        self.planner = planner or planner_for(budgets, NEXT_USE_WITHOUT_PREFETCH)
        self.now = 0.0
        self.missed: Counter[tuple[int, int]] = Counter()
        self.fetched = 0
        self.instructions: list[Instruction] = []
        self._random = random.Random(seed)
        self._next: list[tuple[float, int, Worker]] = []
        self._over: set[int] = set()
        for key, nbytes in groups.items():
            self.tell(events.Registered(GroupId(key, 0), nbytes, backing=True))

    def tell(self, event: events.Event) -> None:
        for instruction in self.planner.handle(event, self.now):
            self.instructions.append(instruction)
            if isinstance(instruction, Copy):
                self.fetched += 1
                self.tell(events.Arrived(instruction.group, instruction.src, instruction.dst))

    def add(self, *workers: Worker) -> None:
        for worker in workers:
            heapq.heappush(self._next, (worker.start, worker.stream, worker))

    def end(self, *streams: int) -> None:
        """End these workers, and release their leases."""
        self._over.update(streams)
        for stream in streams:
            for worker in [w for _, _, w in self._next if w.stream == stream]:
                self._give_back(worker, 0)
            self.tell(events.StreamEnded(stream))

    def run(self, until: float) -> None:
        while self._next and self._next[0][0] < until:
            self.now, _, worker = heapq.heappop(self._next)
            if worker.stream not in self._over:
                self._use(worker)
        self.now = until

    def _use(self, worker: Worker) -> None:
        if worker.used == worker.passes * len(worker.keys):
            self._give_back(worker, 0)
            return
        self._give_back(worker, worker.holds - 1)
        turn, place = divmod(worker.used, len(worker.keys))
        group = GroupId(worker.keys[place], 0)
        if not self.planner.leasable(group, Access.READ):
            self.missed[worker.stream, turn] += 1
        self.tell(events.Demanded(group, worker.stream))
        self.tell(events.Leased(group, Access.READ, stream=worker.stream))
        worker.held.append(group)
        worker.used += 1
        seconds = worker.seconds * (1 + worker.jitter * self._random.random()) * worker.burst
        if worker.used % worker.burst:
            seconds = 0.0
        heapq.heappush(self._next, (self.now + seconds, worker.stream, worker))

    def _give_back(self, worker: Worker, kept: int) -> None:
        while len(worker.held) > kept:
            self.tell(events.Released(worker.held.pop(0), Access.READ))

    def misses(self, stream: int, first: int, last: int) -> float:
        """Return a worker's misses per pass, from pass `first` to before `last`, counted from 0."""
        return sum(self.missed[stream, turn] for turn in range(first, last)) / (last - first)
