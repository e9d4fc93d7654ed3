"""Records acquires and saved activations, for statistics and traces."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from tierstore.model.groups import GroupId
from tierstore.model.locks import RLock, guarded
from tierstore.model.tiers import Tier, UseOrder
from tierstore.observe.device_times import DeviceTimes, Mark
from tierstore.observe.journal import (
    PLANNED,
    ROUTED,
    STALL,
    AcquireNote,
    Journal,
    LeaseUse,
    Span,
    Summary,
)
from tierstore.observe.stats import BYTES_MOVED, ActivationStats, Stats


class ActivationCounts:
    """Counts the bytes that autograd saved. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._shipped = 0
        self._deduplicated = 0
        self._skipped: Counter[str] = Counter()

    @guarded
    def shipped(self, nbytes: int, *, instead_of: str = "") -> None:
        """Count bytes copied into the store; `instead_of` was the reason they had stayed before."""
        self._shipped += nbytes
        if instead_of:
            self._skipped[instead_of] -= nbytes

    @guarded
    def deduplicated(self, nbytes: int) -> None:
        """Count bytes that shared an existing copy."""
        self._deduplicated += nbytes

    @guarded
    def kept(self, reason: str, nbytes: int) -> None:
        """Count bytes that stay where they are, by reason."""
        self._skipped[reason] += nbytes

    @guarded
    def stats(self) -> ActivationStats:
        """Return the totals, as of one moment."""
        return self.sample()

    def sample(self) -> ActivationStats:
        """Return the totals without the lock: fields may be of slightly different moments."""
        shipped, skipped = self._shipped, dict(self._skipped)
        kept = sum(skipped.values())
        skipped = {reason: n for reason, n in sorted(skipped.items()) if n}
        return ActivationStats(shipped + kept, shipped, self._deduplicated, kept, skipped)


Ran = Callable[[GroupId, float, float], None]


def reserved_bytes(device: torch.device) -> int | None:
    """Return the bytes of device memory that torch has reserved, including its cache.

    None if torch does not know, as for the CPU.
    """
    ask = getattr(torch.get_device_module(device), "memory_reserved", None)
    return None if ask is None else int(ask(device))


class Occupancy(Protocol):
    """Bytes used, peak and budget of each tier. `tiers` lists the fastest first."""

    @property
    def tiers(self) -> Sequence[Tier]: ...
    @property
    def used(self) -> Mapping[Tier, int]: ...
    @property
    def peak(self) -> Mapping[Tier, int]: ...
    @property
    def budgets(self) -> Mapping[Tier, int | None]: ...


class Observer:
    """Records the outcome of each acquire, for `stats` and traces.

    Methods need the store's lock unless they say otherwise. `times` is None if the device is the
    CPU. Otherwise the caller runs ahead of the device, so waits and computing are timed on the
    device. `ran` is then called, on any thread, for each use: with the group, when the device began
    to wait for it, and when the use began (both in seconds).
    """

    def __init__(self, journal: Journal, times: DeviceTimes | None, ran: Ran) -> None:
        self.journal = journal
        self.counts: Counter[str] = Counter()
        self.counts_of_loops: Counter[str] = (
            Counter()
        )  # the thread that follows a plan takes no lock
        self.activations = ActivationCounts()
        self._times = times
        self._ran = ran
        self._used: tuple[int, ...] = ()
        self._routed_uses = self._routed_bytes = 0

    def record_levels(self, used: Mapping[Tier, int]) -> None:
        """Record the bytes used on each tier, if they changed."""
        now = tuple(used.values())
        if now != self._used:
            self._used = now
            self.journal.levels.add((time.monotonic(), now))

    def acquire_begun(self, noted: AcquireNote, met: str) -> None:
        """Record that an acquire begins, as a hit, late or a miss."""
        noted.met = met
        self.counts[met] += 1

    def acquire_waits(
        self, noted: AcquireNote, key: str, stream: torch.Stream | None = None
    ) -> None:
        """Record that an acquire of `key` has to wait. `stream` is the current one, if known."""
        if noted.stall is None:
            noted.stall = Span(STALL, key, note=noted.met, start=noted.since)
            if self._times is None:
                self.journal.begin(noted.stall)
            else:
                noted.mark = self._times.mark(stream)

    def acquire_arriving(
        self,
        noted: AcquireNote,
        key: str,
        arrival: torch.Event | None,
        stream: torch.Stream | None,
    ) -> None:
        """Record a wait of the device for the event `arrival`, unless it is complete."""
        if arrival is not None and not arrival.query():
            self.acquire_waits(noted, key, stream)

    def acquire_granted(
        self,
        noted: AcquireNote,
        use: LeaseUse,
        nbytes: int,
        stream: torch.Stream | None,
        order: UseOrder,
    ) -> None:
        """Record that an acquire was granted a group of `nbytes` bytes for use on `stream`."""
        learned = order is UseOrder.LEARNED and use.met != PLANNED
        if order is UseOrder.ROUTED:
            self._routed_uses += 1
            self._routed_bytes += nbytes
        use.nbytes = nbytes
        use.granted = time.monotonic()
        if use.met != PLANNED:
            self.journal.uses.add(use)
        stall, noted.stall = noted.stall, None
        if self._times is None:
            if stall is not None:
                self.journal.end(stall)
        elif stall is not None or learned:
            waited = () if stall is None else (noted.mark,)
            began = functools.partial(self._began, use, stall, learned)
            self._times.notify(began, *waited, self._times.mark(stream))

    def _began(self, use: LeaseUse, stall: Span | None, learned: bool, times: list[float]) -> None:
        """Record that the device has begun a use, perhaps after a stall."""
        if stall is not None:
            use.ready = times[-1]
            self.journal.end_between(stall, times)
        if learned:
            self._ran(use.group, times[0], times[-1])

    def acquire_failed(self, noted: AcquireNote) -> None:
        """Record that an acquire failed or was interrupted."""
        if noted.stall is not None:
            noted.stall.note = "failed"
            self.journal.end(noted.stall)
            noted.stall = None

    def lease_released(self, use: LeaseUse, mark: Mark | None) -> None:
        """Record that a lease was released. `mark` is the end of its work on the device."""
        use.released = time.monotonic()
        if not isinstance(use.caller, int):
            use.caller = id(use.caller)  # a record must not keep a task alive
        if mark is not None and self._times is not None:
            self._times.notify(functools.partial(_set_done, use), mark)

    def stats(self, summary: Summary, tiers: Occupancy, peak: Mapping[Tier, int]) -> Stats:
        """Return all statistics. `peak` has the measured peak memory of tiers, where known."""
        reserved = None if self._times is None else reserved_bytes(self._times.device)
        return replace(
            self.sample(summary, tiers, peak),
            reserved_bytes={} if reserved is None else {Tier.DEVICE.name: reserved},
            activations=self.activations.stats(),
        )

    def sample(self, summary: Summary, tiers: Occupancy, peak: Mapping[Tier, int]) -> Stats:
        """Return the statistics that need no lock and no query of the device."""
        moved, plans = summary.moved, self.journal.plans
        plan = plans.newest
        return Stats(
            hits=self.counts["hit"] + self.counts_of_loops["hit"],
            late=self.counts["late"] + self.counts_of_loops["late"],
            misses=self.counts["miss"],
            stalled_seconds=summary.stalled,
            overlap=summary.overlap,
            busy_seconds=summary.busy,
            **{field: moved.get(hop, 0) for hop, field in BYTES_MOVED.items()},
            used_bytes={t.name: tiers.used[t] for t in tiers.tiers},
            peak_bytes={t.name: peak.get(t, tiers.peak[t]) for t in tiers.tiers},
            budget_bytes={t.name: tiers.budgets[t] for t in tiers.tiers},
            reserved_bytes={},
            activations=ActivationStats(),
            routed_uses=self._routed_uses,
            routed_bytes_used=self._routed_bytes,
            routed_bytes_read=moved.get(ROUTED, 0),
            plans_followed=plans.added,
            followed_seconds=0.0 if plan is None or plan.end else time.monotonic() - plan.start,
        )


def _set_done(use: LeaseUse, times: list[float]) -> None:
    use.done = times[0]
