"""What of a store only adapters and tests use."""

from __future__ import annotations

from tierstore import TierStore
from tierstore.engine.core import Core
from tierstore.engine.mutable_groups import MutableGroups
from tierstore.store import engine_of


def core_of(store: TierStore) -> Core:
    """What a store believes: its planner, mover, tiers and leases, and who waits."""
    return engine_of(store).core


def mutable(store: TierStore) -> MutableGroups:
    """The groups of a store that change all the time."""
    return engine_of(store).mutable_groups
