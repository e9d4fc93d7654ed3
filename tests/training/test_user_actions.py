"""User actions on a model in training, apart from training it: read, edit, save, hook.

Every scenario runs on an ordinary model, too, with the same result.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.helpers.tensors import assert_same, parameter_bytes
from tests.training import models
from tests.training.conftest import (
    ADAMW,
    ON_BOTH,
    Traffic,
    Trained,
    assert_gone,
    assert_nothing_is_leased,
    assert_within_budgets,
    compare,
    offloaded,
    store_for,
    train,
)
from tierstore import TierStore
from tierstore.adapters.training import OffloadModel, OffloadOptimizer

pytestmark = pytest.mark.full(
    "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
    keep="a third",
)

Found = list[torch.Tensor]


@pytest.fixture
def device() -> str:
    """Most scenarios are the same on every device; some request both."""
    return "cpu"


@pytest.fixture
def store(device: str, disk_dir: Path) -> Iterator[TierStore]:
    with store_for(models.build("small"), disk_dir, device, 0.3) as store:
        yield store


def squares(model: Any, number: int, device: str) -> torch.Tensor:
    given = models.batch("small", number).to(device)
    return (model(*given.args) - given.target).square().mean()


def step(model: Any, optimizer: Any, number: int, device: str) -> torch.Tensor:
    """One ordinary step. Returns the loss."""
    return train("small", model, optimizer, 1, first=number, device=device)[0]


def everything(model: nn.Module) -> Found:
    return [p.detach().clone() for p in model.parameters()]


def gradients(model: nn.Module) -> Found:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


# Reading and editing between the passes -----------------------------------------------------------


def reading(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        squares(model, number, device).backward()
        found += everything(model) + gradients(model)
        optimizer.step()
        found += everything(model) + gradients(model)
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        found += [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
        found += [optimizer.state[p]["step"].clone() for p in model.parameters()]
    return found


def editing_in_place(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        found.append(step(model, optimizer, number, device))
        with torch.no_grad():
            model.head.weight[0] = 0.5
            model.layers[0].weight.mul_(0.9)
            nn.init.constant_(model.layers[3].bias, 0.1)
    return found


def editing_through_data(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        found.append(step(model, optimizer, number, device))
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        model.head.bias.data[3] += 1
    return found


def giving_other_data(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        found.append(step(model, optimizer, number, device))
        model.head.weight.data = torch.full_like(model.head.weight, 0.01)
        model.layers[6].bias.data = model.layers[6].bias.data + 1
    model.head.weight.data = model.head.weight.data * 2  # nothing runs after this one
    return [*found, model.head.weight.detach().clone()]


def giving_other_data_between_backward_and_step(model: Any, optimizer: Any, device: str) -> Found:
    for number in range(3):
        squares(model, number, device).backward()
        model.head.weight.data = torch.full_like(model.head.weight, 0.01)
        with torch.no_grad():
            model.layers[0].weight.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return everything(model)


def editing_gradients(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        squares(model, number, device).backward()
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        model.head.weight.grad.mul_(2)
        model.head.bias.grad.data.zero_()
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return found


def editing_gradients_while_they_add_up(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(2):
        squares(model, number, device).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        squares(model, number + 10, device).backward()
        found += gradients(model)
        model.layers[0].weight.grad = None
        model.layers[3].weight.grad = torch.ones_like(model.layers[3].weight)
        squares(model, number + 20, device).backward()
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return found


def giving_and_taking_gradients(model: Any, optimizer: Any, device: str) -> Found:
    for number in range(3):
        squares(model, number, device).backward()
        model.head.weight.grad = torch.full_like(model.head.weight, 0.3)
        model.layers[0].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return everything(model)


def averaging(model: Any, optimizer: Any, device: str) -> Found:
    averages = everything(model)
    found = []
    for number in range(3):
        found.append(step(model, optimizer, number, device))
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
    with torch.no_grad():  # and train on from the averages
        for average, parameter in zip(averages, model.parameters(), strict=True):
            parameter.copy_(average)
    return [*found, *averages, step(model, optimizer, 3, device)]


def loading_in_the_middle(model: Any, optimizer: Any, device: str) -> Found:
    found = [step(model, optimizer, 0, device), step(model, optimizer, 1, device)]
    model.load_state_dict(models.build("small", seed=5).state_dict())
    found += everything(model)
    found.append(step(model, optimizer, 2, device))
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=False)
    return [*found, step(model, optimizer, 3, device)]


def hooks_on_gradients(model: Any, optimizer: Any, device: str) -> Found:
    found: Found = []
    handle = model.head.weight.register_hook(lambda gradient: gradient * 2)

    def note(gradient: torch.Tensor) -> None:
        found.append(gradient.detach().cpu().clone())

    other = model.layers[0].weight.register_hook(note)
    for number in range(2):
        squares(model, number, device).backward()
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    other.remove()
    return [*found, step(model, optimizer, 2, device)]


def hooks_on_modules(model: Any, optimizer: Any, device: str) -> Found:
    found: Found = []

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        found.append(module.weight.detach().cpu().clone())
        return output * 1.5

    def backward(module: nn.Module, given: Any, outer: Any) -> None:
        found.append(outer[0].detach().cpu().clone())

    handles = [
        model.layers[3].register_forward_hook(after),
        model.layers[6].register_full_backward_hook(backward),
        model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
    ]
    for number in range(2):
        found.append(step(model, optimizer, number, device))
    for handle in handles:
        handle.remove()
    return [*found, step(model, optimizer, 2, device)]


def modes(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        model.eval()
        assert not any(module.training for module in model.modules())
        found.append(step(model, optimizer, number, device))
        assert model.train() is model
        assert all(module.training for module in model.modules())
        found.append(step(model, optimizer, number, device))
    return found


def calling_a_part(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        x = models.batch("small", number).to(device).args[0]
        loss = model.head(model.layers(x)).square().mean()
        loss.backward()
        found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return found


def skipping_a_layer_and_changing_it(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    whole = model.layers.forward
    for number in range(2):
        model.layers.forward = lambda x: x
        found.append(step(model, optimizer, number, device))
        with torch.no_grad():
            for parameter in model.layers.parameters():
                parameter.mul_(0.5)
        model.layers.forward = whole
        found.append(step(model, optimizer, number, device))
    del model.layers.forward
    return found


def gradient_penalty(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        given = models.batch("small", number).to(device)
        x = given.args[0].requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        loss = squares(model, number, device) + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        found += [loss.detach().cpu(), gradient.detach().cpu()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def gradient_of_the_input_alone(model: Any, optimizer: Any, device: str) -> Found:
    found = []
    for number in range(3):
        x = models.batch("small", number).to(device).args[0].requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
        found.append(gradient.cpu())
        assert all(p.grad is None for p in model.parameters())
        found.append(step(model, optimizer, number, device))
    return found


SCENARIOS = [
    reading,
    editing_in_place,
    editing_through_data,
    giving_other_data,
    giving_other_data_between_backward_and_step,
    editing_gradients,
    editing_gradients_while_they_add_up,
    averaging,
    loading_in_the_middle,
    hooks_on_gradients,
    hooks_on_modules,
    modes,
    skipping_a_layer_and_changing_it,
    gradient_penalty,
    gradient_of_the_input_alone,
]


@ON_BOTH
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_user_action_equals_plain_torch(scenario: Any, device: str, disk_dir: Path) -> None:
    compare(scenario, disk_dir, device, share=0.25)


@ON_BOTH
@pytest.mark.parametrize(
    "scenario", [giving_and_taking_gradients, calling_a_part], ids=lambda s: s.__name__
)
def test_long_user_action_equals_plain_torch(scenario: Any, device: str, disk_dir: Path) -> None:
    compare(scenario, disk_dir, device, share=0.25)


@pytest.mark.parametrize("share", (0.25, 2.0))
def test_edit_between_forward_and_backward_raises_as_in_torch(share: float, disk_dir: Path) -> None:
    def refusal(model: Any) -> str:
        loss = squares(model, 0, "cpu")
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        return str(caught.value).split(";")[0].split("[")[0]

    expected = refusal(models.build("small"))
    module = models.build("small")
    with store_for(module, disk_dir, share=share) as store:
        model, _ = offloaded(module, store)
        assert refusal(model) == expected
        assert_nothing_is_leased(model)
        if share < 1:
            assert store.stats().bytes_read >= parameter_bytes(module)


# Copies, names, saving ----------------------------------------------------------------------------


@pytest.fixture
def pair(store: TierStore, device: str) -> Any:
    """A model on a store, after two steps, and an ordinary one; each with its optimizer."""
    plain = models.build("small")
    by_itself = torch.optim.AdamW(plain.parameters(), **ADAMW)
    train("small", plain, by_itself, 2)
    model, optimizer = offloaded(models.build("small"), store)
    traffic = Traffic(store)
    train("small", model, optimizer, 2, device=device)
    assert traffic.read >= parameter_bytes(plain)
    yield (model, optimizer), (plain, by_itself)
    # Afterwards, both must train on identically.
    found = train("small", model, optimizer, 1, first=2, device=device)
    wanted = train("small", plain, by_itself, 1, first=2)
    expected = Trained.of(plain, by_itself, wanted)
    Trained.of(model, optimizer, found).assert_same_as(expected, device)
    assert_nothing_is_leased(model)
    assert_within_budgets(store)


@ON_BOTH
def test_state_dict_names_and_values_are_equal(pair: Any) -> None:
    (model, _), (plain, _) = pair
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_children()] == [n for n, _ in plain.named_children()]
    assert [n for n, _ in model.named_modules()][1:] == [n for n, _ in plain.named_modules()][1:]
    assert model.get_parameter("head.weight") is model.head.weight
    assert all(type(p) is nn.Parameter and p.is_leaf for p in model.parameters())


@ON_BOTH
def test_torch_save_of_the_states_works(pair: Any, tmp_path: Path) -> None:
    (model, optimizer), (plain, by_itself) = pair
    for name, states in {
        "ours": (model.state_dict(), optimizer.state_dict()),
        "theirs": (plain.state_dict(), by_itself.state_dict()),
    }.items():
        torch.save(states, tmp_path / name)
    # Not the whole file that a tensor is a map of.
    assert (tmp_path / "ours").stat().st_size <= (tmp_path / "theirs").stat().st_size * 1.1
    found, expected = (torch.load(tmp_path / name) for name in ("ours", "theirs"))
    assert_same(dict(found[0]), dict(expected[0]))
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("how", ("deepcopy", "pickle", "torch.save"))
def test_copy_is_an_ordinary_model(how: str, pair: Any, store: TierStore) -> None:
    (model, _), (plain, _) = pair
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert type(copied) is type(plain)
    expected = copy.deepcopy(plain)
    ours, theirs = (torch.optim.AdamW(m.parameters(), **ADAMW) for m in (copied, expected))
    acquires = store.stats().hits + store.stats().late + store.stats().misses
    found = train("small", copied, ours, 2)
    stats = store.stats()
    assert stats.hits + stats.late + stats.misses == acquires
    wanted = train("small", expected, theirs, 2)
    Trained.of(copied, ours, found).assert_same_as(Trained.of(expected, theirs, wanted))


@ON_BOTH
def test_move_to_the_compute_device_does_nothing(pair: Any, store: TierStore) -> None:
    (model, _), _ = pair
    assert model.to(store.device) is model
    assert model.cpu() is model
    assert model.float() is model
    assert all(p.device.type == "cpu" and p.dtype is torch.float32 for p in model.parameters())


@ON_BOTH
@pytest.mark.parametrize("convert", ("half", "bfloat16", "double"))
def test_conversion_raises(convert: str, pair: Any) -> None:
    (model, _), _ = pair
    with pytest.raises(RuntimeError, match=r"before OffloadModel\(module, store\), or after"):
        getattr(model, convert)()


def test_attributes_are_the_modules(disk_dir: Path) -> None:
    module = models.build("llama")
    with store_for(module, disk_dir) as store:
        model = OffloadModel(module, store)
        assert model.config is module.config
        assert model.model is module.model
        assert model.get_input_embeddings() is module.model.embed_tokens
        assert len(model.model.layers) == 4
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = model.nothing_like_it
        assert len(list(model.parameters())) == len(list(models.build("llama").parameters()))


@ON_BOTH
def test_model_as_a_child_module_trains(device: str, disk_dir: Path) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(models.WIDTH))
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale.to(x.device)

    plain = Outer(models.build("small"))
    by_itself = torch.optim.AdamW(plain.parameters(), **ADAMW)
    wanted = train("small", plain, by_itself, 3, max_norm=0.1)
    module = models.build("small")
    with store_for(module, disk_dir, device, 0.3) as store:
        inner = OffloadModel(module, store)
        model = Outer(inner)
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, **ADAMW)
        traffic = Traffic(store)
        found = train("small", model, optimizer, 3, max_norm=0.1, device=device)
        assert traffic.read >= 3 * parameter_bytes(module)
        Trained.of(model, optimizer, found).assert_same_as(
            Trained.of(plain, by_itself, wanted), device
        )
        assert list(model.state_dict()) == list(plain.state_dict())
        assert_same(dict(model.state_dict()), dict(plain.state_dict()), device=device)
        model.load_state_dict(Outer(models.build("small", seed=3)).state_dict())
        assert_same(dict(inner.state_dict()), dict(models.build("small", seed=3).state_dict()))
        assert_nothing_is_leased(inner)


# The end ------------------------------------------------------------------------------------------


@ON_BOTH
def test_disabled_model_trains_on_as_ordinary(device: str, disk_dir: Path) -> None:
    plain = models.build("small")
    by_itself = torch.optim.AdamW(plain.parameters(), **ADAMW)
    wanted = train("small", plain, by_itself, 2)
    squares(plain, 2, "cpu").backward()
    module = models.build("small")
    with store_for(module, disk_dir, device, 0.3) as store:
        model, optimizer = offloaded(module, store)
        found = train("small", model, optimizer, 2, device=device)
        squares(model, 2, device).backward()
        assert model.disable() is module
        assert model.disable() is module
        assert not [key for key in store if key.startswith("training/")]
        Trained.of(module, optimizer, found).assert_same_as(
            Trained.of(plain, by_itself, wanted), device
        )
        states = optimizer.state_dict()
        fresh = torch.optim.AdamW(module.parameters(), **ADAMW)
        fresh.load_state_dict(copy.deepcopy(states))
    results = []
    for ordinary, stepped in ((plain, by_itself), (module, fresh)):
        stepped.step()
        stepped.zero_grad()
        later = train("small", ordinary, stepped, 2, first=3)
        results.append(Trained.of(ordinary, stepped, later))
    results[1].assert_same_as(results[0], device)
    module.half()  # it is in no store any longer


@ON_BOTH
def test_optimizer_after_disable_continues(device: str, disk_dir: Path) -> None:
    plain = models.build("small")
    by_itself = torch.optim.AdamW(plain.parameters(), **ADAMW)
    train("small", plain, by_itself, 4)
    module = models.build("small")
    with store_for(module, disk_dir, device, 0.3) as store:
        model, optimizer = offloaded(module, store)
        train("small", model, optimizer, 2, device=device)
        ordinary = model.disable()
        traffic = Traffic(store)
        train("small", ordinary, optimizer, 2, first=2)
        assert traffic.read > 0  # the states are in the store as before
        Trained.of(ordinary, optimizer).assert_same_as(Trained.of(plain, by_itself), device)


def test_values_are_readable_after_the_store_closed(disk_dir: Path) -> None:
    plain = models.build("small")
    by_itself = torch.optim.AdamW(plain.parameters(), **ADAMW)
    train("small", plain, by_itself, 2)
    module = models.build("small")
    with store_for(module, disk_dir, share=0.3) as store:
        model, optimizer = offloaded(module, store)
        train("small", model, optimizer, 2)
    assert store.closed
    assert_same(dict(module.state_dict()), dict(plain.state_dict()))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(optimizer.state[ours]["exp_avg"], by_itself.state[theirs]["exp_avg"])
    with pytest.raises(tierstore.errors.ClosedError):
        squares(model, 2, "cpu")


@ON_BOTH
@pytest.mark.parametrize("share", (0.3, 2.0))
def test_dropped_model_is_freed(share: float, device: str, disk_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        module = models.build("resnet")
        with store_for(module, disk_dir, device, share) as store:
            model, optimizer = offloaded(module, store)
            train("resnet", model, optimizer, 2, device=device)
            gone = [weakref.ref(each) for each in (model, optimizer, module, module.stem[0].weight)]
            del model, optimizer, module
            assert_gone(gone)
            # The space of permanent leases is free again.
            again = models.build("resnet")
            model, optimizer = offloaded(again, store)
            train("resnet", model, optimizer, 1, device=device)
            model.disable()
            gone = [weakref.ref(each) for each in (model, optimizer, again)]
            del model, optimizer, again
            assert_gone(gone)
        gone = [weakref.ref(store)]
        del store
        assert_gone(gone)


# Beside other hooks, and errors -------------------------------------------------------------------


@ON_BOTH
def test_saved_tensor_hooks_around_the_model_work(device: str, disk_dir: Path) -> None:
    packed: list[int] = []

    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.nbytes)
            return tensor.detach().clone()

        found = []
        for number in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = squares(model, number, device)
            loss.backward()
            found.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
        return found

    compare(scenario, disk_dir, device)
    assert packed


@ON_BOTH
@pytest.mark.parametrize("checkpoint", (False, True))
def test_activations_and_weights_share_a_store(
    checkpoint: bool, device: str, disk_dir: Path
) -> None:
    plain = models.build("llama")
    by_itself = torch.optim.AdamW(plain.parameters(), **ADAMW)
    wanted = train("llama", plain, by_itself, 3)
    module = models.build("llama")
    with store_for(module, disk_dir, device, 0.3) as store:
        model, optimizer = offloaded(module, store, checkpoint_activation=checkpoint)
        found = []
        for number in range(3):
            torch.manual_seed(number)
            with tierstore.offload_activations(store, min_size=4096):
                loss = models.loss("llama", model, models.batch("llama", number).to(device))
            loss.backward()
            found.append(loss.detach().cpu())
            del loss
            optimizer.step()
            optimizer.zero_grad()
        Trained.of(model, optimizer, found).assert_same_as(
            Trained.of(plain, by_itself, wanted), device
        )
        stats = store.stats()
        assert stats.activations.shipped_bytes > 0
        assert stats.bytes_read >= 3 * parameter_bytes(module)
        assert_within_budgets(store)
        assert_nothing_is_leased(model)


class Interrupted(Exception):
    """Raised by a hook."""


@ON_BOTH
@pytest.mark.parametrize("microbatches", (1, 3))
@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize("where", ("forward", "backward"))
def test_error_leaves_nothing_leased(
    where: str, checkpoint: bool, microbatches: int, device: str, disk_dir: Path
) -> None:
    """As without a store, gradients computed until then count, and later training is right."""

    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        found = [step(model, optimizer, 0, device)]

        def fail(*_: Any) -> None:
            raise Interrupted

        layer = model.layers[6]
        if where == "forward":
            handle = layer.register_forward_hook(fail)
            with pytest.raises(Interrupted):
                squares(model, 1, device)
        else:
            handle = layer.weight.register_hook(fail)
            loss = squares(model, 1, device)
            with pytest.raises(Interrupted):
                loss.backward()
            del loss
        handle.remove()
        if isinstance(model, OffloadModel):
            # If this backward pass failed, torch keeps the inputs of its own checkpoint until the
            # next one. After the scenario, nothing at all may be left.
            recomputed = checkpoint and where == "backward"
            assert_nothing_is_leased(model, but="activation/" if recomputed else "-")
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        return found + [step(model, optimizer, number, device) for number in (1, 2)]

    if microbatches == 1:
        compare(scenario, disk_dir, device, checkpoint_activation=checkpoint)
        return
    # No plain model runs parts of a batch: the reference is a run without an error.
    results = []
    for number, run in enumerate((scenario, without_an_error)):
        module = models.build("small")
        with store_for(module, disk_dir / str(number), device, 0.3) as store:
            how = {"checkpoint_activation": checkpoint, "num_microbatches": microbatches}
            model, optimizer = offloaded(module, store, **how)
            results.append(Trained.of(model, optimizer, run(model, optimizer, device)))
            assert_nothing_is_leased(model)
            assert store.stats().bytes_read >= 3 * parameter_bytes(module)
    results[0].assert_same_as(results[1])


def without_an_error(model: Any, optimizer: Any, device: str) -> Found:
    return [step(model, optimizer, number, device) for number in range(3)]


@ON_BOTH
def test_gradients_before_an_error_count(device: str, disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        def fail(*_: Any) -> None:
            raise Interrupted

        handle = model.layers[3].weight.register_hook(fail)
        loss = squares(model, 0, device)
        with pytest.raises(Interrupted):
            loss.backward()
        handle.remove()
        # The next pass adds to the existing gradients.
        squares(model, 1, device).backward()
        found = [model.head.weight.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
        return found

    compare(scenario, disk_dir, device)


def test_training_continues_after_a_dropped_graph(disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        found = []
        for number in range(2):
            squares(model, 40, device)  # its gradient is not needed
            found.append(step(model, optimizer, number, device))
        return found

    compare(scenario, disk_dir)
