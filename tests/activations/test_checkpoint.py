"""`tierstore.checkpoint_activations` stores the inputs of a block and recomputes the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.activations.helpers import (
    assert_equal,
    assert_nothing_left,
    offloading,
    on_both,
    open_store,
    plain_gradients,
    random_matrices,
)

pytestmark = pytest.mark.full("test_training_steps.py covers both devices", keep="any device")

RAM = 1 << 20
BYTES = 64 * 64 * 4
BLOCKS = 4

Run = Callable[..., torch.Tensor]


def directly(fn: Run, *args: Any, **kwargs: Any) -> torch.Tensor:
    return fn(*args, **kwargs)


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Saves five tensors as large as `x` when it is not checkpointed."""
    return torch.sin(torch.tanh(torch.sin(torch.tanh(x @ weight)))) * x


def by_position(run: Run, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return run(block, x, weight)


def by_keyword(run: Run, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return run(block, x=x, weight=weight)


def in_a_closure(run: Run, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return run(lambda: block(x, weight))


def in_a_nested_argument(run: Run, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return run(lambda given: block(given["x"][0], weight), {"x": (x, "not a tensor")})


WAYS = [by_position, by_keyword, in_a_closure, in_a_nested_argument]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
Way = Callable[[Run, torch.Tensor, torch.Tensor], torch.Tensor]


def loss_of(way: Way, run: Run, leaves: list[torch.Tensor]) -> torch.Tensor:
    x, *weights = leaves
    x = x * 1
    for weight in weights:
        x = way(run, x, weight)
    return x.square().mean()


@on_both
@ways
def test_checkpointed_block_stores_only_its_inputs(way: Way, device: str, disk_dir: Path) -> None:
    leaves = random_matrices(BLOCKS + 1, device)
    wanted = plain_gradients(lambda: loss_of(way, directly, leaves), leaves)
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            loss = loss_of(way, tierstore.checkpoint_activations, leaves)
        shipped = store.stats().activations.shipped_bytes
        # The inputs of each block, and the tensors that the loss saves; nothing from inside a
        # block.
        assert BLOCKS * BYTES <= shipped <= (BLOCKS + 1) * BYTES
        assert_equal(torch.autograd.grad(loss, leaves), wanted)
        assert store.stats().activations.shipped_bytes == shipped, "recomputing shipped more"
        del loss
        assert_nothing_left(store)


@on_both
@ways
def test_checkpoint_without_a_store_is_plain_checkpointing(
    way: Way, device: str, disk_dir: Path
) -> None:
    leaves = random_matrices(BLOCKS + 1, device)
    wanted = plain_gradients(lambda: loss_of(way, directly, leaves), leaves)
    calls = 0

    def counted(fn: Run, *args: Any, **kwargs: Any) -> torch.Tensor:
        def call(*given: Any, **named: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return fn(*given, **named)

        return tierstore.checkpoint_activations(call, *args, **kwargs)

    loss = loss_of(way, counted, leaves)
    assert calls == BLOCKS
    assert_equal(torch.autograd.grad(loss, leaves), wanted)
    assert calls == 2 * BLOCKS, "nothing was recomputed"


@on_both
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_checkpoint_budget_below_the_inputs_spills_them(
    inside: bool, device: str, disk_dir: Path
) -> None:
    leaves = random_matrices(4 * BLOCKS + 1, device)
    wanted = plain_gradients(lambda: loss_of(by_keyword, directly, leaves), leaves)
    budget = 4 * BYTES
    with open_store(disk_dir, budget, device) as store:
        for _ in range(3):
            with offloading(store):
                loss = loss_of(by_keyword, tierstore.checkpoint_activations, leaves)
                found = torch.autograd.grad(loss, leaves) if inside else ()
            assert_equal(found or torch.autograd.grad(loss, leaves), wanted)
            del loss
        stats = store.stats()
        assert stats.bytes_written > 0
        assert stats.peak_bytes["HOST"] <= budget
        assert_nothing_left(store)


@on_both
def test_checkpoint_repeats_dropout_and_running_statistics(device: str, disk_dir: Path) -> None:
    """Recomputation draws the same random numbers, and its result is used only once."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.dropout = nn.Dropout(0.5)

        def forward(self, value: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return value + self.dropout(torch.tanh(self.linear(value))) * scale

    def loss(run: Run) -> torch.Tensor:
        torch.manual_seed(1)
        value = x * 1
        for each in model:
            value = run(each, value, scale=scale)
        return value.square().mean()

    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(3)).to(device)
    x, scale = random_matrices(2, device)
    leaves = [x, scale, *model.parameters()]
    wanted = plain_gradients(lambda: loss(directly), leaves)
    with open_store(disk_dir, RAM, device) as store:
        context = offloading(store, model=model)
        assert_equal(
            plain_gradients(lambda: loss(tierstore.checkpoint_activations), leaves, context), wanted
        )
        assert store.stats().activations.shipped_bytes > 0
        assert_nothing_left(store)


@on_both
def test_checkpoint_input_changed_in_place_raises(device: str, disk_dir: Path) -> None:
    def step() -> torch.Tensor:
        middle = x * 2
        loss = tierstore.checkpoint_activations(lambda: torch.sin(middle @ weight)).sum()
        middle.add_(1)
        return loss

    def without() -> torch.Tensor:
        middle = x * 2
        loss = torch.sin(middle @ weight).sum()
        middle.add_(1)
        return loss

    x, weight = random_matrices(2, device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        without().backward()  # the control: torch's own error
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            loss = step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@on_both
def test_nested_checkpoints_gradients_match(device: str, disk_dir: Path) -> None:
    def two(run: Run, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return run(lambda: run(block, run(block, x, first), weight=second))

    leaves = random_matrices(3, device)
    wanted = plain_gradients(lambda: two(directly, *leaves).sum(), leaves)
    for number, context in enumerate((nullcontext, offloading)):
        with open_store(disk_dir.with_name(f"store{number}"), RAM, device) as store:
            around = context(store) if context is offloading else context()
            found = plain_gradients(
                lambda: two(tierstore.checkpoint_activations, *leaves).sum(), leaves, around
            )
            assert_equal(found, wanted)
            assert_nothing_left(store)


@on_both
def test_checkpoint_retained_and_dropped_graphs_leave_nothing(device: str, disk_dir: Path) -> None:
    leaves = random_matrices(BLOCKS + 1, device)
    wanted = plain_gradients(lambda: loss_of(by_keyword, directly, leaves), leaves)
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            loss = loss_of(by_keyword, tierstore.checkpoint_activations, leaves)
        for again in (True, False):
            found = torch.autograd.grad(loss, leaves, retain_graph=again)
            assert_equal(found, wanted)
        with offloading(store):
            loss = loss_of(in_a_closure, tierstore.checkpoint_activations, leaves)
        del loss
        assert_nothing_left(store)


@on_both
def test_checkpoint_without_gradients_stores_nothing(device: str, disk_dir: Path) -> None:
    leaves = random_matrices(BLOCKS + 1, device)
    wanted = loss_of(by_keyword, directly, leaves)
    with open_store(disk_dir, RAM, device) as store, offloading(store), torch.no_grad():
        found = loss_of(by_keyword, tierstore.checkpoint_activations, leaves)
        assert_equal([found], [wanted.detach()])
        assert store.stats().activations.shipped_bytes == 0


# Arguments of a block -----------------------------------------------------------------------------


def routed(x: torch.Tensor, weight: torch.Tensor, *, logits: list[Any], seen: Any) -> torch.Tensor:
    """A block that appends to a list and writes to a dict, and reads both."""
    logits.append(x @ weight[:, :2])
    earlier = sum(each.sum() for each in logits)
    seen["last"]["mean"] = x.detach().mean()
    seen["count"] = seen.get("count", 0) + 1
    return block(x, weight) * torch.sigmoid(earlier)


def routed_loss(run: Run, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, list[Any], Any]:
    x, *weights = leaves
    logits: list[torch.Tensor] = []
    seen: dict[str, Any] = {"last": {}}
    for weight in weights:
        x = run(routed, x, weight, logits=logits, seen=seen)
    return x.square().mean() + sum(each.square().sum() for each in logits), logits, seen


@on_both
@pytest.mark.parametrize("aside", [True, False], ids=["in a store", "alone"])
def test_checkpoint_block_writes_to_arguments_are_kept(
    aside: bool, device: str, disk_dir: Path
) -> None:
    leaves = random_matrices(BLOCKS + 1, device)
    wanted = plain_gradients(lambda: routed_loss(directly, leaves)[0], leaves)
    _, plain_logits, plain_seen = routed_loss(directly, leaves)
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store) if aside else nullcontext():
            loss, logits, seen = routed_loss(tierstore.checkpoint_activations, leaves)
        assert_equal(logits, plain_logits)
        assert seen == plain_seen
        assert_equal(torch.autograd.grad(loss, leaves, retain_graph=True), wanted)
        assert_equal(torch.autograd.grad(loss, leaves), wanted)
        assert len(logits) == seen["count"] == BLOCKS, "the recomputation wrote to them, too"
        del loss, logits, seen
        assert_nothing_left(store)
