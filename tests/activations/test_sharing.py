"""Each storage is offloaded once, only the part that is viewed, and never a parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator import PRETENDING
from tests.activations.helpers import (
    MIB,
    assert_equal,
    assert_nothing_left,
    offloading,
    on_both,
    open_store,
    plain_gradients,
    random_matrices,
)
from tests.helpers.engine import core_of
from tierstore.model.tiers import Tier

pytestmark = pytest.mark.full("test_training_steps.py covers both devices", keep="any device")

RAM = 8 * MIB
BYTES = 64 * 64 * 4
"""Bytes of one matrix."""


def leaf(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=generator).to(device).requires_grad_()


# Views -------------------------------------------------------------------------------------------


def transposed(base: torch.Tensor) -> torch.Tensor:
    return base.t()


def as_blocks(base: torch.Tensor) -> torch.Tensor:
    return base.view(16, 4, 64).permute(2, 0, 1)


def every_other_row(base: torch.Tensor) -> torch.Tensor:
    return base[::2]


def all_but_the_first(base: torch.Tensor) -> torch.Tensor:
    return base[1:]


def repeated(base: torch.Tensor) -> torch.Tensor:
    return base[None].expand(50, 64, 64)


def as_complex(base: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(base.view(64, 32, 2)).conj()


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    transposed,
    as_blocks,
    every_other_row,
    all_but_the_first,
    repeated,
    as_complex,
]


@on_both
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_saved_view_shares_the_copy_and_keeps_its_strides(
    view: Callable[[torch.Tensor], torch.Tensor], device: str, disk_dir: Path
) -> None:
    def loss(look: bool = False) -> torch.Tensor:
        base = x * 2
        whole, seen = torch.sin(base), torch.sin(view(base))
        if look:
            nodes.append((whole.grad_fn, seen.grad_fn, view(base).detach()))
        total = seen.real.square().sum() if seen.is_complex() else seen.square().sum()
        return whole.sum() + total

    x = leaf(device, 64, 64)
    wanted = plain_gradients(loss, [x])
    nodes: list[tuple] = []
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            value = loss(look=True)
        activations = store.stats().activations
        whole, seen, original = nodes.pop()
        found = seen._saved_self
        assert found.stride() == original.stride()
        assert found.storage_offset() == original.storage_offset()
        assert found.is_conj() == original.is_conj()
        assert_equal([found.resolve_conj()], [original.resolve_conj()])
        assert_equal([whole._saved_self], [(x * 2).detach()])
        # The base, and the result of sin that square() saves: of a repeated view that is large.
        result = 0 if view is as_complex else original.numel() * 4
        assert activations.shipped_bytes <= BYTES + max(result, BYTES * 2)
        assert activations.deduplicated_bytes > 0
        assert_equal(torch.autograd.grad(value, [x]), wanted)
        del whole, seen, found, value
        assert_nothing_left(store)


@on_both
def test_tensor_saved_many_times_is_one_copy(device: str, disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        base = torch.tanh(x)
        return sum((base @ weight).sum() for weight in weights)  # type: ignore[return-value]

    x, *weights = random_matrices(9, device)
    wanted = plain_gradients(loss, [x, *weights])
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(plain_gradients(loss, [x, *weights], offloading(store)), wanted)
        activations = store.stats().activations
        assert activations.shipped_bytes == BYTES
        assert activations.deduplicated_bytes >= 7 * BYTES
        assert core_of(store).planner.peak[Tier.HOST] == BYTES


@on_both
def test_expanded_tensor_is_stored_unexpanded(device: str, disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        row = x * 2
        return torch.sin(row.expand(1000, 4096)).sum()

    x = leaf(device, 1, 4096)
    wanted = plain_gradients(loss, [x])
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(plain_gradients(loss, [x], offloading(store)), wanted)
        assert 0 < store.stats().activations.shipped_bytes <= 4096 * 4


@on_both
def test_small_view_of_a_large_storage_is_stored_alone(device: str, disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        large = x * 2
        return torch.sin(large[500:510]).sum()

    x = leaf(device, MIB)
    wanted = plain_gradients(loss, [x])
    with open_store(disk_dir, 16 * MIB, device) as store:
        for min_size in (0, 4096):
            assert_equal(plain_gradients(loss, [x], offloading(store, min_size)), wanted)
        assert store.stats().activations.shipped_bytes <= 4096


@on_both
def test_slices_that_cover_a_storage_are_stored_once(device: str, disk_dir: Path) -> None:
    """Together they view all of it, as the parts of a fused projection do."""

    def loss() -> torch.Tensor:
        fused = x @ weight
        query, key, value = fused.chunk(3, dim=-1)
        return (torch.tanh(query) * key * value).sum()

    x, weight = leaf(device, 64, 64), leaf(device, 64, 192)
    wanted = plain_gradients(loss, [x, weight])
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(plain_gradients(loss, [x, weight], offloading(store)), wanted)
        shipped = store.stats().activations.shipped_bytes
        # fused (as key and value), tanh(query), tanh(query) * key: nothing twice
        assert 3 * BYTES <= shipped <= 5 * BYTES


@on_both
def test_product_with_own_transpose_is_stored_once(device: str, disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        h = torch.tanh(x)
        return (h @ h.t()).square().mean()

    x = leaf(device, 64, 64)
    wanted = plain_gradients(loss, [x])
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(plain_gradients(loss, [x], offloading(store)), wanted)
        assert store.stats().activations.shipped_bytes == 2 * BYTES


# Tensors that are not stored ---------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("named", [True, False], ids=["model named", "model not named"])
def test_parameters_of_the_model_are_not_stored(named: bool, device: str, disk_dir: Path) -> None:
    """Large weights and small inputs: `nn.Linear` saves a view of its weight, a plain tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).to(device)
    x = leaf(device, 2, 512)
    leaves = [x, *model.parameters()]
    wanted = plain_gradients(lambda: model(x).square().mean(), leaves)
    with open_store(disk_dir, RAM, device) as store:
        context = offloading(store, 1024, model=model if named else None)
        assert_equal(plain_gradients(lambda: model(x).square().mean(), leaves, context), wanted)
        activations = store.stats().activations
        assert 0 < activations.shipped_bytes <= 5 * 2 * 512 * 4
        assert activations.skipped["parameter"] >= 3 * 512 * 512 * 4


@on_both
def test_frozen_parameters_and_buffers_are_not_stored(device: str, disk_dir: Path) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(512, 512) / 20, requires_grad=False)
            self.register_buffer("table", torch.randn(512, 512) / 20)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            hidden = value @ self.weight.t() @ self.table[:, ::2]
            return hidden @ self.weight.detach()[::2]

    torch.manual_seed(0)
    model = Frozen().to(device)
    x = leaf(device, 2, 512)
    wanted = plain_gradients(lambda: model(x).square().mean(), [x])
    with open_store(disk_dir, RAM, device) as store:
        context = offloading(store, 1024, model=model)
        assert_equal(plain_gradients(lambda: model(x).square().mean(), [x], context), wanted)
        assert 0 < store.stats().activations.shipped_bytes <= 2 * 512 * 4


@on_both
def test_tensors_below_min_size_are_not_stored(device: str, disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        return torch.sin(x * 2).square().sum()  # saves two tensors of BYTES

    x = leaf(device, 64, 64)
    with open_store(disk_dir, RAM, device) as store:
        for min_size, shipped in ((BYTES + 1, 0), ("1MB", 0), (BYTES, 2 * BYTES)):
            before = store.stats().activations
            plain_gradients(loss, [x], offloading(store, min_size))
            after = store.stats().activations
            assert after.shipped_bytes - before.shipped_bytes == shipped
            assert after.saved_bytes - before.saved_bytes == 2 * BYTES
            assert after.kept_bytes - before.kept_bytes == 2 * BYTES - shipped


@on_both
def test_activation_statistics_add_up(device: str, disk_dir: Path) -> None:
    """Each saved byte was either offloaded or kept, and each kept byte has a reason."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    model = model.to(device)
    x = leaf(device, 64, 64)
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store, model=model):
            loss = model(x).square().mean()
        loss.backward()
        activations = store.stats().activations
        assert activations.saved_bytes == activations.shipped_bytes + activations.kept_bytes
        assert activations.kept_bytes == sum(activations.skipped.values())
        assert min(activations.shipped_bytes, activations.kept_bytes) > 0
        assert activations == store.stats().activations


@on_both
def test_sparse_tensors_pass_through(device: str, disk_dir: Path) -> None:
    if PRETENDING and device != "cpu":
        pytest.skip("the pretend accelerator has no sparse tensors")

    def loss() -> torch.Tensor:
        hidden = torch.sparse.mm(matrix, torch.tanh(x))
        return torch.sin(torch.sparse.mm(rows, hidden)).sum()

    x = leaf(device, 64, 64)
    dense = torch.relu(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    matrix, rows = dense.to(device).to_sparse(), dense.to(device).to_sparse_csr()
    wanted = plain_gradients(loss, [x])
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(plain_gradients(loss, [x], offloading(store)), wanted)
        assert store.stats().activations.shipped_bytes > 0


# Restored tensors --------------------------------------------------------------------------------


@on_both
def test_saved_tensor_read_repeatedly_is_equal(device: str, disk_dir: Path) -> None:
    x = leaf(device, 64, 64)
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            saved = (x * 2).t()
            value = saved.sin()
        shipped = store.stats().activations.shipped_bytes
        for _ in range(2):
            found = value.grad_fn._saved_self
            assert_equal([found], [saved.detach()])
            assert found.stride() == saved.stride()
        del saved, found
        for _ in range(2):  # and when nothing else refers to it any more
            found = value.grad_fn._saved_self
            assert_equal([found], [(x * 2).t().detach()])
            assert found.stride() == (1, 64)
        del found
        assert store.stats().activations.shipped_bytes == shipped == BYTES
        assert_equal(torch.autograd.grad(value.sum(), [x]), [2 * torch.cos(2 * x).detach()])


@on_both
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str
)
def test_saved_dtypes_are_restored(dtype: torch.dtype, device: str, disk_dir: Path) -> None:
    def loss() -> torch.Tensor:
        total = torch.sin(base * 2).abs().square()
        picked = torch.where(base.real > 0, total, total * 3)  # saves a mask of bool
        return picked.float().sum()

    generator = torch.Generator().manual_seed(2)
    base = torch.randn(96, 96, generator=generator).to(dtype).to(device).requires_grad_()
    wanted = plain_gradients(loss, [base])
    with open_store(disk_dir, RAM, device) as store:
        assert_equal(plain_gradients(loss, [base], offloading(store)), wanted)
        assert store.stats().activations.shipped_bytes >= 96 * 96 * dtype.itemsize


@on_both
def test_concurrent_readers_of_a_storage_share_its_memory(device: str, disk_dir: Path) -> None:
    """An operation that saved a tensor and its view gets back a tensor and its view."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(value, value.t(), value[8:])
            return value * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            one, other, rest = ctx.saved_tensors
            places.append({t.untyped_storage().data_ptr() for t in (one, other, rest)})
            return gradient * other.t()

    places: list[set[int]] = []
    x = leaf(device, 64, 64)
    wanted = plain_gradients(lambda: Both.apply(x * 2).sum(), [x])
    with open_store(disk_dir, RAM, device) as store:
        found = plain_gradients(lambda: Both.apply(x * 2).sum(), [x], offloading(store))
        assert_equal(found, wanted)
    assert [len(seen) for seen in places] == [1, 1]
