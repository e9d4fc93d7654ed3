"""Die at the n-th system call of a protocol, for every n, and check the remains.

`python -m tests.tiers.dying DIRECTORY PROTOCOL` prints one JSON list for each n: the name of the
call at which the process died, and what a reader finds afterwards (`old`, `new`, `absent`, or the
fault). The last line says that the protocol ran to its end. It is a separate process because it
forks: nothing here imports torch, and there are no threads, except for the protocol `store`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.system_calls import Call, answered, until_the_end
from tierstore.model.groups import Block, Packing, TensorSpec, contiguous_stride, pack
from tierstore.model.header import build_header, digest
from tierstore.model.sizes import PAGE, round_up
from tierstore.system.objects import read_object
from tierstore.tiers.directory import ObjectDirectory

KEY = "the/key"
DEAD, DONE = 77, 0
FLOATS = 5000  # several pages, and part of one

# All calls by which a protocol may use files.
CALLS = (
    "open", "close", "read", "pread", "preadv", "write", "pwrite", "pwritev", "fsync", "fdatasync",
    "rename", "replace", "link", "unlink", "remove", "mkdir", "makedirs", "rmdir", "ftruncate",
    "truncate", "posix_fallocate", "fstat", "stat", "lstat", "listdir", "scandir", "symlink",
)  # fmt: skip


def packing() -> Packing:
    blocks = []
    for name, count in (("weight", FLOATS), ("bias", 7)):
        spec = TensorSpec(name, "F32", (count,), contiguous_stride((count,)), 0)
        blocks.append(Block(name, "F32", (count,), spec.nbytes, (spec,)))
    return pack(blocks)


def data_of(value: int) -> memoryview:
    """Return the packed group, filled with one byte, in page-aligned memory."""
    memory = memoryview(mmap.mmap(-1, round_up(packing().nbytes, PAGE)))
    memory[:] = bytes([value]) * len(memory)
    return memory


OLD, NEW = 1, 2


# Protocols: each makes the new group the one of the key ------------------------------------------


def put(directory: Path) -> None:
    """Put a group, as the store does."""
    store = ObjectDirectory(directory)
    store.write(KEY, packing(), data_of(NEW), single=False)
    store.close()


def remove(directory: Path) -> None:
    """Discard a group, as the store does."""
    store = ObjectDirectory(directory)
    store.remove(KEY)
    store.close()


def open_only(directory: Path) -> None:
    """Open a directory, perhaps for the first time."""
    ObjectDirectory(directory).close()


def in_place(directory: Path) -> None:
    """Overwrite the old bytes in place, a faulty protocol."""
    store = ObjectDirectory(directory)
    layout, data = packing(), data_of(NEW)
    digests = [
        digest(data[at : at + b.nbytes])
        for b, at in zip(layout.blocks, layout.offsets, strict=True)
    ]
    header = build_header(KEY, layout, digests)
    descriptor = os.open(store.path_of(KEY), os.O_RDWR)
    os.pwrite(descriptor, header, 0)
    for block, at, dense in zip(layout.blocks, layout.offsets, layout.dense, strict=True):
        os.pwrite(descriptor, data[at : at + block.nbytes], len(header) + dense)
    os.fsync(descriptor)
    os.close(descriptor)
    store.close()


def remove_and_write(directory: Path) -> None:
    """Remove the old file before the rename, a faulty protocol: for a moment there is none."""
    store = ObjectDirectory(directory)
    store.remove(KEY)
    store.write(KEY, packing(), data_of(NEW), single=False)
    store.close()


def through_a_store(directory: Path) -> None:
    """Put a group through all layers and their threads."""
    import torch

    from tierstore import TierStore

    store = TierStore(64 * PAGE, directory, device="cpu")
    value = int.from_bytes(bytes([NEW]) * 4, "little")
    group = {
        name: torch.full((count,), value, dtype=torch.int32).view(torch.float32)
        for name, count in (("weight", FLOATS), ("bias", 7))
    }
    store.put(KEY, group)
    store.flush()
    store.close()


PROTOCOLS: dict[str, Callable[[Path], None]] = {
    "put": put,
    "remove": remove,
    "open": open_only,
    "in place": in_place,
    "remove and write": remove_and_write,
    "store": through_a_store,
}


# Dying -------------------------------------------------------------------------------------------


def die_at(number: int, report: int) -> None:
    """From now on, skip the `number`-th call in CALLS and exit; a write is done by half."""
    calls = 0

    def deadly(call: Call) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            if call.name == "pwrite":
                nbytes = len(call.args[1])
                # A direct write takes whole pages only.
                with contextlib.suppress(OSError):
                    call.in_part(nbytes // 2 // PAGE * PAGE or nbytes // 2)
            plain_write(report, call.name.encode())
            os._exit(DEAD)
        return call.go_on()

    plain_write = os.write
    until_the_end(answered(CALLS, deadly))


def attempt(do: Callable[[], object], number: int) -> tuple[int, str]:
    """Run it in a child that dies at its `number`-th call; return the exit code and the call."""
    listening, report = os.pipe()
    child = os.fork()
    if not child:
        try:
            die_at(number, report)
            do()
            os._exit(DONE)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    os.close(report)
    with os.fdopen(listening) as pipe:
        name = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), name


def look(directory: Path) -> str:
    """Return what a reader finds under the key, in a reopened directory."""
    store = ObjectDirectory(directory)
    left = os.listdir(directory / "tmp")
    path = store.path_of(KEY)
    store.close()
    if left:
        return f"left behind: {left}"
    try:
        found = read_object(path)
    except FileNotFoundError:
        return "absent"
    if found.stored is None:
        return f"damaged: {found.error}"
    raw = Path(path).read_bytes()[found.stored.data_start :]
    if set(raw) == {OLD} or set(raw) == {NEW}:
        value = raw[0]
        expected = data_of(value)
        whole = all(
            digest(expected[: block.nbytes]) == summed
            for block, summed in zip(found.stored.packing.blocks, found.stored.digests, strict=True)
        )
        return {OLD: "old", NEW: "new"}[value] if whole else "the checksums of another version"
    return "a mix"


def prepare(directory: Path, existing: bool) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if existing:
        store = ObjectDirectory(directory)
        store.write(KEY, packing(), data_of(OLD), single=False)
        store.close()


def main(directory: Path, protocol: str, existing: bool) -> None:
    if protocol == "store":
        import tierstore.store  # noqa: F401  and with it torch: once, before all the children
    for number in range(1, 1000):
        prepare(directory, existing)
        status, name = attempt(lambda: PROTOCOLS[protocol](directory), number)
        if status not in (DEAD, DONE):
            raise SystemExit(f"the protocol ended with {status} at call {number}")
        print(json.dumps([name, look(directory)]), flush=True)
        if status == DONE:
            return
    raise SystemExit("the protocol has no end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "over an old group")
