"""User settings, and the values that the store derives from them."""

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


def reports_nothing(*_: Any) -> tuple[int, int]:
    raise NotImplementedError("the backend does not know")


@pytest.fixture(params=[True, False], ids=["torch has no such function", "torch does not know"])
def reported_by_the_device_only(
    request: pytest.FixtureRequest, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Replace torch.accelerator, which reports memory since 2.10 only, and not for all devices.

    The pretend device gets the given answers.
    """
    if request.param:
        monkeypatch.delattr(torch.accelerator, "get_memory_info")
    else:
        monkeypatch.setattr(torch.accelerator, "get_memory_info", reports_nothing)
    yield pretend
    pretend.set_memory_info(None)


@pytest.mark.pretend_only("limits")
def test_device_module_is_asked_where_torch_has_no_size(
    reported_by_the_device_only: Any, tmp_path: Path
) -> None:
    reported_by_the_device_only.set_memory_info((6 * MIB, 8 * MIB), index=1)
    device = torch.device(ACCELERATOR, 1)
    assert device_memory(device) == (6 * MIB, 8 * MIB)
    budgets = resolve_budgets(device, MIB, "50%", None, tmp_path)
    assert budgets[Tier.DEVICE] == 4 * MIB


@pytest.mark.pretend_only("limits")
def test_device_of_unknown_size_needs_a_budget_in_bytes(
    reported_by_the_device_only: Any, tmp_path: Path
) -> None:
    device = torch.device(ACCELERATOR, 0)
    with pytest.raises(ValueError, match="pass device_budget in bytes") as caught:
        resolve_budgets(device, MIB, None, None, tmp_path)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert resolve_budgets(device, MIB, MIB, None, tmp_path)[Tier.DEVICE] == MIB


# Devices that are not there ----------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "xpu", torch.device("cuda", 0)])
def test_accelerator_absent_raises(device: Any, tmp_path: Path) -> None:
    run = run_fresh_with(tmp_path, f"TierStore('64MB', 'd', device={str(device)!r})")
    kind = str(device).partition(":")[0]
    assert (
        f"this machine has no {kind} device: torch {torch.__version__} finds no accelerator" in run
    )
    assert "pass device='cpu', or omit device" in run
    assert not (tmp_path / "d").exists()


def run_fresh_with(tmp_path: Path, call: str) -> str:
    """Return the error of a call in a process without the pretend device."""
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
def test_device_malformed_raises(device: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="not a device") as caught:
        TierStore("64MB", tmp_path / "store", device=device)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    assert repr(device) in str(caught.value)
    assert not (tmp_path / "store").exists()


@needs_accelerator
def test_device_index_beyond_the_last_raises(tmp_path: Path) -> None:
    count = torch.accelerator.device_count()
    with pytest.raises(DeviceError, match=f"this machine has no {ACCELERATOR}:{count}:") as caught:
        TierStore("64MB", tmp_path / "store", device=f"{ACCELERATOR}:{count}", device_budget="1MB")
    assert f"{ACCELERATOR}:{count - 1}, cpu" in str(caught.value)
    assert resolve_device(f"{ACCELERATOR}:{count - 1}").index == count - 1


@needs_accelerator
def test_device_of_another_kind_raises() -> None:
    with pytest.raises(DeviceError, match=f"no xpu device: pass one of {DEVICE_0}, "):
        resolve_device("xpu")


# Budgets that cannot be ----------------------------------------------------------


def test_ram_budget_above_the_machines_memory_warns(
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
