"""A checkpoint at a URL is registered as one in a directory, and its values are right."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from tests.remote.conftest import Uploaded, assert_holds, uploaded, values_of
from tests.remote.servers import BUCKET, Proxy, forbidden, remove, upload
from tierstore import TierStore
from tierstore.engine.checkpoints import read_checkpoint
from tierstore.errors import (
    BudgetError,
    DuplicateKeyError,
    InvalidHeaderError,
    StaleCheckpointError,
    TransferError,
    UnknownKeyError,
)
from tierstore.model.tiers import Access
from tierstore.store import engine_of
from tierstore.tiers.object_store import is_url, memory_store


@pytest.fixture
def checkpoint(s3: str, proxy: Proxy) -> Uploaded:
    return uploaded(s3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TierStore]:
    with TierStore("600KB", tmp_path / "store", device="cpu", disk_budget="700KB") as opened:
        yield opened
        engine_of(opened).core.planner.check()


def test_remote_values_are_right_within_both_budgets(
    checkpoint: Uploaded, store: TierStore, tmp_path: Path
) -> None:
    keys = store.register_checkpoint(checkpoint.url, prefix="flux/", groups=checkpoint.groups)
    assert keys == [f"flux/{key}" for key in checkpoint.groups]
    assert store.stats().bytes_fetched == 0, "registering reads headers only"
    renamed = Uploaded(
        checkpoint.name,
        checkpoint.url,
        checkpoint.values,
        {f"flux/{key}": names for key, names in checkpoint.groups.items()},
        checkpoint.nbytes,
    )
    for _ in range(3):
        for key in keys:
            assert_holds(store, renamed, key)
            assert _bytes_under(tmp_path / "store") <= 750_000
    stats = store.stats()
    assert checkpoint.nbytes <= stats.bytes_fetched < 3 * checkpoint.nbytes
    assert stats.peak_bytes["HOST"] <= 600_000
    assert stats.peak_bytes["DISK"] <= 700_000


def _bytes_under(directory: Path) -> int:
    """Return the size of all cached files. Some may be removed during the count."""
    found = 0
    for path in (directory / "remote" / "objects").rglob("*.safetensors"):
        try:
            found += path.stat().st_size
        except FileNotFoundError:
            continue
    return found


def test_remote_tensors_are_separate_groups_by_default(
    checkpoint: Uploaded, store: TierStore
) -> None:
    keys = store.register_checkpoint(checkpoint.url)
    assert set(keys) == set(checkpoint.values)
    for key in keys:
        found = store.get(key)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, checkpoint.values[key])


def test_remote_register_can_be_awaited(checkpoint: Uploaded, store: TierStore) -> None:
    async def register() -> list[str]:
        return await store.aregister_checkpoint(checkpoint.url, groups=checkpoint.groups)

    assert asyncio.run(register()) == list(checkpoint.groups)
    assert_holds(store, checkpoint, "3")


@pytest.mark.parametrize("slash", ["", "/"])
def test_remote_directory_is_read_by_its_index(
    slash: str, s3: str, proxy: Proxy, store: TierStore
) -> None:
    values = values_of(4, 16)
    halves = [dict(list(values.items())[:3]), dict(list(values.items())[3:])]
    weight_map = {}
    for number, half in enumerate(halves):
        upload(s3, f"sharded/part-{number}.safetensors", save(half))
        weight_map |= dict.fromkeys(half, f"part-{number}.safetensors")
    index = json.dumps({"weight_map": weight_map}).encode()
    upload(s3, "sharded/model.safetensors.index.json", index)
    upload(s3, "sharded/not-listed.safetensors", save({"other": torch.ones(2)}))
    keys = store.register_checkpoint(f"s3://{BUCKET}/sharded{slash}")
    assert set(keys) == set(values)
    for key in keys:
        assert torch.equal(store.get(key), values[key])


def test_remote_index_listing_missing_files_raises(s3: str, proxy: Proxy) -> None:
    index = json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode()
    upload(s3, "broken/model.safetensors.index.json", index)
    with pytest.raises(TransferError, match=r"gone\.safetensors does not exist"):
        read_checkpoint(f"s3://{BUCKET}/broken/")


@pytest.mark.parametrize("name", ["nothing/", "nothing/model.safetensors"])
def test_remote_missing_object_raises(name: str, proxy: Proxy) -> None:
    with pytest.raises(TransferError, match=r"check the URL|has no safetensors"):
        read_checkpoint(f"s3://{BUCKET}/{name}")


def test_remote_malformed_header_raises(s3: str, proxy: Proxy) -> None:
    upload(s3, "bad/model.safetensors", b"\xff" * 64)
    with pytest.raises(InvalidHeaderError, match="declares a header"):
        read_checkpoint(f"s3://{BUCKET}/bad/model.safetensors")
    upload(s3, "bad/empty.safetensors", b"")
    with pytest.raises(InvalidHeaderError, match="too short"):
        read_checkpoint(f"s3://{BUCKET}/bad/empty.safetensors")


def test_remote_permission_error_raises_at_once(checkpoint: Uploaded, proxy: Proxy) -> None:
    proxy.every = forbidden
    with pytest.raises(TransferError, match="credentials"):
        read_checkpoint(checkpoint.url)
    assert len(proxy.requests) == 1


def test_file_and_memory_urls_are_object_stores(tmp_path: Path, store: TierStore) -> None:
    pytest.importorskip("obstore")
    values = values_of(2, 16)
    save_file(values, tmp_path / "model.safetensors")
    memory_store("memory://here").put("deep/model.safetensors", save(values))
    for number, url in enumerate((f"file://{tmp_path}", "memory://here/deep")):
        for key in store.register_checkpoint(url, prefix=f"{number}/"):
            assert torch.equal(store.get(key), values[key[2:]])
    assert store.stats().bytes_fetched > 0


def test_web_server_without_listing_is_tried_by_usual_names(
    checkpoint: Uploaded, proxy: Proxy, store: TierStore
) -> None:
    directory = f"{proxy.address}/{BUCKET}/{checkpoint.name.rpartition('/')[0]}"
    store.register_checkpoint(directory, groups=checkpoint.groups)
    assert_holds(store, checkpoint, "0")


def test_signed_url_raises(store: TierStore) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(ValueError, match="has a query"):
        store.register_checkpoint("https://host/model.safetensors?X-Amz-Signature=1")


@pytest.mark.parametrize("path", ["model", "/tmp/s3:", "c://model", "s3:/bucket", Path("s3://b")])
def test_file_names_are_not_urls(path: object) -> None:
    assert not is_url(path)


def test_invalid_groups_register_nothing(checkpoint: Uploaded, store: TierStore) -> None:
    with pytest.raises(UnknownKeyError):
        store.register_checkpoint(checkpoint.url, groups={"a": ["none"]})
    store.put("3", torch.ones(2))
    with pytest.raises(DuplicateKeyError):
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
    assert store.keys() == ["3"]


def test_disk_budget_below_every_group_raises_on_demand(
    checkpoint: Uploaded, tmp_path: Path
) -> None:
    with TierStore("600KB", tmp_path, device="cpu", disk_budget="50KB") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        with pytest.raises(BudgetError, match="disk_budget"):
            store.acquire("0")


def test_changed_group_is_kept_and_its_object_unchanged(
    checkpoint: Uploaded, store: TierStore, tmp_path: Path
) -> None:
    store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
    with store.acquire("2", Access.UPDATE) as lease:
        lease.tensors["blocks.2.bias"].fill_(3)
    for key in checkpoint.groups:
        if key != "2":
            assert_holds(store, checkpoint, key)
    found = store.get("2")
    assert torch.equal(found["blocks.2.bias"], torch.full((7,), 3.0, dtype=torch.bfloat16))
    assert torch.equal(found["blocks.2.weight"], checkpoint.values["blocks.2.weight"])
    store.flush()
    with TierStore("600KB", tmp_path / "other", device="cpu") as other:
        other.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        assert_holds(other, checkpoint, "2")


def test_put_groups_are_on_disk_beside_fetched_ones(checkpoint: Uploaded, store: TierStore) -> None:
    store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
    mine = {f"mine{i}": torch.randn(128, 256) for i in range(3)}
    for key, value in mine.items():
        store.put(key, value)
    for _ in range(2):
        for key in checkpoint.groups:
            assert_holds(store, checkpoint, key)
    store.flush()
    for key, value in mine.items():
        assert torch.equal(store.get(key), value)


def test_checkpoint_registered_twice_is_two_sets_of_groups(
    checkpoint: Uploaded, store: TierStore
) -> None:
    store.register_checkpoint(checkpoint.url, "a/", groups=checkpoint.groups)
    store.register_checkpoint(checkpoint.url, "b/", groups=checkpoint.groups)
    for key in checkpoint.groups:
        for prefix in ("a/", "b/"):
            found = store.get(prefix + key)
            assert all(torch.equal(found[n], checkpoint.values[n]) for n in checkpoint.groups[key])
    store.discard("a/1")
    assert torch.equal(store.get("b/1")["blocks.1.bias"], checkpoint.values["blocks.1.bias"])


def test_discarded_group_leaves_no_file(
    checkpoint: Uploaded, store: TierStore, tmp_path: Path
) -> None:
    store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
    assert_holds(store, checkpoint, "0")
    assert _bytes_under(tmp_path / "store") > 0
    for key in checkpoint.groups:
        store.discard(key)
    for _ in range(100):  # some may still have been in transit
        if _bytes_under(tmp_path / "store") == 0:
            return
        time.sleep(0.05)
    pytest.fail("a file stays")


def test_replaced_object_raises_in_the_call_that_reads_it(
    checkpoint: Uploaded, s3: str, store: TierStore
) -> None:
    store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
    assert_holds(store, checkpoint, "0")
    upload(s3, checkpoint.name, save(values_of(8, 128, seed=1)))  # of the same size and names
    with pytest.raises(StaleCheckpointError, match="was replaced"):
        store.acquire("7")  # earlier ones may already be in transit
    assert_holds(store, checkpoint, "0")  # which is resident


def test_removed_object_raises_stale(checkpoint: Uploaded, s3: str, store: TierStore) -> None:
    store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
    remove(s3, checkpoint.name)
    with pytest.raises(StaleCheckpointError, match="is gone"):
        store.acquire("7")


def test_reads_request_the_registered_object_version(
    checkpoint: Uploaded, store: TierStore, proxy: Proxy
) -> None:
    store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
    before = len(proxy.requests)
    assert_holds(store, checkpoint, "0")
    asked = proxy.requests[before:]
    assert {method for method, _, _ in asked} == {"GET"}
    assert asked[0][2].startswith("bytes=")
    assert os.path.basename(asked[0][1]) == "model.safetensors"
