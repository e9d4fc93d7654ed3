"""`keep`: a hint that a group should stay in memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.store.helpers import PAGE, on_both, open_store, pages
from tierstore import TierStore
from tierstore.errors import UnknownKeyError

GROUPS, ROOM = 12, 4
SPECIAL = ("group/3", "group/8")


def filled(store: TierStore) -> list[str]:
    keys = [f"group/{i}" for i in range(GROUPS)]
    for number, key in enumerate(keys):
        store.put(key, pages(number))
    store.flush()
    return keys


def reads_of(store: TierStore, key: str) -> int:
    """Return the bytes that one use of a group makes the store read."""
    before = store.stats().bytes_read
    with store.acquire(key) as lease:
        assert lease.tensor[0].item() == int(key.removeprefix("group/"))
    return store.stats().bytes_read - before


@on_both
@pytest.mark.parametrize("policy", ["next-use", "lru"])
@pytest.mark.parametrize("kept", [True, False])
def test_sticky_group_is_read_once(device: str, policy: str, kept: bool, disk_dir: Path) -> None:
    order = random.Random(1)
    with open_store(disk_dir, ROOM * PAGE, device, policy=policy) as store:
        keys = filled(store)
        others = [key for key in keys if key not in SPECIAL]
        for key in SPECIAL:
            if kept:
                store.make_sticky(key)
            reads_of(store, key)
        for _ in range(10):  # in no order that could be learned: enough to push all others out
            for key in order.sample(others, len(others)):
                reads_of(store, key)
        there = {g.key: "HOST" in g.tiers for g in store.snapshot().groups}
        assert all(there[key] == kept for key in SPECIAL)
        assert store.stats().peak_bytes["HOST"] <= ROOM * PAGE


@on_both
def test_sticky_groups_above_the_budget_are_evicted(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, ROOM * PAGE, device) as store:
        keys = filled(store)
        for key in keys:
            store.make_sticky(key)
        for key in keys * 3:
            reads_of(store, key)
        places = ROOM * len([tier for tier in store.stats().budget_bytes if tier != "DISK"])
        assert store.stats().bytes_read >= 3 * (GROUPS - places) * PAGE
        assert store.stats().peak_bytes["HOST"] <= ROOM * PAGE


def test_sticky_unknown_key_raises(disk_dir: Path) -> None:
    with open_store(disk_dir) as store, pytest.raises(UnknownKeyError):
        store.make_sticky("nothing")
