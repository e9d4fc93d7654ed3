"""Where all fits, modules that share a group share its lease, wherever the weights are from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from tierstore import TierStore, enable_group_offload

LAYERS = 20
STEPS = 3


class Stack(nn.Module):
    """Many small layers: several of them make one group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(source: str, tmp_path: Path) -> Stack:
    torch.manual_seed(0)
    model = Stack().eval()
    if source == "a checkpoint":
        save_model(model, str(tmp_path / "model.safetensors"))
        load_model(model, str(tmp_path / "model.safetensors"))
    return model


@pytest.mark.parametrize("source", ["a checkpoint", "memory"])
@pytest.mark.parametrize("roomy", [True, False])
@torch.no_grad()
def test_a_lease_is_shared_by_the_layers_of_a_group_if_there_is_room_for_all(
    source: str, roomy: bool, tmp_path: Path
) -> None:
    model = stack(source, tmp_path)
    x = torch.randn(2, 16)
    expected = model(x)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with TierStore(20 * weights, tmp_path / "store", device="cpu") as store:
        if not roomy:  # what is known has no room together, though nothing of the model has to go
            for key in ("other", "more"):
                store.put(key, torch.zeros(12 * weights, dtype=torch.uint8))
                store.flush()
        with enable_group_offload(model, store, offload_type="leaf_level"):
            for _ in range(STEPS):
                assert torch.equal(model(x), expected)
            counts = store.stats()
            leases = counts.hits + counts.late + counts.misses
            groups = [key for key in store if key.startswith("Stack")]
            assert len(groups) < LAYERS / 2, "several layers share a group"
            assert leases == STEPS * (len(groups) if roomy else LAYERS)
            for key in groups:  # nobody has any of it after the run
                store.offload(key)
            there = {group.key for group in store.snapshot().groups if "HOST" in group.tiers}
            assert not there.intersection(groups)
