"""Who takes the notes that a store's numbers and traces come from."""

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
    """Counts the memory that autograd saved, in bytes. On any thread."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._shipped = 0
        self._deduplicated = 0
        self._skipped: Counter[str] = Counter()

    @guarded
    def shipped(self, nbytes: int, *, instead_of: str = "") -> None:
        """So many bytes went into the store; maybe after they had been kept for a reason."""
        self._shipped += nbytes
        if instead_of:
            self._skipped[instead_of] -= nbytes

    @guarded
    def deduplicated(self, nbytes: int) -> None:
        """So many bytes needed no copy of their own."""
        self._deduplicated += nbytes

    @guarded
    def kept(self, reason: str, nbytes: int) -> None:
        """So many bytes stay where they are."""
        self._skipped[reason] += nbytes

    @guarded
    def stats(self) -> ActivationStats:
        """What all of it comes to."""
        return self.glance()

    def glance(self) -> ActivationStats:
        """The same without the lock: the numbers may be of slightly different moments."""
        shipped, skipped = self._shipped, dict(self._skipped)
        kept = sum(skipped.values())
        skipped = {reason: n for reason, n in sorted(skipped.items()) if n}
        return ActivationStats(shipped + kept, shipped, self._deduplicated, kept, skipped)


Ran = Callable[[GroupId, float, float], None]


def reserved_bytes(device: torch.device) -> int | None:
    """Bytes of the device that this process has taken, those that torch keeps for later included.

    None if torch cannot tell, as for the CPU.
    """
    ask = getattr(torch.get_device_module(device), "memory_reserved", None)
    return None if ask is None else int(ask(device))


class Occupancy(Protocol):
    """The bytes of each tier that are used now, were at most, and may be; the fastest first."""

    @property
    def tiers(self) -> Sequence[Tier]: ...
    @property
    def used(self) -> Mapping[Tier, int]: ...
    @property
    def peak(self) -> Mapping[Tier, int]: ...
    @property
    def budgets(self) -> Mapping[Tier, int | None]: ...


class Observer:
    """Takes notes of how acquires are met, for `stats` and traces. Methods need the lock.

    `times` is None where the device is the CPU. Otherwise the caller runs ahead of the device, so
    that waiting and computing are timed on the device; and `ran` is told, on any thread, of which
    version a use began there, from when on the device had waited for it, and when it began.
    """

    def __init__(self, journal: Journal, times: DeviceTimes | None, ran: Ran) -> None:
        self.journal = journal
        self.counts: Counter[str] = Counter()
        self.counts_of_loops: Counter[str] = Counter()  # who follows a plan needs no lock
        self.activations = ActivationCounts()
        self._times = times
        self._ran = ran
        self._used: tuple[int, ...] = ()
        self._routed_uses = self._routed_bytes = 0

    def level(self, used: Mapping[Tier, int]) -> None:
        """So many bytes are used on each tier."""
        now = tuple(used.values())
        if now != self._used:
            self._used = now
            self.journal.levels.add((time.monotonic(), now))

    def asked(self, noted: AcquireNote, met: str) -> None:
        """An acquire begins; it is a hit, late or a miss."""
        noted.met = met
        self.counts[met] += 1

    def waits(self, noted: AcquireNote, key: str, stream: torch.Stream | None = None) -> None:
        """What an acquire of `key` asks for is not there (yet). `stream` is the current one, if
        known."""
        if noted.stall is None:
            noted.stall = Span(STALL, key, note=noted.met, start=noted.since)
            if self._times is None:
                self.journal.begin(noted.stall)
            else:
                noted.mark = self._times.mark(stream)

    def arrives(
        self,
        noted: AcquireNote,
        key: str,
        arrival: torch.Event | None,
        stream: torch.Stream | None,
    ) -> None:
        """The device will wait for `arrival`, if that has not come yet, before it goes on."""
        if arrival is not None and not arrival.query():
            self.waits(noted, key, stream)

    def granted(
        self,
        noted: AcquireNote,
        use: LeaseUse,
        nbytes: int,
        stream: torch.Stream | None,
        order: UseOrder,
    ) -> None:
        """An acquire has got its lease, of a group of `nbytes` bytes, for use on `stream`."""
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
            self._times.tell(began, *waited, self._times.mark(stream))

    def _began(self, use: LeaseUse, stall: Span | None, learned: bool, times: list[float]) -> None:
        """The device has begun with a use, maybe after a stall."""
        if stall is not None:
            use.ready = times[-1]
            self.journal.end_between(stall, times)
        if learned:
            self._ran(use.group, times[0], times[-1])

    def gave_up(self, noted: AcquireNote) -> None:
        """An acquire has failed, or was interrupted."""
        if noted.stall is not None:
            noted.stall.note = "failed"
            self.journal.end(noted.stall)
            noted.stall = None

    def released(self, use: LeaseUse, mark: Mark | None) -> None:
        """A lease was given back; `mark` is the end of what the device does with it."""
        use.released = time.monotonic()
        if not isinstance(use.caller, int):
            use.caller = id(use.caller)  # notes must not keep a task alive
        if mark is not None and self._times is not None:
            self._times.tell(functools.partial(_set_done, use), mark)

    def stats(self, summary: Summary, tiers: Occupancy, peak: Mapping[Tier, int]) -> Stats:
        """What all of it comes to. `peak` is what memory existed at once, where that is known."""
        reserved = None if self._times is None else reserved_bytes(self._times.device)
        return replace(
            self.glance(summary, tiers, peak),
            reserved_bytes={} if reserved is None else {Tier.DEVICE.name: reserved},
            activations=self.activations.stats(),
        )

    def glance(self, summary: Summary, tiers: Occupancy, peak: Mapping[Tier, int]) -> Stats:
        """The same without what takes a lock or asks the device. Needs no lock itself."""
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
