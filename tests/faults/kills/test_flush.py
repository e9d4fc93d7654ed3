"""A flush also covers groups that are replaced or discarded at the same moment.

The disk is delayed at a chosen moment, which a kill would hit only by luck.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.faults.kills.sharing import numbers
from tests.helpers.threads import hold_calls, start_thread
from tierstore import Access, TierStore
from tierstore.tiers.directory import ObjectDirectory

OLD, NEW, NEWER = 1, 2, 3
PATIENCE = 60.0
KEY = "group"


def on_disk(disk_dir: Path) -> int | None:
    """Return what a new process would find if this one were killed now."""
    paths = list(disk_dir.glob("objects/*/*.safetensors"))
    return int(load_file(paths[0])[KEY][0]) if paths else None


def take(store: TierStore) -> None:
    store.acquire(KEY, Access.TAKE).release()


WAYS: dict[str, Callable[[TierStore], None]] = {
    "replaced": lambda store: store.put(KEY, numbers(NEWER)),
    "replaced for now": lambda store: store.put(KEY, numbers(NEWER), durable=False),
    "discarded": lambda store: store.discard(KEY),
    "taken": take,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["the flush", "the change"])
def test_flush_leaves_nothing_older_on_disk(
    way: str, first: str, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TierStore("4MB", disk_dir, device="cpu") as store:
        store.put(KEY, numbers(OLD))
        store.flush()
        store.put(KEY, numbers(NEW))
        commits = hold_calls(monkeypatch, ObjectDirectory, "commit")
        removals = hold_calls(monkeypatch, ObjectDirectory, "remove")

        def change() -> None:
            WAYS[way](store)

        if first == "the flush":
            flush = start_thread(store.flush)
            assert commits.reached.wait(PATIENCE)
            changing = start_thread(change)
        else:
            changing = start_thread(change)
            if way != "replaced":
                assert removals.reached.wait(PATIENCE)
            flush = start_thread(store.flush)
        flush.join(0.5)
        returned_early, found = not flush.is_alive(), on_disk(disk_dir)
        commits.open()
        removals.open()
        flush.join(PATIENCE)
        changing.join(PATIENCE)

        assert not (returned_early and found == OLD)
        assert not flush.is_alive() and not changing.is_alive()
        assert on_disk(disk_dir) in ((NEW, NEWER) if way == "replaced" else (None,))


@pytest.mark.parametrize("way", ["replaced for now", "discarded", "taken"])
def test_removal_during_a_save_is_final(
    way: str, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TierStore("4MB", disk_dir, device="cpu") as store:
        staging = hold_calls(monkeypatch, ObjectDirectory, "_write_file")
        store.put(KEY, numbers(OLD))
        flush = start_thread(store.flush)
        assert staging.reached.wait(PATIENCE)
        changing = start_thread(lambda: WAYS[way](store))
        changing.join(0.2)  # it may have to wait for the disk
        staging.open()
        changing.join(PATIENCE)
        flush.join(PATIENCE)

        assert not flush.is_alive() and not changing.is_alive()
    assert on_disk(disk_dir) is None
    with TierStore("4MB", disk_dir, device="cpu") as store:
        assert KEY not in store
