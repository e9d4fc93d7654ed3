"""Parts of a store that only adapters and tests use."""

from __future__ import annotations

from tierstore import TierStore
from tierstore.engine.core import Core
from tierstore.engine.mutable_groups import MutableGroups
from tierstore.store import engine_of


def core_of(store: TierStore) -> Core:
    """Return the core of a store: its planner, mover, tiers, leases and waiting requests."""
    return engine_of(store).core


def mutable(store: TierStore) -> MutableGroups:
    """Return the groups of a store that change all the time."""
    return engine_of(store).mutable_groups
