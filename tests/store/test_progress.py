"""Bars: on a terminal, and only for what takes long."""

from __future__ import annotations

import io
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.store.helpers import open_store, pages
from tierstore import progress


class Terminal(io.StringIO):
    """Text that says it is shown to somebody."""

    def isatty(self) -> bool:
        return True


def showing(monkeypatch: pytest.MonkeyPatch, where: io.StringIO) -> io.StringIO:
    """Errors are written there. Not a fixture: pytest sets stderr anew after those."""
    monkeypatch.setattr(sys, "stderr", where)
    return where


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars that do not wait to see whether it takes long."""
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)


def test_the_items_come_through_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = showing(monkeypatch, Terminal())
    assert list(progress.bar(range(5), "Counting", "groups")) == list(range(5))
    assert terminal.getvalue() == "", "it was quick"


def test_what_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    terminal = showing(monkeypatch, Terminal())
    before = threading.enumerate()
    for _ in progress.bar(range(3), "Counting", "groups"):
        time.sleep(0.11)  # bars are drawn ten times a second at most
    assert "Counting" in terminal.getvalue()
    assert "2/3" in terminal.getvalue()
    assert threading.enumerate() == before, "a bar started a thread"


def test_nothing_is_shown_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    shown = showing(monkeypatch, io.StringIO())
    for _ in progress.bar(range(3), "Counting", "groups"):
        time.sleep(0.11)
    assert shown.getvalue() == ""


def test_flushing_registering_and_opening_have_a_bar(
    disk_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    terminal = showing(monkeypatch, Terminal())
    (tmp_path / "model").mkdir()
    for i in range(2):
        save_file({f"weight/{i}": pages(i)}, tmp_path / "model" / f"{i}.safetensors")
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        store.flush()
        assert "Writing what is not on disk" in terminal.getvalue()
        store.register_checkpoint(tmp_path / "model")
        assert "Reading headers" in terminal.getvalue()
    with open_store(disk_dir):
        assert "Looking at what is stored" in terminal.getvalue()
