"""Processes that compete for one directory with real stores, forked from one that imported torch.

    python -m tests.faults.kills.sharing DIRECTORY ROUNDS

Prints a line of JSON for each scene: its name and its findings (`test_sharing.py` has the expected
ones).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tests.faults.kills.racing import tree
from tierstore import Access, TierStore
from tierstore.errors import ClosedError, StoreLockedError
from tierstore.system.locking import is_locked

BUDGET = 1 << 20
PATIENCE = 60.0

Tell = Callable[[Any], None]
Wait = Callable[[], None]


class Child:
    """A process that does something, reports it, and waits until it may continue."""

    def __init__(self, do: Callable[[Tell, Wait], None]) -> None:
        listens, self._speaks = os.pipe()
        self._listens, speaks = os.pipe()
        self.process = os.fork()
        if self.process:
            os.close(listens)
            os.close(speaks)
            return
        with contextlib.suppress(BaseException):
            try:
                do(lambda told: self._say(speaks, told), lambda: os.read(listens, 1) and None)
            except BaseException:
                self._say(speaks, traceback.format_exc()[-3000:])
        os._exit(0)

    @staticmethod
    def _say(speaks: int, told: Any) -> None:
        os.write(speaks, json.dumps(told).encode() + b"\n")

    def hear(self) -> Any:
        """Return the next message of the child."""
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._listens], [], [], PATIENCE)[0]:
                return f"nothing in {PATIENCE} seconds"
            if not (read := os.read(self._listens, 1)):
                return "it has ended"
            line += read
        return json.loads(line)

    def go(self) -> None:
        """Let it continue."""
        os.write(self._speaks, b".")

    def end(self, *, kill: bool = False) -> int:
        """Return its exit status, after waiting for its end."""
        if kill:
            os.kill(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        os.close(self._speaks)
        os.close(self._listens)
        return os.waitstatus_to_exitcode(status)


def opened(directory: Path) -> TierStore:
    return TierStore(BUDGET, directory, device="cpu")


def numbers(number: int) -> torch.Tensor:
    return torch.full((1000,), number, dtype=torch.int32)


def try_to_open(directory: Path) -> dict[str, Any]:
    """Return what another process finds in the directory: its contents, or an error."""

    def look(tell: Tell, _: Wait) -> None:
        begun = time.monotonic()
        try:
            store = opened(directory)
        except StoreLockedError as error:
            tell({"told": str(error), "seconds": time.monotonic() - begun})
            return
        found = {key: sorted(set(store.get(key).tolist())) for key in store}
        store.close()
        tell({"found": found, "seconds": time.monotonic() - begun})

    child = Child(look)
    told = child.hear()
    child.end()
    return told if isinstance(told, dict) else {"wrong": told}


# Scenes -------------------------------------------------------------------------------------------


def second(directory: Path, _: int) -> dict[str, Any]:
    """Open a directory that another process uses."""

    def own(tell: Tell, wait: Wait) -> None:
        with opened(directory) as store:
            store.put("group", numbers(1))
            store.flush()
            tell("open")
            wait()

    owner = Child(own)
    owner.hear()
    before = tree(directory)
    refused = try_to_open(directory)
    unchanged = tree(directory) == before
    owner.go()
    owner.end()
    return {
        "owner": owner.process,
        "refused": refused,
        "unchanged": unchanged,
        "then": try_to_open(directory),
    }


def killed_owner(directory: Path, _: int) -> dict[str, Any]:
    """Kill the owner with much work under way."""

    def own(tell: Tell, wait: Wait) -> None:
        store = opened(directory)
        store.put("group", numbers(1))
        store.flush()
        for i in range(200):
            store.put(f"spilled {i}", numbers(i).repeat(20), durable=False)
        tell("open")
        wait()

    owner = Child(own)
    owner.hear()
    owner.end(kill=True)
    return {"then": try_to_open(directory)}


def with_a_forked_child(directory: Path, way: str, fork: str) -> dict[str, Any]:
    """Kill the owner, or close its store, while a process that it forked is still alive.

    Forked outside Python (`raw`), the child cannot close its copy of the lock.
    """

    def own(tell: Tell, wait: Wait) -> None:
        store = opened(directory)
        store.put("group", numbers(1))
        store.flush()
        library = ctypes.CDLL(None)
        child = library.fork() if fork == "raw" else os.fork()
        if child == 0:
            while True:
                library.pause()
        tell(child)
        wait()
        store.close()
        tell("closed")
        wait()

    owner = Child(own)
    child = owner.hear()
    if way == "closes":
        owner.go()
        owner.hear()
    else:
        owner.end(kill=True)
    meanwhile = try_to_open(directory)
    os.kill(child, signal.SIGKILL)
    if way == "closes":
        owner.go()
        owner.end()
    return {"owner": owner.process, "meanwhile": meanwhile, "then": try_to_open(directory)}


def counting(directory: Path, rounds: int) -> dict[str, Any]:
    """Run two processes that open, increment and close in turn."""

    def count(tell: Tell, _: Wait) -> None:
        done = 0
        while done < rounds:
            try:
                store = opened(directory)
            except StoreLockedError:
                continue
            with store:
                number = int(store.get("count")[0]) if "count" in store else 0
                store.put("count", numbers(number + 1))
            done += 1
        tell(done)

    children = [Child(count), Child(count)]
    done = [child.hear() for child in children]
    for child in children:
        child.end()
    return {"done": done, "then": try_to_open(directory)}


def calls_of(store: TierStore, lease: Any) -> dict[str, Callable[[], Any]]:
    """Return all calls that a store offers."""
    return {
        "get": lambda: store.get("group"),
        "put": lambda: store.put("other", numbers(2)),
        "put for now": lambda: store.put("other", numbers(2), durable=False),
        "acquire": lambda: store.acquire("group"),
        "update": lambda: store.acquire("group", Access.UPDATE),
        "aget": lambda: asyncio.run(store.aget("group")),
        "aput": lambda: asyncio.run(store.aput("other", numbers(2))),
        "register": lambda: store.register("adopted", {"weight": numbers(3)}),
        "discard": lambda: store.discard("group"),
        "prefetch": lambda: store.prefetch("group"),
        "offload": lambda: store.offload("group"),
        "keep": lambda: store.make_sticky("group"),
        "flush": store.flush,
        "keys": store.keys,
        "iterate": lambda: list(store),
        "count": lambda: len(store),
        "contains": lambda: "group" in store,
        "stats": store.stats,
        "snapshot": store.snapshot,
        "trace": lambda: store.trace(os.devnull),
        "release": lease.release,
        "close": store.close,
    }


def try_everything(store: TierStore, lease: Any, tell: Tell) -> None:
    """Report that each call hangs, and then how and after how many seconds it ends."""
    for name, call in calls_of(store, lease).items():
        tell([name, "hangs", PATIENCE])
        begun = time.monotonic()
        try:
            call()
            ended = "returns"
        except ClosedError:
            ended = "ClosedError"
        except BaseException as error:
            ended = repr(error)
        tell([name, ended, time.monotonic() - begun])


def use(store: TierStore, which: int, over: threading.Event) -> None:
    """Use the store in a thread of the parent. Raises if it reads another value than its own."""
    number = 0
    while not over.is_set():
        number += 1
        store.put(f"used {which}", numbers(number))
        assert int(store.get(f"used {which}")[0]) == number
        store.stats()


def forked(directory: Path, rounds: int) -> dict[str, Any]:
    """Fork repeatedly while threads use the store; the children try to use it too."""

    def fork_once(store: TierStore, found: dict[str, dict[str, float]]) -> None:
        with store.acquire("group") as lease:

            def be_a_child(tell: Tell, _: Wait) -> None:
                signal.alarm(20)
                try_everything(store, lease, tell)

            child = Child(be_a_child)
            last = None
            while isinstance(told := child.hear(), list):
                last = told
                if told[1] != "hangs":
                    ways = found.setdefault(told[0], {})
                    ways[told[1]] = max(told[2], ways.get(told[1], 0.0))
            if last is not None and last[1] == "hangs":
                found.setdefault(last[0], {})["hangs"] = PATIENCE
            child.end()

    def own(tell: Tell, _: Wait) -> None:
        store = opened(directory)
        store.put("group", numbers(1))
        over = threading.Event()
        with ThreadPoolExecutor(3) as pool:
            users = [pool.submit(use, store, which, over) for which in range(3)]
            found: dict[str, dict[str, float]] = {}
            for _ in range(rounds):
                fork_once(store, found)
            over.set()
            failed = [repr(user.exception()) for user in users if user.exception()]
        still = is_locked(directory) == owner_now()
        store.close()
        tell({"found": found, "still locked": still, "failed": failed})

    owner = Child(own)
    told = owner.hear()
    owner.end()
    return {"told": told, "then": try_to_open(directory)}


def owner_now() -> str:
    return f"process {os.getpid()} on {os.uname().nodename!r}"


class Numbers(Dataset[torch.Tensor]):
    """A data set read in a DataLoader worker from a store that its parent opened."""

    def __init__(self, store: TierStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            self._store.get("group")
        except ClosedError:
            return torch.tensor(1)
        return torch.tensor(0)


def workers(directory: Path, _: int) -> dict[str, Any]:
    """Run a DataLoader whose workers outlive the store."""

    def own(tell: Tell, _: Wait) -> None:
        store = opened(directory)
        store.put("group", numbers(1))
        loader = DataLoader(
            Numbers(store), num_workers=2, persistent_workers=True, multiprocessing_context="fork"
        )
        refused = sum(int(batch) for batch in loader)
        store.put("group", numbers(2))
        still = is_locked(directory) == owner_now()
        store.close()
        tell({"refused": refused, "still locked": still, "then": try_to_open(directory)})
        del loader

    owner = Child(own)
    told = owner.hear()
    owner.end()
    return told if isinstance(told, dict) else {"wrong": told}


SCENES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "second": second,
    "killed owner": killed_owner,
    "killed, child": lambda path, _: with_a_forked_child(path, "is killed", "forked"),
    "killed, raw child": lambda path, _: with_a_forked_child(path, "is killed", "raw"),
    "closed, child": lambda path, _: with_a_forked_child(path, "closes", "forked"),
    "closed, raw child": lambda path, _: with_a_forked_child(path, "closes", "raw"),
    "counting": counting,
    "forked": forked,
    "workers": workers,
}


def main(root: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    for name, scene in SCENES.items():
        directory = root / name
        print("SCENE " + json.dumps([name, scene(directory, rounds)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
