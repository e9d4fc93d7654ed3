"""Compiling and exporting, with a backend that compiles nothing: graphs begin where they would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.dispatch.models import rows
from tests.operations.actions import Actions
from tests.operations.operation import Table
from tests.operations.plain_modules import dispatched, run
from tests.operations.small_models import tower

COMPILING = Table("`torch.compile` and `torch.export`")


class Block(nn.Module):
    """A user-defined module, because torch does not trace into its built-in layers alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def blocks(actions: Actions) -> Any:
    model = tower(actions)
    for number, layer in enumerate(model.layers):
        model.layers[number] = Block(layer)
    return model


@contextmanager
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers(model: Any) -> None:
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)


@COMPILING.row("`block.compile(fullgraph=True)` of each block, before dispatching")
def compiled_before(actions: Actions) -> None:
    with nothing_compiled():
        model = blocks(actions)
        compile_layers(model)
        actions.dispatch(model)
        run(actions, model)
        run(actions, model)


@COMPILING.row("`block.compile(fullgraph=True)` of each block, while dispatched, and an edit")
def compiled_while_dispatched(actions: Actions) -> None:
    with nothing_compiled():
        model = blocks(actions)
        actions.dispatch(model)
        run(actions, model)
        compile_layers(model)
        run(actions, model)
        with actions.on_the_cpu(model):
            model.layers[1].inner.weight.data.neg_()
        run(actions, model)
        actions.check_that_it_changed()


@COMPILING.row(
    "`torch.compile(model)`",
    note="a break of the graph at each part, unless the budget has it twice",
)
def compiled_as_a_whole(actions: Actions) -> None:
    with nothing_compiled():
        model = dispatched(actions)
        compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
        run(actions, compiled)
        run(actions, compiled)


@COMPILING.row("`torch.export.export`", note="the ordinary model, with inputs on the CPU")
def exported(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    with actions.on_the_cpu(model), torch.no_grad():
        program: Callable[..., torch.Tensor] = torch.export.export(model, (rows(),)).module()
        actions.compare(program(rows()))
    run(actions, model)
