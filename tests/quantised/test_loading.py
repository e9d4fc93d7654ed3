"""Loading with a quantisation config straight into a store gives diffusers' weights, once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers import (
    FluxPipeline,
    FluxTransformer2DModel,
    PipelineQuantizationConfig,
    TorchAoConfig,
)
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

from tests import pipelines
from tests.adapters.conftest import Checkpoints, checkpoint
from tests.store.helpers import open_store
from tierstore import disable_offload, enable_group_offload, from_pretrained
from tierstore.adapters.codecs import leaves_of

__all__ = ["checkpoint"]

BUDGET = 600_000


@pytest.fixture(scope="module")
def flux(checkpoint: Checkpoints) -> Path:
    return checkpoint("flux")


def arguments(config: Any = None, **options: Any) -> dict[str, Any]:
    chosen = Int8WeightOnlyConfig() if config is None else config
    return {
        "quantization_config": TorchAoConfig(chosen, **options),
        "torch_dtype": pipelines.DTYPE,
    }


def bits_of(model: Any) -> dict[str, tuple[torch.dtype, bytes]]:
    found = {}
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        for attribute, leaf in leaves_of(weight).items():
            flat = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            found[f"{name}/{attribute}"] = leaf.dtype, flat.numpy().tobytes()
    return found


def same(found: Any, expected: Any) -> None:
    kinds = {name: type(weight) for name, weight in expected.named_parameters()}
    assert {name: type(weight) for name, weight in found.named_parameters()} == kinds
    assert bits_of(found) == bits_of(expected)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"config": Float8WeightOnlyConfig()},
        {"modules_to_not_convert": ["proj_out", "transformer_blocks.0"]},
    ],
    ids=("int8", "fp8", "some modules"),
)
def test_quantised_weights_equal_those_of_diffusers(
    chosen: dict[str, Any], flux: Path, disk_dir: Path
) -> None:
    folder = flux / "transformer"
    expected = FluxTransformer2DModel.from_pretrained(folder, **arguments(**chosen))
    for start in ("first", "second"):
        with open_store(disk_dir, BUDGET) as store:
            found = from_pretrained(FluxTransformer2DModel, folder, store, **arguments(**chosen))
            same(found, expected)
            assert (store.stats().bytes_written > 0) == (start == "first")
    assert found.hf_quantizer.quantization_config.quant_method == "torchao"


def test_quantised_pipeline_output_is_equal(flux: Path, disk_dir: Path) -> None:
    mapping = {"transformer": TorchAoConfig(Int8WeightOnlyConfig())}
    config = PipelineQuantizationConfig(quant_mapping=mapping)
    load = {"quantization_config": config, "torch_dtype": pipelines.DTYPE}
    expected = pipelines.run("flux", pipelines.quiet(FluxPipeline.from_pretrained(flux, **load)))
    with open_store(disk_dir, BUDGET) as store:
        pipe = pipelines.quiet(from_pretrained(FluxPipeline, flux, store, **load))
        for _ in range(2):
            assert torch.equal(pipelines.run("flux", pipe), expected)
        assert store.stats().bytes_read > 2 * BUDGET
        assert store.stats().peak_bytes["HOST"] <= BUDGET
        disable_offload(enable_group_offload(pipe, store))
    assert torch.equal(pipelines.run("flux", pipe), expected)


def test_quantised_transformers_model_output_is_equal(
    checkpoint: Checkpoints, disk_dir: Path
) -> None:
    folder = checkpoint("llama")

    def named() -> dict[str, Any]:
        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
        return {"quantization_config": config, "dtype": pipelines.DTYPE}

    plain = transformers.LlamaForCausalLM.from_pretrained(folder, **named())
    expected = pipelines.run("llama", pipelines.quiet(plain))
    for start in ("first", "second"):
        with open_store(disk_dir, BUDGET) as store:
            model = from_pretrained(transformers.LlamaForCausalLM, folder, store, **named())
            assert torch.equal(pipelines.run("llama", pipelines.quiet(model)), expected)
            same(model, plain)
            assert (store.stats().bytes_written > 0) == (start == "first")


def test_cached_result_of_another_configuration_is_not_used(
    flux: Path, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    folder, other = flux / "transformer", checkpoint("flux", transformer=5) / "transformer"
    with open_store(disk_dir, BUDGET) as store:
        from_pretrained(FluxTransformer2DModel, folder, store, **arguments())
    for place, config in ((folder, Float8WeightOnlyConfig()), (other, Int8WeightOnlyConfig())):
        expected = FluxTransformer2DModel.from_pretrained(place, **arguments(config))
        with open_store(disk_dir, BUDGET) as store:
            same(
                from_pretrained(FluxTransformer2DModel, place, store, **arguments(config)), expected
            )
            assert store.stats().bytes_written > 0


def test_touched_files_are_read_again_without_writing(
    flux: Path, disk_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in (flux / "transformer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    expected = FluxTransformer2DModel.from_pretrained(folder, **arguments())
    written = []
    for _ in range(2):
        with open_store(disk_dir, BUDGET) as store:
            same(from_pretrained(FluxTransformer2DModel, folder, store, **arguments()), expected)
            written.append(store.stats().bytes_written)
        for file in folder.glob("*.safetensors"):
            os.utime(file)
    assert 0 < written[1] < written[0] / 2  # recorded under its new source


def test_diffusers_quantises_as_before_afterwards(flux: Path, disk_dir: Path) -> None:
    folder = flux / "transformer"
    with open_store(disk_dir, BUDGET) as store:
        with pytest.raises(OSError):
            from_pretrained(FluxTransformer2DModel, flux / "nothing", store, **arguments())
        from_pretrained(FluxTransformer2DModel, folder, store, **arguments())
    model = FluxTransformer2DModel.from_pretrained(folder, **arguments())
    assert any(type(weight).__name__ == "Int8Tensor" for weight in model.parameters())
