"""Short uses of a store, and the promises that hold during and after failed calls.

A `World` is a store and the values that each key may have, now and in the next store. A call that
failed may have taken effect or not; one that returned has taken effect.
"""

from __future__ import annotations

import errno
import gc
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.engine import core_of, mutable
from tests.helpers.files import damaged_objects, open_files
from tests.store.helpers import assert_at_rest, assert_sound, files_below, wait_until_idle
from tierstore import TierStore
from tierstore.errors import TierStoreError, TransferError
from tierstore.model.tiers import Access, HostAccess
from tierstore.system.objects import object_name

PAGE = 4096
BUDGET = 16 * PAGE
ABSENT = None
ADVICE = re.compile(
    r"[:;] (\(?or )?(use|check|free|register|download|remove|raise|open|save|upgrade|close|release|"
    r"lower|pass|put|list|call|choose|discard|try)\b|(then|to) (try|open) again|then try again"
)
"""Matches the remedy that a message names."""

Value = int | None


# Values -------------------------------------------------------------------------------------------


def tensors_of(value: int) -> dict[str, torch.Tensor]:
    """Return a group filled with `value`: two pages and a partial one, and a small tensor."""
    return {"a": torch.full((2 * PAGE // 4 + 25,), float(value)), "b": torch.full((3,), value)}


def value_of(found: Any) -> int:
    """Return the value of a group. Raises AssertionError unless all elements have it."""
    assert isinstance(found, dict) and found.keys() == {"a", "b"}, "another group"
    value = int(found["b"][0])
    expected = tensors_of(value)
    for name in ("a", "b"):
        assert torch.equal(found[name], expected[name]), f"torn or foreign bytes in {name!r}"
    return value


# Worlds -------------------------------------------------------------------------------------------


@dataclass
class World:
    """A store below `place`, and the values that it may have."""

    place: Path
    budget: int = BUDGET
    store: TierStore | None = None
    visible: dict[str, set[Value]] = field(default_factory=dict)
    durable: dict[str, set[Value]] = field(default_factory=dict)
    transient: set[str] = field(default_factory=set)  # keys of non-durable groups
    errors: list[str] = field(default_factory=list)  # reported errors
    mapped: dict[str, torch.Tensor] = field(default_factory=dict)
    closed: bool = False

    @property
    def disk_dir(self) -> Path:
        return self.place / "store"

    def attempt(self, act: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[bool, Any]:
        """Do something that may fail, but only as documented.

        Returns whether it succeeded, and its result.
        """
        try:
            return True, act(*arguments, **options)
        except TierStoreError as error:
            assert_names_a_remedy(error, self)
            self.errors.append(f"{type(error).__name__}: {error}")
            return False, None  # not the error: its traceback refers to locals

    def open(self) -> bool:
        try:
            done, store = self.attempt(TierStore, self.budget, self.disk_dir, device="cpu")
        except OSError as error:
            assert error.errno == errno.EMFILE and error.filename == "/proc/meminfo", error
            self.errors.append(str(error))  # no descriptor is left, even to read the memory size
            return False
        if done:
            self.store = store
            self.visible = {key: set(values) for key, values in self.durable.items()}
        return done

    def put(self, key: str, value: int, durable: bool = True) -> None:
        was = self.visible.get(key, {ABSENT})
        done, _ = self.attempt(self._store.put, key, tensors_of(value), durable=durable)
        self.visible[key] = {value} if done else was | {value}
        before = self.durable.get(key, {ABSENT})
        (self.transient.discard if durable else self.transient.add)(key)
        # The next flush reports an old file that could not be removed.
        self.durable[key] = before | {value if durable else ABSENT}

    def flush(self) -> None:
        done, _ = self.attempt(self._store.flush)
        if done:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Record that every visible durable group is on disk."""
        for key, values in self.visible.items():
            self.durable[key] = {ABSENT} if key in self.transient else set(values)

    def discard(self, key: str) -> None:
        done, _ = self.attempt(self._store.discard, key)
        self._is_gone(key, done)

    def take(self, key: str) -> None:
        done, lease = self.attempt(self._store.acquire, key, Access.TAKE)
        if done:
            assert value_of(lease.tensors) in self.visible[key]
            released, _ = self.attempt(lease.release)
            self._is_gone(key, released)

    def _is_gone(self, key: str, surely: bool) -> None:
        self.visible[key] = {ABSENT} if surely else self.visible[key] | {ABSENT}
        self.durable[key] = {ABSENT} if surely else self.durable.get(key, {ABSENT}) | {ABSENT}

    def get(self, key: str) -> bool:
        """Get an existing group, and return whether that succeeded."""
        done, found = self.attempt(self._store.get, key)
        if done:
            value = value_of(found)
            assert value in self.visible[key], f"{key!r} is {value}, not {self.visible[key]}"
        return done

    def push_out(self) -> None:
        """Evict everything from memory."""
        self._store.put("filler", torch.zeros(self.budget // 4), durable=False)
        self._store.discard("filler")

    def close(self) -> None:
        self.closed = True
        done, _ = self.attempt(self._store.close)
        if done:
            self.acknowledge()
        assert self._store.closed

    @property
    def _store(self) -> TierStore:
        assert self.store is not None
        return self.store


def assert_names_a_remedy(error: TierStoreError, world: World) -> None:
    """Check that an error is the library's, names its subject and a remedy, and has its cause."""
    text = str(error)
    subjects = [str(world.place), "/proc/self/", *map(repr, world.visible)]
    assert any(subject in text for subject in subjects), f"no subject: {text}"
    assert ADVICE.search(text), f"no remedy: {text}"
    if type(error) is TransferError and " failed (" in text:
        assert isinstance(error.__cause__, OSError), f"no cause: {text}"


# Promises -----------------------------------------------------------------------------------------


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Check that no descriptor or thread is left, and that no thread or finalizer failed."""
    stray: list[str] = []
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda a: stray.append(f"unraisable: {a.exc_value!r} in {a.object!r}")
    threading.excepthook = lambda a: stray.append(f"a thread died of {a.exc_value!r}")
    before, threads = open_files(), set(threading.enumerate())
    try:
        yield
        if left_open(before):  # e.g. by objects that await collection
            gc.collect()
    finally:
        sys.unraisablehook, threading.excepthook = hooks
    assert not stray, stray
    assert not left_open(before), f"descriptors are still open: {left_open(before)}"
    alive = [t.name for t in set(threading.enumerate()) - threads]
    assert not alive, f"threads are still running: {alive}"


def left_open(before: dict[int, str]) -> list[str]:
    """Return the descriptors that are open now and were not before."""
    return [name for number, name in open_files().items() if before.get(number) != name]


def copy_tree(source: Path, target: Path) -> None:
    """Copy directories and the bytes of files, without their attributes."""
    target.mkdir()
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            copy_tree(entry, target / entry.name)
        elif not entry.name.startswith(".fuse_hidden"):  # removed while open
            shutil.copyfile(entry, target / entry.name)


def check_directory(directory: Path, durable: dict[str, set[Value]], scratch: Path) -> None:
    """Check that a copy of the directory opens with allowed values and without orphans."""
    copy = Path(tempfile.mkdtemp(dir=scratch)) / "as it is"
    copy_tree(directory, copy)
    with TierStore(BUDGET, copy, device="cpu") as store:
        found = {key: value_of(store.get(key)) for key in store if not key.startswith("weights/")}
        damaged = damaged_objects(copy)
        present = set(store)
        files = files_below(copy)  # before closing, which deletes unreferenced weights
    assert not damaged, f"damaged: {damaged}"
    for key in durable.keys() | found.keys():
        may_be = durable.get(key, {ABSENT})
        assert found.get(key) in may_be, f"on disk, {key!r} is {found.get(key)}, not {may_be}"
    expected = {"STORE.json", "LOCK", "objects", "tmp"}
    files = {name for name in files if not re.fullmatch("objects/[0-9a-f]{2}", name)}
    assert files == expected | {f"objects/{object_name(key)}" for key in present}
    shutil.rmtree(copy.parent)


def check_afterwards(world: World) -> None:
    """Check that the store works as before after the fault has ended. Closes the store."""
    store = world.store
    assert store is not None
    unreadable = set(core_of(store).directory.damaged)
    if not world.closed:
        wait_until_idle(store)
        assert_sound(store)
        for key, values in list(world.visible.items()):
            if values == {ABSENT}:
                assert key not in store
            elif object_name(key) in unreadable:
                world.put(key, 77)  # the error was raised, and another value can be put
            elif key in store:
                world.get(key)  # an error not raised yet may come now, once
        told = len(world.errors)
        check_use(world)
        assert world.errors[told:] == [], "the store fails although the fault has ended"
        assert_at_rest(store)
    store.close()


def check_use(world: World) -> None:
    """Check that groups can be put, replaced, flushed, and read from memory and disk."""
    store = world._store
    for key, values in list(world.visible.items()):
        if key in store:
            assert world.get(key)
        else:
            assert ABSENT in values, f"{key!r} is lost"
            world.visible[key] = {ABSENT}
            world.durable[key] = {ABSENT}
    kept = [key for key in world.visible if key in store]
    for number, key in enumerate(["new", *kept[:1]]):
        if key not in store or not key.startswith(("model.", "state.")):
            world.put(key, 90 + number)
    world.flush()
    world.push_out()
    for key in [*kept, "new"]:
        assert world.get(key)


# Scenarios ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """`prepare` creates the files, `begin` runs before the fault, and `act` during it."""

    name: str
    prepare: Callable[[World], None]
    begin: Callable[[World], None]
    act: Callable[[World], None]
    budget: int = BUDGET


def nothing(world: World) -> None:
    """Prepare nothing."""


def stored(*keys: str) -> Callable[[World], None]:
    """Return a preparation of a directory in which these keys have the values 1, 2, and so on."""

    def prepare(world: World) -> None:
        with TierStore(BUDGET, world.disk_dir, device="cpu") as store:
            for number, key in enumerate(keys, 1):
                store.put(key, tensors_of(number))
        world.durable = {key: {number} for number, key in enumerate(keys, 1)}

    return prepare


def opened(world: World) -> None:
    assert world.open(), world.errors


def read_all(world: World) -> None:
    for key in sorted(world.visible):
        world.get(key)


def open_and_read(world: World) -> None:
    if world.open():
        read_all(world)


def put_and_flush(world: World) -> None:
    world.put("a", 11)
    world.flush()
    world.put("b", 12)
    world.flush()


def replace_and_flush(world: World) -> None:
    world.put("a", 21)
    world.flush()
    world.put("b", 22, durable=False)
    world.flush()


def discard_some(world: World) -> None:
    world.discard("a")
    world.take("b")
    world.put("c", 33)
    world.flush()
    world.discard("c")


def opened_and_pushed_out(world: World) -> None:
    opened(world)
    world.push_out()


def spill(world: World) -> None:
    for number, key in enumerate("abcdef"):
        world.put(key, 40 + number, durable=False)
    for key in "abcdef":
        if key in world._store:
            world.get(key)
    for key in "ace":
        if key in world._store:
            world.discard(key)
    world.put("g", 50, durable=False)
    world.get("g")


def put_unsaved(world: World) -> None:
    opened(world)
    world.put("a", 61)
    world.put("b", 62)
    world.put("c", 63, durable=False)


def closing(world: World) -> None:
    world.close()


# Checkpoints and registered tensors: values 1 and 2 are those of two files.


def with_checkpoint(world: World) -> None:
    model = world.place / "model"
    model.mkdir()
    for number in (1, 2):
        values = tensors_of(number)
        save_file({f"{number}.{n}": t for n, t in values.items()}, model / f"{number}.safetensors")
    stored("kept")(world)


GROUPS = {f"model.{number}": [f"{number}.a", f"{number}.b"] for number in (1, 2)}


def register_and_read(world: World) -> None:
    store, model = world._store, world.place / "model"
    world.transient |= set(GROUPS)
    world.visible["model.1"] = world.visible["model.2"] = {ABSENT}
    done, _ = world.attempt(store.register_checkpoint, model, groups=GROUPS)
    assert done == ("model.1" in store) == ("model.2" in store), "registered in part"
    for number in (1, 2) if done else ():
        key = f"model.{number}"
        done, found = world.attempt(store.get, key)
        if done:
            plain = {name.partition(".")[2]: tensor for name, tensor in found.items()}
            assert value_of(plain) == number
    for key in GROUPS:  # from here on, ordinary groups with other tensor names
        if key in store:
            world.attempt(store.discard, key)
    if not done:
        return


def opened_and_loaded(world: World) -> None:
    opened(world)
    mapped = load_file(world.place / "model" / "1.safetensors")
    world.mapped = {name.partition(".")[2]: tensor for name, tensor in mapped.items()}


def adopt(world: World) -> None:
    """Register one group in its existing file; the other one is written."""
    store = world._store
    adopt_one(world, "model.1", world.mapped, 1)
    adopt_one(world, "model.2", tensors_of(72), 72)
    for key in GROUPS:
        if key in store:
            world.get(key)


def adopt_one(world: World, key: str, tensors: dict[str, torch.Tensor], value: int) -> None:
    world.transient.add(key)
    world.visible[key] = {ABSENT}
    done, homes = world.attempt(world._store.register, key, tensors)
    assert done == (key in world._store)
    if done:
        assert value_of(homes) == value, "a host view has other values"
        world.visible[key] = {value}


# Training state -----------------------------------------------------------------------------------


def train(world: World) -> None:
    """Create groups, change them in memory, move them to disk, change their views, read them."""
    for number, key in enumerate(["state.a", "state.b"]):
        world.transient.add(key)
        world.visible[key] = {ABSENT}
        done, _ = world.attempt(mutable(world._store).create, key, tensors_of(80 + number))
        assert done == (key in world._store)
        if done:
            world.visible[key] = {80 + number}
            change(world, key, 84 + number)
    place_on_disk(world)
    keys = [key for key in ("state.a", "state.b") if key in world._store]
    mutable(world._store).prefetch_to_host(keys)
    for key in keys:
        world.get(key)


def change(world: World, key: str, value: int) -> None:
    store = world._store
    done, held = world.attempt(mutable(store).lease_in_host, key, HostAccess.UPDATE)
    if not done:
        return
    fill(held.tensors, value)
    held.release()
    world.visible[key] = {value}
    away, _ = world.attempt(mutable(store).move_to_disk, [key])
    if not away:
        return
    done, shown = world.attempt(mutable(store).view_on_disk, key)
    if done:
        assert value_of(shown) == value
        fill(shown, value + 4)
        world.visible[key] = {value + 4}


def fill(tensors: dict[str, torch.Tensor], value: int) -> None:
    for tensor in tensors.values():
        tensor.fill_(value)


def place_on_disk(world: World) -> None:
    """Create a group on disk with arbitrary values, then give it new ones."""
    store, key = world._store, "state.c"
    world.transient.add(key)
    world.visible[key] = {ABSENT}
    done, _ = world.attempt(mutable(store).create_on_disk, key, tensors_of(0))
    assert done == (key in store)
    if not done:
        return
    done, held = world.attempt(mutable(store).lease_in_host, key, HostAccess.RENEW)
    if not done:
        store.discard(key)
        return
    fill(held.tensors, 88)
    held.release()
    world.visible[key] = {88}


SMALL = 8 * PAGE

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("opening a new directory", nothing, nothing, open_and_read),
        Scenario("opening one with groups", stored("a", "b"), nothing, open_and_read),
        Scenario("putting", nothing, opened, put_and_flush),
        Scenario("replacing", stored("a", "b"), opened, replace_and_flush),
        Scenario("discarding", stored("a", "b"), opened, discard_some),
        Scenario("getting what is on disk", stored("a", "b", "c"), opened_and_pushed_out, read_all),
        Scenario("reading a checkpoint", with_checkpoint, opened, register_and_read),
        Scenario("registering tensors", with_checkpoint, opened_and_loaded, adopt),
        Scenario("spilling", stored("kept"), opened, spill, budget=SMALL),
        Scenario("training", stored("kept"), opened, train, budget=SMALL),
        Scenario("closing with unsaved groups", nothing, put_unsaved, closing),
    )
}
