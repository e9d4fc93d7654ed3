"""Training, plain and on a store, in the same few lines; and the results that must be equal."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.adapters.conftest import DEVICES
from tests.helpers.tensors import assert_same, parameter_bytes
from tests.training import models
from tierstore import TierStore
from tierstore.adapters.training import OffloadModel, OffloadOptimizer
from tierstore.adapters.training.optimizer import FUSED

__all__ = ["DEVICES"]

ON_BOTH = pytest.mark.parametrize("device", DEVICES)

SMALL = 0.2  # of the full state: most of it streams
LARGE = 2.0  # all of it stays, and there is space for activations
STEPS = 5

# An optimizer on a store does both itself; plain ones need the arguments.
ADAMW = {"lr": 1e-3, "weight_decay": 0.05, "fused": True}
SGD = {"lr": 0.02, "momentum": 0.9, "fused": True}


# The cost of training a model ---------------------------------------------------------------------


@functools.cache
def states_per_parameter(optimizer_class: type[torch.optim.Optimizer], **options: Any) -> int:
    """Number of states, each as large as its parameter, that an optimizer keeps."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = optimizer_class([parameter], **options)
    optimizer.step()
    kept = optimizer.state[parameter].values()
    return sum(isinstance(each, torch.Tensor) and each.shape == (3,) for each in kept)


def full_state_bytes(
    module: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> int:
    """Return the bytes of the parameters, their gradients, and the optimizer's states."""
    states = states_per_parameter(optimizer_class, **options)
    return parameter_bytes(module) + (1 + states) * parameter_bytes(module, trained=True)


@contextmanager
def store_for(
    full_state: nn.Module | int,
    disk_dir: Path,
    device: str = "cpu",
    share: float = SMALL,
    **options: Any,
) -> Iterator[TierStore]:
    """Open a store that may hold `share` of a full training state in RAM.

    `state` is in bytes, or a module that AdamW trains. On an accelerator, all parameters fit by
    default.
    """
    if isinstance(full_state, nn.Module):
        weights = parameter_bytes(full_state)
        full_state = full_state_bytes(full_state, torch.optim.AdamW)
        options.setdefault("device_budget", int(1.5 * weights))
    else:
        options.setdefault("device_budget", full_state)
    if device == "cpu":
        del options["device_budget"]
    with TierStore(int(full_state * share), disk_dir, device=device, **options) as store:
        yield store


def offloaded(
    module: nn.Module,
    store: TierStore,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> tuple[OffloadModel, OffloadOptimizer]:
    """Put a module in training on a store, with its optimizer. AdamW's options are `ADAMW`."""
    model = OffloadModel(module, store, **how)
    if options is None:
        options = ADAMW
    return model, OffloadOptimizer(model, store, optimizer_class, **options)


# Training -----------------------------------------------------------------------------------------


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """Clip the gradients of all parameters, by the optimizer's own method if it has one."""
    if isinstance(optimizer, OffloadOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def train(
    kind: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    *,
    device: str = "cpu",
    max_norm: float | None = None,
    accumulate: int = 1,
    first: int = 0,
    after_step: Callable[[], Any] | None = None,
) -> list[torch.Tensor]:
    """Train on the batches of a kind from number `first * accumulate` on.

    Returns further values to compare: all losses, and the norms before clipping.
    """
    found = []
    for step in range(first, first + steps):
        for number in range(step * accumulate, (step + 1) * accumulate):
            torch.manual_seed(number)
            loss = models.loss(kind, model, models.batch(kind, number).to(device)) / accumulate
            loss.backward()
            found.append(loss.detach().cpu())
        if max_norm is not None:
            found.append(clip(model, optimizer, max_norm).cpu())
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step()
    return found


@dataclass(frozen=True)
class Trained:
    """The complete result of a training, in plain form: equal runs have equal results."""

    found: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    state: dict[str, Any]
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        found: list[torch.Tensor] | None = None,
    ) -> Trained:
        return cls(
            list(found or ()),
            {n: p.detach().cpu().clone() for n, p in model.named_parameters()},
            {n: b.detach().cpu().clone() for n, b in model.named_buffers()},
            copied(optimizer.state_dict()),
            {
                name: None if p.grad is None else p.grad.detach().cpu().clone()
                for name, p in model.named_parameters()
            },
        )

    def assert_same_as(self, expected: Trained, device: str = "cpu") -> None:
        """Compare bit for bit, unless this was computed on a `device` and the other on the CPU."""
        assert_same(self.found, expected.found, "losses", device=device)
        assert_same(self.buffers, expected.buffers, "buffers", device=device)
        assert_same(self.gradients, expected.gradients, "gradients", device=device)
        assert_same(self.parameters, expected.parameters, "parameters", device=device)
        assert_same(self.state, expected.state, "optimizer", device=device)


def copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists, with copies of their tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(each) for each in value)
    return value


# Bytes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """The bytes that one step must move between RAM and disk, if the full state does not fit.

    While an optimizer steps, it needs every parameter, gradient and state, of which at most the
    budget is in RAM when it begins: the rest must be read. It changes the parameters and the
    states, of which at most the budget is in RAM when it ends: the rest must have been written.
    """

    read: int
    written: int

    @classmethod
    def at_least(
        cls, module: nn.Module, budget: int, optimizer_class: type, **options: Any
    ) -> Moved:
        trained = parameter_bytes(module, trained=True)
        states = states_per_parameter(optimizer_class, **options) * trained
        return cls(max(2 * trained + states - budget, 0), max(trained + states - budget, 0))


class Traffic:
    """Counts the bytes that a store moves from now on."""

    def __init__(self, store: TierStore) -> None:
        self.store = store
        self._before = store.stats()

    @property
    def read(self) -> int:
        return self.store.stats().bytes_read - self._before.bytes_read

    @property
    def written(self) -> int:
        return self.store.stats().bytes_written - self._before.bytes_written

    @property
    def onloaded(self) -> int:
        return self.store.stats().bytes_onloaded - self._before.bytes_onloaded

    def assert_at_least(self, moved: Moved, steps: int) -> None:
        """Check the bytes of `steps` steps that all have states, so not of the first step."""
        assert moved.read > 0, "the full state fits"
        assert self.read >= steps * moved.read
        assert self.written >= steps * moved.written


def assert_within_budgets(store: TierStore) -> None:
    """Check that no tier ever exceeded its budget."""
    stats = store.stats()
    for tier, budget in stats.budget_bytes.items():
        if budget is not None:
            assert stats.peak_bytes[tier] <= budget, tier


def assert_nothing_is_leased(model: OffloadModel, *, but: str = "-") -> None:
    """Check that between two steps only permanent leases are held.

    Keys that begin with `but` are exempt.
    """
    store = model.store
    pause = threading.Event()
    for _ in range(100):
        gc.collect()  # an error holds the frames of its backward until another thread drops it
        model.flush()
        found = [key for key in held(store) if not key.startswith(but)]
        if not found:
            return
        pause.wait(0.05)
    raise AssertionError(f"the store still holds {found}")


def assert_gone(references: Iterable[weakref.ref[Any]]) -> None:
    """Wait until these objects are freed.

    Autograd's thread for an accelerator releases the last graph some time after `backward` has
    returned.
    """
    pause = threading.Event()
    for _ in range(100):
        gc.collect()
        found = [one for one in (reference() for reference in references) if one is not None]
        if not found:
            return
        names = [type(one).__name__ for one in found]
        del found
        pause.wait(0.05)
    raise AssertionError(f"still alive: {names}")


def held(store: TierStore) -> list[str]:
    """Return keys of groups that should not be where they are.

    These are in memory though also on disk, or on the device (except buffers, which stay there), or
    belong to nothing that is trained.
    """
    found = []
    for group in store.snapshot().groups:
        on_disk = "DISK" in group.tiers
        in_memory = len(group.tiers) > on_disk
        on_device = "DEVICE" in group.tiers and not group.key.endswith("/resident")
        trained = group.key.startswith(("training/", "optimizer/"))
        if (on_disk and in_memory) or on_device or not trained:
            found.append(group.key)
    return found


# Comparing ----------------------------------------------------------------------------------------

Scenario = Callable[[Any, Any, str], list[torch.Tensor] | None]
"""Uses a model and an optimizer on a device, and returns its results."""
Grouping = Callable[[nn.Module], Any]
"""Returns the first argument of an optimizer for a model."""


class Needs:
    """Records the bytes that an ordinary optimizer reads and writes per step.

    Those that exceed a budget must move. See `Moved`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.needed: list[int] = []
        self.changed: list[int] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = sum(p.grad.nbytes for p in _stepped(optimizer))
        self.needed.append(gradients + _with_states(optimizer))

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.changed.append(_with_states(optimizer))

    def above(self, budget: int) -> Moved:
        """Return the fewest bytes that all steps together must have moved."""
        return Moved(
            sum(max(nbytes - budget, 0) for nbytes in self.needed),
            sum(max(nbytes - budget, 0) for nbytes in self.changed),
        )


def _stepped(optimizer: torch.optim.Optimizer) -> list[Any]:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in every if p.grad is not None]


def _with_states(optimizer: torch.optim.Optimizer) -> int:
    nbytes = 0
    for parameter in _stepped(optimizer):
        states = optimizer.state[parameter].values() if parameter in optimizer.state else ()
        large = [each for each in states if isinstance(each, torch.Tensor) and each.dim()]
        nbytes += parameter.nbytes + sum(each.nbytes for each in large)
    return nbytes


def compare(
    scenario: Scenario,
    disk_dir: Path,
    device: str = "cpu",
    kind: str = "small",
    *,
    build: Callable[[], nn.Module] | None = None,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    grouping: Grouping | None = None,
    share: float = 0.3,
    **how: Any,
) -> None:
    """Run a scenario on a plain model and on one on a store, and compare everything.

    These are the scenario's result, parameters, buffers, gradients and the optimizer's state. Bytes
    above the budget must have moved.
    """
    build = build or functools.partial(models.build, kind)
    options = ADAMW if options is None else options
    module = build()
    fused = {"fused": True} if optimizer_class in FUSED and "foreach" not in options else {}
    parameters = grouping(module) if grouping else module.parameters()
    plain = optimizer_class(parameters, **{**fused, **options})
    needs = Needs(plain)
    expected = Trained.of(module, plain, scenario(module, plain, "cpu"))
    module = build()
    with store_for(
        full_state_bytes(module, optimizer_class, **options), disk_dir, device, share
    ) as (store):
        traffic = Traffic(store)
        model = OffloadModel(module, store, **how)
        given = grouping(model) if grouping else model
        optimizer = OffloadOptimizer(given, store, optimizer_class, **options)
        found = scenario(model, optimizer, device)
        Trained.of(model, optimizer, found).assert_same_as(expected, device)
        budget = store.stats().budget_bytes["HOST"]
        assert budget is not None
        traffic.assert_at_least(needs.above(budget), 1)
        assert_within_budgets(store)
        assert_nothing_is_leased(model)


# Cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingCase:
    """One way to train."""

    kind: str
    optimizer: str
    clipped: bool
    accumulate: int
    slices: int | None
    checkpoint: bool
    share: float
    device: str

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        return getattr(torch.optim, self.optimizer)

    @property
    def options(self) -> dict[str, Any]:
        return {"AdamW": ADAMW, "SGD": SGD}[self.optimizer]

    @property
    def max_norm(self) -> float | None:
        return 0.1 if self.clipped else None

    def __str__(self) -> str:
        names = [self.kind, self.optimizer.lower(), f"slices{self.slices}", f"{self.share}x"]
        names += ["clipped"] * self.clipped + ["checkpoint"] * self.checkpoint
        return "-".join([*names, f"accumulate{self.accumulate}", self.device])


CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": ("mlp", "mlp-dropout", "sequential", "resnet", "llama", "llama-dropout", "flux"),
    "optimizer": ("AdamW", "SGD"),
    "clipped": (True, False),
    "accumulate": (1, 3),
    "slices": (1, 3, None),
    "checkpoint": (True, False),
    "share": (SMALL, LARGE),
    "device": ("cpu", ACCELERATOR),
}

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: TrainingCase) -> set[Pair]:
    """Return all pairs of choices that meet in this case."""
    return set(itertools.combinations(((name, getattr(case, name)) for name in CHOICES), 2))


def pairwise() -> list[TrainingCase]:
    """Return a few cases in which every choice meets every other one."""
    every = [TrainingCase(*values) for values in itertools.product(*CHOICES.values())]
    missing = {case: pairs_of(case) for case in every}
    found: list[TrainingCase] = []
    while missing:
        best = max(missing, key=lambda case: len(missing[case]))
        covered = missing.pop(best)
        found.append(best)
        missing = {case: left for case, pairs in missing.items() if (left := pairs - covered)}
    return found


def needs(case: TrainingCase) -> tuple[pytest.MarkDecorator, ...]:
    """A device draws other random numbers than the CPU, whose results are the reference."""
    if case.device == "cpu":
        return ()
    drawn = "dropout" in case.kind
    return (pytest.mark.pretend_only("kernels"),) if drawn else (needs_accelerator,)


TRAINING_CASES = [pytest.param(case, id=str(case), marks=needs(case)) for case in pairwise()]
