"""Values that modules pass on and that contain themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import DEVICES
from tests.store.helpers import open_store
from tierstore import dispatch_model, enable_group_offload
from tierstore.adapters.nested import map_tensors, tensors_in

WIDTH = 64


@dataclass
class Node:
    """Part of a tree whose nodes know their parents."""

    x: torch.Tensor
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)


class Growing(nn.Linear):
    def forward(self, node: Node) -> Node:  # type: ignore[override]
        child = Node(super().forward(node.x), node)
        node.children.append(child)
        return child


class Passing(nn.Linear):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        state["x"] = super().forward(state["x"])
        state["state"] = state
        return state


def of_nodes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(Node(x)).x


def of_dicts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model({"x": x})["state"]["state"]["x"]


@pytest.mark.parametrize(("kind", "run"), [(Growing, of_nodes), (Passing, of_dicts)])
@pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_model_runs_on_values_that_contain_themselves(
    device: str,
    offload: Callable[..., Any],
    kind: Callable[[int, int], nn.Module],
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(24))), torch.randn(2, WIDTH)
    expected = run(model, x)
    with open_store(tmp_path, 80_000, device) as store:
        offload(model, store)
        for _ in range(2):
            read = store.stats().bytes_read
            assert torch.equal(run(model, x).cpu(), expected)
            assert store.stats().bytes_read > read


def test_circular_value_is_rebuilt_around_its_tensors() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    parent = Node(old)
    child = Node(new, parent)
    parent.children.append(child)
    value: dict[str, Any] = {"tree": (child,), "other": [1]}
    value["self"] = value
    assert [id(t) for t in tensors_in(value)] == [id(new), id(old)]
    assert map_tensors(value, lambda tensor: tensor) is value
    found = map_tensors(value, lambda tensor: new if tensor is old else tensor)
    assert found is not value and found["self"] is found
    assert found["other"] is value["other"]
    (again,) = found["tree"]
    assert again is not child and again.parent.children[0] is again
    assert again.parent.x is new and parent.x is old
    kept = map_tensors(value, lambda tensor: new, frozenset({"tree"}))
    assert kept is value
