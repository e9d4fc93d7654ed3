"""Memory tiers, and the kinds of access to a leased group."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import ClassVar


class Tier(int):
    """A level of the memory hierarchy. Tiers compare by speed; the fastest is the smallest.

    >>> Tier.DEVICE < Tier.HOST < Tier.DISK
    True

    Attributes:
        name: `"DEVICE"`, `"HOST"` or `"DISK"`, as used in statistics and messages.
        persistent: True if bytes there need no copy in memory.
        DEVICE: accelerator memory. A store on the CPU has no such tier.
        HOST: host memory (RAM), page-locked if the store serves an accelerator.
        DISK: the store's directory, and checkpoints registered in place.
    """

    name: str
    persistent: bool

    DEVICE: ClassVar[Tier]
    HOST: ClassVar[Tier]
    DISK: ClassVar[Tier]

    def __new__(cls, rank: int, name: str, *, persistent: bool = False) -> Tier:
        tier = super().__new__(cls, rank)
        tier.name = name
        tier.persistent = persistent
        return tier

    def __repr__(self) -> str:
        return f"<Tier {self.name}>"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (int(self), self.name, self.persistent)


def _restored(rank: int, name: str, persistent: bool) -> Tier:
    tier = TIERS.get(name)
    return Tier(rank, name, persistent=persistent) if tier is None else tier


Tier.DEVICE = Tier(0, "DEVICE")
Tier.HOST = Tier(1, "HOST")
Tier.DISK = Tier(2, "DISK", persistent=True)

TIERS = {tier.name: tier for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)}
"""The tiers that a store may have, by name, fastest first."""


def in_memory(tiers: Iterable[Tier]) -> list[Tier]:
    """Return the tiers that are not persistent, fastest first. Puts go to the last of them."""
    return [tier for tier in sorted(tiers) if not tier.persistent]


class UseOrder(Enum):
    """The source of predictions of a group's next use.

    LEARNED
        The order in which groups were used before.
    PREFETCHED
        Prefetch calls of the group's owner; nothing is learned from its uses.
    ROUTED
        Data decide, as when a router selects experts: the group has no place in an order, and is
        assumed to be used as often as before.
    """

    LEARNED = "learned"
    PREFETCHED = "announced"
    ROUTED = "routed"


class Access(Enum):
    """The kind of access that a lease grants.

    Attributes:
        READ: read-only access, shared by any number of leases. All copies stay valid.
        UPDATE: exclusive access for in-place changes; other leases wait. Afterwards only the leased
            copy is valid, and a checkpoint that the group came from is no longer used.
        TAKE: read access for the last time: the group is discarded when the lease is released.
    """

    READ = "read"
    UPDATE = "update"
    TAKE = "take"


class HostAccess(Enum):
    """The kind of access that a lease in host memory grants.

    READ
        Read-only access. All copies stay valid.
    UPDATE
        In-place changes. Afterwards only this copy is valid.
    RENEW
        Overwriting all values; the old ones are not fetched.
    PERMANENT
        In-place changes, without a release: no request may wait for this memory.
    """

    READ = "read"
    UPDATE = "update"
    RENEW = "renew"
    PERMANENT = "permanent"
