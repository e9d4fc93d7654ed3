"""One protocol for inference and training: its rules are kept, and they catch faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.adapters.models import BLOCK_BYTES, Tower
from tests.conformance.unit_use import Subject, UnitUseConformance
from tierstore import OffloadModel, TierStore, disable_offload, dispatch_model
from tierstore.adapters.training.model import Pass
from tierstore.adapters.training.weights import TrainingUse
from tierstore.adapters.unit_use import StandIn, UnitForward, UnitUse
from tierstore.adapters.weight_use import ModelRun, WeightUse


def addresses(module: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters()]


def maker(module: nn.Module, kind: type) -> Callable[[], Any]:
    """What makes the uses of a kind around a module's forward."""
    stand_in: Any = vars(module)["forward"]
    while isinstance(stand_in, StandIn):
        assert isinstance(stand_in.run, UnitForward)
        if isinstance(stand_in.run.use(), kind):
            return stand_in.run.use
        stand_in = stand_in.replaced
    raise AssertionError(f"no {kind.__name__} is around it")


@contextmanager
def dispatched(disk_dir: Path) -> Iterator[Tower]:
    model = Tower()
    with TierStore(4 * BLOCK_BYTES, disk_dir, device="cpu") as store:
        yield dispatch_model(model, store)
        disable_offload(model)


class TestWeightUse(UnitUseConformance):
    @contextmanager
    def subject(self, disk_dir: Path) -> Iterator[Subject]:
        with dispatched(disk_dir) as model:
            block = model.blocks[2]
            yield Subject(maker(block, WeightUse), lambda: addresses(block))


class TestModelRun(UnitUseConformance):
    @contextmanager
    def subject(self, disk_dir: Path) -> Iterator[Subject]:
        """Within a run, the model does not look for changes, and a call of it is no other run."""
        with dispatched(disk_dir) as model:
            make = maker(model, ModelRun)
            run = make()
            yield Subject(
                lambda: ModelRun(run.held, run.last_lease, run.over, run.passes),
                lambda: make() is None,
            )


class TestTrainingUse(UnitUseConformance):
    @contextmanager
    def subject(self, disk_dir: Path) -> Iterator[Subject]:
        module = Tower()
        with TierStore(10 * BLOCK_BYTES, disk_dir, device="cpu") as store:
            model = OffloadModel(module, store)
            block = module.blocks[3]
            yield Subject(maker(block, TrainingUse), lambda: addresses(block))
            model.disable()


class TestPass(UnitUseConformance):
    @contextmanager
    def subject(self, disk_dir: Path) -> Iterator[Subject]:
        inside: list[None] = []
        yield Subject(lambda: Pass(lambda: inside.append(None), inside.pop), lambda: len(inside))


# Controls ----------------------------------------------------------------------------------------


class Forgets(Pass):
    """Ends once, whatever happens, and only if it was finished."""

    def end(self) -> None:
        pass


class EndsTwice(Pass):
    def end(self) -> None:
        self.leave()


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Forgets, UnitUseConformance.test_what_begins_is_finished),
        (Forgets, UnitUseConformance.test_what_raised_is_ended),
        (EndsTwice, UnitUseConformance.test_it_may_be_ended_again_and_without_a_beginning),
    ],
)
def test_the_rules_catch_it(kind: Callable[..., UnitUse], rule: Any, disk_dir: Path) -> None:
    class Faulty(TestPass):
        @contextmanager
        def subject(self, disk_dir: Path) -> Iterator[Subject]:
            inside: list[int] = [0]

            def count(by: int) -> None:
                inside[0] += by

            yield Subject(lambda: kind(lambda: count(1), lambda: count(-1)), lambda: inside[0])

    with pytest.raises(AssertionError):
        rule(Faulty(), disk_dir)
