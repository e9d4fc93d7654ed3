"""Groups are readable after a put; a call cancelled, refused or too late changes nothing."""

from __future__ import annotations

import asyncio
import errno
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.engine import core_of
from tests.helpers.processes import run_python
from tests.helpers.system_calls import system_call
from tests.helpers.threads import Gate, hold_calls
from tests.store.helpers import PATIENCE, assert_at_rest, assert_group, open_store, pages
from tierstore import Access, TierStore, TransferError, offload_activations
from tierstore.errors import DiskFullError
from tierstore.model.header import MAX_HEADER_BYTES


def many(count: int, length: int = 80) -> dict[str, torch.Tensor]:
    return {f"{'x' * length}{i}": torch.full((1,), float(i)) for i in range(count)}


def test_group_names_larger_than_a_header_raise(disk_dir: Path) -> None:
    length = MAX_HEADER_BYTES // 20  # a header has each name four times
    with open_store(disk_dir, "1GiB") as store:
        store.put("k", many(2, length))
        with pytest.raises(ValueError, match="fewer tensors"):
            store.put("k", many(6, length))
        store.put("never on disk by itself", many(6, length), durable=False)
        assert len(store.get("never on disk by itself")) == 6
    with open_store(disk_dir) as store:
        assert_group(store.get("k"), many(2, length))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros([1] * 65), torch.zeros(2**61, 0), torch.zeros(1).expand(2**61, 2)],
    ids=["rank", "product before a zero", "expanded"],
)
def test_shape_no_file_may_have_raises(tensor: torch.Tensor, disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("k", pages(1))
        with pytest.raises(ValueError, match="could not be read back"):
            store.put("k", {"t": tensor})
        assert_group(store.get("k"), pages(1))
    with open_store(disk_dir) as store:
        assert_group(store.get("k"), pages(1))


def test_changed_checkpoint_group_without_header_raises(tmp_path: Path, disk_dir: Path) -> None:
    """It is not lost: the checkpoint's own group is there as before."""
    tensors = many(10, MAX_HEADER_BYTES // 20)  # that file has each name only once
    save_file(tensors, tmp_path / "c.safetensors")
    store = open_store(disk_dir, "4MiB")
    store.register_checkpoint(tmp_path / "c.safetensors", groups={"all": tensors})
    with store.acquire("all", Access.UPDATE) as lease:
        next(iter(lease.tensors.values())).fill_(7)
    with pytest.raises(TransferError, match="fewer tensors"):
        store.flush()
    with pytest.raises(TransferError, match="fewer tensors"):
        store.close()
    with open_store(disk_dir) as store:
        assert "all" not in store


def test_tensor_named_twice_raises(tmp_path: Path, disk_dir: Path) -> None:
    save_file({"a": pages(1)}, tmp_path / "c.safetensors")
    with open_store(disk_dir) as store:
        with pytest.raises(ValueError, match="twice"):
            store.register_checkpoint(tmp_path / "c.safetensors", groups={"k": ["a", "a"]})
        assert not store.keys()


def test_numpy_arrays_at_one_address_are_tied(disk_dir: Path) -> None:
    whole = np.arange(8, dtype=np.float32)
    tied = {"short": torch.from_numpy(whole[:4]), "whole": torch.from_numpy(whole)}
    with open_store(disk_dir) as store:
        store.put("k", tied)
    with open_store(disk_dir) as store:
        found = store.get("k")
        assert_group(found, tied)
        found["short"][0] = 9
        assert found["whole"][0] == 9


# --- cancelled ------------------------------------------------------------------------------------


def test_cancelled_copy_returns_its_tensor(
    disk_dir: Path,
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    source = pages(1, 4)

    async def main(store: TierStore) -> None:
        fill = core_of(store).tiers.host.fill

        def gated(*arguments: Any) -> None:
            copying.set()
            assert go_on.wait(PATIENCE)
            fill(*arguments)

        core_of(store).tiers.host.fill = gated
        putting = asyncio.create_task(store.aput("k", source))
        assert await asyncio.to_thread(copying.wait, PATIENCE)
        putting.cancel()
        await asyncio.sleep(0.05)
        putting.cancel()
        assert not putting.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
        source.fill_(7)  # it is the caller's again

    with open_store(disk_dir) as store:
        asyncio.run(main(store))
        assert_group(store.get("k"), pages(1, 4))
        assert_at_rest(store)


def test_get_needs_no_waiting_thread(disk_dir: Path) -> None:
    async def main(store: TierStore) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        with await store.aacquire("a", Access.UPDATE):
            waiting = [asyncio.create_task(asyncio.to_thread(store.get, "a")) for _ in range(3)]
            await asyncio.sleep(0.05)
            async with asyncio.timeout(PATIENCE):
                assert_group(await store.aget("b"), pages(2))
        for found in await asyncio.gather(*waiting):
            assert_group(found, pages(1))

    with open_store(disk_dir) as store:
        store.put("a", pages(1))
        store.put("b", pages(2))
        asyncio.run(main(store))


def test_discard_never_blocks_an_event_loop(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(store: TierStore, gate: Gate) -> None:
        store.discard("a")  # would deadlock here
        assert "a" not in store
        flushing = asyncio.create_task(asyncio.to_thread(store.flush))
        assert await asyncio.to_thread(gate.reached.wait, PATIENCE)
        await asyncio.sleep(0.05)
        assert not flushing.done()
        gate.open()
        await flushing

    with open_store(disk_dir) as store:
        store.put("a", pages(1))
        store.flush()
        gate = hold_calls(monkeypatch, core_of(store).directory, "remove")
        asyncio.run(main(store, gate))
    with open_store(disk_dir) as store:
        assert not store.keys()


# --- reserved names -------------------------------------------------------------------------------


def test_reserved_activation_keys_cannot_be_put(disk_dir: Path) -> None:
    with open_store(disk_dir, "4MiB") as store:
        with pytest.raises(ValueError, match="another key"):
            store.put("activation/000000", pages(1))
        store.put("activation/mine", pages(2))
        weight = torch.full((64, 64), 3.0, requires_grad=True)
        with offload_activations(store, min_size=1):
            loss = (weight * weight).sum()
        loss.backward()
        assert torch.equal(weight.grad, torch.full((64, 64), 6.0))
        assert_group(store.get("activation/mine"), pages(2))


# --- opening and the process ----------------------------------------------------------------------


def test_failed_open_leaves_its_directory_to_others(disk_dir: Path) -> None:
    before = threading.active_count()
    with pytest.raises((RuntimeError, ValueError)):
        TierStore("1MiB", disk_dir, device="xpu:0", device_budget=1 << 20)
    with open_store(disk_dir) as store:
        store.put("a", pages(1))
    assert threading.active_count() == before


def test_store_has_a_directory_and_is_not_picklable(disk_dir: Path) -> None:
    with (
        open_store(disk_dir) as store,
        pytest.raises(TypeError, match="cannot be sent to another process"),
    ):
        pickle.dumps(store)
    with pytest.raises(ValueError, match="disk_dir is empty"):
        TierStore("1MiB", "", device="cpu")


def test_weights_with_failed_write_register_on_retry(disk_dir: Path) -> None:
    weights = {"w": torch.arange(1024.0)}
    with open_store(disk_dir, "1MiB") as store:
        with system_call("pwrite", fails_with=errno.ENOSPC) as failed:
            with pytest.raises(DiskFullError):
                store.register("k", weights)
            assert failed
        homes = store.register("k", weights)
        assert torch.equal(homes["w"], weights["w"])


LIMITED = """
import resource, sys, torch
from tierstore import TierStore
limit = sys.argv[1]
if limit == "files":
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, 32 << 20))
with TierStore("2MiB" if limit == "files" else "300MiB", sys.argv[2], device="cpu") as store:
    if limit == "addresses":
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    each = 1 << 20 if limit == "files" else 200 << 20
    for number in range(6 if limit == "files" else 1):
        store.put(f"g{number}", torch.full((each,), number, dtype=torch.uint8), durable=False)
    for key in store.keys():
        assert (store.get(key) == int(key[1:])).all()
print("done")
"""


@pytest.mark.full("a separate process for each limit", keep=["files"])
@pytest.mark.parametrize("limit", ["files", "addresses"])
def test_process_limits_leave_space_for_required_files(limit: str, disk_dir: Path) -> None:
    """The limits exclude the usual reservations: a spill file of 64 MiB, eightfold addresses."""
    done = run_python("-c", LIMITED, limit, disk_dir, timeout=120)
    assert done.stdout == "done\n", done.stderr[-2000:]
