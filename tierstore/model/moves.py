"""Instructions of the planner to the mover."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model.groups import GroupId
from tierstore.model.tiers import Tier


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `group` (`nbytes` bytes) from tier `src` to tier `dst`.

    `urgent` is True if a caller waits for the copy: the mover runs urgent copies first.
    """

    group: GroupId
    nbytes: int
    src: Tier
    dst: Tier
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the memory of `group`'s copy on `tier` (`nbytes` bytes)."""

    group: GroupId
    nbytes: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Reserve:
    """Allocate memory for `group` (`nbytes` bytes) on `tier`, for its caller to fill."""

    group: GroupId
    nbytes: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget `group`: it has no copy left, and no later instruction refers to it."""

    group: GroupId


Instruction = Copy | Drop | Reserve | Forget
