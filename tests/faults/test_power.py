"""After a power cut, acknowledged groups are there, and otherwise only old or new values.

A disk records each write and is replayed up to a moment, without some of the last writes
(`replaying.py`); a file system is shut down at a critical moment; a disk refuses writes. All states
that POSIX allows are in `test_crash_states.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults import replaying
from tests.faults.block_device import Device, block_device
from tests.faults.facilities import cut_power, loop_mounted, make_image
from tests.faults.promised import BUDGET, contents, syncing_again, value
from tests.faults.replaying import Cut
from tests.helpers.processes import output_of, results_in
from tests.helpers.system_calls import system_call
from tests.lanes import by_lane
from tierstore import TierStore
from tierstore.errors import TransferError
from tierstore.tiers import directory as directory_module

pytestmark = pytest.mark.timeout(3600)

ON_EXT4 = pytest.mark.long("the same on another file system", keep=["ext4"])
CONTROLS_ON_EXT4 = pytest.mark.long(
    "the same on another file system", keep=["ext4-files", "ext4-directories"]
)

PATIENCE = 3000
ON_EACH = ("ext4", "xfs")
CONTROLS = ("files", "directories")
CONTROL_STATES = 40
"""States within which a disk without syncs has lost a value; the first few usually suffice."""


Found = dict[str | None, list[Cut]]


def results(plans: Sequence[replaying.Plan]) -> list[list[Cut]]:
    """Return the results of each plan, from one process."""
    told = json.dumps([asdict(plan) for plan in plans])
    output = output_of("-m", "tests.faults.replaying", told, timeout=PATIENCE)
    found: list[list[Cut]] = [[] for _ in plans]
    for number, cut in results_in(output):
        found[number].append(Cut(**cut))
    return found


def assert_promises_hold(cuts: Sequence[Cut]) -> None:
    for cut in cuts:
        assert not cut.broken, cut
        assert not cut.left, cut


# Cuts ---------------------------------------------------------------------------------------------


@contextmanager
def cut_within_a_commit(directory: Path) -> Iterator[TierStore]:
    """Cut a store's power when it renames the last group that was put."""
    store = TierStore(BUDGET, directory / "store", device="cpu")
    store.put("key", value("key", 1))
    store.flush()
    store.put("key", value("key", 2))
    with system_call("rename", after=lambda: cut_power(directory)):
        yield store


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.needs(kind)) for kind in ON_EACH]
)
def test_flush_with_failed_directory_sync_raises(kind: str, quick_dir: Path) -> None:
    image, at = quick_dir / f"told-{kind}", quick_dir / "at"
    make_image(image, kind)
    with loop_mounted(image, at) as directory, cut_within_a_commit(directory) as store:
        for end in (store.flush, store.close):
            with pytest.raises(TransferError, match="Input/output error"):
                end()
    with loop_mounted(image, at) as directory:
        assert contents(directory / "store") == ({"key": ("key", 1)}, [])


@pytest.mark.needs("xfs")
def test_xfs_shutdown_with_sync_believed_loses_data(
    quick_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, at = quick_dir / "believed", quick_dir / "at"
    make_image(image, "xfs")
    monkeypatch.setattr(directory_module, "sync_names", os.fsync)
    with loop_mounted(image, at) as directory, cut_within_a_commit(directory) as store:
        store.flush()
        store.close()
    with loop_mounted(image, at) as directory:
        assert contents(directory / "store") == ({"key": ("key", 1)}, [])


# Replays ------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.needs("fuse", kind)) for kind in ON_EACH],
)
def replays(request: pytest.FixtureRequest, quick_dir: Path, first_seed: int) -> Found:
    """Return the results of replayed states of a file system, with all syncs and without some."""
    kind, place, count = request.param, str(quick_dir), by_lane(4, 8, 30)
    seeds = range(first_seed, first_seed + by_lane(1, 1, 10))
    plans = [replaying.Plan(kind, place, count, seed) for seed in seeds]
    controls = [
        replaying.Plan(kind, place, CONTROL_STATES, first_seed, without, until_lost=True)
        for without in CONTROLS
    ]
    found = results(plans + controls)
    assert [len(of_it) for of_it in found[: len(plans)]] == [plan.states for plan in plans]
    every = [cut for of_it in found[: len(plans)] for cut in of_it]
    return {None: every, **dict(zip(CONTROLS, found[len(plans) :], strict=True))}


@pytest.mark.full("replays a disk; test_crash_states.py has all states that POSIX allows")
@ON_EXT4
def test_replay_without_unflushed_writes_breaks_no_promise(replays: Found) -> None:
    found = replays[None]

    assert_promises_hold(found)
    assert sum(cut.acknowledged for cut in found) > 2 * len(found)
    assert any(cut.lost for cut in found), "no write was ever lost"


@pytest.mark.full("replays a disk; test_crash_states.py has all states that POSIX allows")
@CONTROLS_ON_EXT4
@pytest.mark.parametrize("without", CONTROLS)
def test_replay_without_a_sync_loses_acknowledged_data(without: str, replays: Found) -> None:
    assert any(cut.lost_a_value for cut in replays[without]), replays[without]


# Disks that fail ----------------------------------------------------------------------------------


class Failing:
    """Mount a file system on a disk that fails on command."""

    def __init__(self, device: Device, at: Path) -> None:
        self.device = device
        self._at = at

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        with loop_mounted(self.device.disk, self._at) as directory:
            yield directory / "store"


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.needs("fuse", kind)) for kind in ON_EACH]
)
def failing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Failing]:
    image = tmp_path / "image"
    make_image(image, request.param, replaying.SIZES[request.param])
    with block_device(image, tmp_path / "device", tmp_path / "log") as device:
        yield Failing(device, tmp_path / "mounted")


CACHED, DIRECT = 6, 9
"""Numbers of values.

The first is written through the page cache, so the sync fails; the second by direct I/O, so the
write does.
"""
KEY = "refused"
"""Key, at the start of its file: a loop device does not report a failed write further on."""


@pytest.mark.parametrize("number", [CACHED, DIRECT], ids=["sync", "write"])
def test_disk_refusal_raises_and_is_rewritten_once_healed(number: int, failing: Failing) -> None:
    with failing.mounted() as disk_dir:
        store = TierStore(BUDGET, disk_dir, device="cpu")
        store.put(KEY, value(KEY, 1))
        store.flush()
        store.put(KEY, value(KEY, number))
        failing.device.fail(KEY.encode())
        for _ in range(2):
            with pytest.raises(TransferError, match="Input/output error"):
                store.flush()
        failing.device.heal()
        store.flush()
        store.close()
    with failing.mounted() as disk_dir:
        assert contents(disk_dir) == ({KEY: (KEY, number)}, [])


def test_disk_refusal_without_rewrite_leaves_the_old_value(failing: Failing) -> None:
    with failing.mounted() as disk_dir:
        store = TierStore(BUDGET, disk_dir, device="cpu")
        store.put(KEY, value(KEY, 1))
        store.flush()
        store.put(KEY, value(KEY, CACHED))
        failing.device.fail(KEY.encode())
        with pytest.raises(TransferError, match="Input/output error"):
            store.close()
    with failing.mounted() as disk_dir:
        assert contents(disk_dir) == ({KEY: (KEY, 1)}, [])


def test_second_sync_after_a_refusal_reports_false_success(failing: Failing) -> None:
    with failing.mounted() as disk_dir:
        store = TierStore(BUDGET, disk_dir, device="cpu")
        store.put(KEY, value(KEY, CACHED))
        failing.device.fail(KEY.encode())
        with syncing_again():
            store.flush()
        failing.device.heal()
        store.close()
    with failing.mounted() as disk_dir:
        found, _ = contents(disk_dir)
        assert (KEY, CACHED) not in found.values()
