"""A message that is lost, doubled or changed causes an error at most, never wrong values."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.lanes import by_lane
from tests.service.limits import set_limit
from tests.service.proxy import Fault, Harm, Proxy
from tests.service.serving import ThreadService, serving
from tests.service.test_serving import MIB, checkpoint, same
from tierstore import Access, TierStore, TierStoreError
from tierstore.service import server
from tierstore.tiers import service_wire

SECONDS = 10.0
NO_FAULT = Fault(True, -1, Harm.NONE)
HARMS = [harm for harm in Harm if harm is not Harm.NONE]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadService]:
    set_limit(monkeypatch, service_wire, "HELLO_SECONDS", 2.0)
    set_limit(monkeypatch, service_wire, "PING_SECONDS", 0.05)
    set_limit(monkeypatch, service_wire, "UNFINISHED_SECONDS", 0.5)
    set_limit(monkeypatch, server, "UNFINISHED_SECONDS", 0.5)
    set_limit(monkeypatch, server, "CHECK_SECONDS", 0.05)
    with serving(tmp_path / "served", 4 * MIB + 65536) as running:
        yield running


@dataclass
class Worker:
    """Makes every call of a worker, repeatedly and under new names."""

    place: Path
    tensors: dict[str, torch.Tensor]
    turns: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def connect(self, path: str) -> TierStore:
        self.turns += 1
        own = self.place / f"own{self.turns}"
        return TierStore.connect(path, device="cpu", ram_budget=4 * MIB, disk_dir=own)

    def work(self, store: TierStore) -> None:
        """Make every call. The values that it sees must be right; may raise TierStoreError."""
        self.turns += 1
        prefix = f"{self.turns}/"
        store.register_checkpoint(self.place / "m.safetensors", prefix)
        for name in ("w0", "w1", "w2", "w3", "w0"):
            with store.acquire(prefix + name, timeout=SECONDS) as lease:
                assert same(lease, self.tensors[name], name)
        made = {n: (t[:1000] + self.turns).bfloat16() for n, t in self.tensors.items()}
        store.register(prefix + "made", made)
        with store.acquire(prefix + "made", timeout=SECONDS) as lease:
            assert all(same(lease, tensor, name) for name, tensor in made.items())
        with store.acquire(prefix + "w1", Access.UPDATE, timeout=SECONDS) as lease:
            lease.tensors["w1"].add_(1)
        with store.acquire(prefix + "w1", timeout=SECONDS) as lease:
            assert same(lease, self.tensors["w1"] + 1, "w1")
        with store.acquire(prefix + "w2", timeout=SECONDS) as lease:
            assert same(lease, self.tensors["w2"], "w2")

    @contextlib.contextmanager
    def may_fail(self) -> Iterator[None]:
        """Check that the block ends in time: without an error, or with one of the library."""
        began = time.monotonic()
        try:
            yield
            self.counts["fine"] += 1
        except TierStoreError as error:
            assert str(error)
            self.counts[type(error).__name__] += 1
        assert time.monotonic() - began < SECONDS

    def live(self, service: ThreadService, fault: Fault) -> Proxy:
        """Work over a connection with a fault, then over one without. Nothing may be left."""
        with Proxy(service.socket, fault) as proxy:
            store = None
            with self.may_fail():
                store = self.connect(proxy.path)
            if store is None:
                store = self.connect(proxy.path)
            with self.may_fail():
                self.work(store)
            began = time.monotonic()
            # A fault in the last message of a connection shows at the next one. On a busy machine,
            # fewer prefetches happen before their groups are needed: then the message comes later
            # than it did when they were counted.
            for _ in range(1 if proxy.done else 2):
                with contextlib.suppress(TierStoreError):
                    self.work(store)
            self.work(store)
            store.close()
            assert time.monotonic() - began < 2 * SECONDS
            service.wait_until(lambda: not service.server.connections)
            assert service.leased() == 0
        return proxy


def connections() -> int:
    """Count the open sockets, arenas and processes. Files of groups may stay open."""
    gc.collect()
    kinds = ("socket:", "anon_inode:", "/memfd:")
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith(kinds)
    return count


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path, checkpoint(tmp_path / "m.safetensors", groups=6))


def test_connection_without_faults_works(service: ThreadService, worker: Worker):
    before = connections()
    proxy = worker.live(service, NO_FAULT)
    assert worker.counts == {"fine": 2}
    assert proxy.done == 0
    assert min(proxy.passed.values()) > 15  # a session has enough messages to harm
    assert connections() <= before  # fewer, if some of an earlier test were still ending


@pytest.mark.full("the harm, the message", keep="values")
@pytest.mark.parametrize("up", [True, False], ids=["to the service", "from it"])
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.name)
def test_connection_fault_in_any_message_is_contained(
    service: ThreadService, worker: Worker, up: bool, harm: Harm
):
    before = connections()
    most = worker.live(service, NO_FAULT).passed[up] // 3  # of the first of three turns
    worker.counts.clear()
    harmed = 0
    numbers = range(most)[:: by_lane(max(most // 2, 1), max(most // 6, 1), 1)]
    for number in numbers:
        proxy = worker.live(service, Fault(up, number, harm))
        harmed += proxy.done
    assert harmed >= len(numbers) * 0.8  # prefetching does not always take as many messages
    assert worker.counts.total() > worker.counts["fine"] > 0
    assert connections() <= before  # fewer, if some of an earlier test were still ending
