"""The ways in which a process may end while its store has much under way."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.faults.kills.exiting import Tell
from tests.faults.kills.late import LATE
from tests.helpers.engine import core_of
from tests.helpers.files import damaged_objects
from tests.helpers.system_calls import system_call, until_the_end
from tierstore import Access, TierStore
from tierstore.errors import ClosedError
from tierstore.system.locking import is_locked

BUDGET = 24 << 20
GROUPS = 12
LENGTH = 250_000
SLOW = 0.05
"""Extra seconds for each read and write of the disk, so that many are under way at the end."""
CODE = 5

torch.set_num_threads(1)


def group_of(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((LENGTH,), number, dtype=torch.int32) for name in ("even", "odd")}


def number_of(group: Any) -> int:
    """Return the value that `group_of` was given. Raises if bytes are missing or mixed."""
    number = int(group["even"][0])
    for tensor in group.values():
        if not torch.equal(tensor, torch.full((LENGTH,), number, dtype=torch.int32)):
            raise AssertionError(f"a mixture: {tensor.unique().tolist()}")
    return number


def slowed(name: str, seconds: float) -> threading.Event:
    """Slow down a system call. The event is set at its next call."""
    made = threading.Event()

    def wait() -> None:
        made.set()
        time.sleep(seconds)

    until_the_end(system_call(name, before=wait))
    return made


def busy(disk_dir: Path) -> TierStore:
    """Return a store that has flushed some groups, and is reading, writing and spilling others."""
    slowed("preadv", SLOW)
    writing = slowed("pwrite", SLOW)
    store = TierStore(BUDGET, disk_dir, device="cpu")
    for number in range(3):
        store.put(f"flushed {number}", group_of(number))
    store.flush()
    for number in range(GROUPS):
        store.put(f"fresh {number}", group_of(100 + number))
        store.put(f"spilled {number}", group_of(200 + number), durable=False)
    store.prefetch(store.keys())
    writing.clear()
    threading.Thread(target=flush, args=(store,), daemon=True).start()
    writing.wait()
    return store


def flush(store: TierStore) -> None:
    with contextlib.suppress(ClosedError):
        store.flush()


# Ways ---------------------------------------------------------------------------------------------


def come_to_the_end(_: TierStore, __: Tell) -> None:
    pass


def exit_with_a_code(_: TierStore, __: Tell) -> None:
    sys.exit(CODE)


def raise_an_error(_: TierStore, __: Tell) -> None:
    raise RuntimeError("expected")


def be_terminated(_: TierStore, __: Tell) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def leave_at_once(_: TierStore, __: Tell) -> None:
    os._exit(CODE)


def close(store: TierStore, tell: Tell) -> None:
    store.close()
    tell("ends", time.monotonic())


def fail_in_a_with_block(store: TierStore, _: Tell) -> None:
    with store:
        raise RuntimeError("expected")


def use_for_ever(store: TierStore) -> None:
    while True:
        for number in range(GROUPS):
            store.get(f"fresh {number}")
            store.put(f"spilled {number}", group_of(number), durable=False)


def leave_a_daemon_thread(store: TierStore, _: Tell) -> None:
    for _ in range(2):
        threading.Thread(target=use_for_ever, args=(store,), daemon=True).start()
    time.sleep(0.1)


def leave_a_waiting_thread(store: TierStore, _: Tell) -> None:
    """Leave a thread that waits for a group which another thread never releases."""
    lease = store.acquire("fresh 0", Access.UPDATE)
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        store.acquire("fresh 0")

    threading.Thread(target=wait, daemon=True).start()
    waiting.wait()
    time.sleep(0.1)
    LATE.append(lambda: lease and None)  # it must not be collected earlier


def leave_a_working_thread(store: TierStore, tell: Tell) -> None:
    """Leave a thread that the interpreter waits for: the store must work until it is done."""

    def work() -> None:
        time.sleep(0.2)
        tell("worked", number_of(store.get("fresh 0")))
        store.put("flushed late", group_of(7))
        store.flush()
        tell("ends", time.monotonic())

    threading.Thread(target=work).start()


def use_it_at_exit(store: TierStore, tell: Tell) -> None:
    def use() -> None:
        tell("worked", number_of(store.get("fresh 0")))
        store.put("flushed late", group_of(7))
        store.flush()
        tell("ends", time.monotonic())

    atexit.register(use)


def close_it_at_exit(store: TierStore, tell: Tell) -> None:
    atexit.register(lambda: close(store, tell))


def use_it_too_late(store: TierStore, tell: Tell) -> None:
    """Use the store in an exit handler that runs after the library's own."""

    def use() -> None:
        for name, call in {
            "get": lambda: store.get("fresh 0"),
            "get of the first": lambda: store.get("flushed 0"),
            "put": lambda: store.put("other", group_of(1)),
            "flush": store.flush,
            "acquire": lambda: store.acquire("flushed 1"),
            "close": store.close,
        }.items():
            try:
                call()
                tell(name, "returns")
            except ClosedError:
                tell(name, "ClosedError")
            except BaseException as error:
                tell(name, repr(error))

    LATE.append(use)


def fork_a_child_that_ends(store: TierStore, tell: Tell) -> None:
    """Fork a child that exits as any interpreter does. The parent continues."""
    child = os.fork()
    if child == 0:
        return
    os.waitpid(child, 0)
    tell("locked", is_locked(core_of(store).directory.path) is not None)
    tell("worked", number_of(store.get("fresh 0")))
    store.put("flushed late", group_of(7))
    close(store, tell)


def have_a_dead_disk(store: TierStore, tell: Tell) -> None:
    """Make the disk never answer again."""
    slowed("pwrite", 600)
    slowed("preadv", 600)
    threading.Thread(target=use_for_ever, args=(store,), daemon=True).start()
    time.sleep(0.5)
    tell("ends", time.monotonic())


NO_STORE = "use no store"
"""Measures the seconds that an idle process with torch takes to exit on this machine."""

WAYS: dict[str, Callable[[TierStore, Tell], None]] = {
    way.__name__.replace("_", " "): way
    for way in (
        come_to_the_end,
        exit_with_a_code,
        raise_an_error,
        be_terminated,
        leave_at_once,
        close,
        fail_in_a_with_block,
        leave_a_daemon_thread,
        leave_a_waiting_thread,
        leave_a_working_thread,
        use_it_at_exit,
        close_it_at_exit,
        use_it_too_late,
        fork_a_child_that_ends,
        have_a_dead_disk,
    )
}

_kept: list[TierStore] = []


def end(way: str, disk_dir: Path, tell: Tell) -> None:
    """Start much work, and end."""
    if way == NO_STORE:
        tell("ends", time.monotonic())
        return
    store = busy(disk_dir)
    _kept.append(store)  # as a global of a program
    tell("ends", time.monotonic())
    WAYS[way](store, tell)


def look(disk_dir: Path, tell: Tell) -> None:
    """Report the contents found afterwards, complete or not."""
    before = sorted(path.name for path in disk_dir.glob("tmp/*"))
    with TierStore(BUDGET, disk_dir, device="cpu") as store:
        tell("groups", {key: number_of(store.get(key)) for key in store})
        tell("damaged", sorted(damaged_objects(disk_dir)))
        tell("left", before)
        tell("left behind", sorted(path.name for path in disk_dir.glob("tmp/*")))
