"""A weight that is changed while offloaded, in any way, is changed for the next forward.

The reference is the same model, changed in the same way, without a store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.accelerator import DEVICES
from tests.store.helpers import open_store
from tierstore import TierStore, enable_group_offload
from tierstore.system.maps import WriteWatch

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="any device",
)

WIDTH, LAYERS = 256, 8
LAYER_BYTES = WIDTH * (WIDTH + 1) * 4


def model(file: Path) -> nn.Sequential:
    """Return a model whose weights are maps of a safetensors file, as from `from_pretrained`."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if not file.exists():
        generator = torch.Generator().manual_seed(0)
        values = {
            k: torch.randn(v.shape, generator=generator) for k, v in layers.state_dict().items()
        }
        save_file(values, file)
    layers.load_state_dict(load_file(file), assign=True)
    return layers.requires_grad_(False)


def in_place(layers: nn.Sequential) -> None:
    layers[1].weight.mul_(2)


def uncounted(layers: nn.Sequential) -> None:
    """Change data as a PEFT merge does: torch's version counter does not count it."""
    layers[1].weight.data += 1


def one_element(layers: nn.Sequential) -> None:
    layers[6].bias.data[3] = 100


def other_memory(layers: nn.Sequential) -> None:
    layers[2].weight.data = layers[2].weight * 3


def part_loaded(layers: nn.Sequential) -> None:
    layers[3].load_state_dict({k: v * 2 for k, v in layers[3].state_dict().items()})


def whole_loaded(layers: nn.Sequential) -> None:
    layers.load_state_dict({k: v * 2 for k, v in layers.state_dict().items()})


def cast(layers: nn.Sequential) -> None:
    layers.to(torch.float64)


CHANGES = [in_place, uncounted, one_element, other_memory, part_loaded, whole_loaded, cast]
Change = Callable[[nn.Sequential], None]


def run(layers: nn.Sequential, device: str) -> torch.Tensor:
    dtype = layers[0].weight.dtype
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        return layers(x.to(device)).cpu()


def store_in(tmp_path: Path, device: str) -> TierStore:
    return open_store(tmp_path / "store", 6 * LAYER_BYTES, device)


def expected(file: Path, device: str, change: Change) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the un-offloaded outputs before and after the change."""
    before = run(model(file).to(device), device)
    changed = model(file)
    change(changed)
    return before, run(changed.to(device), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
def test_edit_takes_effect_in_the_next_forward(change: Change, device: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    before, after = expected(file, device, change)
    assert not torch.equal(before, after)
    layers = model(file)
    with store_in(tmp_path, device) as store, enable_group_offload(layers, store) as handle:
        assert torch.equal(run(layers, device), before)
        assert store.stats().bytes_written == 0
        change(layers)
        # Memory in place of the file's may be aligned otherwise: then the last bits differ.
        assert torch.allclose(run(layers, device), after, rtol=1e-5)
        written = store.stats().bytes_written
        assert written > 0
        assert torch.allclose(run(layers, device), after, rtol=1e-5)
        assert store.stats().bytes_written == written  # detected once
        shown = {name: value.clone() for name, value in layers.state_dict().items()}
        assert len(handle.groups) == len([k for k in store if not k.startswith("weights/")])
    for name, value in layers.state_dict().items():
        assert torch.equal(value, shown[name]), name


def test_edit_writes_only_changed_weights(tmp_path: Path) -> None:
    layers = model(tmp_path / "model.safetensors")
    with store_in(tmp_path, "cpu") as store, enable_group_offload(layers, store):
        run(layers, "cpu")
        in_place(layers)
        run(layers, "cpu")
        # Its layer, and those on both sides that share its first or last page.
        assert 0 < store.stats().bytes_written < 4 * LAYER_BYTES


def test_uncounted_write_without_the_write_watch_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the watch, the forward uses the old weights."""
    monkeypatch.setattr(WriteWatch, "written", lambda self: [])
    file = tmp_path / "model.safetensors"
    before, _ = expected(file, "cpu", uncounted)
    layers = model(file)
    with store_in(tmp_path, "cpu") as store, enable_group_offload(layers, store):
        run(layers, "cpu")
        uncounted(layers)
        assert torch.equal(run(layers, "cpu"), before)


class Counting(nn.Module):
    """Changes its own weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(1000), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x) + self.calls[0]


@pytest.mark.parametrize("device", DEVICES)
def test_weight_changed_by_a_forward_is_kept(device: str, tmp_path: Path) -> None:
    module = Counting()
    with store_in(tmp_path, device) as store, enable_group_offload(module, store):
        x = torch.zeros(1, WIDTH, device=device)
        with torch.no_grad():
            for _ in range(3):
                module(x)
        assert module.calls.tolist() == [3.0] * 1000
        for key in store:
            store.offload(key)
        with torch.no_grad():
            module(x)
    assert module.calls.tolist() == [4.0] * 1000


def test_backward_through_absent_weights_raises(tmp_path: Path) -> None:
    layers = model(tmp_path / "model.safetensors").requires_grad_(True)
    with store_in(tmp_path, "cpu") as store, enable_group_offload(layers, store):
        loss = layers(torch.ones(1, WIDTH)).sum()
        with pytest.raises(RuntimeError, match="have left the device"):
            loss.backward()
