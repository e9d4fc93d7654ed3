"""What the planner tells a carrier to do."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model.tiers import Tier


@dataclass(frozen=True, slots=True)
class Copy:
    """Make a copy of group `key` (`nbytes` bytes) on tier `dst` from the one on `src`.

    `urgent` is True when somebody is waiting for it: carriers take urgent copies first.
    """

    key: str
    nbytes: int
    src: Tier
    dst: Tier
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Give the room of group `key`'s copy on `tier` (`nbytes` bytes) back."""

    key: str
    nbytes: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Reserve:
    """Give group `key` room (`nbytes` bytes) on `tier`: its caller will fill it."""

    key: str
    nbytes: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Forget:
    """Group `key` has no copy left and will not be mentioned again."""

    key: str


Instruction = Copy | Drop | Reserve | Forget
