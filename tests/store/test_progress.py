"""Bars: on a terminal, and only for what takes long."""

from __future__ import annotations

import io
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.store.helpers import open_store, pages
from tierstore import progress


class Terminal(io.StringIO):
    """Text that says it is shown to somebody."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars that do not wait to see whether it takes long."""
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)


def test_the_items_come_through_in_order() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        assert list(progress.bar(range(5), "Counting", "groups")) == list(range(5))
    assert terminal.getvalue() == "", "it was quick"


def test_what_takes_long_is_shown(at_once: None) -> None:
    terminal = Terminal()
    before = threading.enumerate()
    with redirect_stderr(terminal):
        for _ in progress.bar(range(3), "Counting", "groups"):
            time.sleep(0.11)  # bars are drawn ten times a second at most
    assert "Counting" in terminal.getvalue()
    assert "2/3" in terminal.getvalue()
    assert threading.enumerate() == before, "a bar started a thread"


def test_nothing_is_shown_without_a_terminal(at_once: None) -> None:
    shown = io.StringIO()
    with redirect_stderr(shown):
        for _ in progress.bar(range(3), "Counting", "groups"):
            time.sleep(0.11)
    assert shown.getvalue() == ""


def test_flushing_registering_and_opening_have_a_bar(
    disk_dir: Path, tmp_path: Path, at_once: None
) -> None:
    terminal = Terminal()
    (tmp_path / "model").mkdir()
    for i in range(2):
        save_file({f"weight/{i}": pages(i)}, tmp_path / "model" / f"{i}.safetensors")
    with redirect_stderr(terminal), open_store(disk_dir) as store:
        store.put("key", pages(1))
        store.flush()
        assert "Writing what is not on disk" in terminal.getvalue()
        store.register_checkpoint(tmp_path / "model")
        assert "Reading headers" in terminal.getvalue()
    with redirect_stderr(terminal), open_store(disk_dir):
        assert "Looking at what is stored" in terminal.getvalue()
