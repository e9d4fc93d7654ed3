"""Numbers about a store, as plain frozen data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tierstore.model.formatting import count, size
from tierstore.observe.report import Shown, shown_by


@dataclass(frozen=True)
class ActivationStats:
    """What `offload_activations` did with the memory that autograd saved.

    Attributes:
        saved_bytes: bytes of memory that was saved. Each piece counts once (at each of its
            versions), however many saved tensors look at it.
        shipped_bytes: bytes of these that were copied into the store.
        deduplicated_bytes: bytes that further saved tensors would have added, had they not shared a
            copy.
        kept_bytes: bytes of `saved_bytes` that stayed where they were.
        skipped: bytes that stayed, by reason: `"parameter"` (or a buffer, or a leaf that wants a
            gradient: the graph has those anyway), `"small"`, `"sparse_slice"` (too little of it is
            looked at), `"other_device"`, `"recomputed"` (inside a backward pass), `"no_room"` (no
            budget is large enough), `"unsupported"` (sparse, nested, subclasses of `torch.Tensor`).
    """

    saved_bytes: int = 0
    shipped_bytes: int = 0
    deduplicated_bytes: int = 0
    kept_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    __repr__, __rich__, _repr_html_ = shown_by(
        lambda stats: Shown("ActivationStats", facts=facts_of(stats))
    )


@dataclass(frozen=True)
class Stats:
    """What a store has done so far. Dicts go by the name of a tier, or of a way: `DISK>HOST`.

    Attributes:
        hits: acquires of groups that were on the fastest tier.
        late: acquires of groups that were on their way.
        misses: acquires of groups that had to be asked for.
        stalled_seconds: seconds that acquires waited, in all (on an accelerator: seconds that its
            work waited for them).
        overlap: the share (0 to 1) of the time in which any bytes moved that no acquire waited. 1.0
            if all transfers were hidden behind the caller's work, or if there were none.
        busy_seconds: seconds in which bytes moved, by way.
        bytes_read: bytes from disk to host memory; of a store that is connected to a service, with
            the bytes that it leased there.
        bytes_written: bytes from host memory to disk.
        bytes_onloaded: bytes from host memory to an accelerator.
        bytes_offloaded: bytes from an accelerator to host memory.
        used_bytes: bytes of groups now, by tier.
        peak_bytes: the most bytes that really existed at once, staging included, by tier
            (page-locked ones, where an accelerator wants that).
        budget_bytes: bytes that a tier may take, by tier; None: no limit.
        reserved_bytes: bytes that torch has taken of the accelerator for this process now: the
            store's memory, everybody else's, and its cache (empty on the CPU, and where torch
            cannot tell).
        activations: what `offload_activations` did.
        routed_uses: leases of experts that a router chose.
        routed_bytes_used: bytes that these leases were of.
        routed_bytes_read: bytes that were read for them.
        leased_bytes: bytes that are leased of a service now.
        allowed_bytes: bytes that may be leased of a service at once.
        bytes_fetched: bytes from an object store.
        plans_followed: how often the plan of a loop was entered.
        followed_seconds: seconds since a plan was entered that is followed now; 0.0 if none is.
    """

    hits: int
    late: int
    misses: int
    stalled_seconds: float
    overlap: float
    busy_seconds: dict[str, float]
    bytes_read: int
    bytes_written: int
    bytes_onloaded: int
    bytes_offloaded: int
    used_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    budget_bytes: dict[str, int | None]
    reserved_bytes: dict[str, int] = field(default_factory=dict)
    activations: ActivationStats = ActivationStats()
    routed_uses: int = 0
    routed_bytes_used: int = 0
    routed_bytes_read: int = 0
    leased_bytes: int = 0
    allowed_bytes: int = 0
    bytes_fetched: int = 0
    plans_followed: int = 0
    followed_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict of plain values."""
        return dataclasses.asdict(self)

    def moved(self) -> dict[str, int]:
        """Bytes that moved on each way, such as `DISK>HOST`, where any did."""
        moved = {hop: int(getattr(self, name)) for hop, name in BYTES_MOVED.items()}
        return {hop: nbytes for hop, nbytes in moved.items() if nbytes}

    __repr__, __rich__, _repr_html_ = shown_by(lambda stats: Shown("Stats", stats))


@dataclass(frozen=True)
class GroupSnapshot:
    """One group, as it was at one moment.

    Attributes:
        key: its key.
        nbytes: bytes that a copy of it takes.
        tiers: the names of the tiers with a complete copy, the fastest first.
        tensors: how many tensors it has.
    """

    key: str
    nbytes: int
    tiers: tuple[str, ...]
    tensors: int


@dataclass(frozen=True)
class Snapshot:
    """What was where at one moment.

    Attributes:
        groups: every group, by key.
        used_bytes: bytes of groups, by the name of a tier.
        budget_bytes: bytes that a tier may take, by its name; None: no limit.
    """

    groups: tuple[GroupSnapshot, ...]
    used_bytes: dict[str, int]
    budget_bytes: dict[str, int | None]

    __repr__, __rich__, _repr_html_ = shown_by(lambda snapshot: _of_snapshot(snapshot))


def facts_of(stats: ActivationStats) -> tuple[tuple[str, str], ...]:
    """What became of what autograd saved, as names and values."""
    facts = [("saved", size(stats.saved_bytes)), ("in the store", size(stats.shipped_bytes))]
    if stats.deduplicated_bytes:
        facts.append(("not copied twice", size(stats.deduplicated_bytes)))
    facts += [(f"stayed ({reason})", size(nbytes)) for reason, nbytes in stats.skipped.items()]
    return tuple(facts)


def _of_snapshot(snapshot: Snapshot) -> Shown:
    """Groups are counted by where they have copies: each by itself would be thousands of lines."""
    nbytes = sum(group.nbytes for group in snapshot.groups)
    number: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for group in snapshot.groups:
        where = "on " + ", ".join(group.tiers) if group.tiers else "on no tier yet"
        number[where] += 1
        held[where] += group.nbytes
    facts = [(where, f"{count(number[where], 'group')}, {size(held[where])}") for where in number]
    budgets = snapshot.budget_bytes
    tiers = [(name, used, budgets.get(name)) for name, used in snapshot.used_bytes.items()]
    title = f"Snapshot of {count(len(snapshot.groups), 'group')}, {size(nbytes)}"
    return Shown(title, tiers=tuple(tiers), rows=tuple(facts))


BYTES_MOVED = {
    "REMOTE>DISK": "bytes_fetched",
    "DISK>HOST": "bytes_read",
    "HOST>DISK": "bytes_written",
    "HOST>DEVICE": "bytes_onloaded",
    "DEVICE>HOST": "bytes_offloaded",
}
"""The field of `Stats` that counts the bytes of a hop."""
