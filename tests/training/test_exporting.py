"""Weights of a training on a store, exported as safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.tensors import assert_same
from tests.training import models
from tests.training.conftest import copied, store_for
from tierstore import OffloadModel, TierStore, export_safetensors
from tierstore.adapters.training.saving import files_of


def test_export_has_each_tensor_once_under_its_name(tmp_path: Path) -> None:
    module = models.build("llama-tied")
    expected = copied(dict(module.state_dict()))
    del expected["lm_head.weight"]  # is model.embed_tokens.weight
    place = tmp_path / "exported"
    with store_for(module, tmp_path / "store") as store:
        export_safetensors(place, OffloadModel(module, store))

    [file] = place.glob("*.safetensors")
    assert_same(load_file(file), expected)
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    with TierStore(1 << 20, tmp_path / "other", device="cpu") as store:
        store.register_checkpoint(place)
    with pytest.raises(ValueError, match="choose another directory"):
        export_safetensors(place, module)


def test_export_files_respect_the_size_limit() -> None:
    sizes = {"a": 10, "b": 20, "c": 80, "d": 200, "e": 1, "none": 0}
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    numbers = files_of(tensors, 100)
    assert numbers == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4, "none": 4}
