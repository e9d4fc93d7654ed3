"""Running a dispatched model in all the ways that a plain one can be run."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    References,
    Weights,
    assert_ordinary,
    evict,
    store_for,
)
from tests.helpers.tensors import assert_same
from tierstore import disable_offload, dispatch_model

pytestmark = pytest.mark.full(
    "model and dispatch method are independent; test_parity.py covers both devices",
    keep="any device",
)

SHARE = 0.3


# Compiled models ----------------------------------------------------------------------------------


@pytest.mark.full("compiles for seconds; tests/adapters/test_compiled.py has small blocks")
@torch.no_grad()
def test_compiled_model_equals_plain(disk_dir: Path) -> None:
    plain, model, x = models.Tower(), models.Tower(), models.rows()
    torch._dynamo.reset()
    with store_for(model, disk_dir, "cpu", 0.4) as store:
        dispatch_model(model, store)
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            read = store.stats().bytes_read
            assert torch.equal(compiled(x), plain(x))
            assert store.stats().bytes_read > read
        model.layers[0].weight.mul_(2)
        plain.layers[0].weight.mul_(2)
        assert torch.equal(compiled(x), plain(x))
    torch._dynamo.reset()


# Inputs and outputs -------------------------------------------------------------------------------


class Point(collections.namedtuple("Point", ("x", "y"))):
    """A named tuple."""


@dataclass
class Output(transformers.utils.ModelOutput):
    """An output class like those of transformers."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None


class Many(nn.Module):
    """Takes tensors in every kind of container, and returns such."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = models.Tower()
        self.seen: dict[str, Any] = {}

    def forward(
        self, x: Any, /, *rest: Any, pair: Any = None, named: Any = None, **more: Any
    ) -> Any:
        self.seen = {"x": x, "rest": rest, "pair": pair, "named": named, **more}
        total = self.tower(x)
        for tensor in _tensors([rest, pair, named, list(more.values())]):
            total = total + tensor
        return {
            "list": [total, {"deep": (total * 2, "text", 3)}],
            "point": Point(total * 3, None),
            "output": Output(first=total, second=total * 4),
        }


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def many_inputs(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = [models.rows(seed).to(device) for seed in range(8)]
    return (
        (x[0], x[1], [x[2], (x[3], {"a": x[4], "n": 5, "s": "text"})], None),
        {"pair": Point(x[5], 2.5), "named": {"y": x[6]}, "flag": True, "tensor": x[7]},
    )


@ON_BOTH
@torch.no_grad()
def test_tensors_in_containers_are_moved(device: str, disk_dir: Path) -> None:
    plain, model = Many().to(device), Many()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        for place in {"cpu", device}:
            args, kwargs = many_inputs(place)
            given = _tensors([args, kwargs])
            args_there, kwargs_there = many_inputs(device)
            expected = plain(*args_there, **kwargs_there)
            found = model(*args, **kwargs)
            assert {tensor.device.type for tensor in _tensors(model.seen)} == {device}
            assert model.seen["pair"]._fields == ("x", "y") and model.seen["pair"].y == 2.5
            assert model.seen["rest"][1][1][1]["s"] == "text" and model.seen["flag"] is True
            # the caller's were not changed
            assert all(tensor.device.type == place for tensor in given)
            assert found.keys() == expected.keys()
            assert type(found["point"]) is Point and type(found["output"]) is Output
            assert found["list"][1]["deep"][1:] == ("text", 3)
            assert torch.equal(found["output"].second.cpu(), expected["output"].second.cpu())
            tensors = _tensors(found)
            assert len(tensors) == 5
            assert {tensor.device.type for tensor in tensors} == {place}
            for tensor, value in zip(tensors, _tensors(expected), strict=True):
                assert torch.equal(tensor.cpu(), value.cpu())
        assert store.stats().bytes_read > 0


@needs_accelerator
@torch.no_grad()
def test_outputs_without_input_tensors_stay_on_the_device(disk_dir: Path) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, count: int) -> torch.Tensor:
            return self.weight.sum() * count

    model = Constant()
    with store_for(1 << 20, disk_dir, ACCELERATOR, 1.0) as store:
        dispatch_model(model, store)
        assert model(2).device.type == ACCELERATOR
        assert model(2).item() == 32


@needs_accelerator
@pytest.mark.parametrize("skip", ("cache", ["cache", "other"]))
@torch.no_grad()
def test_skip_keys_are_not_moved(skip: str | list[str], disk_dir: Path) -> None:
    class Caching(models.Tower):
        def forward(self, x: torch.Tensor, cache: Any, other: Any) -> dict[str, Any]:
            self.seen = {"cache": cache, "other": other}
            out = super().forward(x)
            return {"out": out, "cache": [out], "other": [out]}

    model, cache, other = Caching(), [models.rows()], [models.rows()]
    with store_for(model, disk_dir, ACCELERATOR, SHARE) as store:
        dispatch_model(model, store, skip_keys=skip)
        result = model(models.rows(), cache=cache, other=other)
        assert model.seen["cache"] is cache
        assert cache[0].device.type == "cpu"
        assert result["out"].device.type == "cpu"
        assert result["cache"][0].device.type == ACCELERATOR
        moved = "other" not in skip
        assert (model.seen["other"][0].device.type == ACCELERATOR) == moved
        assert (result["other"][0].device.type == "cpu") == moved


# Modules that use weights in other ways -----------------------------------------------------------


class Reaching(nn.Module):
    """Uses the weights of a child without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


def reaching() -> nn.Module:
    return models.draw(nn.Sequential(*(Reaching() for _ in range(6))))


@needs_accelerator
@torch.no_grad()
def test_preload_module_classes_loads_whole_modules(disk_dir: Path) -> None:
    plain, x = reaching(), models.rows()
    expected = plain.to(ACCELERATOR)(x.to(ACCELERATOR)).cpu()
    model = reaching()
    with store_for(model, disk_dir, ACCELERATOR, 0.5) as store:
        dispatch_model(model, store, preload_module_classes=["Reaching"])
        for _ in range(2):
            read = store.stats().bytes_onloaded
            assert torch.equal(model(x), expected)
            assert store.stats().bytes_onloaded > read
        disable_offload(model)
        dispatch_model(model, store)  # they are loaded for each operation
        assert torch.equal(model(x), expected)


@torch.no_grad()
def test_child_weights_on_the_cpu_are_used_in_place(disk_dir: Path) -> None:
    """True tensors on the CPU need not be loaded."""
    model, x = reaching(), models.rows()
    with store_for(model, disk_dir, "cpu", 0.5) as store:
        dispatch_model(model, store)
        assert torch.equal(model(x), reaching()(x))


class Attending(nn.Module):
    """Its output projection is not called: attention uses the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(models.WIDTH, 4, batch_first=True) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(models.WIDTH, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 4)


def normalised() -> nn.Module:
    tower = models.Tower()
    parametrizations.weight_norm(tower.layers[1])
    return tower


@ON_BOTH
@pytest.mark.parametrize("make", (Attending, encoder, normalised))
@torch.no_grad()
def test_unusual_modules_equal_plain(make: Any, device: str, disk_dir: Path) -> None:
    plain, model = models.draw(make()), models.draw(make())
    x = models.rows(count=6).reshape(2, 3, models.WIDTH)
    expected = plain.to(device)(x.to(device)).cpu()
    with store_for(model, disk_dir, device, 0.6) as store:
        dispatch_model(model, store)
        for _ in range(2):
            assert torch.equal(model(x), expected)
            evict(store)
        assert store.stats().bytes_read > 0


@ON_BOTH
def test_inference_mode_leaves_ordinary_weights(device: str, disk_dir: Path) -> None:
    """Weights may be edited afterwards, and used with gradients."""
    model, plain = models.build("parts"), models.build("parts")
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        for _ in range(2):
            expected = models.run("parts", plain.to(device), device)
            plain.to("cpu")
            with torch.inference_mode():
                assert torch.equal(model(models.tokens()), expected["output"].cpu())
            assert not any(parameter.is_inference() for parameter in model.parameters())
            assert_same(models.run("parts", model), expected)
            for each in (plain, model):
                with torch.no_grad():
                    each.blocks[2].weight.mul_(2)
                each.blocks[3] = models.draw(nn.Linear(models.WIDTH, models.WIDTH), 3)
            with torch.inference_mode():  # detected there
                model(models.tokens())
            assert not any(parameter.is_inference() for parameter in model.parameters())
        model.blocks[1].weight.square().sum().backward()
        assert model.blocks[1].weight.grad is not None
        disable_offload(model)
    Weights.of(plain).assert_equal_to(model)
    assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])


@ON_BOTH
def test_model_without_tensors_runs(device: str, disk_dir: Path) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    x = models.rows()
    expected = model(x)
    with store_for(1 << 20, disk_dir, device) as store:
        dispatch_model(model, store)
        assert torch.equal(model(x), expected)
        disable_offload(model)
    assert_ordinary(model)


# Hooks of other libraries -------------------------------------------------------------------------


@ON_BOTH
@torch.no_grad()
def test_hooks_see_the_same_values_as_plain(device: str, disk_dir: Path) -> None:
    """Compares values of weights, inputs and outputs, in hooks from before, between and after."""

    def record(model: nn.Module, into: list[Any], names: list[str]) -> list[Any]:
        def before(module: nn.Module, args: Any) -> None:
            into.append(("before", args[0].cpu(), module.weight.detach().cpu().clone()))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            into.append(("after", output.cpu(), module.weight.detach().cpu().clone()))

        handles = []
        for name in names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after))
        return handles

    early, late = [f"blocks.{n}" for n in (0, 5, 9)], [f"blocks.{n}" for n in (1, 5, 20)]
    plain, model = models.build("parts").to(device), models.build("parts")
    expected: list[Any] = []
    found: list[Any] = []
    record(plain, expected, early)
    record(plain, expected, late)
    record(model, found, early)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        record(model, found, late)
        for _ in range(2):
            models.run("parts", plain, device)
            models.run("parts", model)
        disable_offload(model)
    models.run("parts", plain.to("cpu"))
    models.run("parts", model)
    assert len(found) == len(expected) == 3 * 12
    for (moment, *tensors), (expected_moment, *values) in zip(found, expected, strict=True):
        assert moment == expected_moment
        for tensor, value in zip(tensors, values, strict=True):
            assert torch.equal(tensor, value)


@ON_BOTH
@torch.no_grad()
def test_hooks_may_change_inputs_and_outputs(device: str, disk_dir: Path) -> None:
    plain, model = models.Tower().to(device), models.Tower()
    with store_for(model, disk_dir, device, 0.5) as store:
        dispatch_model(model, store)
        for each in (plain, model):
            each.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
            each.register_forward_hook(lambda module, args, output: output + 1)
            each.layers[2].register_forward_hook(lambda module, args, output: output - 3)
            each.layers[5].register_forward_pre_hook(
                lambda module, args, kwargs: ((args[0] / 2,), kwargs), with_kwargs=True
            )
        for _ in range(2):
            expected = plain(models.rows().to(device)).cpu()
            assert torch.equal(model(models.rows()), expected)


@ON_BOTH
@torch.no_grad()
def test_replaced_method_is_kept(device: str, disk_dir: Path) -> None:
    plain, model = models.Tower().to(device), models.Tower()

    def halved(layer: nn.Linear) -> Any:
        original = layer.forward
        return lambda x: original(x) / 2

    for each in (plain, model):
        each.layers[1].forward = halved(each.layers[1])
    kept = model.layers[1].forward
    with store_for(model, disk_dir, device, 0.5) as store:
        dispatch_model(model, store)
        for each in (plain, model):
            each.layers[4].forward = halved(each.layers[4])
        expected = plain(models.rows().to(device)).cpu()
        for _ in range(2):
            assert torch.equal(model(models.rows()), expected)
        disable_offload(model)
        earlier = store.stats()
        assert model.layers[1].forward is kept
        assert torch.equal(model(models.rows()), plain.to("cpu")(models.rows()))
        assert store.stats().hits == earlier.hits


# Errors in a forward ------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("kind", (ZeroDivisionError, KeyboardInterrupt))
def test_exception_in_forward_leaves_no_lease(
    kind: type[BaseException], device: str, reference: References, disk_dir: Path
) -> None:
    expected = reference("parts", device, built=True).outputs
    model = models.build("parts")
    weights = Weights.of(model)
    failing = [True]

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        if failing:
            raise kind

    for part in (model.blocks[0], model.blocks[12], model.norm, model.head):
        part.register_forward_hook(fail)
    with store_for(model, disk_dir, device, 0.15) as store:
        dispatch_model(model, store)
        # The budgets are so small that a remaining lease would leave too little memory.
        for part in (model.blocks[0], model.blocks[12], model.norm, model.head):
            with pytest.raises(kind):
                models.run("parts", model)
            weights.assert_unchanged(model)
            part._forward_hooks.clear()
        failing.clear()
        for _ in range(2):
            assert_same(models.run("parts", model), expected)
        assert store.stats().bytes_read > 0
        disable_offload(model)
        assert not [key for key in store if not key.startswith("weights/")]
    weights.assert_unchanged(model)


@ON_BOTH
@torch.no_grad()
def test_wrong_inputs_raise_the_errors_of_torch(device: str, disk_dir: Path) -> None:
    model = models.Tower()
    with store_for(model, disk_dir, device, 0.5) as store:
        dispatch_model(model, store)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.zeros(2, 3))
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            model(models.rows(), nonsense=1)
        expected = models.Tower().to(device)(models.rows().to(device)).cpu()
        assert torch.equal(model(models.rows()), expected)


# Two models ---------------------------------------------------------------------------------------


@ON_BOTH
def test_two_models_in_one_store_keep_their_weights(device: str, disk_dir: Path) -> None:
    """Both have one class and shape: neither runs with weights of the other."""
    plain = [models.build("parts", seed).to(device) for seed in (0, 1)]
    expected = [models.run("parts", model, device) for model in plain]
    assert not torch.equal(expected[0]["output"], expected[1]["output"])
    both = [models.build("parts", seed) for seed in (0, 1)]
    with store_for(both[0], disk_dir, device, SHARE) as store:
        for model in both:
            dispatch_model(model, store)
        for _ in range(2):
            for model, outputs in zip(both, expected, strict=True):
                assert_same(models.run("parts", model), outputs)
        disable_offload(both[0])
        assert_same(models.run("parts", both[1]), expected[1])
    for model, made in zip(both, plain, strict=True):
        state = made.state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), state[name].cpu()), name


@ON_BOTH
@pytest.mark.parametrize("built", (True, False), ids=("in memory", "of a checkpoint"))
def test_second_dispatch_writes_nothing(
    built: bool, device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference("parts", device, built=built)
    for run in range(2):
        model = models.build("parts") if built else models.load("parts", checkpoint("parts"))
        with store_for(model, disk_dir, device, SHARE) as store:
            dispatch_model(model, store)
            for _ in range(2):
                assert_same(models.run("parts", model), expected.outputs)
            written = store.stats().bytes_written
            assert store.stats().bytes_read > 0
        if built and run == 0:
            assert written >= expected.weights
        else:
            assert written == 0
