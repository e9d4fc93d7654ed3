"""Pretrained models loaded straight into a store equal the library's, with their bytes in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests import pipelines
from tests.adapters.conftest import DEVICES, Checkpoints
from tests.helpers.tensors import assert_same
from tests.store.helpers import open_store
from tierstore import (
    TierStore,
    disable_offload,
    enable_group_offload,
    from_pretrained,
    from_single_file,
)
from tierstore.adapters.deferred_loading import MIN_FILE_BYTES, intercepted
from tierstore.errors import BudgetError
from tierstore.system.maps import unnamed_file_memory

TINY_KINDS = pytest.mark.parametrize("kind", pipelines.KINDS)


def class_of(kind: str) -> Any:
    return transformers.LlamaForCausalLM if kind == "llama" else diffusers.DiffusionPipeline


@pytest.fixture
def in_float32(checkpoint: Checkpoints, tmp_path: Path) -> Any:
    """Return `in_float32(kind)`: a float32 checkpoint, and the pipeline that its library casts."""

    def make(kind: str) -> tuple[Path, Any]:
        wide = pipelines.load(kind, checkpoint(kind), torch_dtype=torch.float32)
        wide.save_pretrained(tmp_path / "float32", max_shard_size="1MB")
        return tmp_path / "float32", pipelines.load(kind, tmp_path / "float32")

    return make


def values_of(pipe: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in pipelines.weights(pipe)}


@pytest.mark.full("every pipeline on every device", keep=["cpu-llama"])
@TINY_KINDS
@pytest.mark.parametrize("device", DEVICES)
def test_cast_equals_the_library_and_is_done_once(
    kind: str, device: str, in_float32: Any, disk_dir: Path
) -> None:
    checkpoint, plain = in_float32(kind)
    weights, expected = pipelines.weight_bytes(plain), values_of(plain)
    output = pipelines.run(kind, plain)
    if device != "cpu":
        output = pipelines.run(kind, plain.to(device), device=device)
    for start in ("first", "second"):
        with open_store(disk_dir, int(weights * 0.4), device) as store:
            pipe = pipelines.quiet(
                from_pretrained(class_of(kind), checkpoint, store, dtype=pipelines.DTYPE)
            )
            assert_same(values_of(pipe), expected)
            assert torch.equal(pipelines.run(kind, pipe, device=device), output)
            stats = store.stats()
            assert stats.bytes_read > 0.3 * weights
            assert (stats.bytes_written > 0) == (start == "first")
            assert stats.peak_bytes["HOST"] <= int(weights * 0.4)
            disable_offload(enable_group_offload(pipe, store))
            assert_same(values_of(pipe), expected)


def test_same_bytes_in_other_files_are_not_written_again(in_float32: Any, disk_dir: Path) -> None:
    checkpoint, plain = in_float32("llama")
    weights = pipelines.weight_bytes(plain)
    written = []
    for _ in range(3):
        with open_store(disk_dir, weights, "cpu") as store:
            from_pretrained(class_of("llama"), checkpoint, store, dtype=pipelines.DTYPE)
            written.append(store.stats().bytes_written)
        for file in checkpoint.glob("*.safetensors"):
            os.utime(file)
    assert written[0] >= 0.9 * weights
    assert 0 < written[1] < 0.2 * weights, "only where it is found next time"
    assert written[2] < 0.2 * weights


def test_other_bytes_in_the_same_file_are_detected(in_float32: Any, disk_dir: Path) -> None:
    """The file is replaced by another of the same name and size."""
    checkpoint, plain = in_float32("llama")
    for change in (0.0, 1.0):
        with open_store(disk_dir, pipelines.weight_bytes(plain), "cpu") as store:
            for file in checkpoint.glob("*.safetensors"):
                tensors = {name: tensor + change for name, tensor in load_file(file).items()}
                file.unlink()
                save_file(tensors, file, {"format": "pt"})
            model = from_pretrained(class_of("llama"), checkpoint, store, dtype=pipelines.DTYPE)
            plain = pipelines.load("llama", checkpoint)
            assert_same(values_of(model), values_of(plain))


@pytest.mark.full("every pipeline", keep=["flux", "llama"])
@TINY_KINDS
def test_weights_of_the_right_dtype_are_not_written(
    kind: str, checkpoint: Checkpoints, disk_dir: Path, reference: Any
) -> None:
    expected = reference(kind)
    with open_store(disk_dir, int(expected.weights * 0.4), "cpu") as store:
        dtype = pipelines.DTYPE
        pipe = pipelines.quiet(
            from_pretrained(class_of(kind), checkpoint(kind), store, dtype=dtype)
        )
        assert torch.equal(pipelines.run(kind, pipe), expected.output)
        assert store.stats().bytes_written == 0
        assert store.stats().bytes_read > 0


@pytest.mark.full("every pipeline", keep=["flux", "llama"])
@TINY_KINDS
def test_weights_in_memory_during_load_are_maps_of_files(
    kind: str, in_float32: Any, tmp_path: Path
) -> None:
    checkpoint, plain = in_float32(kind)
    cast = pipelines.not_file_backed(plain)
    assert sum(cast.values()) > 0.9 * pipelines.weight_bytes(plain), "the control"
    del plain
    with intercepted(lambda nbytes: unnamed_file_memory(str(tmp_path), nbytes)) as mode:
        pipe = class_of(kind).from_pretrained(checkpoint, dtype=pipelines.DTYPE)
    assert sum(pipelines.not_file_backed(pipe).values()) < 0.05 * pipelines.weight_bytes(pipe)
    waiting = [dtypes for m in pipelines.components(pipe).values() if (dtypes := mode.pending(m))]
    assert waiting
    assert all(dtype is pipelines.DTYPE for dtypes in waiting for dtype in dtypes.values())


class Fused(nn.Module):
    """Its weights are derived from those of its checkpoint, as for single files and experts."""

    SIDE = 640

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters():
            x = torch.tanh(x @ weight.reshape(-1, self.SIDE).T[:, : self.SIDE])
        return x

    @classmethod
    @torch.no_grad()
    def from_pretrained(cls, path: str, *, dtype: torch.dtype) -> Fused:
        held = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        query, key, value = held["qkv"].chunk(3)
        return cls(
            {
                "query": torch.cat([query]),
                "key": key.contiguous() * 2,
                "value": torch.cat([value, held["out"]]),
                "experts": torch.stack([held["first"], held["second"]]),
                "out": held["out"],
            }
        )


@pytest.fixture
def to_be_fused(tmp_path: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    side = Fused.SIDE

    def made(rows: int) -> torch.Tensor:
        return torch.randn(rows, side, generator=generator) / side**0.5

    path = str(tmp_path / "model.safetensors")
    names = {"qkv": 3 * side, "out": side, "first": side, "second": side}
    save_file({name: made(rows) for name, rows in names.items()}, path)
    return path


def test_derived_weights_are_cast_first_and_lie_in_files(
    to_be_fused: str, tmp_path: Path, disk_dir: Path
) -> None:
    plain = Fused.from_pretrained(to_be_fused, dtype=torch.float64)
    sizes = []

    def make(nbytes: int) -> memoryview:
        sizes.append(nbytes)
        return unnamed_file_memory(str(tmp_path), nbytes)

    with intercepted(make) as mode:
        loaded = Fused.from_pretrained(to_be_fused, dtype=torch.float64)
    made = [loaded.query, loaded.key, loaded.value, loaded.experts]
    assert all(tensor.nbytes >= MIN_FILE_BYTES for tensor in made)
    assert sum(sizes) >= sum(tensor.nbytes for tensor in made)
    assert mode.pending(loaded) == {id(loaded.out): torch.float64}
    budget = 64 << 20
    with TierStore(budget, disk_dir, device="cpu") as store:
        model = from_pretrained(Fused, to_be_fused, store, dtype=torch.float64)
        assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))
        given = torch.randn(3, Fused.SIDE, dtype=torch.float64)
        assert torch.equal(model(given), plain(given))
        assert store.stats().bytes_written >= sum(p.nbytes for p in plain.parameters())


@pytest.mark.full("loads a whole pipeline in another way")
def test_single_file_loads_equal(checkpoint: Checkpoints, tmp_path: Path, disk_dir: Path) -> None:
    kind, config = diffusers.FluxTransformer2DModel, str(checkpoint("flux") / "transformer")
    kind.from_pretrained(config, torch_dtype=torch.float32).save_pretrained(tmp_path)
    (file,) = map(str, tmp_path.glob("*.safetensors"))
    plain = kind.from_single_file(file, config=config, torch_dtype=torch.bfloat16)
    for written in (True, False):
        with open_store(disk_dir, pipelines.weight_bytes(plain) // 2, "cpu") as store:
            dtype = torch.bfloat16
            model = from_single_file(kind, file, store, config=config, torch_dtype=dtype)
            assert_same(values_of(model), values_of(plain))
            assert (store.stats().bytes_written > 0) == written


def test_given_components_and_arguments_are_used(checkpoint: Checkpoints, disk_dir: Path) -> None:
    path = checkpoint("flux")
    with open_store(disk_dir, 1 << 22, "cpu") as store:
        own = from_pretrained(
            diffusers.FluxTransformer2DModel, path, store, subfolder="transformer",
            dtype=torch.bfloat16, offload_type="leaf_level",
        )  # fmt: skip
        pipe = from_pretrained(
            diffusers.DiffusionPipeline, path, store, transformer=own, text_encoder=None,
            dtype=torch.bfloat16, exclude_modules=["transformer", "vae"],
        )  # fmt: skip
        assert pipe.transformer is own
        assert pipe.text_encoder is None
        parts = {key.split("/")[1] for key in enable_group_offload(
            pipe, store, exclude_modules=["transformer", "vae"]
        ).groups}  # fmt: skip
        assert parts == {"text_encoder_2"}


def test_invalid_arguments_raise(checkpoint: Checkpoints, disk_dir: Path) -> None:
    path = checkpoint("llama")
    with open_store(disk_dir, 1 << 22, "cpu") as store:
        with pytest.raises(TypeError, match="device_map is replaced by the store"):
            from_pretrained(class_of("llama"), path, store, device_map="auto")
        with pytest.raises(TypeError, match="pass a TierStore"):
            from_pretrained(class_of("llama"), path, str(disk_dir))  # type: ignore[arg-type]
        with pytest.raises(OSError):
            from_pretrained(class_of("llama"), disk_dir / "nothing", store)


def test_load_after_a_budget_error_works(in_float32: Any, disk_dir: Path) -> None:
    checkpoint, plain = in_float32("llama")
    with (
        open_store(disk_dir, 1 << 14, "cpu") as store,
        pytest.raises(BudgetError, match="raise ram_budget to at least"),
    ):
        from_pretrained(class_of("llama"), checkpoint, store, dtype=pipelines.DTYPE)
    with open_store(disk_dir, pipelines.weight_bytes(plain), "cpu") as store:
        model = from_pretrained(class_of("llama"), checkpoint, store, dtype=pipelines.DTYPE)
        assert_same(values_of(model), values_of(plain))
