"""Statistics and snapshots of a store, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tierstore.model.formatting import count, size
from tierstore.observe.report import Description, display_methods


@dataclass(frozen=True)
class ActivationStats:
    """Statistics of `offload_activations`: what happened to the memory that autograd saved.

    Attributes:
        saved_bytes: bytes of memory that autograd saved. Each storage counts once per version,
            however many saved tensors are views of it.
        shipped_bytes: the part of `saved_bytes` that was copied into the store.
        deduplicated_bytes: bytes that further saved tensors would have added if they had not shared
            a copy.
        kept_bytes: the part of `saved_bytes` that stayed where it was.
        skipped: bytes that stayed, by reason: `"parameter"` (or a buffer, or a leaf that requires a
            gradient: the graph holds those anyway), `"small"`, `"sparse_slice"` (too little of the
            storage is used), `"other_device"`, `"recomputed"` (inside a backward pass),
            `"no_room"` (no budget is large enough), `"unsupported"` (sparse, nested, subclasses of
            `torch.Tensor`).
    """

    saved_bytes: int = 0
    shipped_bytes: int = 0
    deduplicated_bytes: int = 0
    kept_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    __repr__, __rich__, _repr_html_ = display_methods(
        lambda stats: Description("ActivationStats", facts=activation_facts(stats))
    )


@dataclass(frozen=True)
class Stats:
    """Statistics of a store since it opened.

    Dicts are keyed by the name of a tier, or of a hop such as `DISK>HOST`.

    Attributes:
        hits: acquires of groups that were on the fastest tier.
        late: acquires of groups that were on their way there.
        misses: acquires of groups whose transfer had not begun.
        stalled_seconds: total seconds that acquires waited (on an accelerator: seconds that its
            work waited for them).
        overlap: fraction (0 to 1) of transfer time during which no acquire waited. 1.0 if all
            transfers were hidden behind the caller's work, or if there were none.
        busy_seconds: seconds during which bytes moved, by hop.
        bytes_read: bytes from disk to host memory. If the store is connected to a service, this
            includes the bytes that it leased there.
        bytes_written: bytes from host memory to disk.
        bytes_onloaded: bytes from host memory to an accelerator.
        bytes_offloaded: bytes from an accelerator to host memory.
        used_bytes: bytes of groups now, by tier.
        peak_bytes: peak bytes at any one time, including staging, by tier (page-locked bytes
            if an accelerator needs them).
        budget_bytes: budget in bytes, by tier; None: no limit.
        reserved_bytes: accelerator memory that torch has reserved for this process now: the
            store's, everything else, and torch's cache (empty on the CPU, and where torch does not
            report it).
        activations: statistics of `offload_activations`.
        routed_uses: leases of experts that a router chose.
        routed_bytes_used: bytes of the groups in these leases.
        routed_bytes_read: bytes that were read for them.
        leased_bytes: bytes leased from a service now.
        allowed_bytes: bytes that may be leased from a service at the same time.
        bytes_fetched: bytes from an object store.
        plans_followed: number of times that the plan of a loop was entered.
        followed_seconds: seconds since the current plan was entered; 0.0 if none is followed.
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
        """Return the statistics as a dict of plain values."""
        return dataclasses.asdict(self)

    def moved(self) -> dict[str, int]:
        """Return the bytes moved over each hop, such as `DISK>HOST`, if there were any."""
        moved = {hop: int(getattr(self, name)) for hop, name in BYTES_MOVED.items()}
        return {hop: nbytes for hop, nbytes in moved.items() if nbytes}

    __repr__, __rich__, _repr_html_ = display_methods(lambda stats: Description("Stats", stats))


@dataclass(frozen=True)
class GroupSnapshot:
    """One group at one moment.

    Attributes:
        key: its key.
        nbytes: bytes of one copy.
        tiers: names of the tiers with a complete copy, the fastest first.
        tensors: number of its tensors.
    """

    key: str
    nbytes: int
    tiers: tuple[str, ...]
    tensors: int


@dataclass(frozen=True)
class Snapshot:
    """The location of every group at one moment.

    Attributes:
        groups: every group, by key.
        used_bytes: bytes of groups, by the name of a tier.
        budget_bytes: budget in bytes, by the name of a tier; None: no limit.
    """

    groups: tuple[GroupSnapshot, ...]
    used_bytes: dict[str, int]
    budget_bytes: dict[str, int | None]

    __repr__, __rich__, _repr_html_ = display_methods(lambda snapshot: _describe_snapshot(snapshot))


def activation_facts(stats: ActivationStats) -> tuple[tuple[str, str], ...]:
    """Return the statistics as names and values, for display."""
    facts = [("saved", size(stats.saved_bytes)), ("in the store", size(stats.shipped_bytes))]
    if stats.deduplicated_bytes:
        facts.append(("not copied twice", size(stats.deduplicated_bytes)))
    facts += [(f"stayed ({reason})", size(nbytes)) for reason, nbytes in stats.skipped.items()]
    return tuple(facts)


def _describe_snapshot(snapshot: Snapshot) -> Description:
    """Count groups by the tiers they are on: one line for each would be thousands."""
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
    return Description(title, tiers=tuple(tiers), rows=tuple(facts))


BYTES_MOVED = {
    "REMOTE>DISK": "bytes_fetched",
    "DISK>HOST": "bytes_read",
    "HOST>DISK": "bytes_written",
    "HOST>DEVICE": "bytes_onloaded",
    "DEVICE>HOST": "bytes_offloaded",
}
"""Field of `Stats` that counts the bytes of a hop, by hop."""
