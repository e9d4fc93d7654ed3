"""Operations on a pipeline give the same if its models are offloaded one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.adapters.conftest import Checkpoints, checkpoint
from tests.operations.actions import Actions
from tests.operations.adapters import (
    ADAPTERS,
    an_ip_adapter_and_a_lora,
    load_and_unload_an_ip_adapter,
)
from tests.operations.caches import CACHES
from tests.operations.changes import CONVERSIONS, SAVING
from tests.operations.loras import LORAS
from tests.operations.operation import Operation
from tests.operations.test_operations import (
    DEVICES,
    Ordinary,
    any_checkpoint,
    do_and_compare,
    ordinary,
)
from tierstore import enable_group_offload

__all__ = ["any_checkpoint", "checkpoint", "ordinary"]

SHARE = 0.4
BRING_A_MODEL = {an_ip_adapter_and_a_lora, load_and_unload_an_ip_adapter}
"""Give the pipeline a model that is not offloaded, and that runs on the CPU."""


class Handles:
    """Handles of the models of one pipeline."""

    def __init__(self, target: Any, *arguments: Any, **options: Any) -> None:
        models = [target] if isinstance(target, nn.Module) else target.components.values()
        self.all = [
            enable_group_offload(model, *arguments, **options)
            for model in models
            if isinstance(model, nn.Module)
        ]

    def suspended(self) -> AbstractContextManager[None]:
        stack: Any = ExitStack()
        for each in self.all:
            stack.enter_context(each.suspended())
        return stack  # type: ignore[no-any-return]


class OneByOne(Actions):
    """Offloads each model of a pipeline separately."""

    def offload(self, target: Any, **arguments: Any) -> None:
        self._offload(Handles, target, arguments)


CASES = [
    pytest.param(operation, device, id=f"{operation.identifier}-{device}", marks=marks)
    for table in (LORAS, ADAPTERS, CACHES, CONVERSIONS, SAVING)
    for operation in table.operations
    for device, marks in DEVICES.items()
    if device in operation.devices and (device == "cpu" or operation.do not in BRING_A_MODEL)
]


@pytest.fixture
def actions_on(any_checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Callable[..., Actions]]:
    made: list[Actions] = []

    def make(device: str) -> Actions:
        made.append(OneByOne(device, SHARE, any_checkpoint, tmp_path))
        return made[-1]

    yield make
    for actions in made:
        actions.close()


@pytest.mark.full(
    "test_operations covers pipelines, test_models_offloaded_one_by_one each method",
    keep=["load_and_unload_a_lora-cpu", "load_and_unload_a_textual_inversion-cpu"],
)
@pytest.mark.long("test_operations has each operation on each device", keep="any device")
@pytest.mark.parametrize(("operation", "device"), CASES)
def test_operation_on_separately_offloaded_models_equals_torch(
    operation: Operation, device: str, ordinary: Ordinary, actions_on: Callable[..., Actions]
) -> None:
    do_and_compare(operation, ordinary(operation, device), actions_on(device))
