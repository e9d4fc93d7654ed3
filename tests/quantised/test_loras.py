"""LoRAs over quantised weights: loaded, scaled and unloaded, as without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests import pipelines
from tests.adapters.conftest import Checkpoints, checkpoint
from tests.quantised.kinds import quantised, weights_of
from tests.store.helpers import open_store
from tierstore import dispatch_model
from tierstore.adapters.codecs import weight_bytes

__all__ = ["checkpoint"]

LAYERS = ["q_proj", "v_proj", "o_proj"]


def outputs(model: Any) -> list[torch.Tensor]:
    """Return outputs with a LoRA, with it scaled, without it, and after its removal."""
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False), "one")
    found = [pipelines.run("llama", model)]
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["one"] *= 0.5
    found.append(pipelines.run("llama", model))
    model.disable_adapters()
    found.append(pipelines.run("llama", model))
    model.enable_adapters()
    model.delete_adapter("one")
    found.append(pipelines.run("llama", model))
    return found


@pytest.mark.parametrize("kind", ("torchao_int8", "quanto_int8", "bitsandbytes_nf4"))
def test_lora_on_a_quantised_model_is_equal(
    kind: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    expected = outputs(quantised("llama", checkpoint, kind))
    assert not torch.equal(expected[0], expected[1])
    assert not torch.equal(expected[1], expected[2])
    model = quantised("llama", checkpoint, kind)
    with open_store(disk_dir, int(0.4 * weight_bytes(weights_of(model)))) as store:
        dispatch_model(model, store)
        pipelines.run("llama", model)
        assert_equal(outputs(model), expected)
        assert store.stats().bytes_read > weight_bytes(weights_of(model))


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"output {number}"
