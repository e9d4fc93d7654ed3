"""Coroutines that use one store from several event loops and are cancelled at any moment."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from tests.faults.crowds import LARGEST, PATIENCE, Watch
from tests.faults.linearizability import History, Some, assert_linearizable, lent
from tests.faults.values import fill, group, key_of, tag_for, tag_of
from tests.store.helpers import PAGE, assert_at_rest, open_store
from tierstore import Access
from tierstore.errors import BudgetError, LeaseError, UnknownKeyError

KEYS = 10
TASKS = 60  # at once, in each loop
REFUSED = (BudgetError, LeaseError)


class Tasks:
    """A store, and event loops on separate threads, whose tasks use it."""

    def __init__(self, seed: int, device: str, directory: Path, loops: int = 3) -> None:
        rng = random.Random(seed)
        options: dict[str, Any] = {}
        if device != "cpu":
            options["device_budget"] = rng.randint(8, 16) * PAGE
        self.store = open_store(directory, rng.randint(8, 16) * PAGE, device, **options)
        self.history = History()
        self.values: dict[str, int | None] = {key_of(i): None for i in range(KEYS)}
        self.outcomes: Counter[str] = Counter()
        self.seeds = [rng.getrandbits(32) for _ in range(loops)]
        self.rounds = 0
        self.errors: list[BaseException] = []
        self.patience = PATIENCE
        self.watch = Watch(self.store, lambda: self.outcomes.total())

    def play(self, rounds: int) -> None:
        """Run rounds of `TASKS` tasks in each loop, and check the observations after each round."""
        with self.watch:
            for _ in range(rounds):
                self.rounds += 1
                threads = [
                    threading.Thread(target=self._loop, args=(number,), daemon=True)
                    for number in range(len(self.seeds))
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(3 * self.patience)
                    assert not thread.is_alive(), "an event loop never ended"
                for error in [*self.errors, *self.watch.errors]:
                    raise error
                self._settle()

    def _loop(self, number: int) -> None:
        try:
            asyncio.run(self._main(number))
        except BaseException as error:
            self.errors.append(error)

    async def _main(self, number: int) -> None:
        rng = random.Random(self.seeds[number] + self.rounds)
        first = (self.rounds * len(self.seeds) + number) * TASKS
        acts = [Act(self, first + i, random.Random(rng.random())) for i in range(TASKS)]
        tasks = [asyncio.ensure_future(act.run()) for act in acts]
        for task in rng.sample(tasks, TASKS // 2):
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        for result in await asyncio.wait_for(ended, self.patience):
            if isinstance(result, BaseException) and not isinstance(
                result, (asyncio.CancelledError, TimeoutError, *REFUSED)
            ):
                raise result
            self.outcomes[type(result).__name__] += 1

    def _settle(self) -> None:
        """Check the store and the history once all loops and their threads have ended."""
        assert_at_rest(self.store)
        now = {}
        for key in self.values:
            try:
                now[key] = tag_of(key, self.store.get(key))
            except UnknownKeyError:
                now[key] = None
        for key, operations in self.history.settle(now).items():
            assert_linearizable(key, self.values[key], operations)
        self.values = now


class Act:
    """A task that may be cancelled at any await."""

    KINDS = ("put", "put", "put", "get", "get", "read", "update", "update", "take", "pair")

    def __init__(self, tasks: Tasks, number: int, rng: random.Random) -> None:
        self.store, self.history = tasks.store, tasks.history
        self.random = rng
        self.who = number
        self.key = key_of(rng.randrange(KEYS))

    async def run(self) -> None:
        kind = self.random.choice(self.KINDS)
        doing: Awaitable[None] = getattr(self, kind)()
        if self.random.random() < 0.7:
            await doing
            return
        async with asyncio.timeout(self.random.choice([0, 0.001, 0.005, 0.02])):
            await doing

    def note(self, key: str, begin: int, found: Any, left: Any, what: str) -> None:
        self.history.add(key, begin, found, left, f"task {self.who} {what}")

    def tag(self) -> int:
        return tag_for(self.key, self.who & 0xFFF, self.who >> 12)

    async def put(self) -> None:
        tag, begin = self.tag(), self.history.now()
        tensors = group(tag, self.random.randint(1, LARGEST))
        try:
            await self.store.aput(self.key, tensors, durable=self.random.random() < 0.4)
        except asyncio.CancelledError:
            self.history.add_cut(self.key, begin, tag, f"task {self.who} was cut short")
            raise
        self.note(self.key, begin, Some.ANY, tag, "put")

    async def get(self) -> None:
        begin = self.history.now()
        try:
            found: int | None = tag_of(self.key, await self.store.aget(self.key))
        except UnknownKeyError:
            found = None
        self.note(self.key, begin, found, Some.SAME, "get")

    async def read(self) -> None:
        await self._read(self.key)

    async def _read(self, key: str) -> None:
        begin = self.history.now()
        try:
            lease = await self.store.aacquire(key)
        except UnknownKeyError:
            self.note(key, begin, None, Some.SAME, "read")
            return
        with lease:
            found = tag_of(key, lease.tensors)
            self.note(key, begin, found, Some.SAME, "read")
            await self._dawdle()
            assert tag_of(key, lease.tensors) == found, f"{key} changed under its reader"

    async def pair(self) -> None:
        """Hold one group while waiting for another."""
        try:
            lease = await self.store.aacquire(self.key)
        except UnknownKeyError:
            return
        with lease:
            await self._read(key_of(self.random.randrange(KEYS)))

    async def update(self) -> None:
        await self._alone(Access.UPDATE)

    async def take(self) -> None:
        await self._alone(Access.TAKE)

    async def _alone(self, access: Access) -> None:
        begin = self.history.now()
        try:
            lease = await self.store.aacquire(self.key, access)
        except UnknownKeyError:
            self.note(self.key, begin, None, Some.SAME, access.name)
            return
        left: int | None = None
        with lease:
            found = tag_of(self.key, lease.tensors)
            self.note(self.key, begin, found, lent(found), access.name)
            begin = self.history.now()
            try:
                left = found if access is Access.UPDATE else None
                await self._dawdle()  # if cancelled here, it has not changed anything yet
                if access is Access.UPDATE:
                    left = self.tag()
                    fill(lease.tensors, left)
            finally:
                lease.release()
                self.history.add_return(self.key, begin, found, left, f"task {self.who} returned")

    async def _dawdle(self) -> None:
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)
