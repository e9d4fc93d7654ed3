"""A reentrant call on the same thread works, or raises at once.

Finalizers and signal handlers make such calls at every n-th instruction of the library. The default
lane runs a sample.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR
from tests.faults.interrupting import at_call
from tests.faults.reentering import Calls, Dying, Neighbour, Signalling, Visitor, by_finalizer
from tests.faults.test_interrupts import BUDGET, Scene
from tests.helpers.engine import core_of
from tests.lanes import by_lane
from tests.store.helpers import PAGE, assert_at_rest, on_both, open_store, pages
from tierstore import (
    Access,
    OffloadModel,
    OffloadOptimizer,
    TierStore,
    enable_group_offload,
    save_training,
)
from tierstore.engine import request_loop, transaction
from tierstore.errors import BudgetError, LeaseError, ReentrantCallError
from tierstore.model import signal_handlers
from tierstore.model.locks import AutoResetEvent
from tierstore.tiers.workers import URGENT, SerialExecutor

STRIDE = by_lane(50 * 31, 250, 1)
PATIENCE = 20.0


def no_more(scene: Scene) -> None:
    scene.store.close()


def forward(scene: Scene) -> Callable[[], None]:
    """Return runs of a model whose weights exceed the memory."""
    torch.manual_seed(0)
    width = 128  # a weight has the size of one of the scene's groups
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6))).eval()
    x = torch.randn(2, width)
    with torch.no_grad():
        expected = model(x)
    enable_group_offload(model, scene.store)

    def run() -> None:
        with torch.no_grad():
            assert torch.allclose(model(x.to(scene.store.device)).cpu(), expected, atol=1e-5)

    return run


def training_step(scene: Scene) -> Callable[[], None]:
    """Return steps of a training that exceeds the memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    offloaded = OffloadModel(model, scene.store)
    optimizer = OffloadOptimizer(offloaded, scene.store, torch.optim.SGD, lr=1e-3)
    x = torch.randn(2, 64, device=scene.store.device)

    def run() -> None:
        offloaded(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def of_scene(action: Callable[[Scene], None]) -> Callable[[Scene], Callable[[], None]]:
    return lambda scene: lambda: action(scene)


ACTIONS = {
    "put": (of_scene(Scene.put), 1),
    "get": (of_scene(Scene.get), 1),
    "acquire": (of_scene(Scene.acquire_and_release), 1),
    "update": (of_scene(Scene.update), 1),
    "flush": (of_scene(Scene.flush), 1),
    "discard": (of_scene(Scene.discard), 1),
    "hint": (of_scene(Scene.hint), 1),
    "close": (of_scene(no_more), 1),
    "forward": (forward, 7),
    "training": (training_step, 29),
}
"""Interrupted actions, and the factor by which their strides are longer."""

actions = pytest.mark.parametrize("name", ACTIONS)


def sweep(
    store: TierStore, name: str, make: Callable[[str], None], *, times: int = 2
) -> tuple[Scene, int]:
    """Run an action several times, visited at other instructions each time. Returns the count."""
    scene, visits = Scene(store), 0
    begin, longer = ACTIONS[name]
    action, stride = begin(scene), STRIDE * longer
    for turn in range(1 if name == "close" else times):
        scene.prepare()
        visitor = Visitor(make, stride, first=turn * stride // times)
        visitor.run(action)
        visits += visitor.visits
    return scene, visits


def assert_unharmed(scene: Scene, calls: Calls, neighbour: Neighbour) -> None:
    """Check that all values are right, nothing is left behind, and other threads are unaffected."""
    assert neighbour.errors == []
    assert calls.wrong == []
    stats = scene.store.stats() if not scene.store.closed else None
    if stats is None:
        return
    for tier, budget in stats.budget_bytes.items():
        assert budget is None or stats.peak_bytes[tier] <= budget
    for number in range(12):
        assert float(scene.got(f"group {number}")[0]) == number
    gc.collect()


@actions
@on_both
@pytest.mark.full(
    "calls of an accelerator differ in the end of a lease and in copies",
    keep=["cpu-put", "cpu-get", "cpu-flush", "cpu-close", f"{ACCELERATOR}-update"],
)
@pytest.mark.timeout(4 * 3600)
def test_call_in_a_finalizer_works_or_raises(device: str, name: str, quick_dir: Path) -> None:
    store = open_store(quick_dir / "store", BUDGET, device)
    calls = Calls(store, quick_dir)
    with Neighbour(store) as neighbour:
        scene, visits = sweep(store, name, by_finalizer(calls.make))
    assert visits > 0
    assert_unharmed(scene, calls, neighbour)
    assert calls.done.total() + calls.unlucky.total() + calls.refused.total() == visits
    if name not in ("forward", "training", "close"):
        assert_at_rest(store)
    store.close()


@actions
@on_both
@pytest.mark.full(
    "calls of an accelerator differ in the end of a lease and in copies",
    keep=["cpu-put", "cpu-get", "cpu-flush", "cpu-close", "cpu-training", f"{ACCELERATOR}-update"],
)
@pytest.mark.timeout(4 * 3600)
def test_call_in_a_signal_handler_works(device: str, name: str, quick_dir: Path) -> None:
    store = open_store(quick_dir / "store", BUDGET, device)
    calls = Calls(store, quick_dir)
    with Neighbour(store) as neighbour, Signalling(calls.make) as signalling:
        scene, _ = sweep(store, name, signalling.visit)
    assert signalling.handled == signalling.sent > 0
    assert calls.refused == {}
    assert_unharmed(scene, calls, neighbour)
    store.close()


@pytest.mark.timeout(4 * 3600)
def test_save_training_in_a_handler_works_or_raises(quick_dir: Path) -> None:
    """Check that it works except where the step itself has leased a group to be saved."""
    with open_store(quick_dir / "store", BUDGET) as store:
        torch.manual_seed(0)
        offloaded = OffloadModel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), store)
        optimizer = OffloadOptimizer(offloaded, store, torch.optim.SGD, lr=1e-3)
        x, saved, told, wrong = torch.randn(2, 64), 0, 0, []

        def save(where: str) -> None:
            nonlocal saved, told
            try:
                save_training(quick_dir / "run", offloaded, optimizer)
                saved += 1
            except (BudgetError, LeaseError):
                told += 1
            except BaseException as error:
                wrong.append((where, error))

        def step() -> None:
            offloaded(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        with Signalling(save) as signalling:
            Visitor(signalling.visit, by_lane(17_000, 1700)).run(step)
        assert wrong == []
        assert saved > 0
        assert signalling.handled == saved + told + signalling.passed
        step()


def test_call_in_a_finalizer_without_the_check_deadlocks(
    quick_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the control: the call joins the transaction it interrupts, or deadlocks on its lock."""

    def joined(lock: Any, action: Callable[[], Any]) -> Any:
        with lock:
            return action()

    store = open_store(quick_dir / "store", BUDGET)
    calls = Calls(store, quick_dir, patience=0.2)
    monkeypatch.setattr(transaction, "inside", lambda: False)
    monkeypatch.setattr(transaction, "under", joined)
    monkeypatch.setattr(request_loop, "check_may_wait", lambda: None)
    scene = Scene(store)
    scene.prepare()
    harmed: list[BaseException] = []
    for turn in range(40):
        try:
            visit = by_finalizer(partial(calls.one, calls.flush))  # the others may have no timeout
            Visitor(visit, 1021, first=turn * 25).run(scene.put)
        except BaseException as error:
            harmed.append(error)
        if harmed or calls.wrong:
            break
    assert harmed or calls.wrong
    core_of(store).finalizer()


def test_handlers_not_deferred_raise(quick_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the control: calls of handlers that are not deferred run in the middle of steps."""
    monkeypatch.setattr(signal_handlers, "hold", lambda inside, nested: [])
    store = open_store(quick_dir / "store", BUDGET)
    calls = Calls(store, quick_dir)
    with Signalling(calls.make) as signalling:
        sweep(store, "put", signalling.visit)
    assert calls.refused.total() > 0
    assert calls.wrong == []
    store.close()


# Single calls -------------------------------------------------------------------------------------


def in_a_step(store: TierStore, act: Callable[[], None]) -> None:
    """Have a finalizer run a function in the middle of a transaction."""
    planner = type(core_of(store).planner)
    with at_call(planner.handle, lambda: type(Dying(act))):
        store.offload("steady")


@pytest.fixture
def store(quick_dir: Path) -> Iterator[TierStore]:
    with open_store(quick_dir / "store", BUDGET) as store:
        store.put("steady", pages(7))
        yield store


def test_call_in_a_step_raises_with_advice(store: TierStore) -> None:
    told: list[BaseException] = []

    def act() -> None:
        with pytest.raises(ReentrantCallError, match="set a flag or fill a queue") as raised:
            store.get("steady")
        told.append(raised.value)

    in_a_step(store, act)
    assert len(told) == 1
    assert isinstance(told[0], RuntimeError)
    assert_at_rest(store)


def test_lease_released_in_a_step_is_returned(store: TierStore) -> None:
    lease = store.acquire("steady", Access.UPDATE)
    lease.tensor.fill_(8)
    in_a_step(store, lease.release)
    assert lease.released
    assert torch.equal(store.get("steady", timeout=PATIENCE), pages(8))
    assert_at_rest(store)


def test_group_discarded_in_a_step_is_discarded(store: TierStore) -> None:
    store.put("passing", pages(1))
    in_a_step(store, lambda: store.discard("passing"))
    store.stats()  # the next call, whichever it is
    assert "passing" not in store
    assert_at_rest(store)


def test_group_put_after_its_discard_in_a_step_stays(store: TierStore) -> None:
    store.put("passing", pages(1))
    in_a_step(store, lambda: store.discard("passing"))
    assert core_of(store).deferred
    store.put("passing", pages(2))
    assert torch.equal(store.get("passing", timeout=PATIENCE), pages(2))
    assert_at_rest(store)


@pytest.mark.parametrize("place", ["worker", "serial"])
def test_finalizer_on_a_store_thread_raises(place: str, store: TierStore) -> None:
    """Check a call on a thread of the store: its wait might be for that thread itself."""
    told: list[BaseException] = []
    over = threading.Event()

    def act() -> None:
        try:
            store.get("steady", timeout=PATIENCE)
        except BaseException as error:
            told.append(error)
        over.set()

    dying, serial = [Dying(act)], SerialExecutor()
    if place == "worker":
        core_of(store).tiers.disk.workers.submit(URGENT, dying.clear)
    else:
        serial.submit(dying.clear)
    assert over.wait(PATIENCE)
    assert serial.stop(time.monotonic() + PATIENCE)
    assert [type(error) for error in told] == [ReentrantCallError]
    assert torch.equal(store.get("steady", timeout=PATIENCE), pages(7))
    assert_at_rest(store)


def test_handler_blocked_by_its_own_put_raises(store: TierStore) -> None:
    """Call the store during the put that it interrupts: no caller could free its space."""
    size = BUDGET // PAGE * 2 // 3
    told: list[BaseException] = []

    def act() -> None:
        with pytest.raises(BudgetError, match="callers that all wait") as raised:
            store.put("inner", pages(2, size), durable=False, timeout=PATIENCE)
        told.append(raised.value)

    with at_call(type(core_of(store).tiers.host).fill, act):
        store.put("outer", pages(1, size), durable=False, timeout=PATIENCE)
    assert len(told) == 1
    assert torch.equal(store.get("outer", timeout=PATIENCE), pages(1, size))
    assert "inner" not in store
    assert_at_rest(store)


def test_handler_during_a_wait_works(store: TierStore) -> None:
    lease = store.acquire("steady", Access.UPDATE)
    release = threading.Timer(0.2, lease.release)
    found: list[Any] = []
    store.put("other", pages(3))

    def act() -> None:
        found.append(store.get("other", timeout=PATIENCE))

    got: list[Any] = []

    def wait() -> None:
        with at_call(AutoResetEvent.wait, act):
            got.append(store.get("steady", timeout=PATIENCE))

    waiting = threading.Thread(target=wait)
    waiting.start()
    release.start()
    waiting.join(PATIENCE)
    assert torch.equal(found[0], pages(3))
    assert torch.equal(got[0], pages(7))
    assert_at_rest(store)


@pytest.mark.parametrize("wanted", ["flush", "get", "update"])
def test_caller_waiting_for_its_own_lease_raises(wanted: str, store: TierStore) -> None:
    """Check that it raises at once, whatever other callers do meanwhile."""
    calls = {
        "flush": lambda: store.flush(timeout=PATIENCE),
        "get": lambda: store.get("steady", timeout=PATIENCE),
        "update": lambda: store.acquire("steady", Access.UPDATE, timeout=PATIENCE),
    }
    with Neighbour(store) as neighbour, store.acquire("steady", Access.UPDATE) as lease:
        lease.tensor.fill_(8)
        with pytest.raises(LeaseError, match="already leased by this caller"):
            calls[wanted]()
    assert neighbour.errors == []
    assert torch.equal(store.get("steady", timeout=PATIENCE), pages(8))
