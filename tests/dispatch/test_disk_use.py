"""Weights that no model shows any more leave the disk: which leave, which stay, and when.

References are models on no store. `bytes_in` counts the bytes in a directory.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.accelerator import on_both
from tests.lanes import by_lane
from tests.store.helpers import open_store
from tierstore import (
    TierStore,
    disable_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from tierstore.adapters import binding
from tierstore.engine.object_references import ObjectReferences
from tierstore.errors import BudgetError

WIDTH, LAYERS = by_lane((256, 4), (256, 4), (1024, 25))
LAYER = 4 * WIDTH * (WIDTH + 1)
MODEL = LAYERS * LAYER
MERGES = by_lane(8, 8, 50)
TOKENS, LENGTH = by_lane((12, 4096), (12, 4096), (1000, 4096))


def bytes_in(directory: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(os.path.getsize(path) for path in directory.rglob("*") if path.is_file())


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def run(model: nn.Module, *inputs: object) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(*(inputs or (torch.ones(2, WIDTH),)))
    return result.cpu()


def merge_adapter(model: nn.Sequential, seed: int) -> None:
    """Add a product of two thin matrices to each weight, as merging a LoRA does."""
    generator = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(WIDTH, 4, generator=generator) / WIDTH for _ in range(2))
    with torch.no_grad():
        for layer in model:
            layer.weight.data += up @ down.T


def weights_on_disk(store: TierStore) -> list[str]:
    store.flush()
    return store.keys("weights/")


def leave_ends_undetected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: keep the end of references undetected."""
    monkeypatch.setattr(ObjectReferences, "_end", lambda references, key: None)


# Edited weights -----------------------------------------------------------------------------------


def most_bytes_while_merging(disk_dir: Path, merges: int) -> int:
    model, reference = layers(), layers()
    most = 0
    with open_store(disk_dir, 4 * LAYER) as store:
        dispatch_model(model, store)
        for seed in range(merges):
            merge_adapter(model, seed)
            merge_adapter(reference, seed)
            assert torch.equal(run(model), run(reference))
            most = max(most, bytes_in(disk_dir))
            stats = store.stats()
            assert stats.peak_bytes["HOST"] <= 4 * LAYER
            assert stats.used_bytes["DISK"] <= 3 * MODEL
    return most


def test_merged_adapters_leave_two_versions_on_disk(tmp_path: Path) -> None:
    assert MODEL <= most_bytes_while_merging(tmp_path, MERGES) <= 3 * MODEL


def test_merged_adapters_pile_up_if_no_end_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_ends_undetected(monkeypatch)
    with pytest.raises(AssertionError):  # the store's own count of bytes on disk
        most_bytes_while_merging(tmp_path, 6)
    assert bytes_in(tmp_path) > 3 * MODEL


# Buffers that each call changes -------------------------------------------------------------------


class Attention(nn.Module):
    """Attention over keys and values that it keeps in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64)
        self.register_buffer("keys", torch.zeros(LENGTH, 64))
        self.register_buffer("values", torch.zeros(LENGTH, 64))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        self.keys[step], self.values[step] = key[0], value[0]
        scores = query @ self.keys[: step + 1].T
        return x + scores.softmax(-1) @ self.values[: step + 1]


class Attentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, step)
        return x


def pages_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the pages that tensors take at most."""
    return sum(-(-tensor.nbytes // 4096) * 4096 for tensor in tensors)


def nbytes_of(model: nn.Module) -> int:
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def assert_same_state(model: nn.Module, reference: nn.Module) -> None:
    expected = reference.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name].cpu()), name


@on_both
def test_caches_in_buffers_stay_right_and_off_the_disk(device: str, tmp_path: Path) -> None:
    model = Attentions()
    reference, x = copy.deepcopy(model), torch.randn(1, 64)
    reference.to(device)
    nbytes = nbytes_of(model)
    with open_store(tmp_path, nbytes * 2 // 3 // 4096 * 4096, device) as store:
        dispatch_model(model, store)
        settled: list[str] = []
        used = 0
        for step in range(TOKENS):
            assert torch.equal(run(model, x, step), run(reference, x.to(device), step))
            assert bytes_in(tmp_path) <= 3 * nbytes
            if step == 5:
                settled, used = weights_on_disk(store), sum(store.stats().used_bytes.values())
        assert weights_on_disk(store) == settled  # no content was written since
        # Weights may be in RAM and on disk, or on disk alone.
        assert sum(store.stats().used_bytes.values()) <= used + pages_of(model.parameters())
        with torch.no_grad():
            for each in (model, reference):  # as a new prompt begins; torch does not count it
                each.layers[1].keys.data.zero_()
        step = TOKENS - 1
        assert torch.equal(run(model, x, step), run(reference, x.to(device), step))
        assert_same_state(model, reference)
        assert_same_state(copy.deepcopy(model), reference)
        model.to(torch.float64)
        reference.to(torch.float64)
        x = x.double()
        assert torch.equal(run(model, x, step), run(reference, x.to(device), step))
        disable_offload(model)
        assert_same_state(model, reference)


def test_caches_that_count_as_weights_are_written_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "FREQUENT_EDITS", 1000)
    model, x = Attentions(), torch.randn(1, 64)
    with open_store(tmp_path, nbytes_of(model)) as store:
        dispatch_model(model, store)
        found = []
        for step in range(8):
            run(model, x, step)
            found.append(weights_on_disk(store))
    assert found[-1] != found[-2] != found[-3]


def test_buffers_that_share_memory_still_share_it(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.zeros(2, 1 << 18)
            self.register_buffer("first", both[0])
            self.register_buffer("both", both)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first += x
            return self.both.sum(1)

    model = nn.Sequential(Halves())
    reference = copy.deepcopy(model)
    with open_store(tmp_path, 4 << 20) as store:
        dispatch_model(model, store)
        for number in range(6):
            x = torch.full((1 << 18,), float(number))
            assert torch.equal(run(model, x), run(reference, x))
        assert len(weights_on_disk(store)) == 0  # all of it is changing
        assert model[0].first.data_ptr() == model[0].both.data_ptr()


# Dropped models -----------------------------------------------------------------------------------


def run_models_in_turn(disk_dir: Path) -> None:
    budget = MODEL * 5 // 2 // 4096 * 4096
    with open_store(disk_dir, 4 * LAYER, disk_budget=budget) as store:
        for seed in range(4):
            model = layers(seed)
            expected = run(model)
            dispatch_model(model, store)
            assert torch.equal(run(model), expected)
            disable_offload(model)
            del model
            gc.collect()
        assert store.stats().peak_bytes["DISK"] <= budget


def test_models_in_turn_fit_a_disk_budget_of_two(tmp_path: Path) -> None:
    run_models_in_turn(tmp_path)


def test_models_in_turn_exceed_the_budget_if_no_end_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_ends_undetected(monkeypatch)
    with pytest.raises(BudgetError, match="nothing may be dropped"):
        run_models_in_turn(tmp_path)


def test_weights_in_use_by_a_model_stay_on_disk(tmp_path: Path) -> None:
    model = layers()
    expected = run(model)
    with open_store(tmp_path, 4 * LAYER) as store:
        disable_offload(dispatch_model(model, store))
        assert weights_on_disk(store)
        assert torch.equal(run(model), expected)
        written = store.stats().bytes_written
        dispatch_model(model, store)  # its weights are in its files
        assert store.stats().bytes_written == written
        disable_offload(model)
        part = model[0].weight.detach()
        kept = part.clone()
        del model
        gc.collect()
        assert len(weights_on_disk(store)) == 1  # a tensor of it is still referenced
        assert torch.equal(part, kept)
        del part
        assert not weights_on_disk(store)
    assert bytes_in(tmp_path) < 4096


def test_close_keeps_weights_in_use_and_removes_others(tmp_path: Path) -> None:
    model, budget = layers(), 4 * LAYER
    with open_store(tmp_path, budget) as store:
        dispatch_model(model, store)
        first = set(weights_on_disk(store))
    assert first
    with open_store(tmp_path, budget) as store:
        assert set(store.keys("weights/")) == first
        again, other = layers(), layers(1)
        dispatch_model(again, store)
        assert store.stats().bytes_written == 0  # found by their content
        dispatch_model(other, store)
        del model, other
        gc.collect()
    with open_store(tmp_path, budget) as store:
        assert set(store.keys("weights/")) == first
    assert bytes_in(tmp_path) < 4096  # unused for a whole run


# Weights after a restart --------------------------------------------------------------------------


def load_cast(checkpoint: Path, store: TierStore) -> nn.Module:
    with torch.device("meta"):
        model = layers()
    return load_checkpoint_and_dispatch(model, checkpoint, store, dtype=torch.float64)


def test_derived_weights_stay_until_their_space_is_needed(tmp_path: Path) -> None:
    checkpoint, disk_dir, budget = tmp_path / "model.safetensors", tmp_path / "store", 4 * MODEL
    save_file(layers().state_dict(), checkpoint)
    expected = run(layers().double(), torch.ones(2, WIDTH, dtype=torch.float64))
    for start in range(3):
        with open_store(disk_dir, budget, disk_budget=budget) as store:
            model = load_cast(checkpoint, store)
            assert torch.equal(run(model, torch.ones(2, WIDTH, dtype=torch.float64)), expected)
            assert (store.stats().bytes_written > 0) == (start == 0)
            del model  # no model uses them at the end
            gc.collect()
    with open_store(disk_dir, budget, disk_budget=budget) as store:
        derived = len(store.keys("weights/"))
        large, small = (torch.ones(nbytes // 4) for nbytes in (MODEL * 5 // 2, MODEL))
        store.put("mine", large)
        assert 0 < len(weights_on_disk(store)) < derived
        store.put("mine too", small)
        store.flush()
        assert not store.keys("weights/")
        assert torch.equal(store.get("mine"), large)
        assert store.stats().peak_bytes["DISK"] <= budget
    with open_store(disk_dir, budget, disk_budget=budget) as store:
        assert store.keys() == ["mine", "mine too"]  # the records are gone, too
        store.discard("mine")
        model = load_cast(checkpoint, store)  # cast again
        assert torch.equal(run(model, torch.ones(2, WIDTH, dtype=torch.float64)), expected)


def test_smaller_disk_budget_removes_derived_weights(tmp_path: Path) -> None:
    checkpoint, disk_dir = tmp_path / "model.safetensors", tmp_path / "store"
    save_file(layers().state_dict(), checkpoint)
    with open_store(disk_dir, 4 * MODEL) as store:
        load_cast(checkpoint, store)
    before = bytes_in(disk_dir)
    with open_store(disk_dir, 4 * MODEL, disk_budget=MODEL) as store:
        assert store.stats().used_bytes["DISK"] <= MODEL
    assert bytes_in(disk_dir) <= MODEL < before


# Keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ("weights/", "casts/"))
def test_reserved_key_prefix_raises(prefix: str, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(ValueError, match="use another key"):
            store.put(prefix + "0" * 32, torch.ones(1))
        store.put(prefix + "mine", torch.ones(1))
    with open_store(tmp_path) as store:
        assert store.keys() == [prefix + "mine"]
