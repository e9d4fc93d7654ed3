"""Operations on an offloaded model equal those on an ordinary one, bit for bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import pipelines
from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.adapters.conftest import Checkpoints, checkpoint
from tests.lanes import by_lane
from tests.operations import parts
from tests.operations.actions import Actions
from tests.operations.operation import Do, Operation, Refusal
from tests.operations.tables import OPERATIONS, PAGE, page_with, tables

__all__ = ["checkpoint"]

SHARES = (0.15, 0.4)
"""Budgets, as shares of the weights."""


def _shares(number: int, operation: Operation, device: str) -> tuple[float, ...]:
    """Return each budget on each device in the long lane; in others, each on one device."""
    if len(operation.devices) < len(DEVICES):
        return SHARES
    first = (number + (device != "cpu")) % 2
    return by_lane((SHARES[first],), (SHARES[first],), SHARES)


DEVICES: dict[str, Any] = {"cpu": (), ACCELERATOR: needs_accelerator}
CASES = [
    pytest.param(
        operation, device, share, id=f"{operation.identifier}-{device}-{share}", marks=marks
    )
    for number, operation in enumerate(OPERATIONS)
    for device, marks in DEVICES.items()
    if device in operation.devices
    for share in _shares(number, operation, device)
]
Ordinary = Callable[[Operation, str], list[torch.Tensor]]


@pytest.fixture(scope="session")
def any_checkpoint(
    checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoints:
    """Return `any_checkpoint(kind)`: a pipeline of `tests.pipelines`, or an addition of `parts`."""

    @functools.cache
    def find(kind: str) -> Path:
        if kind in pipelines.BUILDERS:
            return checkpoint(kind)
        return parts.BUILDERS[kind](tmp_path_factory.mktemp(kind), checkpoint)

    return find


@pytest.fixture(scope="module")
def ordinary(any_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Ordinary:
    """Return `ordinary(operation, device)`: the outputs without a store."""

    @functools.cache
    def outputs(operation: Operation, device: str) -> list[torch.Tensor]:
        folder = tmp_path_factory.mktemp(operation.identifier)
        actions = Actions(device, None, any_checkpoint, folder)
        operation.do(actions)
        return actions.outputs

    return outputs


@pytest.fixture
def actions_on(any_checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Callable[..., Actions]]:
    """Return `actions_on(device, share)`: actions with a store, which is closed at the end."""
    made: list[Actions] = []

    def make(device: str, share: float) -> Actions:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Actions(device, share, any_checkpoint, folder))
        return made[-1]

    yield make
    for actions in made:
        actions.close()


@pytest.mark.full("the budget hardly affects an operation", keep="a third")
@pytest.mark.long("the device hardly affects an operation", keep="any device")
@pytest.mark.parametrize(("operation", "device", "share"), CASES)
def test_operation_equals_torch(
    operation: Operation,
    device: str,
    share: float,
    ordinary: Ordinary,
    actions_on: Callable[..., Actions],
) -> None:
    do_and_compare(operation, ordinary(operation, device), actions_on(device, share))


def do_and_compare(operation: Operation, expected: list[torch.Tensor], actions: Actions) -> None:
    """Assert that an operation gives the expected outputs, or raises the expected error."""
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


def run_a_model(actions: Actions) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    actions.offload(model)
    actions.compute(lambda: model(torch.ones(1, 64)))
    return model


def edit_it_only_the_second_time() -> Do:
    times = itertools.count()

    def do(actions: Actions) -> None:
        model = run_a_model(actions)
        model[0].weight.data.mul_(1 + next(times))
        actions.compute(lambda: model(torch.ones(1, 64)))

    return do


def compute_without_weights(actions: Actions) -> None:
    run_a_model(actions)
    actions.compute(lambda: torch.ones(1))


def raise_after_an_edit(actions: Actions) -> None:
    run_a_model(actions)[0].weight.data.mul_(2)
    raise ValueError("no")


@pytest.mark.parametrize(
    ("do", "refused", "noticed"),
    (
        (edit_it_only_the_second_time(), False, "output 1"),
        (compute_without_weights, False, "bytes read"),
        (run_a_model, True, "DID NOT RAISE"),
        (raise_after_an_edit, True, "the model has changed"),
    ),
)
def test_operation_controls_fail(
    do: Do, refused: bool, noticed: str, ordinary: Ordinary, actions_on: Callable[..., Actions]
) -> None:
    """Check that different output, no reads, a missing error, or a late one fail the comparison."""
    refusal = Refusal(ValueError, "no", "")
    right = Operation("", "", run_a_model, None, "", ("cpu",))
    wrong = Operation("", "", do, refusal if refused else None, "", ("cpu",))
    expected = ordinary(right if refused else wrong, "cpu")
    with pytest.raises((AssertionError, pytest.fail.Exception), match=noticed):
        do_and_compare(wrong, expected, actions_on("cpu", 0.4))
    do_and_compare(right, ordinary(right, "cpu"), actions_on("cpu", 0.4))


def test_operation_tables_are_in_the_docs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with(text, tables()) == text, "run `python -m tests.operations.tables`"
