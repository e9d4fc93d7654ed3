"""Everything that autograd allows still works, and everything that it rejects still raises."""

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
    pytest.mark.full("test_training_steps.py covers both devices", keep="any device"),
]

RAM = 1 << 20
MODIFIED = "modified by an inplace operation"


def shipped(store: tierstore.TierStore) -> int:
    return store.stats().activations.shipped_bytes


# Changes in place --------------------------------------------------------------------------------


def change_a_saved_tensor(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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


def change_a_tensor_below_min_size(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    small = x[0, :4] * 2
    loss = small.sin().sum() + (x @ weight).sum()
    small.add_(1)
    return loss


def change_a_parameter(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    loss = torch.tanh(x @ weight).sum()
    with torch.no_grad():
        weight.add_(1)
    return loss


def change_one_of_two_saved_tensors(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second = x * 2, x * 3
    loss = first.sin().sum() + second.sin().sum()
    second.mul_(2)
    return loss


CHANGES = [
    change_a_saved_tensor,
    change_it_through_a_view,
    change_a_view_that_outlives_it,
    change_a_tensor_below_min_size,
    change_a_parameter,
    change_one_of_two_saved_tensors,
]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@on_both
@pytest.mark.parametrize("step", CHANGES, ids=lambda step: step.__name__)
def test_saved_tensor_changed_before_backward_raises(
    step: Step, device: str, disk_dir: Path
) -> None:
    x, weight = random_matrices(2, device)
    with pytest.raises(RuntimeError, match=MODIFIED):  # the control: torch's own error
        step(x, weight).backward()
    x, weight = random_matrices(2, device)
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            loss = step(x, weight)
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()
        assert x.grad is None
        # After an error torch keeps other branches of the graph in the queue of its thread.
        if step is not change_one_of_two_saved_tensors:
            del loss
            assert_nothing_left(store)


@on_both
def test_tensor_changed_before_it_is_saved_works(device: str, disk_dir: Path) -> None:
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
def test_tensor_saved_again_after_a_change_still_raises(device: str, disk_dir: Path) -> None:
    """The same memory is saved twice with a change in between. Torch raises, with the store too."""

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
def test_saved_memory_address_reused_is_saved_again(device: str, disk_dir: Path) -> None:
    """Addresses are reused as soon as an offloaded tensor is freed."""

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
def test_retained_graph_second_backward_works(device: str, disk_dir: Path) -> None:
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
def test_double_backward_gradients_match(inside: bool, device: str, disk_dir: Path) -> None:
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
def test_backward_inside_the_context_gradients_match(device: str, disk_dir: Path) -> None:
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
def test_two_losses_with_a_common_trunk_gradients_match(device: str, disk_dir: Path) -> None:
    def run(context: Any) -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        with context:
            common = torch.tanh(torch.sin(x @ trunk))
            one, other = (common @ head).sin().sum(), (common @ tail).cos().sum()
        one.backward(inputs=[head])  # frees a part of the graph; the trunk was not visited
        other.backward(inputs=[tail, trunk, x])
        return [leaf.grad for leaf in leaves]

    leaves = x, trunk, head, tail = random_matrices(4, device)
    wanted = run(nullcontext())
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(run(offloading(store)), wanted)
        assert shipped(store) > 0
        assert_nothing_left(store)


@on_both
def test_two_forwards_backwards_in_any_order_match(device: str, disk_dir: Path) -> None:
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
def test_micro_batches_accumulate_gradients(device: str, disk_dir: Path) -> None:
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


# Graphs without a backward -----------------------------------------------------------------------


@on_both
def test_dropped_graph_leaves_nothing(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    with open_store(disk_dir, RAM, device) as store:
        for _ in range(3):
            with offloading(store):
                loss = chain(x, weights)
            assert store.snapshot().groups, "there was no group to leave behind"
            del loss
            assert_nothing_left(store)


@on_both
def test_unused_branch_leaves_nothing(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    with open_store(disk_dir, RAM, device) as store:
        for _ in range(3):
            with offloading(store):
                loss, unused = chain(x, weights), chain(x, weights[:2])
            loss.backward()
            del loss, unused
            assert_nothing_left(store)


@on_both
def test_exception_in_forward_leaves_nothing(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with open_store(disk_dir, RAM, device) as store:
        with pytest.raises(ZeroDivisionError), offloading(store):
            chain(x, weights)
            raise ZeroDivisionError
        assert_nothing_left(store)
        before = shipped(store)
        assert before > 0
        kept = chain(x, weights)  # the context has ended
        assert shipped(store) == before
        del kept
        found = plain_gradients(lambda: chain(x, weights), [x, *weights], offloading(store))
        assert_equal(found, wanted)


def test_backward_store_already_closed_raises(disk_dir: Path) -> None:
    x, *weights = random_matrices(4, "cpu")
    with open_store(disk_dir, RAM) as store, offloading(store):
        loss = chain(x, weights)
    with pytest.raises(tierstore.TierStoreError):
        loss.backward()


# Threads, devices, streams -----------------------------------------------------------------------


@on_both
def test_two_models_in_two_threads_train(device: str, disk_dir: Path) -> None:
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
def test_backward_in_another_thread_than_forward_matches(device: str, disk_dir: Path) -> None:
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
def test_nested_contexts_of_two_stores_use_the_inner(device: str, disk_dir: Path) -> None:
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
def test_nested_contexts_of_one_store_gradients_match(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(4, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store), offloading(store):
            loss = chain(x, weights)
        assert_equal(torch.autograd.grad(loss, [x, *weights]), wanted)
        assert_nothing_left(store)


@needs_accelerator
@pytest.mark.two_devices
def test_model_on_two_devices_gradients_match(disk_dir: Path) -> None:
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
def test_second_of_two_devices_gradients_match(disk_dir: Path) -> None:
    x, *weights = random_matrices(4, DEVICE_1)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    with open_store(disk_dir, RAM, DEVICE_1) as store:
        found = plain_gradients(lambda: chain(x, weights), [x, *weights], offloading(store))
        assert_equal(found, wanted)
        assert shipped(store) > 0


@pytest.mark.pretend_only("late")
@pytest.mark.parametrize("backward_there", [True, False], ids=["backward too", "forward only"])
def test_stream_of_the_user_gradients_match(
    backward_there: bool, late_pretend: Any, disk_dir: Path
) -> None:
    """The late device exposes a missing wait on a stream."""
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
def test_tensors_saved_on_the_cpu_stay_there(disk_dir: Path) -> None:
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


# Autocast, compilation and custom functions ------------------------------------------------------


def test_autocast_gradients_match(disk_dir: Path) -> None:
    """The weights are cast once for each use, and the casts are saved."""

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
def test_compiled_region_gradients_match(device: str, disk_dir: Path) -> None:
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


def test_random_number_state_is_unchanged(disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return nn.functional.dropout(torch.sin(x @ weight), 0.5).square().mean()

    x, weight = random_matrices(2, "cpu")
    wanted = plain_gradients(loss, [x, weight])
    after = torch.rand(4)
    with open_store(disk_dir, RAM) as store:
        assert_equal(plain_gradients(loss, [x, weight], offloading(store)), wanted)
        assert_equal([torch.rand(4)], [after])


def test_custom_function_that_saves_tensors_matches(disk_dir: Path) -> None:
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
