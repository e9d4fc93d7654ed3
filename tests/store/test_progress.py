"""Progress bars: on a terminal, and only for slow work."""

from __future__ import annotations

import gc
import io
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.store.helpers import open_store, pages, run_threads
from tierstore import OffloadModel, export_safetensors, progress


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw bars at once, without waiting to see whether the work is slow."""
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)


def test_progress_yields_the_items_in_order() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        assert list(progress.bar(range(5), "Counting", "groups")) == list(range(5))
    assert terminal.getvalue() == "", "the work was quick"


def test_progress_of_long_work_is_shown(at_once: None) -> None:
    terminal = Terminal()
    before = threading.enumerate()
    with redirect_stderr(terminal):
        for _ in progress.bar(range(3), "Counting", "groups"):
            time.sleep(0.11)  # bars are drawn ten times a second at most
    assert "Counting" in terminal.getvalue()
    assert "2/3" in terminal.getvalue()
    assert threading.enumerate() == before, "a bar started a thread"


def test_progress_is_disabled_by_environment_variable(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, shown in {"0": False, "off": False, "No ": False, "1": True, "": True}.items():
        monkeypatch.setenv("TIERSTORE_PROGRESS", value)
        terminal = Terminal()
        with redirect_stderr(terminal):
            assert list(progress.bar(range(3), "Counting", "groups")) == [0, 1, 2]
        assert ("Counting" in terminal.getvalue()) is shown, value


def test_progress_of_two_bars_draws_the_first(at_once: None) -> None:
    outer, terminal = Terminal(), Terminal()
    with redirect_stderr(outer):
        for _ in progress.bar(range(2), "Reading files", "files"):
            with progress.byte_bar("Downloading", 100) as advance:
                advance(50)
                time.sleep(0.11)
                advance(50)
    assert outer.getvalue().index("Downloading") < outer.getvalue().index("Reading files")
    assert "50/100 bytes" in outer.getvalue()
    lines = outer.getvalue().split("\r")
    assert not [line for line in lines if "Downloading" in line and "Reading" in line]
    with redirect_stderr(terminal):
        list(progress.bar(range(2), "Once more", "files"))
    assert "Once more" in terminal.getvalue(), "the screen was not restored"


def test_progress_loop_left_early_restores_the_screen(at_once: None) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        with pytest.raises(ValueError, match="enough"):
            for number in progress.bar(range(9), "Counting", "groups"):
                time.sleep(0.01)
                if number == 3:
                    raise ValueError("enough")
        gc.collect()
        with pytest.raises(ValueError, match="enough"), progress.byte_bar("Reading", 9) as advance:
            advance(1)
            raise ValueError("enough")
        list(progress.bar(range(2), "Once more", "files"))
    assert all(doing in terminal.getvalue() for doing in ("Counting", "Reading", "Once more"))


def test_progress_of_many_threads_adds_up(at_once: None) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), progress.byte_bar("Reading", 4000, immediately=True) as advance:

        def add() -> None:
            for _ in range(1000):
                advance(1)

        assert not run_threads([add] * 4)
        time.sleep(0.11)
        advance(0)
    assert "3.9/3.9 KiB" in terminal.getvalue()


def test_progress_text_is_neither_markup_nor_template(at_once: None) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        list(progress.bar(range(2), "s3://[red]{0}", "files"))
    assert "s3://[red]{0}" in terminal.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_progress_bar_keeps_to_one_line(
    columns: int, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal, doing = Terminal(), "Downloading s3://" + "models/" * 20
    with redirect_stderr(terminal), progress.byte_bar(doing, 123 << 30) as advance:
        advance(122 << 30)
        advance(1 << 30)
    # Each drawing replaces the previous one: only one line ends, and that one is erased.
    assert terminal.getvalue().count("\n") == 1
    assert "123.0/123.0 GiB" in terminal.getvalue()


def test_progress_with_closed_stderr_draws_nothing(at_once: None) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, object()):
        with redirect_stderr(stream):
            assert list(progress.bar(range(3), "Counting", "groups")) == [0, 1, 2]


def test_progress_without_a_terminal_draws_nothing(at_once: None) -> None:
    shown = io.StringIO()
    with redirect_stderr(shown):
        for _ in progress.bar(range(3), "Counting", "groups"):
            time.sleep(0.11)
    assert shown.getvalue() == ""


def test_flush_register_and_open_show_progress(
    disk_dir: Path, tmp_path: Path, at_once: None
) -> None:
    terminal = Terminal()
    (tmp_path / "model").mkdir()
    for i in range(2):
        save_file({f"weight/{i}": pages(i)}, tmp_path / "model" / f"{i}.safetensors")
    with redirect_stderr(terminal), open_store(disk_dir) as store:
        store.put("key", pages(1))
        store.flush()
        assert "Writing to disk" in terminal.getvalue()
        store.register_checkpoint(tmp_path / "model")
        assert "Reading headers" in terminal.getvalue()
    with redirect_stderr(terminal), open_store(disk_dir):
        assert "Reading stored groups" in terminal.getvalue()


def test_training_and_export_show_progress(tmp_path: Path, at_once: None) -> None:
    shown = Terminal()
    with redirect_stderr(shown), open_store(tmp_path / "store", 8 << 20) as store:
        model = OffloadModel(torch.nn.Linear(64, 64), store)
        export_safetensors(tmp_path / "exported", model)
        model.disable()
    for doing in ("Storing parameters", "Exporting to", "Restoring parameters"):
        assert doing in shown.getvalue()
    assert "16.2/16.2 KiB" in shown.getvalue(), "not all bytes were reported"
