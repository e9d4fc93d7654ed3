"""From what a user writes to what the store works with."""

from __future__ import annotations

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


@pytest.mark.parametrize("missing", [True, False])
def test_device_memory_is_asked_of_the_device_s_module_where_torch_does_not_tell(
    missing: bool, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.accelerator tells since 2.10, and not of all devices."""
    asked: list[torch.device] = []

    def told(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 6 * MIB, 8 * MIB

    if missing:
        monkeypatch.delattr(torch.accelerator, "get_memory_info")
    else:
        monkeypatch.setattr(torch.accelerator, "get_memory_info", does_not_tell)
    monkeypatch.setattr(pretend, "mem_get_info", told)
    device = torch.device("pretend", 1)
    assert device_memory(device) == (6 * MIB, 8 * MIB)
    assert asked == [device]
    budgets = resolve_budgets(device, MIB, "50%", None, tmp_path)
    assert budgets[Tier.DEVICE] == 4 * MIB


def test_a_device_of_which_nothing_tells_needs_a_budget_in_bytes(
    pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    monkeypatch.setattr(pretend, "mem_get_info", does_not_tell)
    device = torch.device("pretend", 0)
    with pytest.raises(ValueError, match="pass device_budget in bytes") as caught:
        resolve_budgets(device, MIB, None, None, tmp_path)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert resolve_budgets(device, MIB, MIB, None, tmp_path)[Tier.DEVICE] == MIB
