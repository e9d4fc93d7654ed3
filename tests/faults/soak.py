"""A process that uses one store for a long time and measures its resources.

    python -m tests.faults.soak '{"place": ..., "gets": 1000000, "faults": true, "leak": 0}'

Threads get, put, change and discard small groups, of which about two thirds fit. In odd parts of a
run, one system call in about a thousand operations fails. After each part all threads are idle: the
store's bookkeeping must be exact, and the process's memory, files and threads are recorded. Prints
a line of JSON with all records.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.faults.crowds import Watch
from tests.faults.values import fill, group, key_of, tag_for, tag_of
from tests.helpers.engine import core_of
from tests.helpers.system_calls import Call, answered, until_the_end
from tests.store.helpers import PAGE, assert_at_rest, memory_held, open_store
from tierstore import Access, TierStore, TransferError
from tierstore.model.sizes import round_up
from tierstore.model.tiers import Tier
from tierstore.observe.journal import Ring
from tierstore.store import engine_of
from tierstore.system.objects import object_name
from tierstore.tiers.entry import GroupEntry

KEYS = 240  # half of them are durable
PAGES = 390  # of about 600
THREADS = 2
PARTS = 30
KEPT = 256  # events of each kind: so few that their memory is allocated soon
FAULT_EVERY = 1000
CALLS = ("preadv", "pwrite", "fsync", "rename", "posix_fallocate", "unlink")


@dataclass
class Note:
    """The resources of a process after a number of operations."""

    operations: int
    resident: int
    files: int
    threads: int
    seconds: float


@dataclass
class Told:
    """The report at the end."""

    notes: list[Note] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    injected: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    evicted: int = 0
    read: int = 0
    written: int = 0
    samples: int = 0


class Faults:
    """Makes a system call fail now and then, while `broken`."""

    def __init__(self, seed: int, operations: Callable[[], int]) -> None:
        self.broken = False
        self.injected: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._operations = operations
        self._next = 0
        self._lock = threading.Lock()
        until_the_end(answered(CALLS, self._answer))

    def begin(self) -> None:
        self._plan()
        self.broken = True

    def _plan(self) -> None:
        self._next = self._operations() + self._random.randint(1, 2 * FAULT_EVERY)

    def _answer(self, call: Call) -> Any:
        if self.broken and self._operations() >= self._next:
            with self._lock:
                if self._operations() >= self._next:
                    self._plan()
                    self.injected[call.name] += 1
                    room = call.name in ("pwrite", "posix_fallocate")
                    number = self._random.choice([errno.EIO, errno.ENOSPC] if room else [errno.EIO])
                    return call.fail(number)
        return call.go_on()


class Soak:
    """The store, its users, and the notes."""

    def __init__(self, place: str, seed: int, leak: int) -> None:
        self.place = Path(place)
        self.store: TierStore = open_store(self.place, PAGES * PAGE)
        journal = core_of(self.store).mover.journal
        journal.uses, journal.levels, journal.spans = (Ring(KEPT) for _ in range(3))
        self.users = [User(self.store, number, seed) for number in range(THREADS)]
        self.faults = Faults(seed, self.operations)
        self.errors: list[BaseException] = []
        self.told = Told()
        drop = core_of(self.store).tiers.host.drop

        def counting(entry: GroupEntry) -> None:
            newest = core_of(self.store).current.get(entry.group.key)
            self.told.evicted += newest == entry.group
            drop(entry)

        core_of(self.store).tiers.host.drop = counting  # type: ignore[method-assign]
        self._leaked: list[bytes] = []
        if leak:
            get = self.store.get

            def leaking(key: str) -> Any:
                self._leaked.append(os.urandom(leak))
                return get(key)

            self.store.get = leaking  # type: ignore[method-assign]

    def operations(self) -> int:
        return sum(user.count for user in self.users)

    def run(self, gets: int, faults: bool) -> None:
        begun = time.monotonic()
        for user in self.users:
            user.fill()
        with Watch(self.store, self.operations) as watch:
            watch.pause = 0.02
            for part in range(PARTS):
                if faults and part % 2:
                    self.faults.begin()
                self._part(gets // PARTS // THREADS)
                self.faults.broken = False
                for error in [*self.errors, *watch.errors]:
                    raise error
                self.look()
                self.told.notes.append(note(self.operations(), begun))
            self.told.samples = watch.samples
        self._tell()

    def _part(self, gets: int) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(user, gets), daemon=True)
            for user in self.users
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guarded(self, user: User, gets: int) -> None:
        try:
            user.use(gets)
        except BaseException as error:
            self.errors.append(error)

    def look(self) -> None:
        """Assert that the bookkeeping is exact. The threads are idle, and the disk works again."""
        self.store.flush()
        assert_at_rest(self.store)
        assert_true(self.store, self.place)
        known = {key: user for user in self.users for key in user.current}
        assert set(self.store.keys()) == set(known)
        for key in random.sample(sorted(known), 20):
            known[key].see(key, tag_of(key, self.store.get(key)))
        engine_of(
            self.store
        ).core.tiers.disk.files.close()  # a bounded number is held open to be read again
        gc.collect()

    def _tell(self) -> None:
        stats = self.store.stats()
        self.told.misses = stats.misses + stats.late
        self.told.read, self.told.written = stats.bytes_read, stats.bytes_written
        self.told.injected = dict(self.faults.injected)
        for user in self.users:
            self.told.done = dict(Counter(self.told.done) + user.done)
            self.told.failed = dict(Counter(self.told.failed) + user.failed)


class User:
    """A thread. Only it changes its own keys, so it knows their values."""

    def __init__(self, store: TierStore, number: int, seed: int) -> None:
        self.store, self.number = store, number
        self.random = random.Random(seed * 1000 + number)
        self.own = [key_of(i) for i in range(KEYS) if i % THREADS == number]
        self.every = [key_of(i) for i in range(KEYS)]
        self.current: dict[str, int] = {}
        self.unsure: dict[str, int] = {}  # from failed puts
        self.count = 0
        self.serial = 0
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def fill(self) -> None:
        for key in self.own:
            self.put(key)

    def use(self, gets: int) -> None:
        """Make this many gets, with other calls in between."""
        others = (self.put, self.put, self.put, self.update, self.take, self.prefetch, self.offload)
        until = self.done["get"] + gets
        while self.done["get"] < until:
            act = self.get if self.random.random() < 0.98 else self.random.choice(others)
            try:
                act(self._key(act != self.get))
                self.done[act.__name__] += 1
            except TransferError as error:
                self.failed[f"{act.__name__}: {type(error).__name__}"] += 1
            self.count += 1

    def _key(self, own: bool) -> str:
        """Return a random key; some keys are more frequent."""
        keys = self.own if own else self.every
        return keys[int(len(keys) * self.random.random() ** 3)]

    def _tag(self, key: str) -> int:
        self.serial = (self.serial + 1) % (1 << 20)
        return tag_for(key, self.number, self.serial)

    def get(self, key: str) -> None:
        try:
            found = tag_of(key, self.store.get(key))
        except KeyError:
            assert key not in self.current, f"{key} is missing"
            return
        if key in self.own:
            self.see(key, found)

    def put(self, key: str) -> None:
        tag = self._tag(key)
        tensors = group(tag, self.random.randint(1, 4))
        try:
            self.store.put(key, tensors, durable=self.random.random() < 0.2)
        except TransferError:
            self._put_or_not(key, tag)
            raise
        self.current[key] = tag
        self.unsure.pop(key, None)

    def _put_or_not(self, key: str, tag: int) -> None:
        """Record a failed put, which took effect if only an old file could not be removed."""
        if key in self.current:
            self.unsure[key] = tag
        elif key in self.store:
            self.current[key] = tag

    def see(self, key: str, found: int) -> None:
        """Assert that the value is the one that this thread left."""
        if found == self.unsure.pop(key, None):
            self.current[key] = found
        assert self.current[key] == found, f"{key} is stale"

    def update(self, key: str) -> None:
        if key not in self.current:
            return
        with self.store.acquire(key, Access.UPDATE) as lease:
            self.see(key, tag_of(key, lease.tensors))
            self.current[key] = tag = self._tag(key)
            fill(lease.tensors, tag)

    def take(self, key: str) -> None:
        if key in self.current and self.random.random() < 0.5:
            with self.store.acquire(key, Access.TAKE) as lease:
                self.see(key, tag_of(key, lease.tensors))
                del self.current[key]
            return
        if key in self.current:
            tag = self.current.pop(key)
            self.unsure.pop(key, None)
            try:
                self.store.discard(key)
            except TransferError:
                if key in self.store:
                    self.current[key] = tag
                raise
        self.put(key)

    def prefetch(self, key: str) -> None:
        self.store.prefetch(random.sample(sorted(self.current), 3))

    def offload(self, key: str) -> None:
        if key in self.current:
            self.store.offload(key)


def note(operations: int, begun: float) -> Note:
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads = sum(t.name.startswith("tierstore") for t in threading.enumerate())
    files = len(os.listdir("/proc/self/fd"))
    return Note(operations, resident, files, threads, time.monotonic() - begun)


def assert_true(store: TierStore, place: Path) -> None:
    """Check that the bookkeeping matches memory and files. The store is idle."""
    carrier, planner = core_of(store).mover, core_of(store).planner
    with core_of(store).lock:
        entry = {c.group.key: c for c in carrier.entries()}
        held = memory_held(store)["HOST"]
        arena = core_of(store).tiers.host.arena
        slots = [c.slots[Tier.HOST] for c in entry.values() if Tier.HOST in c.slots]
        slots += arena.unused_slots()
        assert held == sum(slot.nbytes for slot in slots if slot.memory is not None)
        assert planner.used[Tier.HOST] <= held <= PAGES * PAGE
        assert arena.make.__self__.held <= PAGES * PAGE
        durable = {object_name(key): c for key, c in entry.items() if c.durable}
        objects = place / "objects"
        sizes = {str(p.relative_to(objects)): p.stat().st_size for p in objects.rglob("*.*")}
        assert set(sizes) == set(durable), set(sizes) ^ set(durable)
        for name, nbytes in sizes.items():
            data = durable[name].packing.dense_nbytes
            assert data < nbytes <= data + 2 * PAGE
        spilled = [c for c in entry.values() if c in core_of(store).tiers.disk.spilled_at]
        end, free = core_of(store).tiers.disk.spill.usage()
        taken = end - sum(nbytes for _, nbytes in free)
        assert taken == sum(round_up(c.spec.nbytes, PAGE) for c in spilled)
        on_disk = [c for c in entry.values() if c.source is not None]
        assert planner.used[Tier.DISK] == sum(c.spec.nbytes for c in on_disk)
        assert not os.listdir(place / "tmp")


def slope(notes: list[Note]) -> float:
    """Return bytes of memory per operation: the median slope over all pairs of notes."""
    slopes = [
        (b.resident - a.resident) / (b.operations - a.operations)
        for a, b in itertools.combinations(notes, 2)
    ]
    return float(torch.tensor(slopes).quantile(0.5))


def main() -> None:
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    files = len(os.listdir("/proc/self/fd"))
    soak = Soak(given["place"], given.get("seed", 0), given.get("leak", 0))
    soak.run(given["gets"], given.get("faults", True))
    soak.store.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files, "files are still open"
    print(json.dumps(asdict(soak.told)))


if __name__ == "__main__":
    main()
