"""Modules that override standard module methods, and wrappers that delegate them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import DEVICES
from tests.store.helpers import open_store
from tierstore import (
    OffloadModel,
    OffloadOptimizer,
    dispatch_model,
    enable_group_offload,
)

WIDTH = 64
BLOCKS = 24
BUDGET = 120_000


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class OwnState(Block):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"up": self.up.weight}


class OwnNames(Block):
    def named_parameters(self, prefix="", recurse=True):  # type: ignore[no-untyped-def]
        return super().named_parameters(prefix, recurse)


class OwnParameters(Block):
    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return self.up.parameters()


class OwnModules(Block):
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:  # type: ignore[override]
        yield "", self


class Replacing(Block):
    """Replaces its parameters when its modules or state are requested, as PEFT's attention does."""

    def _replace(self) -> None:
        weight = self.up.weight
        del self.up.weight
        self.up.register_parameter("weight", nn.Parameter(weight.data, requires_grad=False))

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self._replace()
        return super().named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._replace()
        return super().state_dict(*args, **kwargs)


KINDS = [Block, OwnState, OwnNames, OwnParameters, OwnModules, Replacing]


@pytest.mark.full("the method, the way to offload", keep="a third")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_overriding_modules_run_with_all_of_their_weights_moved(
    device: str, offload: Callable[..., Any], kind: type[Block], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(BLOCKS)))
    nbytes = BLOCKS * 2 * (WIDTH + 1) * WIDTH * 4
    x = torch.randn(2, WIDTH)
    expected = model(x)
    with open_store(tmp_path, BUDGET, device) as store:
        offload(model, store)
        assert torch.equal(model(x).cpu(), expected)
        read = store.stats().bytes_read
        assert torch.equal(model(x).cpu(), expected)
        assert store.stats().bytes_read - read > nbytes // 2


class Adapted(nn.Module):
    """Returns only trained weights as its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*(Block() for _ in range(4)))
        self.adapter = Block()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.adapter.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.adapter.named_parameters("adapter", *args, **kwargs)

    def zero_grad(self) -> None:  # type: ignore[override]
        for part in (self.base, self.adapter):
            part.zero_grad()

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(x))


@pytest.mark.parametrize("device", DEVICES)
def test_optimizer_trains_only_the_listed_parameters(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, module = Adapted(), Adapted()
    module.load_state_dict(plain.state_dict())
    first = copy.deepcopy(plain)
    x = torch.randn(2, WIDTH)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    with open_store(tmp_path, 1 << 20, device) as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1, fused=False)
        assert list(model.parameters()) == list(module.adapter.parameters())
        assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
        for each, step in ((plain, reference.step), (model, optimizer.step)):
            each(x).square().mean().backward()
            step()
            each.zero_grad()
        assert all(p.grad is None for p in module.base.parameters())
        model.load_state_dict(model.state_dict())
        model.disable()
    for name, value in plain.state_dict().items():
        ours = module.state_dict()[name]
        if device == "cpu":
            assert torch.equal(ours, value)
        trained = name.startswith("adapter")
        assert torch.equal(ours, first.state_dict()[name]) != trained


class Delegating(nn.Module):
    """A wrapper that delegates missing attributes, as PEFT's do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.full((), 3.0))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * self.scale


class CopiedByItself(Block):
    """Has its own `__deepcopy__`, which must be used."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedByItself:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.copies = self.copies + 1
        return copied


OFFLOADS: dict[str, Callable[..., Any]] = {
    "dispatched": dispatch_model,
    "offloaded": enable_group_offload,
    "trained": OffloadModel,
}


@pytest.mark.full("how it is offloaded", keep="a third")
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("around", ["outside", "inside"])
@pytest.mark.parametrize("device", DEVICES)
def test_copy_of_delegating_wrapper_is_a_wrapper(
    device: str, around: str, offload: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x = torch.randn(2, WIDTH)
    expected = Delegating(model)(x)
    with open_store(tmp_path, 1 << 21, device) as store:
        wrapper: nn.Module = Delegating(model)
        if around == "outside":
            made = OFFLOADS[offload](model, store)
            if offload == "trained":
                wrapper = Delegating(made)
        else:
            made = OFFLOADS[offload](wrapper, store)
            if offload == "trained":
                wrapper = made
        for copied in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
            assert type(copied) is Delegating and type(copied.model) is nn.Sequential
            assert all(tensor.device.type == "cpu" for tensor in copied.state_dict().values())
            assert torch.equal(copied(x), expected)
            with torch.no_grad():
                copied.scale.fill_(0)
        assert len(store) > 0


@torch.no_grad()
def test_copy_by_the_class_itself_is_an_ordinary_model(tmp_path: Path) -> None:
    with open_store(tmp_path, BUDGET) as store:
        model = CopiedByItself()
        dispatch_model(model, store)
        copied = copy.deepcopy(model)
        x = torch.randn(2, WIDTH)
        assert copied.copies == 1
        assert torch.equal(copied(x), model(x))
        reads = store.stats().hits
        copied(x)
        assert store.stats().hits == reads
        assert not {"__deepcopy__", "__reduce_ex__", "forward"} & copied.__dict__.keys()
