"""Bad input and failures: a clear error with the names and numbers, and nothing is lost."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.accelerator import ACCELERATOR, needs_accelerator, pretend
from tests.faults.interrupting import at_call
from tests.helpers.engine import core_of
from tests.helpers.files import flip_bit, object_file, open_files
from tests.helpers.processes import output_of
from tests.helpers.system_calls import system_call
from tests.store.helpers import (
    PAGE,
    PATIENCE,
    assert_at_rest,
    assert_group,
    assert_same,
    is_root,
    join,
    memory_held,
    on_both,
    open_store,
    pages,
    push_out,
    run_threads,
    tiers_of,
    wait_until,
    wait_until_idle,
)
from tierstore import Access, CorruptDataError, TierStore, TierStoreError, TransferError
from tierstore.errors import (
    BudgetError,
    ClosedError,
    DiskFullError,
    DuplicateKeyError,
    InvalidHeaderError,
    LeaseError,
    StaleCheckpointError,
    StoreLockedError,
    TruncatedFileError,
    UnknownKeyError,
)
from tierstore.model.locks import AutoResetEvent

ROOT = Path(__file__).resolve().parents[2]


def says(error: pytest.ExceptionInfo[BaseException], *parts: object) -> None:
    """Check that the message contains all of these."""
    message = str(error.value)
    for part in parts:
        assert str(part) in message, f"{part!r} is not in {message!r}"


# Budgets -----------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("way", ["put", "acquire", "prefetch and acquire", "get"])
def test_group_larger_than_the_budget_raises(way: str, device: str, disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("large", pages(1, 9))
    options = {} if device == "cpu" else {"device_budget": 8 * PAGE}
    with open_store(disk_dir, 8 * PAGE, device, **options) as store:
        store.put("small", pages(2))
        with pytest.raises(BudgetError) as error:
            if way == "put":
                store.put("large", pages(3, 9))
            else:
                if way != "acquire":
                    store.prefetch("large")  # a hint: it raises nothing
                store.get("large")
        assert (error.value.key, error.value.nbytes, error.value.budget) == (
            "large",
            9 * PAGE,
            8 * PAGE,
        )
        says(error, "'large'", f"{9 * PAGE:,}", f"{8 * PAGE:,}", "_budget")
        assert_group(store.get("small"), pages(2))
        assert_at_rest(store)
    with open_store(disk_dir) as store:
        assert_group(store.get("large"), pages(1, 9))


@needs_accelerator
def test_group_larger_than_the_device_budget_raises(disk_dir: Path) -> None:
    with open_store(disk_dir, 16 * PAGE, ACCELERATOR, device_budget=4 * PAGE) as store:
        store.put("large", pages(1, 5))
        with pytest.raises(BudgetError) as error:
            store.acquire("large")
        assert error.value.tier == "DEVICE"
        says(error, "DEVICE", f"{5 * PAGE:,}", f"{4 * PAGE:,}", "device_budget")
        assert_at_rest(store)
    with open_store(disk_dir) as store:
        assert_group(store.get("large"), pages(1, 5))


AMBIGUOUS = ["8", "0.5", "8G", "8 gigs", "", "-1GB", "0GB", "150%", "0%", "nan%", "1e9", "8gib8"]


@pytest.mark.parametrize(
    "name",
    ["ram_budget", pytest.param("device_budget", marks=needs_accelerator), "disk_budget"],
)
@pytest.mark.parametrize("size", AMBIGUOUS)
def test_size_with_two_readings_raises(name: str, size: str, tmp_path: Path) -> None:
    budgets: dict[str, Any] = {"ram_budget": "64MiB", name: size}
    device = ACCELERATOR if name == "device_budget" else "cpu"
    with pytest.raises(ValueError) as error:
        TierStore(disk_dir=tmp_path / "store", device=device, **budgets)
    says(error, repr(size))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("size", [True, None, b"8GB", [8], 1.5, -1, 0, float("nan"), 100])
def test_size_malformed_raises(size: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        TierStore(size, tmp_path / "store", device="cpu")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"policy": "mru"}, ["mru", "next-use", "lru"]),
        ({"verify": "sometimes"}, ["sometimes", "first", "always", "never"]),
        ({"device": "meta"}, ["meta"]),
        ({"device_budget": "1GB"}, ["device_budget", "ram_budget"]),
    ],
)
def test_impossible_arguments_raise(
    options: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        TierStore("64MiB", tmp_path / "store", **{"device": "cpu", **options})
    says(error, *parts)


def threads_of_stores() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tierstore")]


def test_disk_budget_below_stored_bytes_raises(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        for i in range(4):
            store.put(f"key{i}", pages(i, 2))
    gc.collect()
    threads = threads_of_stores()
    with pytest.raises(BudgetError) as error:
        open_store(disk_dir, disk_budget=7 * PAGE)
    says(error, f"{8 * PAGE:,}", f"{7 * PAGE:,}", "disk_budget", "tierstore-inspect rm")
    assert threads_of_stores() == threads, "the store that failed to open left threads"
    assert not [name for name in open_files().values() if str(disk_dir) in name]
    with open_store(disk_dir, disk_budget=8 * PAGE) as store:
        assert_group(store.get("key3"), pages(3, 2))


def test_disk_budget_exceeded_by_a_flush_raises(disk_dir: Path) -> None:
    store = open_store(disk_dir, disk_budget=4 * PAGE)
    for i in range(3):
        store.put(f"key{i}", pages(i, 2))
    with pytest.raises(BudgetError) as error:
        store.flush()
    assert error.value.tier == "DISK"
    says(error, f"{2 * PAGE:,}", f"{4 * PAGE:,}", "disk_budget")
    for i in range(3):
        assert_group(store.get(f"key{i}"), pages(i, 2))
    store.discard("key0")
    store.flush()
    store.close()
    with open_store(disk_dir, disk_budget=4 * PAGE) as store:
        assert store.keys() == ["key1", "key2"]
        assert_group(store.get("key2"), pages(2, 2))


def test_disk_budget_exceeded_by_a_spill_raises(disk_dir: Path) -> None:
    store = open_store(disk_dir, 4 * PAGE, disk_budget=4 * PAGE)
    for i in range(2):
        store.put(f"key{i}", pages(i, 4), durable=False)
    with pytest.raises(BudgetError) as error:
        store.put("key2", pages(2, 4), durable=False)
    says(error, f"{4 * PAGE:,}", "disk_budget")
    assert "key2" not in store
    assert_group(store.get("key1"), pages(1, 4))
    with pytest.raises(BudgetError):
        store.get("key0")  # could only be swapped with key1, which needs more space
    store.discard("key1")
    assert_group(store.get("key0"), pages(0, 4))
    assert store.stats().bytes_read > 0
    store.discard("key0")
    store.put("key2", pages(2, 4), durable=False)
    assert_group(store.get("key2"), pages(2, 4))
    assert_at_rest(store)
    store.close()


# Keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.acquire("nothing"),
        lambda store: store.get("nothing"),
        lambda store: store.prefetch(["there", "nothing"]),
        lambda store: store.offload("nothing"),
        lambda store: store.discard("nothing"),
    ],
    ids=["acquire", "get", "prefetch", "offload", "discard"],
)
def test_unknown_key_raises(call: Callable[[TierStore], object], disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("there", pages(1))
        with pytest.raises(UnknownKeyError) as error:
            call(store)
        assert isinstance(error.value, KeyError)
        assert error.value.key == "nothing"
        says(error, "'nothing'", "store.keys()")
        assert_group(store.get("there"), pages(1))
        assert_at_rest(store)


def test_duplicate_key_raises(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": pages(1), "b": pages(2)}, path)
    with open_store(disk_dir) as store:
        store.put("m/b", pages(3))
        for call in (
            lambda: store.register_checkpoint(path, "m/"),
            lambda: store.register("m/b", {"b": pages(4)}),
        ):
            with pytest.raises(DuplicateKeyError) as error:
                call()
            assert error.value.key == "m/b"
            says(error, "'m/b'", "discard")
        assert store.keys() == ["m/b"], "half of a checkpoint was registered"
        assert_group(store.get("m/b"), pages(3))
        assert_at_rest(store)


def test_unknown_key_error_suggests_a_similar_key(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        for key in ("layer", "other"):
            store.put(key, pages(1))
        with pytest.raises(UnknownKeyError, match=r"no group 'layr' \(did you mean 'layer'\?\)"):
            store.get("layr")
        with pytest.raises(UnknownKeyError) as error:
            store.get("elsewhere")
        assert "did you mean" not in str(error.value)


def test_checkpoint_without_the_requested_tensor_raises(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": pages(1)}, path)
    with open_store(disk_dir) as store:
        with pytest.raises(UnknownKeyError, match="checkpoint has no tensor 'b'"):
            store.register_checkpoint(path, groups={"block": ["a", "b"]})
        assert store.keys() == []


# Tensors -----------------------------------------------------------------------------------------

UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "compressed sparse": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "complex128": (lambda: torch.ones(2, dtype=torch.complex128), "complex128"),
    "complex32": (lambda: torch.ones(2).half().view(torch.complex32), "complex32"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "quint8"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "'key'"),
    "text": (lambda: "weights", "str"),
    "a number": (lambda: 3.5, "float"),
    "nothing": (lambda: None, "NoneType"),
    "a list": (lambda: [torch.ones(2)], "list"),
    "text in a dict": (lambda: {"a": torch.ones(2), "b": "text"}, "'b'"),
    "a dict in a dict": (lambda: {"a": {"b": torch.ones(2)}}, "'a'"),
    "a name that is no text": (lambda: {1: torch.ones(2)}, "int"),
    "a name that is no UTF-8": (lambda: {"\udcff": torch.ones(2)}, "udcff"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_that_cannot_be_stored_raise(kind: str, disk_dir: Path) -> None:
    make, part = UNFIT[kind]
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with pytest.raises((TypeError, ValueError)) as error:
            store.put("key", make())
        says(error, part)
        assert_group(store.get("key"), pages(1))
        assert_at_rest(store)


# Checkpoints -------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": pages(1), "b": pages(2, 3)}, path)
    return path


LAYERS = 8
"""Large enough that read-ahead after the first one never reaches the last."""


def layers(first: int) -> dict[str, torch.Tensor]:
    return {f"layer{i}": pages(first + i, 4) for i in range(LAYERS)}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def newer(path: Path) -> Path:
    """Write the same checkpoint with other values beside it."""
    new = path.with_suffix(".new")
    few = path.stat().st_size < LAYERS * 4 * PAGE
    save_file({"a": pages(7), "b": pages(8, 3)} if few else layers(100), new)
    return new


def rewrite_by_rename(path: Path) -> None:
    os.replace(newer(path), path)


def overwrite(path: Path, restored: bool) -> None:
    """Write other values in place, as a restarted download may do."""
    times = path.stat()
    with open(path, "r+b") as file:
        file.write(newer(path).read_bytes())
    if restored:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


IN_PLACE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "overwritten": lambda path: overwrite(path, False),
    "overwritten, its time restored": lambda path: overwrite(path, True),
}
NAME_ONLY: dict[str, Callable[[Path], object]] = {
    "rewritten and renamed": rewrite_by_rename,
    "removed": Path.unlink,
    "replaced by a directory": lambda path: (path.unlink(), path.mkdir()),
}


@on_both
@pytest.mark.parametrize("opened", [False, True], ids=["not yet read", "half read"])
@pytest.mark.parametrize("change", IN_PLACE)
def test_checkpoint_changed_after_registration_raises(
    change: str, opened: bool, device: str, checkpoint: Path, disk_dir: Path
) -> None:
    save_file(layers(0), checkpoint)
    last = f"m/layer{LAYERS - 1}"
    with open_store(disk_dir, device=device) as store:
        store.register_checkpoint(checkpoint, "m/")
        store.put("other", pages(5))
        if opened:
            assert_group(store.get("m/layer0"), pages(0, 4))
            wait_until_idle(store)
        assert tiers_of(store, last) == ("DISK",)
        IN_PLACE[change](checkpoint)
        for _ in range(2):  # the second time, too
            with pytest.raises(StaleCheckpointError) as error:
                store.get(last)
            assert (error.value.path, error.value.key) == (str(checkpoint), last)
            says(error, checkpoint)
        if opened:
            assert_group(store.get("m/layer0"), pages(0, 4))  # the copy in memory is still right
        assert_group(store.get("other"), pages(5))
        assert_at_rest(store)


@on_both
@pytest.mark.parametrize("change", NAME_ONLY)
def test_checkpoint_deleted_while_open_is_still_read(
    change: str, device: str, checkpoint: Path, disk_dir: Path
) -> None:
    """The file stays open and readable, like a mapped one, while a group is in it."""
    save_file(layers(0), checkpoint)
    with open_store(disk_dir, device=device) as store:
        keys = store.register_checkpoint(checkpoint, "m/")
        NAME_ONLY[change](checkpoint)
        for _ in range(2):
            for number in range(LAYERS):
                assert_group(store.get(f"m/layer{number}"), pages(number, 4))
            push_out(store, *keys)
        assert store.stats().bytes_read > LAYERS * 4 * PAGE
        assert open_files(checkpoint.parent)
        for key in keys:
            store.discard(key)
        wait_until(lambda: not open_files(checkpoint), "it stays open")
        assert_at_rest(store)


def test_checkpoint_deleted_while_closed_raises(checkpoint: Path, disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        with system_call(
            "open", fails_with=errno.EMFILE, at=2, when=lambda c: c.args[0] == str(checkpoint)
        ):
            store.register_checkpoint(checkpoint, "m/")
        checkpoint.unlink()
        for _ in range(2):
            with pytest.raises(StaleCheckpointError, match="is gone") as error:
                store.get("m/b")
            assert (error.value.path, error.value.key) == (str(checkpoint), "m/b")
        assert_at_rest(store)


def test_checkpoint_without_stamp_check_reads_new_bytes(checkpoint: Path, disk_dir: Path) -> None:
    """The control: without the check, the change is not noticed."""
    with open_store(disk_dir) as store:
        store.register_checkpoint(checkpoint, "m/")
        core_of(store).tiers.disk.files.check = lambda file, held: None  # type: ignore[method-assign]
        overwrite(checkpoint, restored=True)
        assert_group(store.get("m/b"), pages(8, 3))


@pytest.mark.parametrize("replaced", [True, False], ids=["rewritten and renamed", "overwritten"])
def test_changed_checkpoint_can_be_registered_again(
    replaced: bool, checkpoint: Path, disk_dir: Path
) -> None:
    """As the error advises. Groups registered before are not read from the new file."""
    with open_store(disk_dir) as store:
        store.register_checkpoint(checkpoint, "old/")
        assert_group(store.get("old/a"), pages(1))
        rewrite_by_rename(checkpoint) if replaced else overwrite(checkpoint, False)
        store.register_checkpoint(checkpoint, "new/")
        assert_group(store.get("new/b"), pages(8, 3))
        push_out(store, "old/a", "old/b", "new/b")
        for key in () if replaced else ("old/a", "old/b"):
            with pytest.raises(StaleCheckpointError):
                store.get(key)
        if replaced:
            assert_group(store.get("old/b"), pages(2, 3))
        assert_group(store.get("new/b"), pages(8, 3))
        store.discard("old/a")
        store.discard("old/b")
        store.register_checkpoint(checkpoint, "old/")
        assert_group(store.get("old/a"), pages(7))


def test_bit_flip_under_verify_always_raises(checkpoint: Path, disk_dir: Path) -> None:
    """A decaying disk changes no stamp. The first read is trusted; the second must equal it."""
    with open_store(disk_dir, verify="always") as store:
        store.register_checkpoint(checkpoint, "m/")
        assert_group(store.get("m/b"), pages(2, 3))
        push_out(store, "m/b")
        core_of(store).tiers.disk.files.check = lambda file, held: None  # type: ignore[method-assign]
        flip_bit(checkpoint, -1)
        with pytest.raises(CorruptDataError) as error:
            store.get("m/b")
        says(error, "'m/b'", checkpoint, error.value.expected, error.value.found)
        assert error.value.expected != error.value.found


def header(document: object) -> bytes:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(raw).to_bytes(8, "little") + raw


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x02\0\0",
    "no header": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": header(b"{not json}") + bytes(4),
    "a list": header([]) + bytes(4),
    "unknown dtype": header({"a": {**F32, "dtype": "F33"}}) + bytes(4),
    "negative shape": header({"a": {**F32, "shape": [-1]}}) + bytes(4),
    "overlapping": header({"a": F32, "b": F32}) + bytes(4),
    "past the end": header({"a": {**F32, "shape": [2], "data_offsets": [0, 8]}}) + bytes(4),
    "bytes left over": header({"a": F32}) + bytes(8),
    "too large for its bytes": header({"a": {**F32, "shape": [1 << 62]}}) + bytes(4),
    "twice the same name": header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    + bytes(4),
    "a pickle": b"\x80\x02}q\0." + bytes(100),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_checkpoint_raises(kind: str, tmp_path: Path, disk_dir: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(MALFORMED[kind])
    with open_store(disk_dir) as store:
        with pytest.raises(InvalidHeaderError) as error:
            store.register_checkpoint(path)
        assert error.value.path == str(path)
        says(error, path)
        assert store.keys() == []
        store.put("key", pages(1))
        assert_group(store.get("key"), pages(1))


def write_index(directory: Path, document: object) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return path


INDEXES: dict[str, tuple[object, str]] = {
    "a file that is missing": (
        {"weight_map": {"a": "gone.safetensors"}},
        "gone.safetensors, which the checkpoint needs",
    ),
    "a file above": ({"weight_map": {"a": "../secret.safetensors"}}, "index.json"),
    "the directory above": ({"weight_map": {"a": ".."}}, "index.json"),
    "an absolute path": ({"weight_map": {"a": "/etc/passwd"}}, "index.json"),
    "a path with a NUL": ({"weight_map": {"a": "a\0b.safetensors"}}, "index.json"),
    "the empty name": ({"weight_map": {"a": ""}}, "index.json"),
    "a number for a file": ({"weight_map": {"a": 3}}, "index.json"),
    "no map": ({"metadata": {}}, "index.json"),
    "a list for a map": ({"weight_map": ["a"]}, "index.json"),
    "no JSON": (b"{", "index.json"),
    "deeply nested": (b"[" * 100_000, "index.json"),
    "no UTF-8": (b'{"weight_map": {"\xff": "a"}}', "index.json"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_index_pointing_nowhere_or_outside_raises(
    kind: str, tmp_path: Path, disk_dir: Path
) -> None:
    document, part = INDEXES[kind]
    save_file({"a": pages(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write_index(folder, document)
    with open_store(disk_dir) as store:
        with pytest.raises(TransferError) as error:
            store.register_checkpoint(folder)
        says(error, part)
        assert store.keys() == []


def test_two_shards_with_one_tensor_name_raise(tmp_path: Path, disk_dir: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in ("one", "two"):
        save_file({"a": pages(1)}, folder / f"{shard}.safetensors")
    with open_store(disk_dir) as store:
        with pytest.raises(ValueError) as error:
            store.register_checkpoint(folder)
        says(error, "'a'", "one.safetensors", "two.safetensors")
        assert store.keys() == []


@pytest.mark.parametrize("what", ["nothing there", "an empty directory", "a pickle beside it"])
def test_file_that_is_no_checkpoint_raises(what: str, tmp_path: Path, disk_dir: Path) -> None:
    place = tmp_path / "model"
    if what != "nothing there":
        place.mkdir()
    if what == "a pickle beside it":
        torch.save({"a": pages(1)}, place / "pytorch_model.bin")
    with open_store(disk_dir) as store:
        with pytest.raises(TransferError) as error:
            store.register_checkpoint(place)
        says(error, place, "safetensors")


# The directory -----------------------------------------------------------------------------------


def test_file_as_disk_dir_raises(disk_dir: Path) -> None:
    disk_dir.write_text("mine")
    with pytest.raises(TransferError) as error:
        open_store(disk_dir)
    says(error, disk_dir)
    assert disk_dir.read_text() == "mine"


@pytest.mark.parametrize("part", ["objects", "tmp", "LOCK", "STORE.json"])
def test_foreign_entry_in_disk_dir_raises(part: str, disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
    shutil.move(disk_dir / part, aside := disk_dir.parent / "aside")
    if aside.is_dir():
        (disk_dir / part).write_text("mine")
    else:
        (disk_dir / part).mkdir()
    with pytest.raises(TierStoreError) as error:
        open_store(disk_dir)
    says(error, disk_dir)
    shutil.rmtree(disk_dir / part) if (disk_dir / part).is_dir() else (disk_dir / part).unlink()
    shutil.move(aside, disk_dir / part)
    with open_store(disk_dir) as store:
        assert_group(store.get("key"), pages(1))


def run_quietly(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Mount file systems for this test. Skips it where that is not possible."""
    if not is_root() or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    mounts: list[Path] = []

    def mount(*options: str | Path) -> None:
        if not run_quietly("mount", *options):
            pytest.skip("this machine lets nobody mount a file system")
        if Path(options[-1]) not in mounts:
            mounts.append(Path(options[-1]))

    yield mount
    gc.collect()
    for place in reversed(mounts):
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_disk_dir_read_only_raises(disk_dir: Path, mounted: Callable[..., None]) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
    mounted("--bind", disk_dir, disk_dir)
    mounted("-o", "remount,ro,bind", disk_dir)
    with pytest.raises(TransferError) as error:
        open_store(disk_dir)
    says(error, disk_dir, "Read-only")
    new = disk_dir / "new"
    with pytest.raises(TransferError) as error:
        open_store(new)
    says(error, new)


def test_disk_dir_parent_not_writable_raises(disk_dir: Path) -> None:
    if not is_root() or shutil.which("chattr") is None:
        pytest.skip("only root can make a directory immutable")
    store = open_store(disk_dir)
    store.put("before", pages(1))
    store.flush()
    if not run_quietly("chattr", "+i", disk_dir / "tmp"):
        store.close()
        pytest.skip("this file system knows no immutable directories")
    try:
        store.put("after", pages(2))
        with pytest.raises(TransferError) as error:
            store.flush()
        assert error.value.key == "after"
        assert isinstance(error.value.__cause__, OSError)
        assert_group(store.get("after"), pages(2))
        with pytest.raises(TransferError):
            push_out(store, "after")
        assert_group(store.get("after"), pages(2))
    finally:
        subprocess.run(["chattr", "-i", disk_dir / "tmp"], check=True)
    store.flush()
    assert_at_rest(store)
    store.close()
    with open_store(disk_dir) as store:
        assert_group(store.get("after"), pages(2))


@pytest.fixture
def small_disk(disk_dir: Path, mounted: Callable[..., None]) -> Path:
    """A disk_dir on a separate file system with space for about one megabyte."""
    disk_dir.mkdir()
    mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", disk_dir)
    return disk_dir


def assert_disk_full(error: pytest.ExceptionInfo[DiskFullError], directory: Path) -> None:
    assert isinstance(error.value.__cause__, OSError)
    says(error, directory, "free some space")


@on_both
def test_full_disk_on_flush_raises(device: str, small_disk: Path) -> None:
    store = open_store(small_disk, 1024 * PAGE, device)
    store.put("small", pages(1, 10))
    store.flush()
    store.put("small", pages(2, 10))
    store.put("large", pages(3, 300))
    with pytest.raises(DiskFullError) as error:
        store.flush()
    assert error.value.key == "large"
    assert_disk_full(error, small_disk)
    assert_group(store.get("large"), pages(3, 300))
    assert_group(store.get("small"), pages(2, 10))
    with pytest.raises(DiskFullError):
        store.flush()  # again: a failure is not forgotten
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    store.flush()
    assert_at_rest(store)
    store.close()
    with open_store(small_disk, 1024 * PAGE, device) as store:
        assert_group(store.get("large"), pages(3, 300))
        assert_group(store.get("small"), pages(2, 10))
        assert store.stats().bytes_read >= 310 * PAGE


@on_both
@pytest.mark.parametrize("durable", [True, False])
def test_full_disk_on_eviction_raises(durable: bool, device: str, small_disk: Path) -> None:
    store = open_store(small_disk, 320 * PAGE, device)
    store.put("first", pages(1, 300), durable=durable)
    with pytest.raises(DiskFullError) as error:
        store.put("second", pages(2, 300), durable=durable)
    assert_disk_full(error, small_disk)
    assert "second" not in store
    assert_group(store.get("first"), pages(1, 300))
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    store.put("second", pages(2, 300), durable=durable)
    assert_group(store.get("first"), pages(1, 300))
    assert_group(store.get("second"), pages(2, 300))
    assert store.stats().bytes_read >= 300 * PAGE
    assert_at_rest(store)
    store.close()


def test_full_disk_on_close_raises(small_disk: Path) -> None:
    store = open_store(small_disk, 1024 * PAGE)
    store.put("large", pages(3, 300))
    with pytest.raises(DiskFullError):
        store.close()
    assert store.closed
    with open_store(small_disk) as again:
        assert again.keys() == []
        assert [p for p in small_disk.rglob("*.safetensors")] == []


def test_space_discarded_can_be_used_again(small_disk: Path) -> None:
    store = open_store(small_disk, 220 * PAGE)
    for number in range(8):
        store.put("key", pages(number, 200))
        store.flush()
        store.discard("key")
    for number in range(8):
        store.put("spilled", pages(number, 200), durable=False)
        push_out(store, "spilled")
        assert_group(store.get("spilled"), pages(number, 200))
        store.discard("spilled")
    assert_at_rest(store)
    store.close()


@pytest.mark.parametrize("kept", [True, False])
def test_spill_space_yields_to_durable_groups(kept: bool, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=2m", small_disk], check=True)
    store = open_store(small_disk, 512 * PAGE)
    store.put("spilled", pages(1, 200), durable=False)
    push_out(store, "spilled")
    store.discard("spilled")
    store.put("key", pages(2, 400))
    if kept:
        store.flush()
        assert_group(store.get("key"), pages(2, 400))
    else:
        # The control: with nothing to evict, the disk is full.
        with (
            system_call("ftruncate", fails_with=errno.EIO) as refused,
            pytest.raises(DiskFullError),
        ):
            store.flush()
        assert refused
        store.discard("key")
    assert_at_rest(store)
    store.close()


# Damage ------------------------------------------------------------------------------------------


def two_objects(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("damaged", pages(1, 2))
        store.put("whole", pages(2, 2))


DAMAGES: dict[str, tuple[Callable[[Path], object], type[TransferError]]] = {
    "a bit of the data": (lambda path: flip_bit(path, path.stat().st_size - 5), CorruptDataError),
    "a bit of the header": (lambda path: flip_bit(path, 40), CorruptDataError),
    "a bit of its padding": (lambda path: flip_bit(path, 4090), CorruptDataError),
    "the end is missing": (lambda path: os.truncate(path, path.stat().st_size - 1), TransferError),
    "half of the header": (lambda path: os.truncate(path, 2000), TransferError),
    "nothing in it": (lambda path: os.truncate(path, 0), TransferError),
    "a link in its place": (
        lambda path: (path.rename(path.parent / "aside"), path.symlink_to("aside")),
        TransferError,
    ),
    "another group's file": (
        lambda path: shutil.copy(object_file(path.parents[2], "whole"), path),
        CorruptDataError,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_object_costs_its_own_key_only(damage: str, disk_dir: Path) -> None:
    act, kind = DAMAGES[damage]
    two_objects(disk_dir)
    act(object_file(disk_dir, "damaged"))
    with open_store(disk_dir) as store:
        assert_group(store.get("whole"), pages(2, 2))
        for _ in range(2):
            with pytest.raises(kind) as error:
                store.get("damaged")
            assert error.value.path == str(object_file(disk_dir, "damaged"))
        assert_at_rest(store)
        store.put("damaged", pages(3, 2))
        store.flush()
        assert_group(store.get("damaged"), pages(3, 2))
    with open_store(disk_dir) as store:
        assert_group(store.get("damaged"), pages(3, 2))
        assert_group(store.get("whole"), pages(2, 2))


def test_flipped_bit_without_checksums_is_unnoticed(disk_dir: Path) -> None:
    """The control for the test above."""
    two_objects(disk_dir)
    DAMAGES["a bit of the data"][0](object_file(disk_dir, "damaged"))
    with open_store(disk_dir, verify="never") as store:
        found = store.get("damaged")
        assert isinstance(found, torch.Tensor)
        assert not torch.equal(found, pages(1, 2))


@pytest.mark.parametrize(
    ("verify", "noticed"), [("first", True), ("always", True), ("never", False)]
)
def test_reread_is_checked_as_configured(verify: str, noticed: bool, disk_dir: Path) -> None:
    """A file that was changed afterwards is not the one that was checked first."""
    two_objects(disk_dir)
    with open_store(disk_dir, verify=verify) as store:
        assert_group(store.get("damaged"), pages(1, 2))
        push_out(store, "damaged")
        flip_bit(object_file(disk_dir, "damaged"), 5000)
        if noticed:
            with pytest.raises(CorruptDataError):
                store.get("damaged")
        else:
            assert not torch.equal(store.get("damaged"), pages(1, 2))


@pytest.mark.parametrize("step", ["discard", "take"])
def test_object_file_removed_by_others_raises(step: str, disk_dir: Path) -> None:
    two_objects(disk_dir)
    with open_store(disk_dir) as store:
        lease = store.acquire("damaged", Access.TAKE) if step == "take" else None
        object_file(disk_dir, "damaged").unlink()
        if lease is None:
            store.discard("damaged")
        else:
            lease.release()
        assert store.keys() == ["whole"]
        assert_at_rest(store)


def test_object_file_shorter_than_declared_raises(checkpoint: Path, disk_dir: Path) -> None:
    """The read itself finds the change that no stamp shows."""
    with open_store(disk_dir) as store:
        store.register_checkpoint(checkpoint, "m/")
        core_of(store).tiers.disk.files.check = lambda file, held: None  # type: ignore[method-assign]
        os.truncate(checkpoint, checkpoint.stat().st_size - 2 * PAGE)
        with pytest.raises(TruncatedFileError) as error:
            store.get("m/b")
        says(error, checkpoint, f"{checkpoint.stat().st_size:,}", f"{2 * PAGE:,}")


# One store, one process --------------------------------------------------------------------------

SECOND = """
import sys
from tierstore import TierStore
from tierstore.errors import StoreLockedError
try:
    TierStore("64MiB", sys.argv[1], device="cpu")
except StoreLockedError as error:
    print(error)
else:
    print("opened")
"""


@pytest.mark.full("a process that imports torch; tests/system/test_locks.py has one without")
def test_second_process_on_one_directory_raises(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        message = output_of("-c", SECOND, disk_dir)
        for part in (str(disk_dir), f"process {os.getpid()} ", "another disk_dir"):
            assert part in message
        assert_group(store.get("key"), pages(1))


@pytest.mark.full("a separate process; below, a second store opens the directory of the first")
def test_second_process_after_the_first_opens(disk_dir: Path) -> None:
    open_store(disk_dir).close()
    assert output_of("-c", SECOND, disk_dir) == "opened\n"


def test_second_store_in_one_process_raises(disk_dir: Path) -> None:
    with open_store(disk_dir):
        with pytest.raises(StoreLockedError) as error:
            open_store(disk_dir)
        says(error, f"process {os.getpid()} ", disk_dir)
    with open_store(disk_dir) as store:
        assert store.keys() == []


CALLS: dict[str, Callable[[TierStore], object]] = {
    "put": lambda store: store.put("new", pages(1)),
    "acquire": lambda store: store.acquire("key"),
    "get": lambda store: store.get("key"),
    "prefetch": lambda store: store.prefetch(["key"]),
    "offload": lambda store: store.offload("key"),
    "discard": lambda store: store.discard("key"),
    "register": lambda store: store.register("new", {"a": pages(1)}),
    "flush": lambda store: store.flush(),
}


@pytest.mark.parametrize("call", CALLS)
def test_closed_store_raises(call: str, disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("key", pages(1))
    store.close()
    store.close()  # a second time does nothing
    assert store.closed
    with pytest.raises(ClosedError) as error:
        CALLS[call](store)
    says(error, "closed", "disk_dir")
    with open_store(disk_dir) as again:
        assert_group(again.get("key"), pages(1))


@on_both
def test_leases_outlive_a_closed_store(device: str, disk_dir: Path) -> None:
    store = open_store(disk_dir, device=device)
    store.put("key", pages(4))
    lease = store.acquire("key")
    store.close()
    assert_same(lease.tensor, pages(4))
    lease.release()
    with pytest.raises(LeaseError):
        lease.tensor  # noqa: B018


@pytest.mark.pretend_only("counts")
def test_closed_store_frees_its_memory(disk_dir: Path) -> None:
    gc.collect()
    before = pretend.pinned_bytes(), pretend.memory_allocated()
    store = open_store(disk_dir, device=ACCELERATOR)
    for i in range(4):
        store.put(f"key{i}", pages(i))
        store.get(f"key{i}")
    assert pretend.pinned_bytes() > before[0]
    assert pretend.memory_allocated() > before[1]
    store.close()
    gc.collect()
    assert (pretend.pinned_bytes(), pretend.memory_allocated()) == before
    assert memory_held(store) == {"HOST": 0, "DEVICE": 0}


def test_put_before_close_is_in_the_next_store(
    disk_dir: Path,
) -> None:
    store = open_store(disk_dir, 512 * PAGE)
    done: list[int] = []
    begun = threading.Event()

    def put_until_closed() -> None:
        with pytest.raises(ClosedError):
            for number in range(10_000):
                store.put(f"key{number}", pages(number))
                done.append(number)
                begun.set()

    def close() -> None:
        assert begun.wait(PATIENCE)
        store.close()

    assert run_threads([put_until_closed, close, close]) == []
    with open_store(disk_dir) as again:
        for number in done:
            assert_group(again.get(f"key{number}"), pages(number))


def in_a_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child. Its exit status is 0 if it raised nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        body()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(1)


def test_forked_child_raises(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        store.flush()
        wait_until_idle(store)

        def child() -> None:
            for call in CALLS.values():
                with pytest.raises(ClosedError) as error:
                    call(store)
                says(error, "forked")

        assert in_a_child(child) == 0
        with pytest.raises(StoreLockedError):
            open_store(disk_dir)  # the end of the child did not release the lock
        assert_group(store.get("key"), pages(1))
        store.put("key", pages(2))
    with open_store(disk_dir) as again:
        assert_group(again.get("key"), pages(2))


def test_forked_child_at_a_bad_moment_ends(disk_dir: Path) -> None:
    """Another thread has a lock that the child's copy of the store will never get."""
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        held, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with core_of(store).tiers.disk.workers._ready:
                held.set()
                forked.wait(PATIENCE)

        holder = threading.Thread(target=hold, daemon=True)
        holder.start()
        assert held.wait(PATIENCE)

        def child() -> None:
            signal.alarm(PATIENCE)  # kills it if it hangs
            with pytest.raises(ClosedError):
                store.close()

        assert in_a_child(child) == 0
        forked.set()
        join(holder)
    with open_store(disk_dir) as store:
        assert_group(store.get("key"), pages(1))


# Leases ------------------------------------------------------------------------------------------


def full_store(disk_dir: Path, device: str = "cpu") -> TierStore:
    """A store with three groups, and space for two."""
    store = open_store(disk_dir, 4 * PAGE, device)
    for name in "abc":
        store.put(name, pages(ord(name), 2))
    return store


@on_both
@pytest.mark.parametrize("way", ["acquire", "get", "put"])
def test_own_leases_filling_the_budget_raise(way: str, device: str, disk_dir: Path) -> None:
    store = full_store(disk_dir, device)
    with store.acquire("a"), store.acquire("b"):
        if way == "put" and device != "cpu":
            store.put("new", pages(1, 2))  # there is still space on the host
        else:
            with pytest.raises(BudgetError) as error:
                store.put("new", pages(1, 2)) if way == "put" else store.get("c")
            assert (error.value.nbytes, error.value.budget) == (2 * PAGE, 4 * PAGE)
            says(error, f"{2 * PAGE:,}", f"{4 * PAGE:,}", "release")
    assert_group(store.get("c"), pages(ord("c"), 2))
    assert_at_rest(store)
    store.close()


@pytest.mark.parametrize("second", [Access.UPDATE, Access.TAKE])
def test_update_of_own_read_lease_raises(second: Access, disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with store.acquire("key") as lease:
            with pytest.raises(LeaseError) as error:
                store.acquire("key", second)
            says(error, "'key'", "release")
            assert_same(lease.tensor, pages(1))
        store.acquire("key", second).release()
        assert_at_rest(store)


def test_read_of_own_update_lease_raises(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with store.acquire("key", Access.UPDATE):
            for call in (lambda: store.get("key"), store.flush):
                with pytest.raises(LeaseError) as error:
                    call()
                says(error, "'key'", "release")
        assert_at_rest(store)
        store.flush()


def test_two_threads_in_deadlock_raise_in_one(disk_dir: Path) -> None:
    store = full_store(disk_dir)
    meet = threading.Barrier(2)
    outcomes: list[str] = []

    def body(first: str, second: str) -> None:
        with store.acquire(first, Access.UPDATE):
            meet.wait(PATIENCE)
            try:
                with store.acquire(second, Access.UPDATE) as lease:
                    assert_same(lease.tensor, pages(ord(second), 2))
                outcomes.append("went on")
            except LeaseError as error:
                assert f"'{second}'" in str(error)
                outcomes.append("told")

    assert run_threads([lambda: body("a", "b"), lambda: body("b", "a")]) == []
    assert sorted(outcomes) == ["told", "went on"]
    assert_at_rest(store)
    store.close()


def test_two_threads_filling_the_budget_raise_in_one(disk_dir: Path) -> None:
    store = full_store(disk_dir)
    store.put("d", pages(ord("d"), 2))
    meet = threading.Barrier(2)
    outcomes: list[str] = []

    def body(first: str, second: str) -> None:
        with store.acquire(first):
            meet.wait(PATIENCE)
            try:
                with store.acquire(second) as lease:
                    assert_same(lease.tensor, pages(ord(second), 2))
                outcomes.append("went on")
            except BudgetError as error:
                assert error.budget == 4 * PAGE
                outcomes.append("told")

    assert run_threads([lambda: body("a", "c"), lambda: body("b", "d")]) == []
    assert sorted(outcomes) == ["told", "went on"]
    assert_at_rest(store)
    store.close()


def test_lease_used_after_release_raises(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", {"x": pages(1), "y": pages(2)})
        lease = store.acquire("key")
        with pytest.raises(LeaseError, match="2 tensors"):
            lease.tensor  # noqa: B018
        lease.release()
        lease.release()  # a second time does nothing
        for name in ("tensors", "tensor"):
            with pytest.raises(LeaseError) as error:
                getattr(lease, name)
            says(error, "'key'", "store.get")
        assert_at_rest(store)


def lose(store: TierStore, key: str, access: Access) -> None:
    with pytest.warns(ResourceWarning, match=f"'{key}'"):
        lease = store.acquire(key, access)
        assert lease.tensors  # otherwise it may be lost before it reaches this function
        del lease
        gc.collect()


@on_both
@pytest.mark.parametrize("access", Access)
def test_lost_lease_is_reclaimed_with_a_warning(
    access: Access, device: str, disk_dir: Path
) -> None:
    store = full_store(disk_dir, device)
    lose(store, "a", access)
    for name in "bcb":  # more than fit beside a
        with store.acquire(name, Access.UPDATE) as lease:
            assert_same(lease.tensor, pages(ord(name), 2))
    assert ("a" in store) == (access is not Access.TAKE)
    assert_at_rest(store)
    store.close()


def test_lost_lease_frees_space_for_a_waiter(disk_dir: Path) -> None:
    store = full_store(disk_dir)
    leases = [store.acquire("a"), store.acquire("b")]
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("c")), daemon=True)
    waiting.start()
    wait_until(lambda: bool(core_of(store).queue.requests()), "nobody waits")
    assert all(lease.tensors for lease in leases)  # else it may be lost before it arrives
    with pytest.warns(ResourceWarning):
        leases.clear()
        gc.collect()
    join(waiting)
    assert_group(found[0], pages(ord("c"), 2))
    assert_at_rest(store)
    store.close()


@on_both
def test_lost_lease_in_a_cycle_blocks_no_other_call(device: str, disk_dir: Path) -> None:
    """Lose leases in a cycle of references, as of an error and its frames.

    Leases that are kept are the control.
    """
    store = full_store(disk_dir, device)
    gc.disable()
    try:
        cycle: list[Any] = [store.acquire("a"), store.acquire("b")]
        assert all(lease.tensors for lease in cycle)  # else they may be lost before they arrive
        with pytest.raises(BudgetError):
            store.get("c")
        cycle.append(cycle)
        del cycle
        with pytest.warns(ResourceWarning):
            assert_group(store.get("c"), pages(ord("c"), 2))
    finally:
        gc.enable()
    assert_at_rest(store)
    store.close()


def test_interrupted_wait_leaves_nothing(disk_dir: Path) -> None:
    store = full_store(disk_dir)
    taken, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with store.acquire("a"), store.acquire("b"):
            taken.set()
            may_go.wait(PATIENCE)

    other = threading.Thread(target=hold, daemon=True)
    other.start()
    assert taken.wait(PATIENCE)
    for call in (lambda: store.get("c"), lambda: store.put("d", pages(1, 2))):
        with at_call(AutoResetEvent.wait), pytest.raises(KeyboardInterrupt):
            call()
    may_go.set()
    join(other)
    assert "d" not in store
    assert_group(store.get("c"), pages(ord("c"), 2))
    assert_at_rest(store)
    store.close()
