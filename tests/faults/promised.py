"""Self-describing values, work that stores them, and the promises about them.

Workers report each change before it begins, and when it is acknowledged. From these reports alone,
`Promised` knows the allowed values after a power cut: the last acknowledged one, or any begun
since.
"""

from __future__ import annotations

import os
import random
import stat
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.helpers.files import damaged_objects
from tests.helpers.processes import Tell
from tests.helpers.system_calls import Call, system_call
from tierstore import TierStore
from tierstore.engine.in_place_groups import WEIGHTS, content_hash
from tierstore.errors import TierStoreError
from tierstore.model.tiers import Access
from tierstore.system.objects import LOCK, MARKER, OBJECTS, TEMPORARY

PAGE = 4096
BUDGET = 48 * PAGE
HEAD = 64
SIZES = (HEAD, 700, PAGE, 3 * PAGE + 123, 10 * PAGE)
"""Small values are written through the page cache; of large ones, only the end is."""
KEYS = 6
"""Keys of each worker."""

Name = tuple[str, int]
"""The key that a value was made for, and its number."""
Around = Callable[[str], AbstractContextManager[object]]
"""Returns a context for each operation of a worker, by the name of the operation."""


def nothing_around(name: str) -> AbstractContextManager[object]:
    return nullcontext()


# Values -------------------------------------------------------------------------------------------


def value(key: str, number: int) -> dict[str, torch.Tensor]:
    """Return the value of that name. The name determines all bytes, the number the size."""
    kind = number % len(SIZES)
    seed = zlib.crc32(f"{key} {number}".encode())
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (SIZES[kind],), generator=generator, dtype=torch.uint8)
    head = f"{key} {number}".encode().ljust(HEAD)
    data[:HEAD] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return {"data": data} if kind % 2 else {"data": data, "tail": data[:13].clone()}


def name_of(found: dict[str, torch.Tensor]) -> Name:
    """Return the name of a value. Raises ValueError unless all of its bits are right."""
    key, _, number = bytes(found["data"][:HEAD].tolist()).decode().rstrip().rpartition(" ")
    expected = value(key, int(number))
    if found.keys() != expected.keys() or not all(
        torch.equal(found[name], expected[name]) for name in expected
    ):
        raise ValueError(f"half of {key} {number}, and half of something else")
    return key, int(number)


class Promised:
    """The values that each key may have after a power cut at this moment. None: no value."""

    def __init__(self) -> None:
        self._may: dict[str, list[Name | None]] = {}
        self.acknowledged = 0

    def told(self, what: str, *about: Any) -> None:
        """Record a message of a worker."""
        if what == "begin":
            key, origin, number = about
            found = None if number is None else (origin, number)
            self._may.setdefault(key, [None]).append(found)
        elif what == "sure":
            self._be_sure(key for key in self._may if key == about[0])
        elif what == "all sure":
            # Weights stay as long as any group lies in their file.
            keys = [key for key in self._may if not key.startswith(WEIGHTS)]
            self._be_sure(key for key in keys if key.startswith(about[0]))

    def _be_sure(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.acknowledged += len(self._may[key]) > 1
            self._may[key] = self._may[key][-1:]

    def broken_by(self, found: dict[str, Name | str]) -> list[str]:
        """Return the broken promises. `found` has the name of each key's value, or an error."""
        wrong = []
        for key in sorted(self._may.keys() | found.keys()):
            there = found.get(key)
            if isinstance(there, str):
                wrong.append(f"damaged: {key}: {there}")
            elif there not in (may := self._may.get(key, [None])):
                wrong.append(f"lost: {key} is {there}, not any of {may}")
        return wrong

    def begin_with(self, found: dict[str, Name | str]) -> None:
        """Take the contents found after a power cut as durable."""
        self._may = {key: [name] for key, name in found.items() if not isinstance(name, str)}
        for key in self._may:
            if key.startswith(WEIGHTS):
                self._may[key].append(None)


# Work ---------------------------------------------------------------------------------------------


class Worker:
    """Runs a user's operations on a store, on separate keys, and reports them."""

    def __init__(
        self, store: TierStore, name: str, seed: int, tell: Tell, around: Around = nothing_around
    ) -> None:
        self._store = store
        self._around = around
        self._name = name
        self._random = random.Random(f"{seed} {name}")
        self._number = seed * 1000
        self._tell = tell
        self._durable = {
            key: name_of(store.get(key))[1] for key in store.keys(f"{name}/")
        }  # the keys that must survive, with their numbers
        self._registered = f"{name}/registered"
        self._ways = (
            [self._put] * 8
            + [self._edit] * 4
            + [self._put_for_now, self._discard, self._get]
            + [self._flush] * 4
            + [self._take, self._offload, self._prefetch]
        )

    def go_on(self, times: int) -> None:
        """Run this many random operations."""
        ways = [] if self._registered in self._store else [self._register]
        for way in [*ways, *self._random.choices(self._ways, k=times)]:
            with self._around(way.__name__.strip("_")):
                way()

    def _some_key(self) -> str:
        return f"{self._name}/{self._random.randrange(KEYS)}"

    def _next(self, like: int | None = None) -> int:
        """Return an unused number, for a value as large as that of `like` if given."""
        self._number += 1
        while like is not None and (self._number - like) % len(SIZES):
            self._number += 1
        return self._number

    def _put(self) -> None:
        key, number = self._some_key(), self._next()
        self._tell("begin", key, key, number)
        self._store.put(key, value(key, number))
        self._durable[key] = number

    def _put_for_now(self) -> None:
        key = self._some_key()
        self._tell("begin", key, key, None)
        self._durable.pop(key, None)
        # The next flush removes the old value.
        self._store.put(key, value(key, self._next()), durable=False)

    def _discard(self) -> None:
        key = self._some_key()
        if key in self._store:
            self._tell("begin", key, key, None)
            self._durable.pop(key, None)
            self._store.discard(key)
            self._tell("sure", key)

    def _take(self) -> None:
        key = self._some_key()
        if key in self._store:
            self._tell("begin", key, key, None)
            self._durable.pop(key, None)
            with self._store.acquire(key, Access.TAKE) as lease:
                name_of(lease.tensors)
            self._tell("sure", key)

    def _offload(self) -> None:
        key = self._some_key()
        if key in self._store:
            self._store.offload(key)

    def _prefetch(self) -> None:
        self._store.prefetch(self._store.keys(f"{self._name}/"))

    def _register(self) -> None:
        number = self._next()
        tensors = value(self._registered, number)
        weights = WEIGHTS + content_hash(tensors)
        self._tell("begin", weights, self._registered, number)
        self._store.register(self._registered, tensors)
        self._tell("sure", weights)
        # From here on the weights may be deleted: with the group that lies in their file, or when a
        # store closes in which no group does.
        self._tell("begin", weights, self._registered, None)
        self._durable[self._registered] = number

    def _edit(self) -> None:
        if not self._durable:
            return
        key = self._random.choice(sorted(self._durable))
        number = self._next(like=self._durable[key])
        new = value(key, number)
        with self._store.acquire(key, Access.UPDATE) as lease:
            self._tell("begin", key, key, number)
            for name, tensor in lease.tensors.items():
                tensor.copy_(new[name])
            self._durable[key] = number

    def _get(self) -> None:
        key = self._some_key()
        if key in self._store:
            found = name_of(self._store.get(key))
            assert found == (key, self._durable.get(key, found[1])), f"{key} is {found}"

    def _flush(self) -> None:
        self._store.flush()
        self._tell("all sure", f"{self._name}/")


def contents(disk_dir: Path) -> tuple[dict[str, Name | str], list[str]]:
    """Open the store, call `look`, and close it."""
    with TierStore(BUDGET, disk_dir, device="cpu") as store:
        return look(store, disk_dir)


def look(store: TierStore, disk_dir: Path) -> tuple[dict[str, Name | str], list[str]]:
    """Return the name of each key's value, or its error, and the files that belong to no group."""
    found: dict[str, Name | str] = dict(damaged_objects(disk_dir))
    for key in store:
        try:
            found[key] = name_of(store.get(key))
        except (TierStoreError, ValueError, KeyError) as error:
            found[key] = f"{type(error).__name__}: {error}"
    left = [str(path.relative_to(disk_dir)) for path in disk_dir.rglob("*") if path.is_file()]
    objects = [name for name in left if name.startswith(f"{OBJECTS}/")]
    others = sorted(set(left) - set(objects) - {MARKER, LOCK})
    assert (disk_dir / TEMPORARY).is_dir()
    return found, others + ([f"{len(objects)} objects"] if len(objects) != len(found) else [])


def read_back(found: dict[str, list[Any] | str]) -> dict[str, Name | str]:
    """Return names parsed from JSON as tuples."""
    return {key: n if isinstance(n, str) else (n[0], n[1]) for key, n in found.items()}


# Controls -----------------------------------------------------------------------------------------


def without_syncs(of: str | None) -> AbstractContextManager[list[Call]]:
    """Disable syncs of `"files"` or `"directories"`, as a negative control. None: disable none."""

    def concerns(call: Call) -> bool:
        is_directory = stat.S_ISDIR(os.fstat(call.args[0]).st_mode)
        return of == ("directories" if is_directory else "files")

    return system_call("fsync", returns=None, when=concerns)


def syncing_again() -> AbstractContextManager[list[Call]]:
    """Retry a failed sync, which no program should do."""

    def twice(call: Call) -> None:
        try:
            call.go_on()
        except OSError:
            call.go_on()

    return system_call("fsync", answer=twice)
