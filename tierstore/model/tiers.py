"""Where bytes can live, and what a caller means to do with them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import ClassVar


class Tier(int):
    """A kind of memory. Tiers compare by speed: the fastest is the smallest.

    >>> Tier.DEVICE < Tier.HOST < Tier.DISK
    True

    Attributes:
        name: as numbers and messages have it: `"DEVICE"`, `"HOST"`, `"DISK"`.
        persistent: whether what is there needs no copy in memory.
        DEVICE: memory of the accelerator. A store on the CPU has no such tier.
        HOST: memory of the machine; page-locked where there is an accelerator.
        DISK: the store's directory, and checkpoints where they lie.
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
"""The tiers that every store may have, by name, the fastest first."""


def in_memory(tiers: Iterable[Tier]) -> list[Tier]:
    """Those that are not persistent, the fastest first. Groups are put to the last of them."""
    return [tier for tier in sorted(tiers) if not tier.persistent]


class UseOrder(Enum):
    """How it is known when a group is used next.

    LEARNED
        From the order in which groups were used before.
    ANNOUNCED
        Its user always says when it comes next: nothing is learned from its uses.
    ROUTED
        Data choose it, as a router chooses experts: it has no place in an order, and is used as
        often as it was before.
    """

    LEARNED = "learned"
    ANNOUNCED = "announced"
    ROUTED = "routed"


class Access(Enum):
    """What you will do with the tensors of a lease.

    Attributes:
        READ: look at them. Every copy stays valid; many may read at once.
        UPDATE: change them in place; others wait meanwhile. Afterwards only the leased copy is
            valid, and a checkpoint that the group came from is no longer trusted.
        TAKE: read them for the last time: the group is forgotten when the lease is released.
    """

    READ = "read"
    UPDATE = "update"
    TAKE = "take"


class HostAccess(Enum):
    """What somebody will do with a group in host memory while they hold it there.

    READ
        Look at it. Every copy stays valid.
    UPDATE
        Change it in place. Afterwards only this copy is valid.
    RENEW
        Give all of it new values: the old ones are not even fetched.
    PERMANENT
        Change it now and then, and never give it back: nobody should wait for its room.
    """

    READ = "read"
    UPDATE = "update"
    RENEW = "renew"
    PERMANENT = "permanent"
