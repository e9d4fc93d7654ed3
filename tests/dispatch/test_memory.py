"""A model several times as large as memory runs, is saved, loaded into and converted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.dispatch.limited import MARGIN, MIB, SHARD, TOKENS
from tests.helpers.processes import results_in, with_the_usual_allocator
from tools.bench import llama, memory_group
from tools.bench.memory_group import MemoryGroup

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="only Linux reports private memory"
    ),
]

LARGE = llama.Shape(hidden=1536, intermediate=4096, layers=18)  # 2.06 GB
SMALL = llama.Shape(hidden=1024, intermediate=2816, layers=8, shard="100MB")  # 428 MB
OTHER = llama.Shape(**{**SMALL.__dict__, "seed": 1})
LIMIT = 900 * MIB  # RAM, of which the process without a model takes 250
BUDGETS = {LARGE: 400 * MIB, SMALL: 64 * MIB}

Wrapped = Callable[[list[str]], list[str]]


@dataclass
class Checkpoint:
    """A saved model, its bytes, and the tokens that it generates when it is not offloaded."""

    shape: llama.Shape
    path: Path
    nbytes: int
    tokens: list[int]

    @classmethod
    def of(cls, shape: llama.Shape, path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
        llama.save(shape, path)
        model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=dtype).eval()
        return cls(shape, path, llama.weight_bytes(model), llama.write(model, TOKENS).tokens)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    place = tmp_path_factory.mktemp("large")
    yield Checkpoint.of(LARGE, place / "checkpoint")
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    place = tmp_path_factory.mktemp("small")
    yield Checkpoint.of(SMALL, place / "checkpoint")
    shutil.rmtree(place)


def start(how: str, model: Checkpoint, place: Path, wrapped: Wrapped, **more: Any) -> Any:
    """Start the process of `limited.py`."""
    options = {"how": how, "checkpoint": str(model.path), "place": str(place / "store")}
    options = {**options, "budget": BUDGETS[model.shape], **more}
    return subprocess.run(
        wrapped([sys.executable, "-m", "tests.dispatch.limited", json.dumps(options)]),
        capture_output=True,
        text=True,
        # Freed memory that it keeps counts as used.
        env=with_the_usual_allocator(),
        timeout=300,
        check=False,
    )


def run(
    how: str, model: Checkpoint, place: Path, wrapped: Wrapped = lambda words: words, **more: Any
) -> dict[str, Any]:
    done = start(how, model, place, wrapped, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = results_in(done.stdout)
    return result


def memory_gained(result: dict[str, Any]) -> int:
    """Return the memory above that of the process before there was a model, in bytes."""
    return result["peak"] - result["start"]


needs_groups = pytest.mark.skipif(
    not os.access(memory_group.ROOT / "memory", os.W_OK), reason="may not make control groups"
)


@pytest.mark.full("a large model; a small one runs under an exact limit")
@needs_groups
def test_2_gb_model_generates_the_same_in_900_mib(large: Checkpoint, tmp_path: Path) -> None:
    assert large.nbytes > 2e9 > 2 * LIMIT
    with MemoryGroup(LIMIT) as group:
        result = run("write", large, tmp_path, group.command)
    assert result["tokens"] == large.tokens
    assert len(set(large.tokens)) > 1, "it always generates the same token"
    assert memory_gained(result) <= BUDGETS[LARGE] + MARGIN
    assert result["peak_of_store"] <= BUDGETS[LARGE]
    assert result["read"] >= large.nbytes, "the checkpoint was not read"
    assert result["written"] == 0
    assert sum(result["files"].values()) < MIB, result["files"]


@pytest.mark.full("the control of a large model")
@needs_groups
def test_2_gb_model_without_a_store_exceeds_900_mib(large: Checkpoint, tmp_path: Path) -> None:
    """The control."""
    with MemoryGroup(LIMIT) as group:
        done = start("usual", large, tmp_path, group.command)
    assert done.returncode == -9, done.stderr[-3000:]
    assert "RESULT" not in done.stdout


@pytest.mark.full("a process with a model; tests/activations/test_memory_limit.py has one without")
def test_address_limit_of_the_system_is_respected(small: Checkpoint, tmp_path: Path) -> None:
    """The same without the right to make control groups, on a smaller model."""
    assert small.nbytes > 400e6 > 2 * (BUDGETS[SMALL] + MARGIN)
    result = run("limit", small, tmp_path)
    assert result["tokens"] == small.tokens
    assert memory_gained(result) <= BUDGETS[SMALL] + MARGIN
    assert result["read"] >= small.nbytes
    assert result["written"] == 0


@pytest.mark.full("the control of a process with a model")
def test_model_without_a_store_exceeds_the_address_limit(small: Checkpoint, tmp_path: Path) -> None:
    """The control."""
    done = start("usual, limit", small, tmp_path, lambda words: words)
    assert done.returncode == 1
    assert "RESULT" not in done.stdout
    assert "can't allocate memory" in done.stderr or "MemoryError" in done.stderr, done.stderr


@pytest.mark.full("a long measurement; a process under a limit is in each lane")
def test_larger_budget_uses_more_memory(small: Checkpoint, tmp_path: Path) -> None:
    """The control of the measurement: it shows the weights' memory."""
    result = run("write", small, tmp_path, budget=2 * small.nbytes)
    assert result["tokens"] == small.tokens
    assert memory_gained(result) > small.nbytes > BUDGETS[SMALL] + SHARD + MARGIN


@pytest.mark.full("a long measurement; a process under a limit is in each lane")
def test_saving_takes_the_budget_and_one_shard(small: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    result = run("save", small, tmp_path, target=str(target))
    assert memory_gained(result) <= BUDGETS[SMALL] + SHARD + MARGIN
    assert result["written"] == 0
    assert result["tokens"] == small.tokens
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) >= small.nbytes // SHARD
    assert contents(target) == contents(small.path)


def contents(checkpoint: Path) -> dict[str, int]:
    """Return a fingerprint of each tensor, to the last bit."""
    return {
        name: hash(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.full("a long measurement; a process under a limit is in each lane")
def test_other_weights_are_loaded_within_the_budget(small: Checkpoint, tmp_path: Path) -> None:
    other = Checkpoint.of(OTHER, tmp_path / "other")
    assert other.tokens != small.tokens
    result = run("load", small, tmp_path, target=str(other.path))
    assert result["tokens"] == other.tokens
    assert memory_gained(result) <= BUDGETS[SMALL] + MARGIN
    assert result["written"] <= 1.01 * other.nbytes


@pytest.mark.full("a long measurement; a process under a limit is in each lane")
@pytest.mark.parametrize("how", ["halve", "cast"])
def test_dtype_is_converted_within_the_budget(how: str, small: Checkpoint, tmp_path: Path) -> None:
    half = Checkpoint.of(SMALL, small.path, torch.bfloat16)
    assert half.nbytes == small.nbytes / 2
    result = run(how, small, tmp_path)
    assert result["dtypes"] == ["torch.bfloat16"]
    assert result["tokens"] == half.tokens
    assert memory_gained(result) <= BUDGETS[SMALL] + MARGIN
    assert half.nbytes <= result["written"] <= 1.01 * half.nbytes
