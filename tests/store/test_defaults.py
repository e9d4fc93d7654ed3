"""A store opened without options: the place of its files, its budgets, and its log."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import psutil
import pytest
import torch

from tests.accelerator import ACCELERATOR
from tests.store.helpers import PAGE, open_store, pages
from tierstore import TierStore
from tierstore.engine.settings import device_memory
from tierstore.errors import StoreLockedError
from tierstore.model.formatting import Units, size
from tierstore.model.sizes import usable_memory

MIB = 1 << 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point to the user's cache directory, and remove all other defaults."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TIERSTORE_DIR", raising=False)
    return tmp_path / "cache"


def test_store_without_arguments_uses_the_user_cache(cache: Path) -> None:
    with TierStore() as store:
        store.put("key", pages(1))
    assert (cache / "tierstore" / "store" / "objects").is_dir()
    with TierStore() as store:
        assert torch.equal(torch.as_tensor(store.get("key")).cpu(), pages(1))


@pytest.mark.parametrize("named", ["mine", "~/mine"])
def test_environment_variable_sets_the_directory(
    named: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TIERSTORE_DIR", named)
    TierStore("64MiB", device="cpu").close()
    assert (tmp_path / "mine" / "objects").is_dir()
    assert not cache.exists()
    TierStore("64MiB", tmp_path / "passed", device="cpu").close()
    assert (tmp_path / "passed" / "objects").is_dir()


def test_environment_variable_empty_is_ignored(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERSTORE_DIR", "")
    TierStore("64MiB", device="cpu").close()
    assert (cache / "tierstore" / "store").is_dir()


def test_second_store_in_default_directory_names_disk_dir(cache: Path, tmp_path: Path) -> None:
    with TierStore("64MiB", device="cpu"):
        with pytest.raises(
            StoreLockedError, match=r"pass another disk_dir.* set TIERSTORE_DIR"
        ) as error:
            TierStore("64MiB", device="cpu")
        assert str(cache / "tierstore" / "store") in str(error.value)
        with pytest.raises(StoreLockedError) as chosen:
            TierStore("64MiB", cache / "tierstore" / "store", device="cpu")
        assert "TIERSTORE_DIR" not in str(chosen.value)
        TierStore("64MiB", tmp_path / "other", device="cpu").close()


def test_auto_ram_budget_is_half_of_available_and_logged(
    disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierstore")
    with TierStore(disk_dir=disk_dir, device="cpu") as store:
        budget = store.stats().budget_bytes["HOST"]
    assert budget is not None
    available = min(usable_memory(), psutil.virtual_memory().available)
    assert budget == pytest.approx(available / 2, rel=0.3)  # others use memory meanwhile
    (message,) = messages(caplog)
    found = re.fullmatch(r"ram_budget 'auto': ([\d.]+) (\w+), half of the .* available", message)
    assert found is not None
    assert float(found[1]) == pytest.approx(budget / {"MB": 1e6, "GB": 1e9}[found[2]], abs=1)


def test_explicit_budget_is_not_logged(disk_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierstore")
    open_store(disk_dir).close()
    assert messages(caplog) == []


def test_auto_device_budget_on_the_cpu_is_none(disk_dir: Path) -> None:
    with open_store(disk_dir, device_budget="auto") as store:
        assert set(store.stats().budget_bytes) == {"HOST", "DISK"}


@pytest.mark.pretend_only("bytes")
@pytest.mark.parametrize("budget", ["auto", None])
def test_auto_device_budget_is_half_of_free_and_logged(
    budget: str | None, disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierstore")
    free, _ = device_memory(torch.device(ACCELERATOR, 0))
    with TierStore(MIB, disk_dir, device=ACCELERATOR, device_budget=budget) as store:
        assert store.stats().budget_bytes["DEVICE"] == free // 2 // PAGE * PAGE
    (message,) = messages(caplog)
    budget_text, free_text = size(free // 2, Units.DECIMAL), size(free, Units.DECIMAL)
    assert message == f"device_budget 'auto': {budget_text}, half of the {free_text} free"


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log, except for opening and closing."""
    assert {record.name.partition(".")[0] for record in caplog.records} <= {"tierstore"}
    logged = [record.getMessage() for record in caplog.records]
    return [each for each in logged if not each.startswith(("opened ", "closed "))]
