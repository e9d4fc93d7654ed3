"""Bytes that a checkpoint holds are not written; others are written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests import pipelines
from tests.adapters.conftest import DEVICES, OFFLOAD_TYPES, Checkpoints, a_third_of
from tests.helpers.processes import output_of
from tierstore import enable_group_offload

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="a third",
)

ON_BOTH = pytest.mark.parametrize("device", DEVICES)
CAST = torch.float32


def bytes_in_files(disk_dir: Path) -> int:
    """Return the bytes of all tensors in the files of a store."""
    total = 0
    for path in disk_dir.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    return total


def parameters_in_memory(pipe: Any) -> int:
    """Return the bytes of the parameters that are not in the checkpoint, tied ones once."""
    names = pipelines.not_file_backed(pipe)
    return sum(
        tensor.nbytes
        for name, tensor in pipelines.weights(pipe)
        if name in names and isinstance(tensor, torch.nn.Parameter)
    )


@pytest.mark.long("the pipeline, the kind of offloading", keep="values")
@ON_BOTH
@pytest.mark.parametrize("offload_type", OFFLOAD_TYPES)
@pytest.mark.parametrize("kind", pipelines.KINDS)
def test_checkpoint_bytes_are_not_written(
    kind: str, offload_type: str, device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    pipe = pipelines.load(kind, checkpoint(kind))
    assert parameters_in_memory(pipe) == 0
    with a_third_of(pipe, disk_dir, device) as store:
        with enable_group_offload(pipe, store, offload_type=offload_type):
            pipelines.run(kind, pipe, device=device)
        assert store.stats().bytes_written == 0
    assert bytes_in_files(disk_dir) == 0


@pytest.mark.long("the pipeline, the kind of offloading", keep="values")
@ON_BOTH
@pytest.mark.parametrize("offload_type", OFFLOAD_TYPES)
@pytest.mark.parametrize("kind", ("flux", "wan", "llama"))
def test_cast_weights_are_written_once(
    kind: str, offload_type: str, device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    expected = pipelines.run(
        kind, pipelines.load(kind, checkpoint(kind), torch_dtype=CAST).to(device), device=device
    )
    for run in range(2):
        pipe = pipelines.load(kind, checkpoint(kind), torch_dtype=CAST)
        cast = parameters_in_memory(pipe)
        # Wan keeps some weights at float32, so that these are still the checkpoint's.
        assert (cast < pipelines.weight_bytes(pipe)) == (kind == "wan")
        with a_third_of(pipe, disk_dir, device) as store:
            with enable_group_offload(pipe, store, offload_type=offload_type) as handle:
                assert torch.equal(pipelines.run(kind, pipe, device=device), expected)
                groups = len(handle.groups)
            written = store.stats().bytes_written
            if run == 0:
                padding = groups * 4096 + 256 * sum(1 for _ in pipelines.weights(pipe))
                assert cast <= written <= cast + padding
            else:
                assert written == 0
        assert bytes_in_files(disk_dir) == cast


SEPARATE_PROCESS = """
import sys
import torch
from tests import pipelines
from tierstore import TierStore, enable_group_offload

directory, disk_dir, budget = sys.argv[1:]
model = pipelines.load("llama", directory, torch_dtype=torch.float32)
with TierStore(int(budget), disk_dir, device="cpu") as store:
    with enable_group_offload(model, store):
        pipelines.run("llama", model)
    print(store.stats().bytes_written)
"""


@pytest.mark.long(
    "a separate process; another store in this process writes nothing, either",
    sentinel="tests/adapters/test_bytes_written.py::test_cast_weights_are_written_once",
)
def test_cast_weights_in_another_process_are_not_written(
    checkpoint: Checkpoints, disk_dir: Path
) -> None:
    directory = checkpoint("llama")
    model = pipelines.load("llama", directory, torch_dtype=CAST)
    budget = pipelines.weight_bytes(model) // 3
    words = ["-c", SEPARATE_PROCESS, directory, disk_dir, budget]
    written = [int(output_of(*words).split()[-1]) for _ in range(2)]
    assert written[0] >= pipelines.weight_bytes(model)
    assert written[1] == 0


@ON_BOTH
def test_equal_content_of_two_models_is_written_once(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    models = [pipelines.load("llama", checkpoint("llama"), torch_dtype=CAST) for _ in range(2)]
    with a_third_of(models[0], disk_dir, device) as store:
        first = enable_group_offload(models[0], store)
        written = store.stats().bytes_written
        second = enable_group_offload(models[1], store)
        assert store.stats().bytes_written == written > 0
        assert not first.groups.keys() & second.groups.keys()
        outputs = [pipelines.run("llama", model, device=device) for model in models]
        assert torch.equal(*outputs)
