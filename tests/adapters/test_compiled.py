"""Blocks that are compiled separately run as one graph each, with weights leased before them.

Backends that compile nothing show where graphs begin and end; one test compiles to code.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from tests import pipelines
from tests.accelerator import ACCELERATOR
from tests.adapters.conftest import DEVICES, Checkpoints, a_third_of, acquires
from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, dispatch_model, enable_group_offload

COMPILED = {
    "flux": ["transformer"],
    "sd3": ["transformer"],
    "sdxl": ["unet"],
    "wan": ["transformer", "transformer_2"],
}


class Compilations:
    """Counts torch's compilations."""

    def __init__(self) -> None:
        self.count = 0
        self.start_anew()

    def start_anew(self) -> None:
        """Reset torch's compiler and the counters."""
        torch._dynamo.reset()
        counters.clear()
        self.count = 0
        callback_handler.register_start_callback(self)

    def __call__(self, *_: Any) -> None:
        self.count += 1


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    yield Compilations()
    torch._dynamo.reset()


def compile_blocks(kind: str, pipe: Any, backend: str) -> None:
    if kind == "sd3":  # diffusers does not say which of its blocks are repeated
        for block in pipe.transformer.transformer_blocks:
            block.compile(fullgraph=True, backend=backend)
        return
    for name in COMPILED[kind]:
        getattr(pipe, name).compile_repeated_blocks(fullgraph=True, backend=backend)


def run_twice(kind: str, pipe: Any, counting: Compilations) -> tuple[Any, Any]:
    """Return two outputs, and the number of compilations after each step of both runs."""
    compiled: list[int] = []

    def count(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        compiled.append(counting.count)
        return tensors

    outputs = [pipelines.run(kind, pipe, callback_on_step_end=count) for _ in range(2)]
    return outputs, compiled


@pytest.mark.long("one kind covers it in the full lane", keep="values")
@pytest.mark.full("seconds of tracing; test_compiled_blocks_are_one_graph_each covers small blocks")
@pytest.mark.parametrize(("when", "share"), [("before", 1.5), ("after", 0.3)])
@pytest.mark.parametrize("kind", COMPILED)
def test_repeated_blocks_compile_once_and_equal_plain(
    kind: str,
    when: str,
    share: float,
    checkpoint: Checkpoints,
    compilations: Compilations,
    disk_dir: Path,
) -> None:
    plain = pipelines.load(kind, checkpoint(kind))
    compile_blocks(kind, plain, "eager")
    expected, _ = run_twice(kind, plain, compilations)
    graphs = counters["stats"]["unique_graphs"]
    compilations.start_anew()
    pipe = pipelines.load(kind, checkpoint(kind))
    budget = int(pipelines.weight_bytes(pipe) * share)
    with open_store(disk_dir, budget) as store:
        if when == "before":
            compile_blocks(kind, pipe, "eager")
        enable_group_offload(pipe, store)
        if when == "after":
            compile_blocks(kind, pipe, "eager")
        found, compiled = run_twice(kind, pipe, compilations)
        assert all(map(torch.equal, found, expected))
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == graphs
        assert compiled[1:] == compiled[1:2] * len(compiled[1:])  # nothing after the second step
        stats = store.stats()
        assert stats.bytes_read > 0
        assert stats.peak_bytes["HOST"] <= budget


@pytest.mark.long(
    "a minute of compiling; the same blocks are traced above",
    sentinel="tests/adapters/test_compiled.py::test_repeated_blocks_compile_once_and_equal_plain",
)
def test_repeated_blocks_compiled_to_code_equal_plain(
    checkpoint: Checkpoints, compilations: Compilations, disk_dir: Path
) -> None:
    plain = pipelines.load("flux", checkpoint("flux"))
    compile_blocks("flux", plain, "inductor")
    expected, _ = run_twice("flux", plain, compilations)
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, "cpu") as store, enable_group_offload(pipe, store):
        before = compilations.count
        compile_blocks("flux", pipe, "inductor")
        found, compiled = run_twice("flux", pipe, compilations)
        assert all(map(torch.equal, found, expected))
        assert before < compiled[1] == compiled[-1]
        assert not counters["graph_break"]
        assert store.stats().bytes_read > pipelines.weight_bytes(pipe)


# Blocks of any model -----------------------------------------------------------------------------

WIDTH, BLOCKS = 64, 6


class Block(nn.Module):
    """A block of 33 kB, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).tanh())


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


BLOCK_BYTES = sum(p.nbytes for p in Block().parameters())
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def compile_each(model: nn.Sequential, **arguments: Any) -> None:
    for block in model:
        block.compile(backend="eager", fullgraph=True, **arguments)


def wrap_each(model: nn.Sequential) -> None:
    for number, block in enumerate(model):
        model[number] = torch.compile(block, backend="eager", fullgraph=True)  # type: ignore[assignment]


def in_a_store(disk_dir: Path, blocks: float, device: str = "cpu") -> TierStore:
    """Return a store whose budgets are this many blocks."""
    return open_store(disk_dir, int(BLOCK_BYTES * blocks), device)


@pytest.mark.full("when, and in which way", keep="a third")
@torch.no_grad()
@pytest.mark.parametrize("way", (compile_each, wrap_each), ids=("in place", "wrapped"))
@pytest.mark.parametrize("when", ("before", "after", "between"))
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_blocks_are_one_graph_each(
    device: str,
    when: str,
    way: Callable[[nn.Sequential], None],
    compilations: Compilations,
    disk_dir: Path,
) -> None:
    """Without compilation, blocks this large for the budget would be divided."""
    expected = build().to(device)(X.to(device)).cpu()
    model = build()
    with in_a_store(disk_dir, 2.5, device) as store:
        if when == "before":
            way(model)
        dispatch_model(model, store)
        if when == "between":
            assert torch.equal(model(X), expected)
        if when != "before":
            way(model)
        for _ in range(3):
            assert torch.equal(model(X), expected)
        assert not counters["graph_break"]
        assert store.stats().bytes_read > 2 * BLOCKS * BLOCK_BYTES
        assert store.stats().peak_bytes["HOST"] <= 2.5 * BLOCK_BYTES


@torch.no_grad()
def test_edit_of_a_compiled_block_takes_effect(compilations: Compilations, disk_dir: Path) -> None:
    model = build()
    with in_a_store(disk_dir, 2.5) as store:
        dispatch_model(model, store)
        compile_each(model)
        model(X)
        compiled = compilations.count
        for change in (0.5, 2.0):
            model[2].first.weight.mul_(change)  # type: ignore[union-attr]
            expected = X
            for block in copy.deepcopy(model):
                expected = block.forward(expected)  # of a plain copy that is not compiled
            assert torch.equal(model(X), expected)
        assert compilations.count == compiled


@torch.no_grad()
def test_compiled_block_called_alone_runs(compilations: Compilations, disk_dir: Path) -> None:
    expected = build()[3](X)
    model = build()
    with in_a_store(disk_dir, 2.5) as store:
        dispatch_model(model, store)
        compile_each(model)
        for call in (lambda: model[3](X), lambda: model[3].forward(X)):
            before = acquires(store)
            assert torch.equal(call(), expected)
            assert acquires(store) > before
            model(X)
        assert store.stats().bytes_read > BLOCKS * BLOCK_BYTES


@torch.no_grad()
def test_disabled_model_stays_compiled(compilations: Compilations, disk_dir: Path) -> None:
    model = build()
    with in_a_store(disk_dir, 2.5) as store:
        compile_each(model)
        expected = model(X)
        compiled = compilations.count
        dispatch_model(model, store)
        assert torch.equal(model(X), expected)
        disable_offload(model)
        count = compilations.count
        assert torch.equal(model(X), expected)
        assert compiled <= count == compilations.count
        acquired = store.stats().hits
        model(X)
        assert store.stats().hits == acquired


@torch.no_grad()
def test_compiled_block_larger_than_half_the_budget_is_divided(
    compilations: Compilations, disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, model = build()(X), build()
    for block in model:
        block.compile(backend="eager")
    caplog.set_level(logging.WARNING, "tierstore")
    with in_a_store(disk_dir, 1.5) as store:
        dispatch_model(model, store)
        for _ in range(2):
            assert torch.equal(model(X), expected)
        assert counters["graph_break"]
    (record,) = caplog.records
    assert f"{BLOCK_BYTES:,} bytes" in record.getMessage()
    assert f"{BLOCK_BYTES * 5 // 2:,}" in record.getMessage()


@torch.no_grad()
def test_compiled_model_that_fits_twice_is_one_graph(
    compilations: Compilations, disk_dir: Path
) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = build()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.blocks(x)
            return result

    model = Whole()
    expected = model(X)
    with in_a_store(disk_dir, 2 * BLOCKS + 1) as store:
        dispatch_model(model, store)
        model.compile(backend="eager", fullgraph=True)
        for _ in range(2):
            assert torch.equal(model(X), expected)
        assert counters["stats"]["unique_graphs"] == 1
        assert store.stats().bytes_read >= BLOCKS * BLOCK_BYTES


# Exported models ----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.full("traces twice", keep=["cpu-False", f"{ACCELERATOR}-False"])
@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("device", DEVICES)
def test_exported_model_equals_the_plain_export(
    device: str, strict: bool, compilations: Compilations, disk_dir: Path
) -> None:
    ordinary = torch.export.export(build(), (X,), strict=strict)
    model = build()
    with in_a_store(disk_dir, 2.5, device) as store:
        dispatch_model(model, store)
        exported = torch.export.export(model, (X,), strict=strict)
        assert exported.graph_module.code == ordinary.graph_module.code
        assert torch.equal(exported.module()(X), ordinary.module()(X))
        expected = build().to(device)(X.to(device)).cpu()
        assert torch.equal(model(X), expected)
        assert store.stats().bytes_read > 0
    saved = disk_dir / "exported.pt2"
    torch.export.save(exported, saved)
    assert torch.equal(torch.export.load(saved).module()(X), ordinary.module()(X))
