"""Every dtype that safetensors and torch have works everywhere, or is named as unsupported."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from click.testing import CliRunner
from torch import nn

from tests.store.helpers import open_store
from tierstore import TierStoreError, disable_offload, dispatch_model
from tierstore import load_checkpoint_and_dispatch as load_and_dispatch
from tierstore.cli.commands import inspector
from tierstore.engine.checkpoints import read_checkpoint
from tierstore.errors import InvalidHeaderError
from tierstore.system.views import DTYPES

SHAPE = (6, 4)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def made(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose bytes are all different, as far as the dtype allows."""
    nbytes = math.prod(SHAPE) * dtype.itemsize
    data = torch.arange(nbytes, dtype=torch.int64) % (2 if dtype is torch.bool else 251)
    return data.to(torch.uint8).view(dtype).reshape(SHAPE)


def known_to_safetensors() -> set[str]:
    """Return the names that safetensors lists in its error for an unknown dtype."""
    try:
        safetensors.deserialize(file_of("NONE", [1], 1))
    except safetensors.SafetensorError as error:
        return set(re.findall(r"`([A-Z0-9_]+)`", str(error))) - {"NONE"}
    raise AssertionError("it takes any name")


def file_of(dtype: str, shape: list[int], nbytes: int) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}
    head = json.dumps({"weight": entry}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(i % 2 for i in range(nbytes))


class Holder(nn.Module):
    """A module that computes with the bits of its weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.reshape(-1).view(torch.uint8).double().sum()


def test_dtype_names_are_those_of_safetensors() -> None:
    unsupported = {"F6_E2M3", "F6_E3M2"}
    assert set(DTYPES) == known_to_safetensors() - unsupported
    assert unsupported <= known_to_safetensors()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtype_works_everywhere(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = made(dtype)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": weight}, path)
    (file,) = read_checkpoint(path)
    assert (DTYPES[file.tensors[0].dtype], file.tensors[0].shape) == (dtype, SHAPE)
    expected = Holder(weight)(torch.zeros(1, dtype=torch.float64))
    with open_store(tmp_path / "store", 1 << 20) as store:
        store.register_checkpoint(path)
        for key, shown in {"put": weight, "turned": weight.t(), "one": weight[0, 0]}.items():
            store.put(key, shown)
        store.put("tied", {"a": weight, "b": weight[1:3]})
        store.flush()
        loaded = load_and_dispatch(Holder(torch.empty_like(weight)), path, store)
        put = dispatch_model(Holder(weight.clone()), store)
        for model in (loaded, put):
            assert torch.equal(model(torch.zeros(1, dtype=torch.float64)), expected)
            assert bits(model.state_dict()["weight"]) == bits(weight)
            disable_offload(model)
        assert store.stats().bytes_read > 0
    with open_store(tmp_path / "store", 1 << 20) as store:
        found = {key: store.get(key) for key in ("put", "turned", "one", "tied")}
    assert found["put"].dtype is dtype and bits(found["put"]) == bits(weight)
    assert found["turned"].shape == SHAPE[::-1] and bits(found["turned"]) == bits(weight.t())
    assert found["one"].shape == () and bits(found["one"]) == bits(weight[0, 0])
    assert bits(found["tied"]["b"]) == bits(weight[1:3])
    planned = CliRunner().invoke(inspector, ["plan", str(path), "--ram", "1MB", "--json"])
    assert planned.exit_code == 0, planned.output
    (component,) = json.loads(planned.output)["components"]
    assert component["nbytes"] == weight.nbytes


UNSUPPORTED = {
    "F6_E2M3": file_of("F6_E2M3", [4, 4], 12),
    "F6_E3M2": file_of("F6_E3M2", [4, 4], 12),
    "half an element": file_of("F4", [4, 3], 6),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_dtype_unknown_to_torch_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(UNSUPPORTED[what])
    dtype = what if what.startswith("F") else "F4"
    with open_store(tmp_path / "store", 1 << 20) as store:
        for way in (
            lambda: store.register_checkpoint(path),
            lambda: load_and_dispatch(Holder(torch.empty(4, 4)), path, store),
        ):
            with pytest.raises(TierStoreError, match=f"{dtype}.*not supported: convert") as error:
                way()
            assert not isinstance(error.value, InvalidHeaderError), "the header is valid"
            assert str(path) in str(error.value)
    for command in ("plan", "ls"):
        done = CliRunner().invoke(inspector, [command, str(path)])
        assert done.exit_code != 0
        assert command == "ls" or (dtype in done.output and "not supported" in done.output)


@pytest.mark.parametrize("raw", [file_of("I4", [4], 2), file_of("F4", [4, 4], 9)])
def test_dtype_unknown_to_safetensors_is_malformed(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(raw)
    with pytest.raises(InvalidHeaderError, match="malformed"):
        read_checkpoint(path)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.uint4, torch.bits8])
def test_dtype_without_a_name_raises(dtype: torch.dtype, tmp_path: Path) -> None:
    with (
        open_store(tmp_path / "store") as store,
        pytest.raises(TypeError, match=f"has the dtype {dtype}"),
    ):
        store.put("k", torch.zeros(16, dtype=torch.uint8).view(dtype))
