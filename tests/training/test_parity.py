"""Training on a store equals ordinary training.

Losses, parameters, buffers, gradients and optimizer state are equal bit for bit, however little
fits in memory.

Each device is compared with plain training on the CPU. The kernels of the pretend accelerator are
the CPU's; those of a real one agree within the tolerances of `tests/accelerator.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.accelerator import ACCELERATOR
from tests.helpers.tensors import assert_same, parameter_bytes
from tests.training import models
from tests.training.conftest import (
    ADAMW,
    CHOICES,
    ON_BOTH,
    SGD,
    SMALL,
    STEPS,
    TRAINING_CASES,
    Moved,
    Traffic,
    Trained,
    TrainingCase,
    assert_nothing_is_leased,
    assert_within_budgets,
    clip,
    compare,
    full_state_bytes,
    offloaded,
    pairs_of,
    pairwise,
    store_for,
    train,
)
from tierstore.adapters.training import OffloadModel, OffloadOptimizer

pytestmark = pytest.mark.full(
    "the model, the optimizer, and the device: each has its own part in what is tested",
    keep="a third",
)

DRAWN = pytest.mark.pretend_only("kernels")
"""A real device draws other random numbers than the CPU."""

AdamW = torch.optim.AdamW
Plain = tuple[nn.Module, torch.optim.Optimizer]


@functools.cache
def plain(
    kind: str,
    optimizer: str = "AdamW",
    max_norm: float | None = None,
    accumulate: int = 1,
    steps: int = STEPS,
) -> Trained:
    """Return the result of ordinary training, on the CPU."""
    model = models.build(kind)
    options = {"AdamW": ADAMW, "SGD": SGD}[optimizer]
    made = getattr(torch.optim, optimizer)(model.parameters(), **options)
    found = train(kind, model, made, steps, max_norm=max_norm, accumulate=accumulate)
    return Trained.of(model, made, found)


# All ways to train --------------------------------------------------------------------------------


def test_cases_cover_every_pair_of_choices() -> None:
    met = set().union(*map(pairs_of, pairwise()))
    wanted = {
        ((one, x), (other, y))
        for one, other in itertools.combinations(CHOICES, 2)
        for x, y in itertools.product(CHOICES[one], CHOICES[other])
    }
    assert met == wanted


@pytest.mark.parametrize("case", TRAINING_CASES)
def test_training_equals_plain_torch(case: TrainingCase, disk_dir: Path) -> None:
    expected = plain(case.kind, case.optimizer, case.max_norm, case.accumulate)
    module = models.build(case.kind)
    state = full_state_bytes(module, case.optimizer_class, **case.options)
    weights = parameter_bytes(module)
    # One slice is the whole model; two of three, and two of many, are less.
    on_device = int({1: 1.5, 3: 1.1, None: 0.6}[case.slices] * weights)
    with store_for(state, disk_dir, case.device, case.share, device_budget=on_device) as store:
        model, optimizer = offloaded(
            module,
            store,
            case.optimizer_class,
            case.options,
            num_slices=case.slices,
            checkpoint_activation=case.checkpoint,
        )
        how = {"max_norm": case.max_norm, "accumulate": case.accumulate, "device": case.device}
        found = train(case.kind, model, optimizer, 1, **how)
        traffic = Traffic(store)
        found += train(case.kind, model, optimizer, STEPS - 1, first=1, **how)
        Trained.of(model, optimizer, found).assert_same_as(expected, case.device)
        assert_moved(case, module, traffic)
        assert_within_budgets(store)
        assert_nothing_is_leased(model)


def assert_moved(case: TrainingCase, module: nn.Module, traffic: Traffic) -> None:
    budget = traffic.store.stats().budget_bytes["HOST"]
    assert budget is not None
    if case.share == SMALL:
        moved = Moved.at_least(module, budget, case.optimizer_class, **case.options)
        traffic.assert_at_least(moved, STEPS - 1)
    else:  # all of it stays, and so do the activations of these small batches
        assert traffic.read == traffic.written == 0
    if case.device != "cpu":  # the optimizer changes parameters in RAM: each is loaded again
        passes = (STEPS - 1) * case.accumulate
        assert traffic.onloaded >= passes * parameter_bytes(module)


@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize("kind", ("tied", "llama-tied"))
def test_parameters_shared_by_several_slices_train(
    kind: str, checkpoint: bool, disk_dir: Path
) -> None:
    compare(
        lambda model, optimizer, device: train(kind, model, optimizer, 3, max_norm=0.1),
        disk_dir,
        kind=kind,
        num_slices=3,
        checkpoint_activation=checkpoint,
    )


# Microbatches -------------------------------------------------------------------------------------


def parts_of(given: models.Batch, count: int) -> Iterator[models.Batch]:
    """Yield the parts of a batch, as `tensor_split` makes them."""
    targets = given.target.tensor_split(count)
    args = [tuple(a.tensor_split(count)[i] for a in given.args) for i in range(count)]
    for number in range(count):
        kwargs = {name: x.tensor_split(count)[number] for name, x in given.kwargs.items()}
        yield models.Batch(args[number], kwargs, targets[number])


def summed(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return a loss for which the parts of a batch add up to the whole."""
    output = output if isinstance(output, torch.Tensor) else output.logits[..., :VALUES]
    if target.dtype is torch.int64:
        target = functional.one_hot(target % VALUES, VALUES).float()
    return (output - target).square().sum()


VALUES = 8


@ON_BOTH
@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("small", 2),
        ("small", 3),
        ("small", 4),
        pytest.param("llama-dropout", 3, marks=DRAWN),
        pytest.param("small-dropout", 5, marks=DRAWN),
    ],
)
def test_microbatches_equal_a_loop_over_the_parts(
    kind: str, count: int, checkpoint: bool, device: str, disk_dir: Path
) -> None:
    """A loss whose first gradient is exact.

    That gradient is twice the difference either way, so all that follows is computed from the same
    numbers. 5 parts of a batch of 12 have different sizes.
    """
    plain = models.build(kind)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    expected = []
    for step in range(2):
        torch.manual_seed(step)
        for part in parts_of(models.batch(kind, step), count):
            output = plain(*part.args, **part.kwargs)
            summed(output, part.target).backward()
            expected.append(values(output).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    wanted = Trained.of(
        plain, optimizer, [torch.cat(expected[:count]), torch.cat(expected[count:])]
    )

    module = models.build(kind)
    with store_for(module, disk_dir, device, 0.3) as store:
        model, stored = offloaded(
            module, store, num_microbatches=count, checkpoint_activation=checkpoint
        )
        found = []
        for step in range(2):
            torch.manual_seed(step)
            given = models.batch(kind, step).to(device)
            output = model(*given.args, **given.kwargs)
            summed(output, given.target).backward()
            found.append(values(output).detach().cpu())
            stored.step()
            stored.zero_grad()
        Trained.of(model, stored, found).assert_same_as(wanted, device)
        assert_nothing_is_leased(model)
        budget = store.stats().budget_bytes["HOST"]
        assert budget is not None
        assert store.stats().bytes_read >= Moved.at_least(module, budget, AdamW).read > 0


def values(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize("count", (2, 3, 4))
def test_microbatches_approximate_the_whole_batch(
    count: int, checkpoint: bool, disk_dir: Path
) -> None:
    plain = models.build("small")
    given = models.batch("small")
    x, y = given.args[0].clone().requires_grad_(), plain(*given.args)
    expected = functional.mse_loss(plain(x), given.target)
    expected.backward()
    module = models.build("small")
    with store_for(module, disk_dir, share=0.3) as store:
        model = OffloadModel(
            module, store, num_microbatches=count, checkpoint_activation=checkpoint
        )
        ours = given.args[0].clone().requires_grad_()
        output = model(ours)
        loss = functional.mse_loss(output, given.target)
        loss.backward()
        close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)
        close(output, y)
        close(loss, expected)
        close(ours.grad, x.grad)
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            close(other.grad, one.grad, msg=name)
        with torch.no_grad():
            assert not model(ours).requires_grad
            close(model(ours), y)
        assert store.stats().bytes_read > 0


# Optimizers ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam-amsgrad": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "rmsprop-momentum": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2, "t0": 1}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "adamw-maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    "sgd-nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_plain_torch(name: str, disk_dir: Path) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    compare(
        lambda model, optimizer, device: train("small", model, optimizer, 3),
        disk_dir,
        optimizer_class=optimizer_class,
        options=options,
        share=0.4,
    )


def test_param_groups_keep_their_decay_and_rate(disk_dir: Path) -> None:
    def grouping(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        weights = [p for name, p in named.items() if not name.endswith("bias")]
        return [
            {"params": weights[:3], "weight_decay": 0.1},
            {"params": biases, "weight_decay": 0.0, "lr": 1e-2},
            {"params": weights[3:], "betas": (0.8, 0.9)},
        ]

    compare(
        lambda model, optimizer, device: train("small", model, optimizer, 3, max_norm=0.1),
        disk_dir,
        grouping=grouping,
    )


def test_param_group_added_later_trains(disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
        found = train("small", model, optimizer, 2)
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-2})
        return found + train("small", model, optimizer, 2, first=2)

    compare(scenario, disk_dir, grouping=lambda model: model.layers.parameters())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 4),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_the_rate(name: str, disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        seen = []

        def after_step() -> None:
            if name == "plateau":
                scheduler.step(1.0)  # the metric never improves
            else:
                scheduler.step()
            rates.append(torch.tensor([g["lr"] for g in optimizer.param_groups]))
            seen.append(torch.tensor(scheduler.last_epoch))

        found = train("small", model, optimizer, 3, after_step=after_step)
        assert len(set(rates)) > 1
        return found + rates + seen

    compare(scenario, disk_dir)


# Models and options -------------------------------------------------------------------------------


def test_parameters_unfrozen_later_train(disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
        frozen = [*model.layers[0].parameters(), model.layers[6].weight]
        for parameter in frozen:
            parameter.requires_grad_(False)
        found = train("small", model, optimizer, 2)
        for parameter in frozen:
            assert parameter.grad is None
            parameter.requires_grad_(True)
        return found + train("small", model, optimizer, 2, first=2)

    compare(scenario, disk_dir)


def test_parameters_frozen_later_stay(disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
        found = train("small", model, optimizer, 2)
        model.layers[0].requires_grad_(False)
        return found + train("small", model, optimizer, 2, first=2)

    compare(scenario, disk_dir)


class Branches(nn.Module):
    """Takes several inputs, returns several outputs, and never uses one of its layers."""

    def __init__(self, as_dict: bool = False) -> None:
        super().__init__()
        self.body = models.Mlp(layers=4)
        self.left = nn.Linear(models.WIDTH, models.WIDTH)
        self.right = nn.Linear(models.WIDTH, models.WIDTH)
        self.unused = nn.Linear(models.WIDTH, models.WIDTH)
        self.as_dict = as_dict

    def forward(self, x: torch.Tensor, *, scale: float, extra: dict[str, torch.Tensor]) -> Any:
        x = self.body(x + extra["shift"])
        left, right = self.left(x) * scale, self.right(x)
        size = x.size(0)
        return {"left": left, "more": [right, size]} if self.as_dict else (left, [right, size])


@ON_BOTH
@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize("as_dict", (False, True))
def test_several_inputs_outputs_and_an_unused_layer_train(
    as_dict: bool, checkpoint: bool, device: str, disk_dir: Path
) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
        found = []
        for step in range(3):
            given = models.batch("small", step).to(device)
            shift = given.target * 0.5
            output = model(given.args[0], scale=0.5, extra={"shift": shift})
            left, (right, size) = output.values() if as_dict else output
            assert size == models.BATCH
            loss = left.square().mean() + (right - given.target).square().mean()
            loss.backward()
            found.append(loss.detach().cpu())
            assert model.unused.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        return found

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Branches(as_dict)

    compare(scenario, disk_dir, device, build=build, checkpoint_activation=checkpoint)


@ON_BOTH
@pytest.mark.parametrize("checkpoint", (False, True))
def test_gradient_of_the_input_is_equal(checkpoint: bool, device: str, disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
        found = []
        for step in range(2):
            given = models.batch("small", step).to(device)
            x = given.args[0].requires_grad_()
            (model(x) - given.target).square().mean().backward()
            assert x.grad is not None
            found.append(x.grad.cpu())
            optimizer.step()
            optimizer.zero_grad()
        return found

    compare(scenario, disk_dir, device, checkpoint_activation=checkpoint)


# Passes in other orders ---------------------------------------------------------------------------


def squares(model: nn.Module, number: int, device: str) -> torch.Tensor:
    torch.manual_seed(number)
    given = models.batch("small", number).to(device)
    return (model(*given.args) - given.target).square().mean()


def evaluating_between_steps(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        found += train("small-dropout", model, optimizer, 1, first=step, device=device)
        model.eval()
        with torch.no_grad():
            output = model(*models.batch("small", 50).to(device).args)
        assert not output.requires_grad
        found.append(output.cpu())
        model.train()
    return found


def two_forwards_before_one_backward(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        loss = squares(model, step, device) + squares(model, step + 10, device)
        loss.backward()
        found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return found


def two_forwards_and_two_backwards(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        losses = [squares(model, step, device), squares(model, step + 10, device)]
        for loss in losses:  # in the order of the forwards, not the reverse
            loss.backward()
            found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return found


def evaluating_between_forward_and_backward(
    model: Any, optimizer: Any, device: str
) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        loss = squares(model, step, device)
        with torch.no_grad():
            found.append(squares(model, 60, device).cpu())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def going_back_twice(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        loss = squares(model, step, device)
        loss.backward(retain_graph=True)
        found.append(model.head.weight.grad.clone())
        loss.backward()
        found.append(model.head.weight.grad.clone())
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        clip(model, optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return found


def zeroing_after_the_forward(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        loss = squares(model, step, device)
        optimizer.zero_grad()
        loss.backward()
        found.append(loss.detach().cpu())
        optimizer.step()
    return found


def zeroing_to_zeros(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        loss = squares(model, step, device)
        loss.backward()
        found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in model.parameters())
    return found


def stepping_without_gradients(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
    optimizer.step()
    found = train("small", model, optimizer, 2, device=device)
    optimizer.step()
    return found


def stepping_with_a_closure(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = squares(model, step, device)
        loss.backward()
        return loss

    return [optimizer.step(functools.partial(closure, step)).detach().cpu() for step in range(3)]


ORDERS: list[Callable[[Any, Any, str], list[torch.Tensor]]] = [
    evaluating_between_steps,
    two_forwards_before_one_backward,
    two_forwards_and_two_backwards,
    evaluating_between_forward_and_backward,
    going_back_twice,
    zeroing_after_the_forward,
    zeroing_to_zeros,
    stepping_without_gradients,
    stepping_with_a_closure,
]


@pytest.mark.parametrize(
    ("device", "checkpoint"),
    [("cpu", True), pytest.param(ACCELERATOR, False, marks=DRAWN)],
)
@pytest.mark.parametrize("scenario", ORDERS, ids=lambda scenario: scenario.__name__)
def test_passes_in_any_order_are_equal(
    scenario: Callable[[Any, Any, str], list[torch.Tensor]],
    checkpoint: bool,
    device: str,
    disk_dir: Path,
) -> None:
    compare(scenario, disk_dir, device, "small-dropout", checkpoint_activation=checkpoint)


@pytest.mark.parametrize(
    ("device", "checkpoint"),
    [("cpu", False), pytest.param(ACCELERATOR, True, marks=DRAWN)],
)
def test_double_backward_is_equal(checkpoint: bool, device: str, disk_dir: Path) -> None:
    compare(going_back_twice, disk_dir, device, "small-dropout", checkpoint_activation=checkpoint)


# Other precisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize("kind", ("small", "llama"))
def test_bfloat16_under_autocast_is_equal(kind: str, checkpoint: bool, disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> list[torch.Tensor]:
        found = []
        for step in range(3):
            given = models.batch(kind, step)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(*given.args, **given.kwargs)
                assert values(output).dtype is torch.bfloat16
                loss = models.KINDS[kind].loss(output, given.target)
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return found

    compare(scenario, disk_dir, kind=kind, checkpoint_activation=checkpoint)


@ON_BOTH
def test_bfloat16_model_with_float32_masters_is_equal(device: str, disk_dir: Path) -> None:
    """Return the masters: parameters of a plain AdamW, kept by hand, and rounded after steps."""
    plain = models.build("small").bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    by_hand = torch.optim.AdamW(masters, **ADAMW)
    expected = []
    for step in range(3):
        loss = squares_in_bfloat16(plain, step, "cpu")
        loss.backward()
        expected.append(loss.detach())
        for master, parameter in zip(masters, plain.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        by_hand.step()
        with torch.no_grad():
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.copy_(master)
        plain.zero_grad()

    module = models.build("small").bfloat16()
    weights = parameter_bytes(module)
    state = weights * (1 + 1 + 3 * 2)  # two states and the master are twice as large
    with store_for(state, disk_dir, device, 0.3) as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, AdamW, master_dtype=torch.float32, **ADAMW)
        traffic = Traffic(store)
        found = []
        for step in range(3):
            loss = squares_in_bfloat16(model, step, device)
            loss.backward()
            found.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
        assert_same(found, expected, "losses", device=device)
        assert_same(list(model.parameters()), list(plain.parameters()), "parameters", device=device)
        states = optimizer.state_dict()
        kept = [state.pop("master") for state in states["state"].values()]
        assert_same(kept, [master.detach() for master in masters], "masters", device=device)
        assert_same(states, by_hand.state_dict(), "optimizer", device=device)
        budget = store.stats().budget_bytes["HOST"]
        assert budget is not None
        traffic.assert_at_least(Moved(state - budget, state - weights - budget), 2)
        assert_nothing_is_leased(model)


def squares_in_bfloat16(model: nn.Module, number: int, device: str) -> torch.Tensor:
    given = models.batch("small", number).to(device)
    return (model(given.args[0].bfloat16()).float() - given.target).square().mean()
