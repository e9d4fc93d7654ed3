"""Many threads that use one store at random, and their observations of each key.

They work in short rounds. Between two rounds all threads are idle: the values are read, and the
observations of the round must have an order that explains them.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tests.faults.linearizability import History, Some, assert_linearizable, lent
from tests.faults.values import fill, group, key_of, tag_for, tag_of
from tests.helpers.engine import core_of
from tests.store.helpers import PAGE, assert_at_rest, assert_sound, open_store
from tierstore import Access, Lease, TierStore
from tierstore.errors import BudgetError, LeaseError, UnknownKeyError

KEYS = 20
LARGEST = 4  # pages of a group
PATIENCE = 60.0
"""Seconds without progress after which the threads count as deadlocked."""


class Stuck(AssertionError):
    """No thread made progress for a long time."""


class Watch:
    """Samples a store continuously: it must stay within its budgets, and threads must progress."""

    def __init__(self, store: TierStore, progress: Callable[[], int]) -> None:
        self.store = store
        self.budgets = dict(store.stats().budget_bytes)
        self.samples = 0
        self.pause = 0.002  # seconds between two samples
        self.stuck = threading.Event()
        self.errors: list[BaseException] = []
        self._progress = progress
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)

    def look(self) -> None:
        """Assert that no tier exceeds the budget that the store was opened with."""
        stats = self.store.stats()
        for tier, budget in self.budgets.items():
            for what, nbytes in (("used", stats.used_bytes), ("peak", stats.peak_bytes)):
                held = nbytes.get(tier, 0)
                assert budget is None or held <= budget, f"{what} {held} of {budget} on {tier}"
        if self.store.device.type == "cpu":
            pages = core_of(self.store).tiers.host.arena.make.__self__
            assert pages.held <= self.budgets["HOST"], "memory is not released"
        self.samples += 1
        if self.samples % 8 == 0:
            assert_sound(self.store)

    def _run(self) -> None:
        last, since = -1, time.monotonic()
        while not self._over.wait(self.pause):
            try:
                self.look()
            except BaseException as error:
                self.errors.append(error)
                return
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE and not self.stuck.is_set():
                faulthandler.dump_traceback()
                self.stuck.set()


@contextmanager
def switching_often(often: bool) -> Any:
    """Make the interpreter switch threads at almost every step."""
    before = sys.getswitchinterval()
    if often:
        sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Throng:
    """The threads, their store and their history."""

    def __init__(
        self, seed: int, device: str, directory: Path, threads: int = 64, least: int | None = None
    ) -> None:
        """Create a store of `least` to 40 pages; of `least` if that is more."""
        self.random = rng = random.Random(seed)
        options: dict[str, Any] = {}
        if device != "cpu":
            options["device_budget"] = rng.randint(12, 24) * PAGE
        # All groups together have about 50 pages. With space for few of them, almost all threads
        # wait, and the more threads wait the longer each step takes. So small budgets get few
        # threads.
        least = least or (LARGEST if threads <= 16 else 24)
        nbytes = rng.randint(least, max(least, 40)) * PAGE
        self.store = open_store(directory, nbytes, device, **options)
        self.history = History()
        self.values: dict[str, int | None] = {key_of(i): None for i in range(KEYS)}
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.players = [Player(self, number, rng.getrandbits(32)) for number in range(threads)]
        self.access_to_change = Access.UPDATE
        self.watch = Watch(self.store, lambda: self.done.total())
        self.errors: list[BaseException] = []

    def play(self, rounds: int, steps: int) -> None:
        """Run rounds of `steps` steps of each thread. Raises all errors at the end of a round."""
        with self.watch:
            for number in range(rounds):
                with switching_often(number % 2 == 1):
                    self._round(steps)
                self._raise()
                self.settle()

    def _round(self, steps: int) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(player, steps), daemon=True)
            for player in self.players
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not self.watch.stuck.is_set():
                thread.join(0.5)
        if self.watch.stuck.is_set():
            # All waiters get an error, so the test can end.
            threading.Thread(target=self.store.close, daemon=True).start()
            raise Stuck(f"no progress for {PATIENCE} s; all stacks were printed")

    def _guarded(self, player: Player, steps: int) -> None:
        try:
            player.play(steps)
        except BaseException as error:
            self.errors.append(error)
            for lease in player.held:
                lease.release()

    def _raise(self) -> None:
        for error in [*self.errors, *self.watch.errors]:
            raise error

    def settle(self) -> None:
        """Check the round that has ended."""
        now = {key: self.value_of(key) for key in self.values}
        for key, operations in self.history.settle(now).items():
            assert_linearizable(key, self.values[key], operations)
        self.values = now
        assert_at_rest(self.store)

    def value_of(self, key: str) -> int | None:
        try:
            return tag_of(key, self.store.get(key))
        except UnknownKeyError:
            return None


class Player:
    """A thread whose random steps are recorded in the history."""

    STEPS: ClassVar[dict[str, int]] = {  # relative frequencies
        "put": 10,
        "put_ephemeral": 14,
        "get": 24,
        "read": 14,
        "update": 14,
        "take": 3,
        "discard": 3,
        "two": 4,
        "put_while_holding": 2,
        "prefetch": 6,
        "offload": 5,
        "keep": 2,
        "flush": 0.3,
        "contains": 2,
        "keys": 0.5,
    }

    def __init__(self, throng: Throng, number: int, seed: int) -> None:
        self.throng = throng
        self.store = throng.store
        self.history = throng.history
        self.number = number
        self.random = random.Random(seed)
        self.serial = 0
        self.held: list[Lease] = []

    def play(self, steps: int) -> None:
        names, weights = list(self.STEPS), list(self.STEPS.values())
        for name in self.random.choices(names, weights, k=steps):
            getattr(self, name)(self.key())
            self.throng.done[name] += 1  # may miss some, because threads add concurrently

    def key(self) -> str:
        return key_of(self.random.randrange(KEYS))

    def tag(self, key: str) -> int:
        self.serial += 1
        return tag_for(key, self.number, self.serial)

    def note(self, key: str, begin: int, found: Any, left: Any, what: str) -> None:
        self.history.add(key, begin, found, left, f"thread {self.number} {what}")

    def refuse(self, error: BaseException) -> None:
        """Count an error that only a caller holding a lease may get."""
        if not self.held:
            raise AssertionError("got the error although it holds no lease") from error
        self.throng.refused[type(error).__name__] += 1

    # Values ------------------------------------------------------------------------------------

    def put(self, key: str, durable: bool = True) -> None:
        tag = self.tag(key)
        tensors = group(tag, self.random.randint(1, LARGEST))
        begin = self.history.now()
        try:
            self.store.put(key, tensors, durable=durable)
        except (BudgetError, LeaseError) as error:
            self.refuse(error)  # nothing was put
            return
        self.note(key, begin, Some.ANY, tag, "put")

    def put_ephemeral(self, key: str) -> None:
        self.put(key, durable=False)

    def get(self, key: str) -> None:
        begin = self.history.now()
        try:
            found: int | None = tag_of(key, self.store.get(key))
        except UnknownKeyError:
            found = None
        self.note(key, begin, found, Some.SAME, "get")

    def acquire(self, key: str, access: Access) -> Lease | None:
        begin = self.history.now()
        try:
            lease = self.store.acquire(key, access)
        except UnknownKeyError:
            self.note(key, begin, None, Some.SAME, "acquire")
            return None
        except (BudgetError, LeaseError) as error:
            self.refuse(error)
            return None
        self.held.append(lease)
        return lease

    def release(self, lease: Lease) -> None:
        lease.release()
        self.held.remove(lease)

    def read(self, key: str) -> None:
        begin = self.history.now()
        lease = self.acquire(key, Access.READ)
        if lease is None:
            return
        found = tag_of(key, lease.tensors)
        self.note(key, begin, found, Some.SAME, "read")
        self.dawdle()
        assert tag_of(key, lease.tensors) == found, f"{key} changed under its reader"
        self.release(lease)

    def dawdle(self) -> None:
        """Yield to other threads, sometimes for longer."""
        if self.random.random() < 0.5:
            time.sleep(0 if self.random.random() < 0.9 else 0.002)

    def update(self, key: str) -> None:
        begin = self.history.now()
        lease = self.acquire(key, self.throng.access_to_change)
        if lease is None:
            return
        found, tag = tag_of(key, lease.tensors), self.tag(key)
        self.note(key, begin, found, lent(found), "update")
        self.dawdle()
        begin = self.history.now()
        fill(lease.tensors, tag)
        self.release(lease)
        self.history.add_return(key, begin, found, tag, f"thread {self.number} updated")

    def take(self, key: str) -> None:
        begin = self.history.now()
        lease = self.acquire(key, Access.TAKE)
        if lease is None:
            return
        found = tag_of(key, lease.tensors)
        self.note(key, begin, found, lent(found), "take")
        self.dawdle()
        assert tag_of(key, lease.tensors) == found, f"{key} changed under its taker"
        begin = self.history.now()
        self.release(lease)
        self.history.add_return(key, begin, found, None, f"thread {self.number} took")

    def discard(self, key: str) -> None:
        begin = self.history.now()
        try:
            self.store.discard(key)
        except UnknownKeyError:
            self.note(key, begin, None, Some.SAME, "discard")
            return
        self.note(key, begin, Some.GROUP, None, "discard")

    # While it holds another lease --------------------------------------------------------------

    def two(self, key: str) -> None:
        self._holding(key, lambda: self.read(self.key()))

    def put_while_holding(self, key: str) -> None:
        self._holding(key, lambda: self.put(self.key(), durable=False))

    def _holding(self, key: str, then: Callable[[], None]) -> None:
        begin = self.history.now()
        lease = self.acquire(key, Access.READ)
        if lease is None:
            return
        found = tag_of(key, lease.tensors)
        self.note(key, begin, found, Some.SAME, "read")
        try:
            then()
            assert tag_of(key, lease.tensors) == found, f"{key} changed under its reader"
        finally:
            self.release(lease)

    # Hints and queries -------------------------------------------------------------------------

    def prefetch(self, key: str) -> None:
        self._hint(key, lambda: self.store.prefetch([key]))

    def offload(self, key: str) -> None:
        self._hint(key, lambda: self.store.offload(key))

    def keep(self, key: str) -> None:
        self._hint(key, lambda: self.store.make_sticky(key))

    def _hint(self, key: str, give: Callable[[], None]) -> None:
        begin, found = self.history.now(), True
        try:
            give()
        except UnknownKeyError:
            found = False
        self.note(key, begin, Some.GROUP if found else None, Some.SAME, "hint")

    def contains(self, key: str) -> None:
        begin = self.history.now()
        found = Some.GROUP if key in self.store else None
        self.note(key, begin, found, Some.SAME, "contains")

    def keys(self, _: str) -> None:
        begin = self.history.now()
        there = set(self.store.keys("key/"))
        assert there <= set(self.throng.values), there
        for key in self.throng.values:
            found = Some.GROUP if key in there else None
            self.note(key, begin, found, Some.SAME, "keys")

    def flush(self, _: str) -> None:
        self.store.flush()
