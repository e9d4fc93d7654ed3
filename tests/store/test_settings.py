"""From what a user writes to what the store works with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR, DEVICE_0, needs_accelerator
from tests.fresh import run_fresh
from tierstore import TierStore
from tierstore.engine.settings import device_memory, resolve_budgets, resolve_device
from tierstore.errors import DeviceError
from tierstore.model.sizes import PAGE, usable_memory
from tierstore.model.tiers import Tier

pytestmark = pytest.mark.floor

MIB = 1 << 20


def does_not_tell(*_: Any) -> tuple[int, int]:
    raise NotImplementedError("the backend does not know")


@pytest.fixture(params=[True, False], ids=["torch has no such function", "torch does not know"])
def told_by_the_device_only(
    request: pytest.FixtureRequest, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """torch.accelerator tells since 2.10, and not of all devices. The pretend device, to be told
    what to tell."""
    if request.param:
        monkeypatch.delattr(torch.accelerator, "get_memory_info")
    else:
        monkeypatch.setattr(torch.accelerator, "get_memory_info", does_not_tell)
    yield pretend
    pretend.set_memory_info(None)


@pytest.mark.pretend_only("limits")
def test_device_memory_is_asked_of_the_device_s_module_where_torch_does_not_tell(
    told_by_the_device_only: Any, tmp_path: Path
) -> None:
    told_by_the_device_only.set_memory_info((6 * MIB, 8 * MIB), index=1)
    device = torch.device(ACCELERATOR, 1)
    assert device_memory(device) == (6 * MIB, 8 * MIB)
    budgets = resolve_budgets(device, MIB, "50%", None, tmp_path)
    assert budgets[Tier.DEVICE] == 4 * MIB


@pytest.mark.pretend_only("limits")
def test_a_device_of_which_nothing_tells_needs_a_budget_in_bytes(
    told_by_the_device_only: Any, tmp_path: Path
) -> None:
    device = torch.device(ACCELERATOR, 0)
    with pytest.raises(ValueError, match="pass device_budget in bytes") as caught:
        resolve_budgets(device, MIB, None, None, tmp_path)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert resolve_budgets(device, MIB, MIB, None, tmp_path)[Tier.DEVICE] == MIB


# Devices that are not there ----------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "xpu", torch.device("cuda", 0)])
def test_an_accelerator_is_asked_for_where_there_is_none(device: Any, tmp_path: Path) -> None:
    run = run_fresh_with(tmp_path, f"TierStore('64MB', 'd', device={str(device)!r})")
    kind = str(device).partition(":")[0]
    assert f"there is no {kind} device here: torch {torch.__version__} finds no accelerator" in run
    assert "pass device='cpu', or leave device out" in run
    assert not (tmp_path / "d").exists()


def run_fresh_with(tmp_path: Path, call: str) -> str:
    """What a call says that fails in a process without the pretended device."""
    program = tmp_path / "program.py"
    program.write_text(
        "from tierstore import TierStore; from tierstore.errors import DeviceError\n"
        f"try:\n    {call}\n"
        "except DeviceError as error:\n    print(error)\n"
    )
    run = run_fresh(program, directory=tmp_path)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("device", ["nonsense", "cuda:x", ""])
def test_what_is_no_device(device: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no device") as caught:
        TierStore("64MB", tmp_path / "store", device=device)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    assert repr(device) in str(caught.value)
    assert not (tmp_path / "store").exists()


@needs_accelerator
def test_one_device_more_than_there_are(tmp_path: Path) -> None:
    count = torch.accelerator.device_count()
    with pytest.raises(DeviceError, match=f"there is no {ACCELERATOR}:{count} here") as caught:
        TierStore("64MB", tmp_path / "store", device=f"{ACCELERATOR}:{count}", device_budget="1MB")
    assert f"{ACCELERATOR}:{count - 1}, cpu" in str(caught.value)
    assert resolve_device(f"{ACCELERATOR}:{count - 1}").index == count - 1


@needs_accelerator
def test_another_kind_of_device_than_there_is() -> None:
    with pytest.raises(DeviceError, match=f"no xpu device here: pass one of {DEVICE_0}, "):
        resolve_device("xpu")


# Budgets that cannot be ----------------------------------------------------------


def test_more_host_memory_than_there_is_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TierStore("1MiB", tmp_path / "store", device="cpu"):
        assert not caplog.records
    with TierStore(usable_memory() + PAGE, tmp_path / "store", device="cpu") as store:
        store.put("a", torch.ones(3))
        assert torch.equal(store.get("a"), torch.ones(3))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "ram_budget is " in record.message and "lower it" in record.message
