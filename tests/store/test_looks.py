"""The repr of a store and a handle, at any moment: it never raises, waits or changes anything."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.engine import core_of
from tests.helpers.processes import Tell, forked
from tests.helpers.threads import PATIENCE
from tests.observe.test_report import drawn
from tests.store.helpers import PAGE, on_both, open_store, pages
from tierstore import TierStore, disable_offload, enable_group_offload
from tierstore.model.formatting import count

LOOKS: dict[str, Callable[[Any], str]] = {
    "repr": repr,
    "html": lambda shown: str(shown._repr_html_()),
    "rich": lambda shown: drawn(shown, 200),
}
STORE_LOOKS = {**LOOKS, "report": lambda store: str(store.report())}

every_look = pytest.mark.parametrize("look", STORE_LOOKS.values(), ids=STORE_LOOKS)


def used(store: TierStore) -> None:
    """Write and read a few groups."""
    for i in range(4):
        store.put(f"key{i}", pages(i, 4))
    store.flush()
    for i in range(4):
        store.get(f"key{i}")


def at_once(look: Callable[[], str]) -> str | None:
    """Return the repr, or None if it takes seconds."""
    shown: list[str] = []
    thread = threading.Thread(target=lambda: shown.append(look()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return shown[0] if shown else None


@on_both
@every_look
def test_repr_shows_the_figures_of_stats(
    look: Callable[[Any], str], device: str, disk_dir: Path
) -> None:
    with open_store(disk_dir, 8 * PAGE, device) as store:
        used(store)
        stats = store.stats()
        shown = look(store)
        assert "TierStore on " in shown
        assert f"{count(stats.hits, 'hit')}, {stats.late} late, {stats.misses} misses" in shown
        assert f"{stats.stalled_seconds:.2f} s" in shown
        assert stats.misses > 1
        for part in ("HOST", "32.0 KiB", "64.0 KiB", "4 groups", "MiB/s"):
            assert part in shown, part
        assert ("DEVICE" in shown) == (device != "cpu")
    assert str(disk_dir) in repr(store)


def test_repr_is_one_line_and_report_is_short(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        used(store)
        assert "\n" not in repr(store)
        assert str(store) == repr(store)
        assert len(store.report().splitlines()) <= 12


@every_look
def test_repr_of_a_closed_store_says_closed(look: Callable[[Any], str], disk_dir: Path) -> None:
    store = open_store(disk_dir, 8 * PAGE)
    used(store)
    before = store.stats()
    store.close()
    shown = look(store)
    assert "closed" in shown
    assert f"{count(before.hits, 'hit')}, " in shown
    assert "32.0 KiB" not in shown  # its memory was returned


@every_look
def test_repr_while_another_thread_holds_the_lock_returns(
    look: Callable[[Any], str], disk_dir: Path
) -> None:
    with open_store(disk_dir) as store:
        used(store)
        with core_of(store).lock:
            shown = at_once(lambda: look(store))
            waiting = threading.Thread(target=store.keys)
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive()  # the control: a call that takes the lock waits
        waiting.join()
        assert shown is not None
        assert "4 groups" in shown


def test_repr_within_a_transaction_changes_nothing(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        used(store)
        core = core_of(store)
        with core.lock:
            core.dirty = True  # the next transaction rebuilds the state
            planner = core.planner
            for look in STORE_LOOKS.values():
                assert "4 groups" in look(store)
            assert core.dirty
            assert core.planner is planner
        store.keys()
        assert not core.dirty


def test_repr_in_a_forked_child_returns(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        used(store)
        taken, over = threading.Event(), threading.Event()

        def hold() -> None:
            with core_of(store).lock:
                taken.set()
                over.wait(PATIENCE)

        holder = threading.Thread(target=hold)
        holder.start()
        taken.wait(PATIENCE)

        def look_at_it(tell: Tell) -> None:
            tell(*[look(store) for look in STORE_LOOKS.values()])

        try:
            child, source = forked(look_at_it)
            with open(source, encoding="utf-8") as told:
                shown = json.loads(told.read())
            assert os.waitpid(child, 0)[1] == 0
        finally:
            over.set()
            holder.join()
    assert len(shown) == len(STORE_LOOKS)
    assert all("of another process" in each for each in shown), shown


def test_repr_during_construction_returns() -> None:
    store = TierStore.__new__(TierStore)
    assert repr(store) == "<TierStore, not open>"
    assert store.report() == "TierStore, not open"


def test_repr_with_any_directory_name_is_safe(tmp_path: Path) -> None:
    with open_store(tmp_path / "<b>[red]\x1b[31m") as store:
        assert "&lt;b&gt;[red]\\x1b[31m" in store._repr_html_()
        assert "<b>[red]\\x1b[31m" in repr(store)
        assert "<b>[red]\\x1b[31m" in drawn(store, 300)


def test_repr_in_a_log_handler_returns(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        records: list[str] = []

        class Looking(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                records.append(store.report())

        logger, handler = logging.getLogger("tierstore"), Looking()
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            enable_group_offload(torch.nn.Linear(64, 64), store)
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)
        assert records


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_repr_of_a_handle_shows_model_and_store(look: Callable[[Any], str], disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        handle = enable_group_offload(model, store)
        model(torch.ones(1, 64))
        shown = look(handle)
        for part in ("Sequential, enabled, 1 model in ", "HOST", "256.0 KiB", " late, "):
            assert part in shown, part
        with handle.suspended():
            assert "not enabled" in look(handle)
        assert "not enabled" not in look(handle)
        with core_of(store).lock:
            assert at_once(lambda: look(handle)) is not None
        disable_offload(handle)
        assert "not enabled" in look(handle)
        del model
    assert "closed" in look(handle)
