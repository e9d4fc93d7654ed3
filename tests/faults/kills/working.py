"""A process that uses a store, tells what it does, and may be killed at any moment.

First it opens the directory that others were killed in, and tells what it finds there. Then it
puts, replaces, changes, discards, spills and adopts groups at random, on one thread or two, with
room in memory for few of them.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy.ma  # noqa: F401  torch imports it at the first use of something
import torch

from tests.faults.kills.killer import AFTER, Killer, Tell
from tests.faults.kills.mutants import MUTANTS
from tests.faults.kills.oracle import FLUSH, KEEP, LOOK, LOSE, WRITE, Value
from tests.helpers.files import damaged_objects
from tierstore import Access, TierStore
from tierstore.engine.adoption import WEIGHTS, content_hash
from tierstore.model.sizes import PAGE
from tierstore.system import files as disk_module
from tierstore.tiers import directory as directory_module

BUDGET = 64 * PAGE
LENGTHS = (3, 1000, 4096, 5000, 9000)
"""Of groups, in elements of a tensor. The longest takes a quarter of the budget."""
PARTS = 4 * PAGE
"""Bytes per write, so that these small groups are written in several calls, by several threads."""

CALLS_OF_CLOSING = 12
KEYS = 4  # of each thread
CHECKPOINT_VALUE: Value = (-7, 2000)

Group = dict[str, torch.Tensor]


def group_of(value: Value) -> Group:
    """Two tensors that are full of one number."""
    number, length = value
    return {
        "even": torch.full((length,), number, dtype=torch.int32),
        "odd": torch.full((length // 3 + 1, 3), number, dtype=torch.int32),
    }


def value_of(group: Any) -> Value:
    """What `group_of` was given. Raises if these are not all the bytes of one group."""
    number, length = int(group["even"][0]), len(group["even"])
    expected = group_of((number, length))
    if group.keys() != expected.keys() or not all(
        torch.equal(group[name], tensor) for name, tensor in expected.items()
    ):
        raise AssertionError(f"a mixture: {[t.unique().tolist() for t in group.values()]}")
    return number, length


@dataclass(frozen=True)
class Plan:
    """What one process does, and when it dies: at call `target`, counted from when it begins to do
    `doing` for the `turn`-th time ("open" comes first), or, if it never does, from when it closes.
    Counted are `only` calls of that name, or all. A target of 0 kills nobody."""

    seed: int
    disk_dir: str
    checkpoint: str
    first_value: int
    doing: str = "open"
    turn: int = 1
    target: int = 0
    when: str = AFTER
    only: str = ""
    mutant: str = ""
    steps: int = 20
    threads: int = 1


@dataclass
class Known:
    """What a thread knows of a key: its value, and whether it outlives the store."""

    value: Value
    durable: bool
    changes: bool = True  # what lies in a checkpoint or under its content's name is only read


@dataclass
class Life:
    """One process's use of a store."""

    plan: Plan
    tell: Tell
    killer: Killer
    numbers: Iterator[int] = field(default_factory=itertools.count)
    turns: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = itertools.count(self.plan.first_value)

    @contextmanager
    def doing(self, name: str, what: str = LOOK, key: str = "", value: Value | None = None) -> Any:
        """Tell that something begins, and, once it is done, that it is."""
        number = next(self.numbers)
        self.tell("begin", number, what, key, value, name)
        self.turns[name] = self.turns.get(name, 0) + 1
        if self.plan.target and (name, self.turns[name]) == (self.plan.doing, self.plan.turn):
            self.killer.arm(self.plan.target, self.plan.when, self.plan.only)
        elif self.plan.target and name == "close":
            self.killer.arm(self.plan.target % CALLS_OF_CLOSING + 1, self.plan.when)
        yield
        self.tell("end", number)

    def live(self) -> None:
        """Open, look, work, close."""
        with self.doing("open"):
            store = TierStore(BUDGET, self.plan.disk_dir, device="cpu")
        self.look(store)
        workers = [Worker(self, store, which) for which in range(self.plan.threads)]
        threads = [threading.Thread(target=worker.run) for worker in workers[1:]]
        for thread in threads:
            thread.start()
        workers[0].run()
        for thread in threads:
            thread.join()
        with self.doing("close", FLUSH):
            store.close()
        self.tell("over")

    def look(self, store: TierStore) -> None:
        """Tell what there is: values, and whatever should not be there."""
        found = {key: value_of(store.get(key)) for key in store}
        left = os.listdir(os.path.join(self.plan.disk_dir, "tmp"))
        left += set(os.listdir(self.plan.disk_dir)) - {"STORE.json", "LOCK", "objects", "tmp"}
        self.tell("found", found, left, sorted(damaged_objects(self.plan.disk_dir)))


class Worker:
    """A thread that uses the store. Its keys are its own, so that it knows what they hold."""

    def __init__(self, life: Life, store: TierStore, which: int) -> None:
        self.life, self.store, self.which = life, store, which
        self.random = random.Random(f"{life.plan.seed} {which}")
        self.known = {
            key: Known(value_of(store.get(key)), durable=True, changes=not key.startswith(WEIGHTS))
            for key in store
            if self._is_mine(key)
        }
        for key in self.known:
            if key.startswith(WEIGHTS):
                self._may_go(key)
        self._things: list[tuple[int, Callable[[], None]]] = [
            (8, self.put),
            (2, self.put_for_now),
            (3, self.change),
            (2, self.discard),
            (1, self.take),
            (2, self.flush),
            (2, self.offload),
            (3, self.read),
            (1, self.prefetch),
            (1, self.register),
            (1, self.register_checkpoint),
        ]

    def _is_mine(self, key: str) -> bool:
        return sum(key.encode()) % self.life.plan.threads == self.which

    def run(self) -> None:
        weights, things = zip(*self._things, strict=True)
        try:
            self._discard_old_weights()
            for _ in range(self.life.plan.steps):
                self.random.choices(things, weights)[0]()
        except BaseException:
            self.life.tell("wrong", traceback.format_exc()[-3000:])

    # What it may do --------------------------------------------------------------------------

    def _fresh(self) -> Value:
        return next(self.life.values), self.random.choice(LENGTHS)

    def _some_key(self) -> str:
        while True:
            key = f"{self.which}/group {self.random.randrange(KEYS * self.life.plan.threads)}"
            if self._is_mine(key):
                return key

    def _may_go(self, weights: str) -> None:
        """Weights may go from now on: with the group in their file, or at the end of this life."""
        number = next(self.life.numbers)
        self.life.tell("begin", number, LOSE, weights, None, "register")

    def _known_key(self, *, changes: bool = False) -> str | None:
        keys = [key for key, known in self.known.items() if known.changes or not changes]
        return self.random.choice(sorted(keys)) if keys else None

    def put(self) -> None:
        key, value = self._some_key(), self._fresh()
        with self.life.doing("replace" if key in self.known else "put", KEEP, key, value):
            self.store.put(key, group_of(value))
        self.known[key] = Known(value, durable=True)

    def put_for_now(self) -> None:
        """A group that does not outlive the store, nor leaves the one that it replaces."""
        key, value = self._some_key(), self._fresh()
        with self.life.doing("put for now", LOSE, key):
            self.store.put(key, group_of(value), durable=False)
        self.known[key] = Known(value, durable=False)

    def change(self) -> None:
        key = self._known_key(changes=True)
        if key is None:
            return
        known = self.known[key]
        value = next(self.life.values), known.value[1]
        what = KEEP if known.durable else LOOK
        with self.life.doing("change", what, key, value):
            with self.store.acquire(key, Access.UPDATE) as lease:
                for tensor in lease.tensors.values():
                    tensor.fill_(value[0])
            known.value = value

    def discard(self) -> None:
        key = self._known_key(changes=True)
        if key is not None:
            self._discard(key)

    def _discard(self, key: str) -> None:
        with self.life.doing("discard", LOSE, key):
            self.store.discard(key)
        del self.known[key]

    def _discard_old_weights(self) -> None:
        """Weights that were registered in another life: nobody uses them now."""
        for key in [key for key in self.known if key.startswith(WEIGHTS)]:
            if self.random.random() < 0.5:
                self._discard(key)

    def take(self) -> None:
        key = self._known_key(changes=True)
        if key is None:
            return
        with self.life.doing("take", LOSE, key), self.store.acquire(key, Access.TAKE) as lease:
            self._compare(key, lease.tensors)
        del self.known[key]

    def flush(self) -> None:
        with self.life.doing("flush", FLUSH):
            self.store.flush()

    def offload(self) -> None:
        key = self._known_key()
        if key is not None:
            with self.life.doing("offload"):
                self.store.offload(key)

    def read(self) -> None:
        key = self._known_key()
        if key is not None:
            with self.life.doing("read"):
                self._compare(key, self.store.get(key))

    def prefetch(self) -> None:
        with self.life.doing("prefetch"):
            self.store.prefetch(self.random.sample(sorted(self.known), len(self.known)))

    def register(self) -> None:
        value = self._fresh()
        group = group_of(value)
        weights = WEIGHTS + content_hash(group)
        with self.life.doing("register", WRITE, weights, value):
            homes = self.store.register(f"adopted/{value[0]}", group)
        self._may_go(weights)
        self._compare_values(weights, value, homes)
        if self._is_mine(key := f"adopted/{value[0]}"):
            # It lies in the file of its weights until it is changed; then in one of its own.
            self.known[key] = Known(value, durable=True)

    def register_checkpoint(self) -> None:
        prefix = f"checkpoint {next(self.life.values)}/"
        with self.life.doing("register_checkpoint"):
            [key] = self.store.register_checkpoint(
                self.life.plan.checkpoint, prefix, groups={"all": ["even", "odd"]}
            )
        if self._is_mine(key):
            self.known[key] = Known(CHECKPOINT_VALUE, durable=True)

    def _compare(self, key: str, group: Any) -> None:
        self._compare_values(key, self.known[key].value, group)

    def _compare_values(self, key: str, expected: Value, group: Any) -> None:
        if (found := value_of(group)) != expected:
            self.life.tell("wrong", f"{key!r} is {found} and not {expected}")


def work(plan: Plan, tell: Tell) -> None:
    """Live one life. Raises whatever goes wrong in it."""
    if plan.mutant:
        MUTANTS[plan.mutant]()
    directory_module.WRITE_BLOCK = disk_module.WRITE_BLOCK = PARTS
    killer = Killer(tell, plan.disk_dir)
    Life(plan, tell, killer).live()


def warm_up() -> None:
    """Do once what is slow the first time, without a thread: who is forked then has done it."""
    group = group_of((1, 8))
    value_of({name: tensor.view(torch.uint8).view(tensor.dtype) for name, tensor in group.items()})
    group["even"].as_strided((2,), (1,))
    content_hash(group)
    gc.collect()
    gc.freeze()
