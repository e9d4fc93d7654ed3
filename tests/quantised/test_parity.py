"""Quantised weights move like others, and give bitwise the same results as without a store."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import pipelines
from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.adapters.conftest import Checkpoints, checkpoint
from tests.quantised.kinds import (
    CPU_ONLY,
    KINDS,
    LEAST,
    MODELS,
    large_parts,
    outside,
    quantised,
    weights_of,
)
from tests.store.helpers import open_store
from tierstore import enable_group_offload
from tierstore.adapters.codecs import leaves_of, weight_bytes

__all__ = ["checkpoint"]

Output = Callable[[str, str, str], torch.Tensor]


@pytest.fixture(scope="module")
def output(checkpoint: Checkpoints) -> Output:
    """`output(model, kind, device)` is that of the quantised model without a store."""

    @functools.cache
    def run(model: str, kind: str, device: str) -> torch.Tensor:
        pipe = quantised(model, checkpoint, kind)
        if device != "cpu":
            pipe.to(device)
        return pipelines.run(model, pipe, device=device)

    return run


CASES = [
    pytest.param(
        device,
        model,
        kind,
        (0.15, 0.4, 1.5)[number % 3],
        marks=needs_accelerator if device != "cpu" else (),
    )
    for number, (model, kind, device) in enumerate(
        (model, kind, device)
        for kind in KINDS
        for model in MODELS
        for device in ("cpu", ACCELERATOR)
        if device == "cpu" or kind not in CPU_ONLY
    )
]


@pytest.mark.parametrize(("device", "model", "kind", "share"), CASES)
def test_quantised_output_bytes_and_budgets_are_equal(
    device: str,
    model: str,
    kind: str,
    share: float,
    checkpoint: Checkpoints,
    output: Output,
    disk_dir: Path,
) -> None:
    expected = output(model, kind, device)
    pipe = quantised(model, checkpoint, kind)
    total = weight_bytes(weights_of(pipe))
    budget = max(int(share * total), LEAST)
    with open_store(disk_dir, budget, device) as store:
        with enable_group_offload(pipe, store):
            gc.collect()
            assert outside(model, pipe) <= 0.02 * total
            for _ in range(2):
                assert torch.equal(pipelines.run(model, pipe, device=device), expected)
            stats = store.stats()
            assert stats.bytes_read > (0.5 if share > 1 else 1) * total / 2
            assert stats.peak_bytes["HOST"] <= budget
            if device != "cpu":
                assert 0 < stats.peak_bytes["DEVICE"] <= budget
        assert torch.equal(output(model, kind, "cpu"), pipelines.run(model, pipe))
    written = stats.bytes_written
    assert written > 0
    again = quantised(model, checkpoint, kind)
    with open_store(disk_dir, budget, device) as store, enable_group_offload(again, store):
        assert torch.equal(pipelines.run(model, again, device=device), expected)
        assert store.stats().bytes_written == 0


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_model_reads_and_copies_like_a_plain_one(
    kind: str, checkpoint: Checkpoints, output: Output, disk_dir: Path
) -> None:
    expected = output("llama", kind, "cpu")
    model = quantised("llama", checkpoint, kind)
    weights = {id(weight): type(weight) for weight in model.parameters()}
    ordinary = quantised("llama", checkpoint, kind).state_dict()
    with open_store(disk_dir, int(0.3 * weight_bytes(weights_of(model)))) as store:
        with enable_group_offload(model, store):
            assert {id(weight): type(weight) for weight in model.parameters()} == weights
            state = model.state_dict()
            assert state.keys() == ordinary.keys()
            for name, tensor in state.items():
                for part, leaf in leaves_of(tensor).items():
                    assert torch.equal(leaf, leaves_of(ordinary[name])[part]), (name, part)
            copied = copy.deepcopy(model)
            assert torch.equal(pipelines.run("llama", model), expected)
        assert torch.equal(pipelines.run("llama", copied), expected)
    assert {id(weight) for weight in copied.parameters()}.isdisjoint(weights)
    (part,) = large_parts("llama", copied)
    assert part is copied
