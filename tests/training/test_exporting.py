"""Weights of a training on a store as safetensors files, for whoever reads those."""

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
from tierstore.adapters.training import exporting


def test_an_export_has_each_tensor_once_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "FILE_BYTES", 100_000)
    module = models.build("llama-tied")
    expected = copied(dict(module.state_dict()))
    del expected["lm_head.weight"]  # is model.embed_tokens.weight
    place = tmp_path / "exported"
    with store_for(module, tmp_path / "store") as store:
        export_safetensors(place, OffloadModel(module, store))

    files = sorted(place.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 150_000 for file in files)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert_same(found, {name: expected[name] for name in found})
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    with TierStore(1 << 20, tmp_path / "other", device="cpu") as store:
        store.register_checkpoint(place)
    with pytest.raises(ValueError, match="choose a directory of its own"):
        export_safetensors(place, module)
