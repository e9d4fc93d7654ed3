"""Values are returned as they were put.

Any dtype, shape, stride and tie, from every tier and in a new store.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerator import ACCELERATOR, DEVICE_0, DEVICE_1, needs_accelerator
from tests.helpers.engine import core_of
from tests.helpers.files import object_file
from tests.helpers.processes import run_python
from tests.store.helpers import (
    PAGE,
    assert_at_rest,
    assert_group,
    assert_same,
    bits,
    files_below,
    join,
    on_both,
    open_store,
    pages,
    push_out,
    random_tensor,
    run_threads,
    tiers_of,
)
from tierstore import Access, TierStore
from tierstore.system.views import DTYPES

pytestmark = pytest.mark.floor

Group = torch.Tensor | Mapping[str, torch.Tensor]
ROOT = Path(__file__).resolve().parents[2]


def floats(*shape: int) -> torch.Tensor:
    return random_tensor(torch.float32, *shape, seed=len(shape))


def complexes(*shape: int) -> torch.Tensor:
    return torch.complex(torch.arange(6.0), torch.arange(6.0, 12.0)).reshape(shape)


def with_gap() -> torch.Tensor:
    return floats(64, 40)[::3, 5:31:2]


SHAPES: dict[str, Callable[[], Group]] = {
    "0-d": lambda: torch.tensor(3.5),
    "0-d in a dict": lambda: {"scale": torch.tensor(7, dtype=torch.int64)},
    "one element": lambda: floats(1),
    "empty": lambda: torch.empty(0),
    "empty with a shape": lambda: torch.empty(3, 0, 5, dtype=torch.bfloat16),
    "an empty slice of something": lambda: floats(10)[4:4],
    "no tensors at all": dict,
    "odd sizes": lambda: {f"t{n}": random_tensor(torch.uint8, n, seed=n) for n in (1, 3, 255, 257)},
    "exactly a page": lambda: floats(PAGE // 4),
    "a page and a byte": lambda: random_tensor(torch.uint8, PAGE + 1),
    "many dimensions": lambda: floats(*[1, 2] * 8),
    "transposed": lambda: floats(5, 7).t(),
    "permuted": lambda: floats(2, 3, 4, 5).permute(3, 1, 0, 2),
    "expanded": lambda: floats(3, 1).expand(3, 1000),
    "expanded scalar": lambda: torch.tensor(2.0).expand(100, 100),
    "sliced with gaps": with_gap,
    "a row of a matrix": lambda: floats(50, 60)[7],
    "a column of a matrix": lambda: floats(50, 60)[:, 7],
    "channels last": lambda: floats(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "channels last, 3-d": lambda: floats(1, 2, 3, 4, 5).contiguous(
        memory_format=torch.channels_last_3d
    ),
    "overlapping windows": lambda: floats(20).unfold(0, 5, 1),
    "a parameter": lambda: torch.nn.Parameter(floats(8, 8)),
    "with a gradient": lambda: (floats(4).requires_grad_() * 2),
    "mixed dtypes": lambda: {
        name: random_tensor(dtype, 7, 3, seed=3) for name, dtype in DTYPES.items()
    },
    "names like paths": lambda: {
        name: floats(len(name)) for name in ("../up", "/etc", "", "é\n", "a/b")
    },
    "a tensor named as the header's metadata": lambda: {"__metadata__": floats(3)},
    "that name beside the one it gets in the file": lambda: {
        "__metadata__": floats(3),
        "tensor": floats(2),
        "__metadata___": floats(4),
    },
}  # fmt: skip


def reopen(store: TierStore) -> TierStore:
    store.close()
    return open_store(core_of(store).directory.path, device=store.device.type)


def assert_comes_back(store: TierStore, group: Group, expected: Group) -> None:
    """Check a group from memory, disk and a new store. Only non-empty groups cause reads."""
    store.put("key", group)
    assert_group(store.get("key"), expected)
    assert store.stats().bytes_read == 0
    push_out(store, "key")
    tensors = [expected] if isinstance(expected, torch.Tensor) else list(expected.values())
    some = any(tensor.numel() for tensor in tensors)
    before = store.stats().bytes_read
    assert_group(store.get("key"), expected)
    assert (store.stats().bytes_read > before) == some
    again = reopen(store)
    try:
        assert tiers_of(again, "key") == ("DISK",)
        assert_group(again.get("key"), expected)
        assert (again.stats().bytes_read > 0) == some
    finally:
        again.close()


def on(device: str, group: Group) -> Group:
    """Return the tensors on a device, with their strides but without shared memory."""
    if device == "cpu":
        return group
    if isinstance(group, torch.Tensor):
        there = torch.empty_strided(group.shape, group.stride(), dtype=group.dtype, device=device)
        storage = torch.empty(0, dtype=group.dtype).set_(group.detach().untyped_storage())
        moved = storage.to(device)
        return there.set_(
            moved.untyped_storage(), group.storage_offset(), group.shape, group.stride()
        )
    return {name: on(device, tensor) for name, tensor in group.items()}


@on_both
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(name: str, device: str, disk_dir: Path) -> None:
    expected = random_tensor(DTYPES[name], 3, 50)
    assert_comes_back(open_store(disk_dir, device=device), on(device, expected), expected)


def test_every_dtype_of_safetensors_is_covered() -> None:
    assert set(DTYPES.values()) >= set(safetensors.torch._TYPES.values())


@on_both
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_and_stride_comes_back(name: str, device: str, disk_dir: Path) -> None:
    expected = SHAPES[name]()
    assert_comes_back(open_store(disk_dir, device=device), on(device, expected), expected)


@pytest.mark.parametrize("view", ["conj", "neg", "conj of a slice"])
def test_conjugated_and_negated_views_come_back_as_values(view: str, disk_dir: Path) -> None:
    plain = complexes(2, 3)
    seen = {"conj": plain.conj(), "neg": plain.conj().imag, "conj of a slice": plain[:, 1:].conj()}
    group = seen[view]
    assert group.is_conj() or group.is_neg(), "the case tests nothing"
    with open_store(disk_dir) as store:
        store.put("key", group)
        for _ in range(2):
            found = store.get("key")
            assert torch.equal(found, group)
            assert bits(found) == bits(group)
            push_out(store, "key")
        assert store.stats().bytes_read > 0


def test_get_returns_tensors_the_caller_owns(disk_dir: Path) -> None:
    mine = pages(1)
    with open_store(disk_dir) as store:
        store.put("key", mine)
        mine.fill_(2)
        first = store.get("key")
        assert isinstance(first, torch.Tensor)
        first.fill_(3)
        assert_group(store.get("key"), pages(1))
        push_out(store, "key")
        assert_group(store.get("key"), pages(1))
    assert_same(first, pages(3))  # still there when the store is closed


# Ties -------------------------------------------------------------------------------------------


def tied_group() -> dict[str, torch.Tensor]:
    base = floats(8, 8)
    raw = random_tensor(torch.uint8, 64)
    return {
        "weight": base,
        "same": base,
        "turned": base.t(),
        "rows": base[2:5],
        "gaps": base[::2, ::3],
        "as integers": base.view(torch.int32),
        "apart": floats(8, 8),
        "bytes": raw[1:9],
        "word in the bytes": raw[4:12].view(torch.float32),
    }


SHARING = {"weight", "same", "turned", "rows", "gaps", "as integers"}


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def assert_tied(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that the same tensors share memory: a write through one is visible in all."""
    found["weight"].view(torch.int32).copy_(torch.arange(64, dtype=torch.int32).reshape(8, 8))
    expected["weight"].view(torch.int32).copy_(torch.arange(64, dtype=torch.int32).reshape(8, 8))
    found["bytes"].fill_(9)
    expected["bytes"].fill_(9)
    assert_group(dict(found), expected)
    assert len({memory_of(found[name]) for name in SHARING}) == 1
    assert memory_of(found["bytes"]) == memory_of(found["word in the bytes"])


@on_both
@pytest.mark.parametrize("place", ["memory", "disk", "a new store"])
def test_tied_tensors_stay_tied(place: str, device: str, disk_dir: Path) -> None:
    store = open_store(disk_dir, device=device)
    store.put("key", tied_group())
    if place == "disk":
        push_out(store, "key")
    elif place == "a new store":
        store = reopen(store)
    found = store.get("key")
    assert isinstance(found, dict)
    assert_tied(found, tied_group())
    with store.acquire("key", Access.UPDATE) as lease:
        shared = lease.tensors["weight"]
        shared.zero_()
        assert not lease.tensors["turned"].cpu().any()
    assert (store.stats().bytes_read > 0) == (place != "memory")
    store.close()


def test_tied_tensors_take_space_once(disk_dir: Path) -> None:
    base = pages(1, 10)
    with open_store(disk_dir, ram=16 * PAGE) as store:
        store.put("tied", {"a": base, "b": base[:500], "c": base.view(-1, 8).t()})
        assert store.stats().used_bytes["HOST"] == 10 * PAGE
        store.flush()
        assert object_file(disk_dir, "tied").stat().st_size < 12 * PAGE


def test_expanded_tensor_takes_the_space_of_its_elements(disk_dir: Path) -> None:
    with open_store(disk_dir, ram=4 * PAGE) as store:
        store.put("key", torch.ones(4, 1).expand(4, 1 << 20))
        assert store.stats().used_bytes["HOST"] == PAGE
        with store.acquire("key") as lease:
            assert tuple(lease.tensor.shape) == (4, 1 << 20)


# Replacing --------------------------------------------------------------------------------------

VERSIONS = 60
PARTS = 5


def version(number: int) -> dict[str, torch.Tensor]:
    return {f"part{i}": torch.full((700,), float(number)) for i in range(PARTS)}


class Witness:
    """Reads a group repeatedly and records every read that mixes two versions."""

    def __init__(self, store: TierStore) -> None:
        self.store = store
        self.torn: list[set[float]] = []
        self.seen: set[float] = set()
        self.stop = threading.Event()

    def __call__(self) -> None:
        while not self.stop.is_set():
            with self.store.acquire("key") as lease:
                values = {v for t in lease.tensors.values() for v in t.unique().tolist()}
                if len(values) != 1:
                    self.torn.append(values)
                self.seen |= values


def replaced_under_readers(store: TierStore, replace: Callable[[int], None]) -> list[Witness]:
    store.put("key", version(0))
    witnesses = [Witness(store) for _ in range(3)]

    def write() -> None:
        try:
            for number in range(1, VERSIONS):
                replace(number)
                push_aside(store, number)
        finally:
            for witness in witnesses:
                witness.stop.set()

    assert run_threads([*witnesses, write]) == []
    return witnesses


def push_aside(store: TierStore, number: int) -> None:
    """Occasionally evict the group, so that readers read from disk."""
    if number % 5 == 0:
        store.put("other", pages(number, 6), durable=False)


def test_readers_see_the_old_or_the_new_group(disk_dir: Path) -> None:
    with open_store(disk_dir, ram=14 * PAGE) as store:
        witnesses = replaced_under_readers(store, lambda n: store.put("key", version(n)))
        assert all(witness.torn == [] for witness in witnesses)
        assert len(set.union(*(witness.seen for witness in witnesses))) > 2
        assert_group(store.get("key"), version(VERSIONS - 1))
        store.discard("other")
        assert_at_rest(store)
    with open_store(disk_dir) as again:
        assert_group(again.get("key"), version(VERSIONS - 1))


def test_readers_would_notice_a_mix(disk_dir: Path) -> None:
    """The control: a writer that overwrites the group in place is caught."""
    store = open_store(disk_dir, ram=14 * PAGE)

    def overwrite(number: int) -> None:
        with store.acquire("key") as lease:
            for i, tensor in enumerate(lease.tensors.values()):
                tensor.fill_(number)
                if i == PARTS // 2:
                    halfway.wait(timeout=0.01)

    halfway = threading.Event()
    witnesses = replaced_under_readers(store, overwrite)
    assert any(witness.torn for witness in witnesses)
    store.close()


def test_lease_of_the_old_group_keeps_it(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with store.acquire("key") as old:
            store.put("key", pages(2))
            assert_same(old.tensor, pages(1))
            assert_group(store.get("key"), pages(2))
            store.discard("key")
            assert_same(old.tensor, pages(1))
            assert "key" not in store
        assert_at_rest(store)
        assert store.stats().used_bytes == {"HOST": 0, "DISK": 0}


def slow_fill(store: TierStore, name: str) -> tuple[threading.Event, threading.Event]:
    """Stop puts of the thread `name` before they copy; return (has stopped, may continue)."""
    stopped, go_on = threading.Event(), threading.Event()
    fill = core_of(store).tiers.host.fill

    def patched(entry: Any, blocks: Mapping[str, torch.Tensor]) -> None:
        if threading.current_thread().name == name:
            stopped.set()
            assert go_on.wait(60)
        fill(entry, blocks)

    core_of(store).tiers.host.fill = patched
    return stopped, go_on


@pytest.mark.parametrize("meanwhile", ["put and flush", "discard"])
def test_slow_put_overtaken_by_others_is_not_lost(meanwhile: str, disk_dir: Path) -> None:
    """Disk and memory agree on which of two concurrent puts came last."""
    store = open_store(disk_dir)
    store.put("key", pages(0))
    store.flush()
    stopped, go_on = slow_fill(store, "slow")
    slow = threading.Thread(target=lambda: store.put("key", pages(1)), name="slow", daemon=True)
    slow.start()
    assert stopped.wait(60)
    if meanwhile == "discard":
        store.discard("key")
    else:
        store.put("key", pages(2))
        store.flush()
    go_on.set()
    join(slow)
    last = store.get("key")
    assert isinstance(last, torch.Tensor)
    push_out(store, "key")
    assert_group(store.get("key"), last)
    store = reopen(store)
    assert_group(store.get("key"), last)
    assert store.stats().bytes_read > 0
    store.close()


# Durability --------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
from tests.store.test_put_get import lasting, pages
from tests.store.helpers import open_store
from pathlib import Path
store = open_store(Path(sys.argv[1]))
for key, group in lasting().items():
    store.put(key, pages(-1))
    store.put(key, group)
store.put("fleeting", pages(5), durable=False)
store.flush()
store.put("late", pages(6))
store.put(next(iter(lasting())), pages(7))
print("flushed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def lasting() -> dict[str, Group]:
    return {
        "plain": pages(1, 3),
        "tied": {"weight": floats(6, 6), "turned": floats(6, 6).t()},
        "mixed": {name: random_tensor(dtype, 5) for name, dtype in DTYPES.items()},
        "empty": torch.empty(0, 3),
    }


def test_flushed_group_survives_a_kill(disk_dir: Path) -> None:
    done = run_python("-c", DIES, disk_dir)
    assert (done.stdout, done.returncode) == ("flushed\n", -signal.SIGKILL), done.stderr
    with open_store(disk_dir) as store:
        assert set(store.keys()) == set(lasting())
        for key, group in lasting().items():
            assert_group(store.get(key), group)
        assert store.stats().bytes_read > 0
        store.put("late", pages(6))
        store.flush()


@pytest.mark.parametrize("name", ["plain", "mixed", "empty"])
def test_object_files_load_with_plain_safetensors(name: str, disk_dir: Path) -> None:
    group = lasting()[name]
    tensors = {name: group} if isinstance(group, torch.Tensor) else dict(group)
    tensors.pop("F8_E8M0", None)  # no release of safetensors converts this dtype for torch
    with open_store(disk_dir) as store:
        store.put(name, group if isinstance(group, torch.Tensor) else tensors)
        store.flush()
        loaded = safetensors.torch.load_file(object_file(disk_dir, name))
    assert_group(loaded, tensors)


def test_strided_tensors_are_stored_as_raw_bytes(
    disk_dir: Path,
) -> None:
    with open_store(disk_dir) as store:
        store.put("key", {"turned": floats(4, 6).t(), "whole": floats(2)})
        store.flush()
        loaded = safetensors.torch.load_file(object_file(disk_dir, "key"))
    assert loaded["turned"].dtype == torch.uint8
    assert bits(loaded["turned"]) == bits(floats(4, 6))
    assert_same(loaded["whole"], floats(2))


@on_both
def test_ephemeral_group_leaves_no_file(device: str, disk_dir: Path) -> None:
    store = open_store(disk_dir, device=device)
    nothing = files_below(disk_dir)
    store.put("fleeting", pages(5, 3), durable=False)
    push_out(store, "fleeting")
    assert store.stats().bytes_written >= 3 * PAGE, "nothing was spilled: this proves nothing"
    assert files_below(disk_dir) == nothing
    assert_group(store.get("fleeting"), pages(5, 3))
    assert store.stats().bytes_read >= 3 * PAGE
    store.flush()
    assert files_below(disk_dir) == nothing
    store = reopen(store)
    assert store.keys() == []
    assert files_below(disk_dir) == nothing
    store.close()


def test_durable_group_leaves_a_file(disk_dir: Path) -> None:
    """The control for the test above."""
    with open_store(disk_dir) as store:
        nothing = files_below(disk_dir)
        store.put("lasting", pages(5))
        store.flush()
        assert files_below(disk_dir) > nothing


def test_group_made_ephemeral_is_gone_after_reopening(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("key", pages(1))
    store.flush()
    store.put("key", pages(2), durable=False)
    assert_group(store.get("key"), pages(2))
    store = reopen(store)
    # Only an acknowledged value, and never a damaged one.
    if "key" in store:
        assert_group(store.get("key"), pages(1))
    store.close()


KEYS = {
    "slashes": "a/b//c/",
    "upwards": "../../outside",
    "dots": "..",
    "absolute": "/etc/passwd",
    "spaces": "  two  words  ",
    "control characters": "\x00\x01\x1b[31m\n\r\t\x7f",
    "a version in it": "key\x007",
    "the header's metadata": "__metadata__",
    "json": '{"a": [1, "\\u0000"]}',
    "longest": "k" * 1024,
    "longest in two bytes": "é" * 512,
    "not ASCII": "鍵 🔑 \u202e",
    "composed": "\u00e9",
    "decomposed": "e\u0301",
    "like ours": "weights/0123456789abcdef",
    "upper": "KEY",
    "lower": "key",
}


def test_keys_of_every_kind_work(disk_dir: Path) -> None:
    expected = {key: pages(i) for i, key in enumerate(KEYS.values())}
    store = open_store(disk_dir)
    for key, tensor in expected.items():
        store.put(key, {key: tensor})
    push_out(store, *expected)
    store = reopen(store)
    assert store.keys() == sorted(expected)
    assert len(store) == len(list(store)) == len(expected)
    for key, tensor in expected.items():
        assert key in store
        assert_group(store.get(key), {key: tensor})
    assert store.stats().bytes_read >= len(expected) * PAGE
    assert store.keys("k") == sorted(key for key in expected if key.startswith("k"))
    store.close()
    assert set(disk_dir.parent.iterdir()) == {disk_dir}
    names = {Path(name).name for name in files_below(disk_dir)}
    assert all(name.isascii() and len(name) < 60 for name in names)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("", ValueError),
        ("k" * 1025, ValueError),
        ("é" * 513, ValueError),
        ("\ud800", ValueError),
        (3, TypeError),
        (None, TypeError),
        (b"key", TypeError),
    ],
)
def test_invalid_keys_raise(key: object, error: type[Exception], disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        with pytest.raises(error):
            store.put(key, pages(1))
        assert len(store) == 0
        assert key not in store
        assert_at_rest(store)


# Anything at all ---------------------------------------------------------------------------------


@st.composite
def strided(draw: st.DrawFn, storages: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Draw a view of a storage: any shape, stride and offset that stays inside it."""
    # Some dtypes more often than others, so that several element sizes share one storage.
    dtype = DTYPES[draw(st.sampled_from(["U8", "F32", "C64"]) | st.sampled_from(sorted(DTYPES)))]
    kind = "bool" if dtype is torch.bool else draw(st.sampled_from(["raw", "other"]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    stride = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 7))
    return storages[kind].view(dtype).as_strided(shape, stride, offset)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    seed = draw(st.integers(0, 99))
    storages = {
        "raw": random_tensor(torch.uint8, 1024, seed=seed),
        "other": random_tensor(torch.uint8, 1024, seed=seed + 1),
        "bool": random_tensor(torch.bool, 1024, seed=seed),
    }
    if draw(st.booleans()):
        return draw(strided(storages))
    return draw(st.dictionaries(st.text(max_size=4), strided(storages), max_size=5))


@settings(max_examples=80)
@given(group=groups())
def test_any_group_comes_back(group: Group, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_comes_back(open_store(tmp_path_factory.mktemp("any") / "store"), group, group)


# Accelerators ------------------------------------------------------------------------------------


@needs_accelerator
@pytest.mark.two_devices
def test_device_groups_are_put_and_come_back(disk_dir: Path) -> None:
    with open_store(disk_dir, device=ACCELERATOR) as store:
        store.put("key", {"here": pages(1).to(ACCELERATOR), "there": pages(2).to(DEVICE_1)})
        store.put("host", pages(3))
        for _ in range(2):
            found = store.get("key")
            assert isinstance(found, dict)
            assert {str(tensor.device) for tensor in found.values()} == {DEVICE_0}
            assert_group(found, {"here": pages(1), "there": pages(2)})
            assert store.get("host").device.type == ACCELERATOR
            push_out(store, "key", "host")
        assert store.stats().bytes_onloaded >= 6 * PAGE


@needs_accelerator
def test_device_update_is_read_back(disk_dir: Path) -> None:
    store = open_store(disk_dir, device=ACCELERATOR)
    store.put("key", pages(1))
    for step in range(2, 5):
        with store.acquire("key", Access.UPDATE) as lease:
            lease.tensor.fill_(step)
        push_out(store, "key")
        assert_group(store.get("key"), pages(step))
    stats = store.stats()
    assert stats.bytes_offloaded == 3 * PAGE, "only changed groups are offloaded"
    assert stats.bytes_read >= 3 * PAGE
    store = reopen(store)
    assert_group(store.get("key"), pages(4))
    store.close()


@pytest.mark.pretend_only("late")
@pytest.mark.parametrize("change", ["queued", "none"])
def test_queued_update_is_saved(change: str, late_pretend: Any, disk_dir: Path) -> None:
    """The offload waits for the onload, and for the last user's stream."""
    store = open_store(disk_dir, device=ACCELERATOR)
    store.put("key", pages(1))
    source = pages(2).pin_memory()
    with torch.Stream(device=DEVICE_0), store.acquire("key", Access.UPDATE) as lease:
        if change == "queued":
            lease.tensor.copy_(source, non_blocking=True)
    push_out(store, "key")
    store = reopen(store)
    assert_group(store.get("key"), pages(2 if change == "queued" else 1))
    assert store.stats().bytes_read == PAGE
    store.close()


@pytest.mark.pretend_only("late")
@pytest.mark.parametrize("way", ["acquire", "get"])
def test_side_stream_waits_for_its_acquire(way: str, late_pretend: Any, disk_dir: Path) -> None:
    with open_store(disk_dir, device=ACCELERATOR) as store:
        store.put("key", pages(3))
        with torch.Stream(device=DEVICE_0):
            if way == "get":
                doubled = store.get("key") * 2
            else:
                with store.acquire("key") as lease:
                    doubled = lease.tensor * 2
            assert_same(doubled, pages(6))


@pytest.mark.pretend_only("late")
def test_side_stream_without_the_wait_reads_garbage(late_pretend: Any, disk_dir: Path) -> None:
    """The control for the test above."""
    with open_store(disk_dir, device=ACCELERATOR) as store:
        core_of(store).order_after_arrival = lambda entry, stream: None
        store.put("key", pages(3))
        with torch.Stream(device=DEVICE_0), store.acquire("key") as lease:
            assert not torch.equal((lease.tensor * 2).cpu(), pages(6))


def read_late(store: TierStore) -> torch.Tensor:
    """Queue a download on the caller's stream, release, and reuse the slot."""
    mine = torch.Stream(device=DEVICE_0)
    target = torch.zeros(
        core_of(store).planner.budgets[core_of(store).planner.top] // 4,
        pin_memory=True,
    )
    with mine, store.acquire("first") as lease:
        target.copy_(lease.tensor, non_blocking=True)
    with store.acquire("second") as lease:
        assert_same(lease.tensor, pages(2, 4))
    mine.synchronize()
    return target


@pytest.mark.pretend_only("late")
def test_memory_is_reused_after_its_last_reader(late_pretend: Any, disk_dir: Path) -> None:
    with open_store(disk_dir, device=ACCELERATOR, device_budget=4 * PAGE) as store:
        store.put("first", pages(1, 4))
        store.put("second", pages(2, 4))
        assert_same(read_late(store), pages(1, 4))


@pytest.mark.pretend_only("late")
def test_memory_without_release_guard_is_read_late(late_pretend: Any, disk_dir: Path) -> None:
    """The control for the test above."""
    with open_store(disk_dir, device=ACCELERATOR, device_budget=4 * PAGE) as store:
        core_of(store).tiers.device.used_on = lambda entry, event: None
        store.put("first", pages(1, 4))
        store.put("second", pages(2, 4))
        assert not torch.equal(read_late(store), pages(1, 4))
