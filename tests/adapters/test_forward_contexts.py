"""One protocol of contexts for inference and training: it holds, and violations are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.adapters.models import BLOCK_BYTES, Tower
from tests.conformance.forward_context import ForwardContextConformance, Subject
from tierstore import OffloadModel, TierStore, disable_offload, dispatch_model
from tierstore.adapters.forward import ForwardRunner, MethodPatch
from tierstore.adapters.unit_context import PassContext, UnitContext


def addresses(module: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters()]


def maker(module: nn.Module, kind: type) -> Callable[[], Any]:
    """Return the function that makes contexts of a kind around a module's forward."""
    patch: Any = vars(module)["forward"]
    while isinstance(patch, MethodPatch):
        assert isinstance(patch.run, ForwardRunner)
        if isinstance(patch.run.make_context(), kind):
            return patch.run.make_context
        patch = patch.replaced
    raise AssertionError(f"no {kind.__name__} is around it")


@contextmanager
def dispatched(disk_dir: Path) -> Iterator[Tower]:
    model = Tower()
    with TierStore(4 * BLOCK_BYTES, disk_dir, device="cpu") as store:
        yield dispatch_model(model, store)
        disable_offload(model)


@contextmanager
def trained(disk_dir: Path) -> Iterator[Tower]:
    module = Tower()
    with TierStore(10 * BLOCK_BYTES, disk_dir, device="cpu") as store:
        model = OffloadModel(module, store)
        yield module
        model.disable()


class TestUnitContext(ForwardContextConformance):
    kind: Any = staticmethod(dispatched)

    @contextmanager
    def subject(self, disk_dir: Path) -> Iterator[Subject]:
        with self.kind(disk_dir) as model:
            block = model.blocks[3]
            yield Subject(maker(block, UnitContext), lambda: addresses(block))


class TestUnitContextInTraining(TestUnitContext):
    kind = staticmethod(trained)


class TestPassContext(ForwardContextConformance):
    """A nested call during a pass is not a separate pass."""

    kind: Any = staticmethod(dispatched)
    made: Callable[..., PassContext] = PassContext

    @contextmanager
    def subject(self, disk_dir: Path) -> Iterator[Subject]:
        with self.kind(disk_dir) as model:
            make = maker(model, PassContext)
            run = make()
            yield Subject(
                lambda: type(self).made(run.current, run.passes, run.on_begin, on_end=run.on_end),
                lambda: run.current.context is None,
            )


class TestPassContextInTraining(TestPassContext):
    kind = staticmethod(trained)


# Controls ----------------------------------------------------------------------------------------


class Forgets(PassContext):
    """Never ends."""

    def _end(self, *, failed: bool) -> None:
        pass


class EndsOthers(PassContext):
    """Ends the pass, whichever context began it."""

    def _end(self, *, failed: bool) -> None:
        self.current.context = None


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Forgets, ForwardContextConformance.test_begin_then_finish_restores_the_model),
        (Forgets, ForwardContextConformance.test_end_after_an_error_restores_the_model),
        (EndsOthers, ForwardContextConformance.test_nested_contexts_restore_in_order),
    ],
)
def test_context_that_breaks_a_rule_fails(kind: Any, rule: Any, disk_dir: Path) -> None:
    class Faulty(TestPassContext):
        made = kind

    with pytest.raises(AssertionError):
        rule(Faulty(), disk_dir)
