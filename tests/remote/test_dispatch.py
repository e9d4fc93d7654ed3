"""A model with a checkpoint in an object store loads and dispatches as from a directory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from tests.remote.servers import BUCKET, Proxy, error_500, upload
from tierstore import TierStore, disable_offload, load_checkpoint_and_dispatch
from tierstore.errors import BudgetError, StaleCheckpointError, TransferError
from tierstore.tiers.object_store import retry_policy


def model_of(layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers))).eval()


@pytest.fixture
def model(s3: str, proxy: Proxy) -> nn.Module:
    found = model_of()
    upload(s3, "dispatched/model.safetensors", save(found.state_dict()))
    return found


URL = f"s3://{BUCKET}/dispatched/"


def empty() -> nn.Module:
    with torch.device("meta"):
        return model_of()


@torch.no_grad()
def test_remote_dispatch_computes_and_holds_the_models_values(
    model: nn.Module, proxy: Proxy, tmp_path: Path
) -> None:
    x = torch.randn(3, 128)
    expected = model(x)
    with TierStore("200KB", tmp_path, device="cpu") as store:
        loaded = load_checkpoint_and_dispatch(empty(), URL, store)
        fetched = sum(method == "GET" and path.endswith("s") for method, path, _ in proxy.requests)
        assert fetched >= 2, "it fetches a header and data"
        for _ in range(2):
            assert torch.equal(loaded(x), expected)
        assert store.stats().bytes_read > 0
        assert store.stats().peak_bytes["HOST"] <= 200_000
        state = loaded.state_dict()
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        again = copy.deepcopy(loaded)
        assert torch.equal(again(x), expected)
        assert torch.equal(disable_offload(loaded)(x), expected)


@torch.no_grad()
def test_remote_dispatch_next_time_fetches_headers_only(
    model: nn.Module, proxy: Proxy, tmp_path: Path
) -> None:
    x = torch.randn(3, 128)
    with TierStore("200KB", tmp_path, device="cpu") as store:
        load_checkpoint_and_dispatch(empty(), URL, store)
    proxy.sent, written = 0, store.stats().bytes_written
    with TierStore("200KB", tmp_path, device="cpu") as store:
        loaded = load_checkpoint_and_dispatch(empty(), URL, store)
        assert written > 390_000 > store.stats().bytes_written == 0
        assert torch.equal(loaded(x), model(x))
    headers_only = 256 << 10  # the size of the first read
    assert proxy.sent < headers_only + 10_000


@torch.no_grad()
def test_remote_dispatch_can_cast(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 128).bfloat16()
    with TierStore("200KB", tmp_path, device="cpu") as store:
        loaded = load_checkpoint_and_dispatch(empty(), URL, store, dtype=torch.bfloat16)
        assert torch.equal(loaded(x), model.bfloat16()(x))


def test_remote_dispatch_with_too_small_disk_budget_raises(
    model: nn.Module, tmp_path: Path
) -> None:
    with TierStore("200KB", tmp_path, device="cpu", disk_budget="100KB") as store:
        loaded = empty()
        with pytest.raises(BudgetError, match="disk_budget"):
            load_checkpoint_and_dispatch(loaded, URL, store)
        assert all(p.device.type == "meta" for p in loaded.parameters())


def test_remote_dispatch_failure_leaves_the_model_unchanged(
    model: nn.Module, proxy: Proxy, tmp_path: Path
) -> None:
    with retry_policy(deadline=0.5), TierStore("200KB", tmp_path, device="cpu") as store:
        loaded = empty()
        proxy.before = lambda number: setattr(proxy, "every", error_500 if number > 3 else None)
        with pytest.raises(TransferError, match="could not be read"):
            load_checkpoint_and_dispatch(loaded, URL, store)
        assert all(p.device.type == "meta" for p in loaded.parameters())


def test_remote_dispatch_of_a_replaced_object_is_stale(
    model: nn.Module, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    other = save({k: v + 1 for k, v in model.state_dict().items()})

    def before(number: int) -> None:
        if number == 4:
            upload(s3, "dispatched/model.safetensors", other)

    proxy.before = before
    with TierStore("200KB", tmp_path, device="cpu") as store, pytest.raises(StaleCheckpointError):
        load_checkpoint_and_dispatch(empty(), URL, store)
