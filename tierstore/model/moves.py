"""What the planner tells the mover to do."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model.groups import GroupId
from tierstore.model.tiers import Tier


@dataclass(frozen=True, slots=True)
class Copy:
    """Make a copy of `group` (`nbytes` bytes) on tier `dst` from the one on `src`.

    `urgent` is True when somebody is waiting for it: the mover takes urgent copies first.
    """

    group: GroupId
    nbytes: int
    src: Tier
    dst: Tier
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Give the room of `group`'s copy on `tier` (`nbytes` bytes) back."""

    group: GroupId
    nbytes: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Reserve:
    """Give `group` room (`nbytes` bytes) on `tier`: its caller will fill it."""

    group: GroupId
    nbytes: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Forget:
    """`group` has no copy left and will not be mentioned again."""

    group: GroupId


Instruction = Copy | Drop | Reserve | Forget
