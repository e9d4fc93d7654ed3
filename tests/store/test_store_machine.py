"""Real stores under random histories: alone against a model, and in a crowd of threads."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest

from tests.accelerator import ACCELERATOR, counted, pretend, start_counting
from tests.helpers.engine import core_of
from tests.store.crowd import Crowd
from tests.store.helpers import assert_at_rest, make_deaf_to_changes, on_both
from tests.store.machine import DEVICE_PAGES, HOST_PAGES, PAGE, Machine

STEPS = 250
SEEDS = 4


@on_both
@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_store_behaves_like_a_dict(policy: str, device: str, tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    if device != "cpu":
        start_counting()
    for seed in range(SEEDS):
        print(f"Machine({seed}, {device!r}, directory, {policy!r}).play({STEPS})")
        machine = Machine(seed, device, tmp_path / str(seed), policy)
        machine.play(STEPS)
        machine.finish()
        assert_at_rest(machine.store)
        machine.store.close()
        done += machine.done
    for name in ("bytes_read", "bytes_written"):
        assert done[name] > SEEDS * HOST_PAGES * PAGE
    if device != "cpu":
        assert done["bytes_onloaded"] > SEEDS * DEVICE_PAGES * PAGE
        assert done["bytes_offloaded"] > 0
        assert counted("stale_copies") == 0, "a copy used memory that was freed"
    assert all(done[step] > SEEDS for step in Machine.STEPS)
    assert done["refused"], "no history was blocked by its own leases"


@pytest.mark.pretend_only("counts")
def test_page_locked_memory_stays_within_budget_at_every_step(tmp_path: Path) -> None:
    gc.collect()
    before = pretend.pinned_bytes()
    pretend.reset_peak_pinned()
    machine = Machine(99, ACCELERATOR, tmp_path, "next-use")
    machine.play(STEPS)
    peak = pretend.peak_pinned_bytes() - before
    assert HOST_PAGES * PAGE // 2 < peak <= HOST_PAGES * PAGE
    machine.release_all()
    machine.store.close()


@pytest.mark.parametrize("fault", ["forgets an update", "reads another file"])
def test_model_notices_a_seeded_fault(fault: str, tmp_path: Path) -> None:
    """The control: the same machine on a store with one protection removed."""
    machine = Machine(0, "cpu", tmp_path, "next-use")
    if fault == "forgets an update":
        make_deaf_to_changes(machine.store)
    else:
        core_of(machine.store).tiers.disk.files.forget = lambda path: None
        core_of(machine.store).tiers.reader.check = lambda *arguments: None
    machine.STEPS = {**Machine.STEPS, "reopen": 0}
    with pytest.raises(AssertionError):
        machine.play(10 * STEPS)
    machine.release_all()


@on_both
def test_crowd_of_threads_sees_whole_values_and_proceeds(device: str, tmp_path: Path) -> None:
    crowd = Crowd(0, device, tmp_path / "store")
    crowd.run()
    crowd.finish()
    assert_at_rest(crowd.store)
    stats = crowd.store.stats()
    assert stats.bytes_read > 0
    assert stats.bytes_written > 0
    assert stats.hits and stats.misses
    crowd.store.close()


def test_lost_update_would_be_counted(tmp_path: Path) -> None:
    """The control: without exclusive leases the crowd's counter comes out too small."""
    crowd = Crowd(1, "cpu", tmp_path / "store")
    crowd.exclusive = False
    crowd.run()
    # The count, a checksum taken during a write, or a leased group that is half written: each
    # shows that two changers ran at once.
    lost = r"updates were lost|is not what was written|counter is a mix of"
    with pytest.raises(AssertionError, match=lost):
        crowd.finish()
    crowd.store.close()
