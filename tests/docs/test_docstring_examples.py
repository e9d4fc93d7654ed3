"""The examples in the docstrings of the reference run, each with small things of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.docs import stand_ins
from tests.docs.test_docstrings import SECTION, Shown, shown

EXAMPLE = re.compile(r"(?:^ {4}.*\n?)+", re.MULTILINE)


def prose(docstring: str) -> str:
    """A docstring without its sections."""
    lines = inspect.cleandoc(docstring).splitlines()
    first = next((n for n, line in enumerate(lines) if SECTION.match(line)), len(lines))
    return "\n".join(lines[:first])


def examples_of(each: Shown) -> Iterator[tuple[str, str]]:
    """The indented blocks in what the reference shows of a name, with whose they are."""
    value = each.value
    members = vars(value) if isinstance(value, type) else {}
    parts = {each.name: value, **{f"{each.name}.{name}": part for name, part in members.items()}}
    for name, part in parts.items():
        docstring = getattr(part, "__doc__", None)
        if not name.rpartition(".")[2].startswith("_") and isinstance(docstring, str):
            for match in EXAMPLE.finditer(prose(docstring)):
                yield name, inspect.cleandoc("\n" + match[0])


EXAMPLES = [example for each in shown() for example in examples_of(each)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(256, 64), nn.Linear(64, 256)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(x)))


class Small(nn.Module):
    """A model of six layers whose result is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()

    def generate(self, **inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self(inputs["x"])
        return result


@contextmanager
def names(name: str) -> Iterator[dict[str, Any]]:
    """What an example finds."""
    model, x = Small(), torch.randn(2, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    with tierstore.TierStore("16MB", "store", device="cpu") as store:
        store.put("blocks.0", {"weight": torch.randn(8, 256)})
        found: dict[str, Any] = {
            **{each: getattr(tierstore, each) for each in tierstore.__all__},
            **{"torch": torch, "nn": nn, "store": store, "model": model, "x": x},
            **{"block": model.layers[0], "mask": None, "optimizer": optimizer},
            **{"inputs": {"x": x}, "up": torch.zeros(64, 2), "down": torch.zeros(2, 256)},
        }
        handle = None
        if "OffloadHandle" in name:
            handle = found["handle"] = tierstore.enable_group_offload(model, store)
        if "onloaded" in name:
            tierstore.dispatch_model(model, store)
        if needs_a_pipeline(name):
            found |= pipeline()
        if "load_training" in name:
            extra = {"rng": torch.get_rng_state()}
            tierstore.save_training("run", model, optimizer, extra=extra)
        if "prometheus" in name:
            found |= prometheus()
        try:
            yield found
        finally:
            stand_ins.undo()
        if handle is not None:
            handle.disable()


def needs_a_pipeline(name: str) -> bool:
    return name.endswith(("from_pretrained", "enable_group_offload"))


def pipeline() -> dict[str, Any]:
    from diffusers import DiffusionPipeline

    stand_ins.prepare("pipeline a/pipeline", {})
    return {
        "DiffusionPipeline": DiffusionPipeline,
        "pipe": DiffusionPipeline.from_pretrained("a/pipeline", dtype=torch.bfloat16),
    }


def prometheus() -> dict[str, Any]:
    from prometheus_client import CollectorRegistry

    from tierstore.prometheus import StoreCollector

    return {"REGISTRY": CollectorRegistry(), "StoreCollector": StoreCollector}


def test_examples_are_many() -> None:
    """The control: they are found, and are Python."""
    assert len(EXAMPLES) >= 14
    for name, code in EXAMPLES:
        compile(code, name, "exec")


@pytest.mark.full(
    "a pipeline is made for two of them",
    keep=[name for name, _ in EXAMPLES if not needs_a_pipeline(name)],
)
@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_an_example_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with names(name) as found:
        exec(compile(stand_ins.with_paths_here(code), name, "exec"), found)


def test_an_example_that_does_not_run_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = dict(EXAMPLES)["tierstore.Lease"].replace("acquire", "borrow")
    with names("tierstore.Lease") as found, pytest.raises(AttributeError, match="borrow"):
        exec(code, found)
