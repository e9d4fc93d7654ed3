"""What users do with an offloaded model gives, bit for bit, what it gives with an ordinary one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import pipelines
from tests.adapters.conftest import NEEDS_PRETEND, Checkpoints, checkpoint
from tests.operations import parts
from tests.operations.actions import Actions
from tests.operations.operation import Operation
from tests.operations.tables import OPERATIONS, PAGE, page_with, tables

__all__ = ["checkpoint"]

CASES = [
    pytest.param(operation, device, id=f"{operation.identifier}-{device}", marks=marks)
    for operation in OPERATIONS
    for device, marks in (("cpu", ()), ("pretend", NEEDS_PRETEND))
    if device in operation.devices
]
Ordinary = Callable[[Operation, str], list[torch.Tensor]]


@pytest.fixture(scope="session")
def any_checkpoint(
    checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoints:
    """`any_checkpoint(kind)`: a pipeline of `tests.pipelines`, or what `parts` adds to them."""

    @functools.cache
    def find(kind: str) -> Path:
        if kind in pipelines.BUILDERS:
            return checkpoint(kind)
        return parts.BUILDERS[kind](tmp_path_factory.mktemp(kind), checkpoint)

    return find


@pytest.fixture(scope="module")
def ordinary(any_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Ordinary:
    """`ordinary(operation, device)`: what it computes without a store."""

    @functools.cache
    def outputs(operation: Operation, device: str) -> list[torch.Tensor]:
        folder = tmp_path_factory.mktemp(operation.identifier)
        actions = Actions(device, None, any_checkpoint, folder)
        operation.do(actions)
        return actions.outputs

    return outputs


@pytest.fixture
def actions_on(any_checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Callable[..., Actions]]:
    """`actions_on(device, share)`: with a store, which is closed at the end."""
    made: list[Actions] = []

    def make(device: str, share: float) -> Actions:
        made.append(Actions(device, share, any_checkpoint, tmp_path))
        return made[-1]

    yield make
    for actions in made:
        actions.close()


@pytest.mark.full("how much of a model stays has little to do with what is done", keep="any device")
@pytest.mark.parametrize("share", (0.15, 0.4))
@pytest.mark.parametrize(("operation", "device"), CASES)
def test_an_operation(
    operation: Operation,
    device: str,
    share: float,
    ordinary: Ordinary,
    actions_on: Callable[..., Actions],
) -> None:
    expected = ordinary(operation, device)
    actions = actions_on(device, share)
    if operation.refusal is not None:
        with pytest.raises(operation.refusal.error, match=operation.refusal.says):
            operation.do(actions)
        actions.check_that_it_is_as_it_was()
    else:
        operation.do(actions)
        assert len(actions.outputs) == len(expected) > 0
    for number, (found, ordinary_output) in enumerate(zip(actions.outputs, expected, strict=False)):
        assert torch.equal(found, ordinary_output), f"output {number}"
    assert all(read > 0 for read in actions.read), f"bytes read: {actions.read}"
    actions.check_budgets()


def test_the_documentation_has_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with(text, tables()) == text, "run `python -m tests.operations.tables`"
