"""Whatever autograd allows still works, and whatever it refuses is still refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.accelerator import ACCELERATOR, DEVICE_0, DEVICE_1, needs_accelerator
from tests.activations.helpers import (
    SMALL,
    assert_equal,
    assert_nothing_left,
    chain,
    forget_graphs,
    offloading,
    on_both,
    open_store,
    plain_gradients,
    random_matrices,
)
from tests.store.helpers import run_threads

pytestmark = [
    pytest.mark.floor,
    pytest.mark.full(
        "devices differ in what test_training_steps.py does on both", keep="any device"
    ),
]

RAM = 1 << 20
MODIFIED = "modified by an inplace operation"


def shipped(store: tierstore.TierStore) -> int:
    return store.stats().activations.shipped_bytes


# Changes in place --------------------------------------------------------------------------------


def change_what_was_saved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    saved = x * 2
    loss = saved.sin().sum()
    saved.add_(1)
    return loss


def change_it_through_a_view(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    saved = x * 2
    loss = saved.sin().sum()
    saved.view(-1)[3:5].zero_()
    return loss


def change_a_view_that_outlives_it(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    saved = x * 2
    view = saved.view(-1)
    loss = saved.sin().sum()
    del saved
    view.add_(1)
    return loss


def change_what_is_too_small_to_ship(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    small = x[0, :4] * 2
    loss = small.sin().sum() + (x @ weight).sum()
    small.add_(1)
    return loss


def change_a_parameter(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    loss = torch.tanh(x @ weight).sum()
    with torch.no_grad():
        weight.add_(1)
    return loss


def change_one_of_two_that_are_saved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second = x * 2, x * 3
    loss = first.sin().sum() + second.sin().sum()
    second.mul_(2)
    return loss


CHANGES = [
    change_what_was_saved,
    change_it_through_a_view,
    change_a_view_that_outlives_it,
    change_what_is_too_small_to_ship,
    change_a_parameter,
    change_one_of_two_that_are_saved,
]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@on_both
@pytest.mark.parametrize("step", CHANGES, ids=lambda step: step.__name__)
def test_a_change_before_backward_is_refused(step: Step, device: str, disk_dir: Path) -> None:
    x, weight = random_matrices(2, device)
    with pytest.raises(RuntimeError, match=MODIFIED):  # the control: what torch itself says
        step(x, weight).backward()
    x, weight = random_matrices(2, device)
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            loss = step(x, weight)
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()
        assert x.grad is None
        # After an error torch keeps other branches of the graph in the queue of its thread.
        if step is not change_one_of_two_that_are_saved:
            del loss
            assert_nothing_left(store)


@on_both
def test_a_change_before_anything_is_saved_is_fine(device: str, disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        changed = x * 2
        changed.add_(1)
        result = changed.sin()
        result.relu_()
        return result.sum()

    (x,) = random_matrices(1, device)
    wanted = plain_gradients(loss, [x])
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(plain_gradients(loss, [x], offloading(store)), wanted)
        assert shipped(store) > 0


@on_both
def test_a_changed_tensor_that_is_saved_again_is_not_the_old_one(
    device: str, disk_dir: Path
) -> None:
    """The same memory is saved twice with a change between: torch refuses it, and so it stays."""

    def step() -> torch.Tensor:
        saved = x * 2
        first = saved.sin().sum()
        saved.add_(1)
        return first + saved.cos().sum()

    (x,) = random_matrices(1, device)
    with pytest.raises(RuntimeError, match=MODIFIED):
        step().backward()
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            loss = step()
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()


@on_both
def test_memory_reused_for_something_else_is_not_taken_for_the_old(
    device: str, disk_dir: Path
) -> None:
    """Addresses come again as soon as what was shipped is freed."""

    def loss() -> torch.Tensor:
        total = x.sum() * 0
        for i in range(30):
            total = total + ((x + i) * x).sin().sum()
        return total

    (x,) = random_matrices(1, device)
    wanted = plain_gradients(loss, [x])
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(plain_gradients(loss, [x], offloading(store)), wanted)


# Several backwards -------------------------------------------------------------------------------


@on_both
def test_a_retained_graph_can_be_used_again(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            loss = chain(x, weights)
        for again in (True, True, False):
            found = torch.autograd.grad(loss, [x, *weights], retain_graph=again)
            assert_equal(found, wanted)
        assert shipped(store) > 0
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert_nothing_left(store)


@on_both
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_double_backward(inside: bool, device: str, disk_dir: Path) -> None:
    def twice(context: Any) -> list[torch.Tensor]:
        with context:
            loss = chain(x, weights)
            if inside:
                return second(loss)
        return second(loss)

    def second(loss: torch.Tensor) -> list[torch.Tensor]:
        (first,) = torch.autograd.grad(loss, [x], create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [x, *weights]))

    x, *weights = random_matrices(4, device)
    wanted = twice(nullcontext())
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(twice(offloading(store)), wanted)
        assert shipped(store) > 0
        assert_nothing_left(store)


@on_both
def test_backward_inside_the_context(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            for _ in range(2):
                loss = chain(x, weights)
                assert_equal(torch.autograd.grad(loss, [x, *weights]), wanted)
        assert shipped(store) > 0
        assert_nothing_left(store)


@on_both
def test_two_losses_with_a_common_trunk(device: str, disk_dir: Path) -> None:
    def run(context: Any) -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        with context:
            common = torch.tanh(torch.sin(x @ trunk))
            one, other = (common @ head).sin().sum(), (common @ tail).cos().sum()
        one.backward(inputs=[head])  # a part of the graph is freed, the trunk was not visited
        other.backward(inputs=[tail, trunk, x])
        return [leaf.grad for leaf in leaves]

    leaves = x, trunk, head, tail = random_matrices(4, device)
    wanted = run(nullcontext())
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(run(offloading(store)), wanted)
        assert shipped(store) > 0
        assert_nothing_left(store)


@on_both
def test_two_forwards_and_then_their_backwards_in_any_order(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    for number, first in enumerate((0, 1)):
        with open_store(disk_dir.with_name(f"store{number}"), RAM, device) as store:
            losses = []
            for _ in range(2):
                with offloading(store):
                    losses.append(chain(x, weights))
            for i in (first, 1 - first):
                assert_equal(torch.autograd.grad(losses[i], [x, *weights]), wanted)
            assert_nothing_left(store)


@on_both
def test_gradients_accumulate_over_micro_batches(device: str, disk_dir: Path) -> None:
    def run(context: Callable[[], Any]) -> list[torch.Tensor]:
        for weight in weights:
            weight.grad = None
        for batch in batches:
            with context():
                loss = chain(batch, weights)
            loss.backward()
        return [weight.grad for weight in weights]

    weights = random_matrices(3, device)
    batches = [batch.detach() for batch in random_matrices(3, device, seed=5)]
    wanted = run(nullcontext)
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(run(lambda: offloading(store)), wanted)
        assert shipped(store) > 0
        assert_nothing_left(store)


# Graphs that never see a backward ----------------------------------------------------------------


@on_both
def test_a_dropped_graph_leaves_nothing(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    with open_store(disk_dir, RAM, device) as store:
        for _ in range(3):
            with offloading(store):
                loss = chain(x, weights)
            assert store.snapshot().groups, "nothing was there to be left behind"
            del loss
            assert_nothing_left(store)


@on_both
def test_an_unused_branch_leaves_nothing(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    with open_store(disk_dir, RAM, device) as store:
        for _ in range(3):
            with offloading(store):
                loss, unused = chain(x, weights), chain(x, weights[:2])
            loss.backward()
            del loss, unused
            assert_nothing_left(store)


@on_both
def test_an_exception_in_the_forward(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with open_store(disk_dir, RAM, device) as store:
        with pytest.raises(ZeroDivisionError), offloading(store):
            chain(x, weights)
            raise ZeroDivisionError
        assert_nothing_left(store)
        before = shipped(store)
        assert before > 0
        kept = chain(x, weights)  # the context is over
        assert shipped(store) == before
        del kept
        found = plain_gradients(lambda: chain(x, weights), [x, *weights], offloading(store))
        assert_equal(found, wanted)


def test_a_store_that_is_closed_too_early_is_told(disk_dir: Path) -> None:
    x, *weights = random_matrices(4, "cpu")
    with open_store(disk_dir, RAM) as store, offloading(store):
        loss = chain(x, weights)
    with pytest.raises(tierstore.TierStoreError):
        loss.backward()


# Threads, devices, streams -----------------------------------------------------------------------


@on_both
def test_two_models_train_in_two_threads(device: str, disk_dir: Path) -> None:
    models = [random_matrices(4, device, seed=seed) for seed in (1, 2)]
    wanted = [plain_gradients(lambda m=m: chain(m[0], m[1:]), m) for m in models]

    def train(i: int) -> Callable[[], None]:
        def steps() -> None:
            x, *weights = models[i]
            for _ in range(10):
                found = plain_gradients(lambda: chain(x, weights), models[i], offloading(store))
                assert_equal(found, wanted[i])

        return steps

    with open_store(disk_dir, 8 * SMALL * 4, device) as store:
        assert run_threads([train(0), train(1)]) == []
        assert shipped(store) > 0
        assert_nothing_left(store)


@on_both
def test_forward_in_a_worker_thread_and_backward_in_another(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    losses: list[torch.Tensor] = []
    with open_store(disk_dir, RAM, device) as store:

        def forward() -> None:
            with offloading(store):
                losses.append(chain(x, weights))

        assert run_threads([forward, forward]) == []
        assert shipped(store) > 0
        while losses:
            assert_equal(torch.autograd.grad(losses.pop(), [x, *weights]), wanted)
        assert_nothing_left(store)


@on_both
def test_the_inner_of_two_contexts_is_used(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with (
        open_store(disk_dir.with_name("outer"), RAM, device) as outer,
        open_store(disk_dir.with_name("inner"), RAM, device) as inner,
    ):
        with offloading(outer):
            with offloading(inner):
                first = chain(x, weights)
            assert shipped(inner) > 0
            assert shipped(outer) == 0
            before = shipped(inner)
            second = chain(x, weights)
            assert shipped(inner) == before
            assert shipped(outer) > 0
        for loss in (first, second):
            assert_equal(torch.autograd.grad(loss, [x, *weights]), wanted)
        del first, second, loss
        assert_nothing_left(outer)
        assert_nothing_left(inner)


@on_both
def test_one_context_inside_another_of_the_same_store(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store), offloading(store):
            loss = chain(x, weights)
        assert_equal(torch.autograd.grad(loss, [x, *weights]), wanted)
        assert_nothing_left(store)


@needs_accelerator
@pytest.mark.two_devices
def test_a_model_on_two_devices(disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        middle = chain_of(x, first)
        result = chain_of(middle.to(DEVICE_1), second)
        saved_on.append(result.grad_fn._saved_result.device)
        return result.square().mean()

    def chain_of(value: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            value = torch.tanh(torch.sin(value @ weight))
        return value

    saved_on: list[torch.device] = []
    x, *first = random_matrices(4, DEVICE_0)
    second = random_matrices(3, DEVICE_1, seed=3)
    wanted = plain_gradients(loss, [x, *first, *second])
    with open_store(disk_dir, RAM, ACCELERATOR) as store:
        found = plain_gradients(loss, [x, *first, *second], offloading(store))
        assert_equal(found, wanted)
        assert saved_on == [torch.device(DEVICE_1)] * 2
        assert shipped(store) > 0
        assert_nothing_left(store)


@needs_accelerator
@pytest.mark.two_devices
def test_the_second_of_two_devices(disk_dir: Path) -> None:
    x, *weights = random_matrices(4, DEVICE_1)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with open_store(disk_dir, RAM, DEVICE_1) as store:
        found = plain_gradients(lambda: chain(x, weights), [x, *weights], offloading(store))
        assert_equal(found, wanted)
        assert shipped(store) > 0


@pytest.mark.pretend_only("late")
@pytest.mark.parametrize("backward_there", [True, False], ids=["backward too", "forward only"])
def test_computing_on_a_stream_of_the_user(
    backward_there: bool, late_pretend: Any, disk_dir: Path
) -> None:
    """A stream that is not waited for shows."""
    x, *weights = random_matrices(6, ACCELERATOR)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    side = torch.Stream(device=ACCELERATOR)
    late_pretend.reset_counters()
    with open_store(disk_dir, 4 * 4 * SMALL, ACCELERATOR) as store:
        for _ in range(3):
            side.wait_stream(torch.accelerator.current_stream())
            with side, offloading(store):
                loss = chain(x, weights)
                found = torch.autograd.grad(loss, [x, *weights]) if backward_there else []
            torch.accelerator.current_stream().wait_stream(side)
            if not backward_there:
                found = torch.autograd.grad(loss, [x, *weights])
            assert_equal(found, wanted)
            del loss
        assert shipped(store) > 0
        assert late_pretend.stale_copies() == 0
        assert_nothing_left(store)


@needs_accelerator
def test_what_was_on_the_cpu_stays_there(disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        on_cpu = torch.tanh(there @ there)
        saved_on.append(on_cpu.grad_fn._saved_result.device.type)
        return chain(on_cpu.to(ACCELERATOR), weights)

    saved_on: list[str] = []
    (there,) = random_matrices(1, "cpu")
    weights = random_matrices(2, ACCELERATOR, seed=4)
    wanted = plain_gradients(loss, [there, *weights])
    with open_store(disk_dir, RAM, ACCELERATOR) as store:
        assert_equal(plain_gradients(loss, [there, *weights], offloading(store)), wanted)
        assert saved_on == ["cpu", "cpu"]
        assert 0 < shipped(store) <= 5 * 4 * SMALL  # two for each weight, and one for the loss


# Other ways to compute ---------------------------------------------------------------------------


def test_autocast(disk_dir: Path) -> None:
    """The weights are cast once for each use, and what is cast is saved."""

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(model(x)).float().square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
    (x,) = random_matrices(1, "cpu")
    leaves = [x, *model.parameters()]
    wanted = plain_gradients(loss, leaves)
    with open_store(disk_dir, RAM) as store:
        assert_equal(plain_gradients(loss, leaves, offloading(store, model=model)), wanted)
        assert shipped(store) > 0
        assert_nothing_left(store)


@on_both
def test_a_compiled_region(device: str, disk_dir: Path) -> None:
    def region(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.tanh(value @ weight)) * value

    torch.compiler.reset()
    compiled = torch.compile(region, backend="aot_eager")
    x, first, second, third = leaves = random_matrices(4, device)

    def loss() -> torch.Tensor:
        return (compiled(torch.tanh(compiled(x, first) @ second), third)).square().mean()

    wanted = plain_gradients(loss, leaves)
    with open_store(disk_dir, RAM, device) as store:
        for _ in range(2):
            assert_equal(plain_gradients(loss, leaves, offloading(store)), wanted)
        assert shipped(store) > 0
        forget_graphs()
        assert_nothing_left(store)
    torch.compiler.reset()


def test_random_numbers_are_not_touched(disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return nn.functional.dropout(torch.sin(x @ weight), 0.5).square().mean()

    x, weight = random_matrices(2, "cpu")
    wanted = plain_gradients(loss, [x, weight])
    after = torch.rand(4)
    with open_store(disk_dir, RAM) as store:
        assert_equal(plain_gradients(loss, [x, weight], offloading(store)), wanted)
        assert_equal([torch.rand(4)], [after])


def test_a_function_of_the_user_that_saves_tensors(disk_dir: Path) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            inner = value * value
            result = inner * value
            ctx.save_for_backward(value, inner, result)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            value, inner, result = ctx.saved_tensors
            assert torch.equal(inner * value, result)
            return gradient * 3 * inner

    (x,) = random_matrices(1, "cpu")
    wanted = plain_gradients(lambda: Cube.apply(x * 2).sum(), [x])
    with open_store(disk_dir, RAM) as store:
        found = plain_gradients(lambda: Cube.apply(x * 2).sum(), [x], offloading(store))
        assert_equal(found, wanted)
        assert shipped(store) >= 3 * 4 * SMALL
        assert_nothing_left(store)
