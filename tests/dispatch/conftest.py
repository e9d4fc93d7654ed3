"""Fixtures: checkpoints and plain runs, made once for all tests, and stores of a known size."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import DEVICES, called_modules
from tests.dispatch import models
from tests.helpers.tensors import parameter_bytes
from tests.store.helpers import open_store
from tierstore import TierStore, dispatch_model

__all__ = ["DEVICES"]

ON_BOTH = pytest.mark.parametrize("device", DEVICES)

SHARE = 0.2
"""Budget of a store on each memory tier, as a fraction of the weights of `model`."""

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return `checkpoint(kind, seed=0)`, which makes a read-only directory."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(kind: str, seed: int) -> Path:
        return models.save(kind, models.build(kind, seed), root / f"{kind}-{seed}")

    return lambda kind, seed=0: make(kind, seed)


@dataclass(frozen=True)
class Reference:
    """The output of a plain model, computed twice.

    `needed` are the bytes of the weights of the modules that it calls, each time; `weights` those
    of all.
    """

    outputs: models.Outputs
    weights: int
    needed: int


References = Callable[..., Reference]


@pytest.fixture(scope="session")
def reference(checkpoint: Checkpoints) -> References:
    """Return `reference(kind, device="cpu")`, the reference of the reloaded model.

    `built=True` is for the one that was never saved: its weights are aligned otherwise, which shows
    in last bits.
    """

    @functools.cache
    def make(kind: str, device: str, built: bool) -> Reference:
        model = models.build(kind) if built else models.load(kind, checkpoint(kind))
        weights = parameter_bytes(model)
        with called_modules(model) as called:
            outputs = models.run(kind, model.to(device), device)
        used = {id(p): p.nbytes for module in called for p in module.parameters(recurse=False)}
        return Reference(on_cpu(outputs), weights, sum(used.values()))

    return lambda kind, device="cpu", built=False: make(kind, device, built)


def on_cpu(outputs: models.Outputs) -> models.Outputs:
    return {name: value.cpu() for name, value in outputs.items()}


@contextmanager
def store_for(
    target: nn.Module | int, disk_dir: Path, device: str = "cpu", share: float = 1 / 3
) -> Iterator[TierStore]:
    """Return a store that holds `share` of a model (or of this many bytes) on each memory tier."""
    weights = target if isinstance(target, int) else parameter_bytes(target)
    with open_store(disk_dir, int(weights * share), device) as store:
        yield store


@pytest.fixture
def store(device: str, disk_dir: Path) -> Iterator[TierStore]:
    """Return a store for `model`."""
    with store_for(models.build("parts"), disk_dir, device, SHARE) as store:
        yield store


@pytest.fixture
def model(store: TierStore) -> Any:
    """Return a dispatched model that has run, so that its resident weights are in memory."""
    model = dispatch_model(models.build("parts"), store)
    models.run("parts", model)
    assert_moved(store)
    return model


def assert_moved(store: TierStore) -> None:
    """Check that a run of `model` read the weights that did not fit in memory."""
    stats = store.stats()
    memory = sum(b for tier, b in stats.budget_bytes.items() if tier != "DISK" and b is not None)
    needed = parameter_bytes(models.build("parts")) - models.LAYER_BYTES
    assert needed > memory
    assert stats.bytes_read >= needed - memory


@dataclass(frozen=True)
class Weights:
    """Snapshot of a model's parameters: the objects, and copies of their values."""

    objects: dict[str, int]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        named = dict(model.named_parameters(remove_duplicate=False))
        return cls(
            {name: id(parameter) for name, parameter in named.items()},
            {name: parameter.detach().cpu().clone() for name, parameter in named.items()},
        )

    def assert_unchanged(self, model: nn.Module) -> None:
        """Check that the same objects are on the CPU, with their addresses and true values."""
        named = dict(model.named_parameters(remove_duplicate=False))
        assert {name: id(parameter) for name, parameter in named.items()} == self.objects
        self.assert_equal_to(model)

    def assert_equal_to(self, model: nn.Module) -> None:
        """Check that the parameters are on the CPU, with their true values."""
        named = dict(model.named_parameters(remove_duplicate=False))
        assert named.keys() == self.values.keys()
        for name, value in self.values.items():
            assert named[name].device.type == "cpu", name
            assert type(named[name]) is nn.Parameter
            assert torch.equal(named[name], value), name


def assert_ordinary(model: nn.Module) -> None:
    """Check that every method of every module is that of its class."""
    for name, module in model.named_modules():
        for method in vars(module):
            its_own = getattr(type(module), method, None)
            if callable(its_own):
                assert getattr(module, method) == types.MethodType(its_own, module), name


def evict(store: TierStore) -> None:
    """Evict everything from the device that is not in use."""
    for key in store:
        store.offload(key)
