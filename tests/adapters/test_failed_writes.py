"""Writes that fail or are interrupted during dispatch, conversion or loading.

Each call that stores weights meets a full disk at each of its writes in turn, and an interrupt at
many moments. It raises; once there is space, the same call on the same model succeeds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import nn

from tests.faults.injecting import FAULTS, Injector, injected
from tests.faults.interrupting import InterruptAt, at_call
from tests.lanes import by_lane
from tests.store.helpers import assert_at_rest
from tierstore import (
    TierStore,
    adapters,
    dispatch_model,
    enable_group_offload,
    from_pretrained,
    load_checkpoint_and_dispatch,
)
from tierstore.adapters.attachment import Attachment
from tierstore.adapters.binding import ParameterBinding
from tierstore.adapters.changing import cast_weights
from tierstore.errors import DiskFullError

T = TypeVar("T")

ADAPTERS = Path(adapters.__file__).parent
WIDTH, LAYERS = 64, 8
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
BUDGET = 6 * LAYER_BYTES
"""Bytes: less than half of the weights at the widest dtype."""


class Layers(nn.Sequential):
    """A model with the attributes that a pipeline requires."""

    device = torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @classmethod
    def from_pretrained(cls, path: Path, *, dtype: torch.dtype) -> Layers:
        """Load as a library does: maps of a file, and then a cast."""
        model = layers()
        model.load_state_dict(load_file(path), assign=True)
        return model.to(dtype)


def layers(seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    return Layers(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


class Pair(DiffusionPipeline):
    """A pipeline of two models."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.register_modules(first=first, second=second)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


def pair() -> Pair:
    return Pair(layers(0), layers(1))


@dataclass
class Case:
    """A call that stores weights, with the same model in float64 without a store.

    It also has the model that the call is about, if the call does not return it.
    """

    call: Callable[[], Any]
    plain: Callable[[torch.Tensor], torch.Tensor]
    model: Any = None

    def attempt(self) -> None:
        found = self.call()
        self.model = self.model or found

    def assert_right(self) -> None:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            expected = self.plain(x)
            for _ in range(2):
                assert torch.equal(self.model(x), expected)


def halfway(store: TierStore, place: Path) -> Case:
    """The control: a second try skips the layer that was not stored."""
    model = dispatch_model(layers(), store)
    left = iter(model)

    def call() -> None:
        for layer in left:
            layer.double()

    return Case(call, layers().double(), model)


def saved(model: nn.Module, place: Path) -> Path:
    path = place / "model.safetensors"
    if not path.exists():
        save_file(model.state_dict(), path)
    return path


def enabling(store: TierStore, place: Path) -> Case:
    pipe = pair()
    pipe.to(torch.float64)  # as if loaded with a cast
    return Case(lambda: enable_group_offload(pipe, store), pair().to(torch.float64), pipe)


def dispatching(store: TierStore, place: Path) -> Case:
    model = layers().double()
    return Case(lambda: dispatch_model(model, store), layers().double(), model)


def loading_and_dispatching(store: TierStore, place: Path) -> Case:
    path = saved(layers(), place)
    with torch.device("meta"):
        model = layers()
    return Case(
        lambda: load_checkpoint_and_dispatch(model, path, store, dtype=torch.float64),
        layers().double(),
        model,
    )


def loading_into_another_dtype(store: TierStore, place: Path) -> Case:
    path = saved(layers(), place)
    model = layers(1).double()
    return Case(lambda: load_checkpoint_and_dispatch(model, path, store), layers().double(), model)


def converting(store: TierStore, place: Path) -> Case:
    model = dispatch_model(layers(), store)
    return Case(model.double, layers().double(), model)


def converting_a_pipeline(store: TierStore, place: Path) -> Case:
    pipe = pair()
    enable_group_offload(pipe, store)
    return Case(lambda: pipe.to(torch.float64), pair().to(torch.float64), pipe)


def casting(store: TierStore, place: Path) -> Case:
    model = layers()
    model.load_state_dict(load_file(saved(model, place)), assign=True)
    dtypes = {id(parameter): torch.float64 for parameter in model.parameters()}
    dispatch_model(model, store)
    return Case(lambda: cast_weights(model, dtypes), layers().double(), model)


def loading_pretrained(store: TierStore, place: Path) -> Case:
    path = saved(layers(), place)
    return Case(
        lambda: from_pretrained(Layers, path, store, dtype=torch.float64), layers().double()
    )


def loading_a_state_dict(store: TierStore, place: Path) -> Case:
    model = dispatch_model(layers().double(), store)
    other = layers(1).double()
    return Case(lambda: model.load_state_dict(other.state_dict()), other, model)


CASES = [
    enabling,
    dispatching,
    loading_and_dispatching,
    loading_into_another_dtype,
    converting,
    converting_a_pipeline,
    casting,
    loading_pretrained,
    loading_a_state_dict,
]
Make = Callable[[TierStore, Path], Case]
EACH = pytest.mark.parametrize("make", CASES)
NEVER = 10**9
ONE_OF_EACH_KIND = ["loading_and_dispatching", "casting", "converting", "dispatching"]


def attempted(
    make: Make, place: Path, fault: Callable[[], AbstractContextManager[T]]
) -> tuple[T, bool]:
    """Make a call during a fault, on a new store; if it raises, repeat it and check the result.

    Returns the fault's value, and whether the call raised.
    """
    with TierStore(BUDGET, place / f"store{len(list(place.iterdir()))}", device="cpu") as store:
        case, raised = make(store, place), False
        with fault() as met:
            try:
                case.attempt()
            except (DiskFullError, KeyboardInterrupt):
                raised = True
        if raised:
            case.attempt()
        case.assert_right()
        stats = store.stats()
        assert stats.bytes_read > 0
        assert stats.bytes_written > 0
        assert stats.peak_bytes["HOST"] <= BUDGET
        del case
        gc.collect()
        assert_at_rest(store)
        assert {key.partition("/")[0] for key in store} <= {"weights", "casts"}, "a group is left"
    return met, raised


def spread(count: int) -> range:
    """Return `count` numbers spread from 1 to the given number."""
    return range(1, count + 1, max(1, count // by_lane(1, 3, 100)))


def sweep_of_writes(make: Make, place: Path) -> None:
    """Fill the disk before one write, in the next call before another one, and so forth."""

    def full(first: int) -> AbstractContextManager[Injector]:
        return injected(place, FAULTS["ENOSPC"], first, once=False)

    whole, _ = attempted(make, place, lambda: full(NEVER))
    assert whole.count > 3 * LAYERS
    for first in spread(whole.count):
        injector, raised = attempted(make, place, lambda first=first: full(first))  # type: ignore[misc]
        assert raised == bool(injector.failed), first


@pytest.mark.full(
    "one call after another, of one kind", keep=["loading_and_dispatching", "casting"]
)
@pytest.mark.long("one call after another, of one kind", keep=ONE_OF_EACH_KIND)
@EACH
def test_call_on_a_full_disk_raises_and_can_be_repeated(make: Make, tmp_path: Path) -> None:
    sweep_of_writes(make, tmp_path)


def test_call_that_skips_the_failed_write_is_detected(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        sweep_of_writes(halfway, tmp_path)


@pytest.mark.full("one call after another, of one kind", keep=["loading_and_dispatching"])
@pytest.mark.long("one call after another, of one kind", keep=ONE_OF_EACH_KIND)
@EACH
def test_call_after_an_interrupt_can_be_repeated(make: Make, tmp_path: Path) -> None:
    whole, _ = attempted(make, tmp_path, lambda: InterruptAt(NEVER, ADAPTERS))
    points = NEVER - whole.left
    for point in spread(points):
        at = InterruptAt(point, ADAPTERS)
        _, raised = attempted(make, tmp_path, lambda at=at: at)  # type: ignore[misc]
        assert raised == at.raised, point


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (converting, ParameterBinding.move_to),
        (casting, ParameterBinding.move_to),
        (loading_a_state_dict, ParameterBinding.move_to),
        (dispatching, Attachment.add),
    ],
)
def test_call_interrupted_in_a_function_can_be_repeated(
    make: Make, function: Callable[..., None], tmp_path: Path
) -> None:
    _, raised = attempted(make, tmp_path, lambda: at_call(function))
    assert raised
