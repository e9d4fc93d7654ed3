"""Several threads on one store, on private and shared keys.

Every value describes itself: a group's tensors are filled with one number made of the key, the
version and the thread that wrote it. A reader checks whether a group is whole and whether its value
is allowed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from tests.store.helpers import PAGE, assert_sound, join, open_store
from tierstore import Access, Lease, TierStore
from tierstore.errors import BudgetError, LeaseError, UnknownKeyError

HOST_PAGES, DEVICE_PAGES = 20, 14
ROUNDS = 150
OWNERS, COUNTERS = 2, 2
OWN_KEYS = 3
TOKENS = 40
PAIR = ["pair/left", "pair/right"]


def parts(tag: int, pages: int) -> dict[str, torch.Tensor]:
    """Return a group of `pages` pages in two tensors, filled with one number."""
    rows = pages * PAGE // 8
    return {"left": torch.full((rows // 2,), tag), "right": torch.full((rows - rows // 2,), tag)}


def tag_of(lease: Lease) -> int:
    """Return the number that fills the whole group."""
    values = {int(v) for t in lease.tensors.values() for v in torch.unique(t.cpu()).tolist()}
    assert len(values) == 1, f"{lease.key} is a mix of {sorted(values)}"
    return values.pop()


class Crowd:
    """The threads, their actions, and their errors."""

    def __init__(self, seed: int, device: str, directory: Path) -> None:
        self.seed = seed
        self.store: TierStore = open_store(
            directory,
            HOST_PAGES * PAGE,
            device,
            **({} if device == "cpu" else {"device_budget": DEVICE_PAGES * PAGE}),
        )
        self.exclusive = True
        self.errors: list[BaseException] = []
        self.refused: Counter[str] = Counter()
        self.added: Counter[int] = Counter()
        self.taken: Counter[str] = Counter()
        self.samples = 0
        self.meet = threading.Barrier(2)
        self.over = threading.Event()
        self.store.put("counter", {"count": torch.zeros(2 * PAGE // 8, dtype=torch.int64)})
        self.store.put("news", parts(0, 3))
        for key in PAIR:
            self.store.put(key, parts(0, 2))

    def run(self) -> None:
        """Start all threads and wait for them. If one never ends, print all stacks."""
        bodies: list[Callable[[random.Random], None]] = [
            *[self._owner(i) for i in range(OWNERS)],
            *[self._counter(i) for i in range(COUNTERS)],
            self._publisher,
            self._reader,
            self._taker,
            self._changer(0),
            self._changer(1),
        ]
        threads = [self._thread(body, number) for number, body in enumerate(bodies)]
        sampler = self._thread(lambda rng: self._sample(), -1)
        hinter = self._thread(self._hinter, -2)
        for thread in [sampler, hinter, *threads]:
            thread.start()
        for thread in threads:
            join(thread)
        self.over.set()
        join(sampler)
        join(hinter)

    def finish(self) -> None:
        """Check the conditions that hold when all threads are done."""
        assert not self.errors, self.errors
        assert self.samples > 0
        with self.store.acquire("counter") as lease:
            counted = tag_of(lease)
        assert counted == sum(self.added.values()), "updates were lost"
        paired = []
        for key in PAIR:
            with self.store.acquire(key) as lease:
                paired.append(tag_of(lease))
        assert paired == [2 * ROUNDS - sum(self.refused.values())] * 2
        assert self.refused, "no lease was ever refused"
        assert set(self.taken.values()) == {1}, "a token was taken twice"
        assert len(self.taken) == TOKENS

    def _thread(self, body: Callable[[random.Random], None], number: int) -> threading.Thread:
        def guarded() -> None:
            try:
                body(random.Random(self.seed + number))
            except BaseException as error:
                self.errors.append(error)

        return threading.Thread(target=guarded, name=f"crowd-{number}", daemon=True)

    # Members of the crowd ----------------------------------------------------------------------

    def _owner(self, number: int) -> Callable[[random.Random], None]:
        """Owns keys that no other thread changes: always reads the version that it wrote last."""

        def body(rng: random.Random) -> None:
            current: dict[str, int] = {}
            for step in range(ROUNDS):
                key = f"own/{number}/{rng.randrange(OWN_KEYS)}"
                tag = (number + 1) * 1_000_000 + step
                act = rng.choice(["put", "put", "read", "read", "update", "take", "discard"])
                if key not in current or act == "put":
                    self.store.put(key, parts(tag, rng.randint(1, 4)), durable=step % 3 == 0)
                    current[key] = tag
                elif act == "discard":
                    self.store.discard(key)
                    del current[key]
                else:
                    self._use_own(key, act, current, tag)

        return body

    def _use_own(self, key: str, act: str, current: dict[str, int], tag: int) -> None:
        access = {"read": Access.READ, "update": Access.UPDATE, "take": Access.TAKE}[act]
        with self.store.acquire(key, access) as lease:
            assert tag_of(lease) == current[key]
            if act == "update":
                for tensor in lease.tensors.values():
                    tensor.fill_(tag)
        if act == "update":
            current[key] = tag
        elif act == "take":
            del current[key]
            assert key not in self.store

    def _counter(self, number: int) -> Callable[[random.Random], None]:
        """Increments a counter in a group that other threads increment, too."""

        def body(rng: random.Random) -> None:
            for _ in range(ROUNDS):
                access = Access.UPDATE if self.exclusive else Access.READ
                with self.store.acquire("counter", access) as lease:
                    before = tag_of(lease)
                    if not self.exclusive:
                        threading.Event().wait(0.001)
                    lease.tensors["count"].fill_(before + 1)
                self.added[number] += 1

        return body

    def _publisher(self, rng: random.Random) -> None:
        for number in range(1, ROUNDS):
            self.store.put("news", parts(number, rng.choice([2, 3])))
            if number <= TOKENS:
                self.store.put(f"token/{number}", parts(number, 1), durable=False)

    def _reader(self, rng: random.Random) -> None:
        """Checks that the news never goes backwards."""
        newest = 0
        while newest < ROUNDS - 1:
            with self.store.acquire("news") as lease:
                seen = tag_of(lease)
            assert newest <= seen < ROUNDS
            newest = seen

    def _taker(self, rng: random.Random) -> None:
        """Races two threads for each token: only one may get it."""

        def race(key: str, found: list[str]) -> None:
            try:
                with self.store.acquire(key, Access.TAKE) as lease:
                    assert tag_of(lease) == int(key.rpartition("/")[2])
                    found.append(key)
            except UnknownKeyError:
                pass
            except BaseException as error:
                self.errors.append(error)

        while len(self.taken) < TOKENS and not self.errors:
            for key in self.store.keys("token/"):
                found: list[str] = []
                rivals = [
                    threading.Thread(target=race, args=(key, found), daemon=True) for _ in "ab"
                ]
                for rival in rivals:
                    rival.start()
                for rival in rivals:
                    join(rival)
                self.taken.update(found)

    def _changer(self, number: int) -> Callable[[random.Random], None]:
        """Changes two groups together. If the second is refused, it releases the first."""

        def body(rng: random.Random) -> None:
            for step in range(ROUNDS):
                first, second = rng.sample(PAIR, 2) if step else (PAIR[number], PAIR[1 - number])
                with self.store.acquire(first, Access.UPDATE) as one:
                    if not step:
                        self.meet.wait()  # once, each certainly holds the other's group
                    self._change(one, second)

        return body

    def _change(self, one: Lease, second: str) -> None:
        try:
            two = self.store.acquire(second, Access.UPDATE)
        except (BudgetError, LeaseError) as error:
            self.refused[type(error).__name__] += 1
            return
        with two:
            count = tag_of(one)
            assert tag_of(two) == count
            for tensor in (*one.tensors.values(), *two.tensors.values()):
                tensor.fill_(count + 1)

    def _hinter(self, rng: random.Random) -> None:
        while not self.over.is_set():
            keys = self.store.keys()
            key = rng.choice(keys)
            act = rng.choice(["prefetch", "prefetch", "offload", "flush"])
            try:
                if act == "flush":
                    self.store.flush()
                else:
                    getattr(self.store, act)(key)
            except UnknownKeyError:
                pass  # removed since the keys were listed
            self.over.wait(0.003)

    def _sample(self) -> None:
        while not self.over.is_set():
            assert_sound(self.store)
            self.samples += 1
            self.over.wait(0.001)
