"""An ordinary run logs each event once, and nothing per step."""

from __future__ import annotations

import errno
import logging
import re
from pathlib import Path

import pytest
import torch

import tierstore
from tests.adapters.models import BLOCK_BYTES, Tower, given
from tests.helpers.system_calls import system_call
from tests.store.helpers import PAGE, open_store, pages, push_out
from tierstore import (
    OffloadModel,
    OffloadOptimizer,
    TransferError,
    disable_offload,
    dispatch_model,
    enable_group_offload,
    load_training,
    save_training,
)


def logged(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[tuple[str, str]]:
    """Return the loggers and messages of at least this level."""
    return [(r.name, r.getMessage()) for r in caplog.records if r.levelno >= level]


def test_run_is_logged_from_open_to_close(disk_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierstore")
    model = Tower()
    with torch.no_grad(), open_store(disk_dir, 4 * BLOCK_BYTES) as store:
        dispatch_model(model, store)
        for _ in range(5):
            model(given())
        store.flush()
        stats = store.stats()
        disable_offload(model)
    opened, dispatched, closed = logged(caplog)
    assert opened[0] == closed[0] == "tierstore.engine"
    assert re.fullmatch(
        rf"opened {re.escape(str(disk_dir))} on cpu: ram_budget \d+\.\d KiB, "
        "disk_budget no limit; 0 groups",
        opened[1],
    )
    assert dispatched[0] == "tierstore.adapters"
    assert re.match(r"Tower: \d+ groups, \d+ bytes of weights; \d+ bytes written", dispatched[1])
    assert re.match(rf"closed {re.escape(str(disk_dir))} after \d+\.\d s: ", closed[1])
    assert f"{stats.hits:,} hits, {stats.late:,} late, {stats.misses:,} miss" in closed[1]
    assert "DISK>HOST" in closed[1]


def test_offloading_and_reopening_are_logged(
    disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
    caplog.set_level(logging.INFO, "tierstore")
    model = Tower()
    with torch.no_grad(), open_store(disk_dir) as store:
        handle = enable_group_offload(model, store)
        model(given())
        disable_offload(handle)
    opened, offloaded, _closed = [message for _, message in logged(caplog)]
    assert opened.endswith("; 1 group")
    assert re.match(r"Tower-\d+: \d+ groups, \d+ bytes of weights", offloaded)


def test_training_checkpoints_are_logged_but_steps_are_not(
    disk_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierstore.adapters")
    with open_store(disk_dir, 40 * BLOCK_BYTES) as store:
        model = OffloadModel(Tower(), store)
        optimizer = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1)
        for _ in range(3):
            model(given()).sum().backward()
            optimizer.step()
        save_training(tmp_path / "run", model, optimizer)
        load_training(tmp_path / "run", model, optimizer)
        model.disable()
    taken, saved, loaded = [message for _, message in logged(caplog)]
    assert re.fullmatch(r"Tower in training: \d+ slices, \d+ groups, \d+ bytes of .*", taken)
    assert re.fullmatch(rf"saved a training run in {tmp_path / 'run'} in \d+\.\d s", saved)
    assert re.fullmatch(rf"loaded a training run from {tmp_path / 'run'} in \d+\.\d s", loaded)


def test_failure_logs_a_warning_with_its_group(
    disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        store.flush()
        push_out(store, "key")
        with system_call("preadv", fails_with=errno.EIO), pytest.raises(TransferError):
            store.get("key")
        [(name, message)] = logged(caplog, logging.WARNING)
        assert name == "tierstore.tiers"
        assert message.startswith("DISK>HOST of group 'key' failed: ")
        store.get("key")
    assert len(logged(caplog, logging.WARNING)) == 1


def test_debug_level_logs_each_move(disk_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tierstore.tiers")
    with open_store(disk_dir) as store:
        store.put("key", pages(1, 2))
        store.flush()
        push_out(store, "key")
        store.get("key")
    moved = [message for name, message in logged(caplog, logging.DEBUG) if "tiers" in name]
    assert f"HOST>DISK of group 'key': {2 * PAGE} bytes" in moved
    assert f"DISK>HOST of group 'key': {2 * PAGE} bytes" in moved


def test_package_leaves_logging_configuration_alone() -> None:
    """No handler and no level are set: warnings are visible, the program may enable the rest."""
    changes = re.compile(r"\b(basicConfig|addHandler|setLevel|NullHandler|captureWarnings)\b")
    package = Path(tierstore.__file__).parent
    found = {
        path.relative_to(package).as_posix(): changes.findall(path.read_text(encoding="utf-8"))
        for path in package.rglob("*.py")
    }
    assert {path for path, names in found.items() if names} == {"service/cli.py"}


def test_every_logger_is_in_the_guide() -> None:
    package = Path(tierstore.__file__).parent
    named = re.compile(r'getLogger\("(.*?)"\)')
    used = {
        name
        for path in package.rglob("*.py")
        for name in named.findall(path.read_text(encoding="utf-8"))
    }
    guide = (package.parent / "docs" / "guides" / "profiling.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(tierstore\.\w+)` \|", guide, re.MULTILINE))
    assert used == listed
