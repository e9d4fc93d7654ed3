"""Errors and interrupts in the middle of a forward, and calls from several threads."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import pipelines
from tests.accelerator import same
from tests.adapters.conftest import (
    DEVICES,
    OFFLOAD_TYPES,
    Checkpoints,
    References,
    a_third_of,
)
from tests.adapters.models import BLOCK_BYTES, Tower, given
from tests.faults.interrupting import InterruptAt
from tests.lanes import by_lane
from tests.store.helpers import open_store
from tierstore import Access, TierStore, adapters, enable_group_offload
from tierstore.errors import LeaseError
from tierstore.types import OffloadHandle

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="a third",
)

ADAPTERS = Path(adapters.__file__).parent
ON_BOTH = pytest.mark.parametrize("device", DEVICES)


def assert_nothing_is_leased(store: TierStore, handle: OffloadHandle) -> None:
    """Check that every group can be leased to update, which conflicts with all other leases.

    Groups that stay on an accelerator while the model is offloaded are excluded.
    """
    keys = [key for key in handle.groups if not key.endswith("/resident")]
    assert keys
    for key in keys:
        store.acquire(key, Access.UPDATE).release()


def test_remaining_lease_is_detected(disk_dir: Path) -> None:
    with (
        TierStore(1 << 20, disk_dir, device="cpu") as store,
        enable_group_offload(Tower(), store) as handle,
        store.acquire(next(iter(handle.groups))),
        pytest.raises(LeaseError, match="leased"),
    ):
        assert_nothing_is_leased(store, handle)


class Raise:
    """A hook that raises once, when it was called `after` times."""

    def __init__(self, error: type[BaseException], after: int) -> None:
        self.error = error
        self.left = after

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@ON_BOTH
@pytest.mark.parametrize("error", (ZeroDivisionError, KeyboardInterrupt))
@pytest.mark.parametrize("after", (1, 2), ids=("first step", "second step"))
@pytest.mark.parametrize(
    "cut", ({"num_blocks_per_group": 1}, {"offload_type": "leaf_level"}), ids=OFFLOAD_TYPES
)
def test_error_inside_a_block_leaves_no_lease(
    cut: dict[str, Any],
    after: int,
    error: type[BaseException],
    device: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    inner = pipe.transformer.single_transformer_blocks[3].attn.to_q
    with (
        a_third_of(pipe, disk_dir, device) as store,
        enable_group_offload(pipe, store, **cut) as handle,
    ):
        away = {name: tensor.data_ptr() for name, tensor in pipelines.weights(pipe)}
        inner.register_forward_pre_hook(Raise(error, after))
        with pytest.raises(error):
            pipelines.run("flux", pipe, device=device)
        assert {name: tensor.data_ptr() for name, tensor in pipelines.weights(pipe)} == away
        assert_nothing_is_leased(store, handle)
        for _ in range(2):
            output = pipelines.run("flux", pipe, device=device)
            assert torch.equal(output, reference("flux", device=device).output)


@ON_BOTH
@torch.no_grad()
def test_error_while_loading_weights_leaves_no_lease(device: str, disk_dir: Path) -> None:
    """A module needs two groups, and the second cannot be leased."""
    model = Tower()
    model.tail.weight = model.head.weight  # the tail needs the head's group and its own
    x = given()
    expected = model(x)
    with (
        open_store(disk_dir, 3 * BLOCK_BYTES, device) as store,
        enable_group_offload(model, store, num_blocks_per_group=1) as handle,
    ):
        model(x)
        keys = [key for key, names in handle.groups.items() if "tail.bias" in names]
        with store.acquire(keys[0], Access.UPDATE), pytest.raises(LeaseError, match="leased"):
            model(x)
        assert_nothing_is_leased(store, handle)
        assert same(model(x), expected, device)


# interrupted before its caller got it
@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
@torch.no_grad()
def test_interrupt_at_any_point_is_undone(disk_dir: Path) -> None:
    model, x = Tower(2), given()
    expected = model(x)
    with (
        TierStore(4 * BLOCK_BYTES, disk_dir, device="cpu") as store,
        enable_group_offload(model, store, num_blocks_per_group=1) as handle,
    ):
        for point in itertools.count(1, by_lane(17, 1)):
            try:
                with InterruptAt(point, ADAPTERS) as interrupt:
                    model(x)
            except KeyboardInterrupt:
                pass
            gc.collect()
            # All weights are restored: maps of files, not memory that the store reuses.
            assert not pipelines.not_file_backed(model), point
            assert torch.equal(model(x), expected), point
            if not interrupt.raised:
                break
        assert point > 100
        assert_nothing_is_leased(store, handle)


# Threads ------------------------------------------------------------------------------------------


def on_threads(jobs: list[Callable[[], None]]) -> None:
    """Run all jobs at once. Raises the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def guarded(job: Callable[[], None]) -> None:
        try:
            start.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@ON_BOTH
def test_model_called_from_two_threads_is_right(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    plain = pipelines.load("llama", checkpoint("llama")).to(device)
    model = pipelines.load("llama", checkpoint("llama"))
    prompts = [torch.arange(3 + n, 15 + n).reshape(1, 12).to(device) for n in range(2)]

    @torch.no_grad()
    def logits(owner: nn.Module, prompt: torch.Tensor) -> torch.Tensor:
        return owner(prompt).logits.cpu()

    expected = [logits(plain, prompt) for prompt in prompts]
    with a_third_of(model, disk_dir, device) as store, enable_group_offload(model, store) as handle:

        def repeat(which: int) -> None:
            for _ in range(10):
                assert torch.equal(logits(model, prompts[which]), expected[which])

        on_threads([lambda: repeat(0), lambda: repeat(1)])
        assert store.stats().bytes_written == 0  # neither thread's steps counted as an edit
        assert_nothing_is_leased(store, handle)
        assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.full("test_models_on_threads.py has threads")
@ON_BOTH
def test_two_models_on_one_store_in_two_threads_are_right(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    tokens = torch.arange(3, 27).reshape(1, 24).to(device)
    models = [pipelines.load("llama", checkpoint("llama", model=seed)) for seed in range(2)]
    plain = [pipelines.load("llama", checkpoint("llama", model=seed)) for seed in range(2)]

    @torch.no_grad()
    def logits(owner: nn.Module) -> torch.Tensor:
        return owner(tokens).logits.cpu()

    expected = [logits(model.to(device)) for model in plain]
    assert not torch.equal(*expected)
    with (
        a_third_of(models[0], disk_dir, device) as store,
        enable_group_offload(models[0], store),
        enable_group_offload(models[1], store),
    ):

        def repeat(which: int) -> None:
            for _ in range(10):
                assert torch.equal(logits(models[which]), expected[which])

        on_threads([lambda: repeat(0), lambda: repeat(1)])
