"""A process whose main thread uses a store while another process interrupts it.

    python -m tests.faults.signals '{"place": ..., "seed": 1, "fault": "", "patience": 60}'

Writes a byte when it is ready and after each KeyboardInterrupt, and a line of JSON after SIGTERM.
After each interrupt the store must be usable. At the end nothing is leased, nothing waits, and
every value is the last one put or that of an interrupted put.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests.faults.values import fill, group, key_of, tag_for, tag_of
from tests.store.helpers import PAGE, assert_at_rest, open_store
from tierstore import Access
from tierstore.errors import UnknownKeyError
from tierstore.store import engine_of

KEYS = 6


class Worker:
    """Random steps, and all values that each key may have now."""

    def __init__(self, directory: Path, seed: int, fault: str, patience: float) -> None:
        self.random = random.Random(seed)
        self.patience = patience  # seconds
        self.store = open_store(directory, 10 * PAGE)
        if fault == "forgets":
            engine_of(self.store).requests.cancel = lambda request: None
        self.may_be: dict[str, set[int | None]] = {key_of(i): {None} for i in range(KEYS)}
        self.serial = self.steps = self.interrupts = self.checked = 0
        self.over = False

    def work(self) -> None:
        """Work until SIGTERM. Each interrupt is answered with a byte."""
        begun = False
        while not self.over:
            try:
                if not begun:  # interrupts may come from here on
                    begun = True
                    os.write(1, b".")
                while not self.over:
                    self.step()
            except KeyboardInterrupt:
                pass  # meanwhile its traceback may keep a lease that was just entered
            if not self.over:
                self.answered()

    def answered(self) -> None:
        """Request the next interrupt after this one is handled, and while a store is in use."""
        while True:
            try:
                self.interrupts += 1
                self.get(key_of(self.random.randrange(KEYS)))
                os.write(1, b".")
                return
            except KeyboardInterrupt:
                continue

    def step(self) -> None:
        key = key_of(self.random.randrange(KEYS))
        acts = [self.put, self.put, self.get, self.get, self.read, self.update, self.discard]
        faulthandler.dump_traceback_later(self.patience, exit=True)  # else it hangs forever
        self.random.choice(acts)(key)
        self.steps += 1

    def new(self, key: str) -> int:
        self.serial += 1
        return tag_for(key, 1, self.serial)

    def put(self, key: str) -> None:
        tag = self.new(key)
        tensors = group(tag, self.random.randint(1, 4))
        self.may_be[key] = self.may_be[key] | {tag}
        self.store.put(key, tensors, durable=self.random.random() < 0.3)
        self.may_be[key] = {tag}

    def get(self, key: str) -> None:
        try:
            found: int | None = tag_of(key, self.store.get(key))
        except UnknownKeyError:
            found = None
        self.see(key, found)

    def see(self, key: str, found: int | None) -> None:
        assert found in self.may_be[key], f"{key}: {found}, may be {self.may_be[key]}"
        self.may_be[key] = {found}
        self.checked += 1

    def read(self, key: str) -> None:
        try:
            with self.store.acquire(key) as lease:
                self.see(key, tag_of(key, lease.tensors))
        except UnknownKeyError:
            self.see(key, None)

    def update(self, key: str) -> None:
        try:
            with self.store.acquire(key, Access.UPDATE) as lease:
                found, tag = tag_of(key, lease.tensors), self.new(key)
                self.see(key, found)
                self.change(key, lease.tensors, found, tag)
        except UnknownKeyError:
            self.see(key, None)

    def change(self, key: str, tensors: Any, old: int, new: int) -> None:
        """Change all tensors or none: an interrupt in between would be this test's own fault."""
        late: list[int] = []
        self.may_be[key] = {old, new}
        signal.signal(signal.SIGINT, lambda number, _: late.append(number))
        try:
            fill(tensors, new)
            self.may_be[key] = {new}
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if late:
            raise KeyboardInterrupt

    def discard(self, key: str) -> None:
        if self.random.random() < 0.7:
            self.store.prefetch([key for key in self.may_be if key in self.store][:3])
            return
        self.may_be[key] = self.may_be[key] | {None}
        try:
            self.store.discard(key)
        except UnknownKeyError:
            self.see(key, None)
            return
        self.may_be[key] = {None}

    def finish(self) -> None:
        """Stop the interrupts."""
        faulthandler.dump_traceback_later(self.patience, exit=True)
        gc.collect()  # leases lost before they were assigned to a variable
        assert_at_rest(self.store)
        self.store.flush()
        for key in self.may_be:
            self.get(key)
            if key in self.store:
                with self.store.acquire(key, Access.UPDATE) as lease:
                    tag_of(key, lease.tensors)
        assert_at_rest(self.store)
        self.store.close()
        threads = [t.name for t in threading.enumerate() if t.name.startswith("tierstore")]
        assert not threads, threads


def main() -> None:
    told = json.loads(sys.argv[1])
    faulthandler.enable()
    worker = Worker(Path(told["place"]), told["seed"], told["fault"], told["patience"])

    def end(*_: object) -> None:
        worker.over = True

    signal.signal(signal.SIGTERM, end)
    worker.work()
    worker.finish()
    numbers = ("steps", "interrupts", "checked")
    print(f"\n{json.dumps({name: getattr(worker, name) for name in numbers})}", flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
