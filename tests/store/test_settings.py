"""From what a user writes to what the store works with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.engine.settings import device_memory, resolve_budgets
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


def test_device_memory_is_asked_of_the_device_s_module_where_torch_does_not_tell(
    told_by_the_device_only: Any, tmp_path: Path
) -> None:
    told_by_the_device_only.set_memory_info((6 * MIB, 8 * MIB), index=1)
    device = torch.device("pretend", 1)
    assert device_memory(device) == (6 * MIB, 8 * MIB)
    budgets = resolve_budgets(device, MIB, "50%", None, tmp_path)
    assert budgets[Tier.DEVICE] == 4 * MIB


def test_a_device_of_which_nothing_tells_needs_a_budget_in_bytes(
    told_by_the_device_only: Any, tmp_path: Path
) -> None:
    device = torch.device("pretend", 0)
    with pytest.raises(ValueError, match="pass device_budget in bytes") as caught:
        resolve_budgets(device, MIB, None, None, tmp_path)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert resolve_budgets(device, MIB, MIB, None, tmp_path)[Tier.DEVICE] == MIB
