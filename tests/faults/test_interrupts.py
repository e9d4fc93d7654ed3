"""Ctrl-C at any instruction of the library leaves a store whole and usable.

Every n-th instruction is tried, with other ones in each run. The default lane tries one in eleven
of the full lane's; `--long` tries all.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR
from tests.faults.interrupting import PACKAGE, Interrupter
from tests.helpers.engine import core_of, mutable
from tests.lanes import by_lane
from tests.store.helpers import assert_at_rest, on_both
from tierstore import Access, TierStore
from tierstore.engine.core import Core
from tierstore.errors import BudgetError, UnknownKeyError
from tierstore.lease import make_revocable, resume
from tierstore.model.locks import under
from tierstore.model.tiers import HostAccess

PAGE = 4096
GROUPS = 12
PAGES = 4  # of each group; the budget holds two thirds of them
BUDGET = 8 * PAGES * PAGE
PATIENCE = 30.0
STRIDE = 97


def value(number: float) -> torch.Tensor:
    return torch.full((PAGES * PAGE // 4,), float(number))


class Scene:
    """A store with more groups than its memory holds, and actions on it."""

    def __init__(self, store: TierStore, patience: float = PATIENCE) -> None:
        self.store = store
        self.patience = patience
        self.turn = 0
        for number in range(GROUPS):
            store.put(f"group {number}", value(number))
        mutable(store).create("state", {"a": value(0)})
        store.flush()

    def prepare(self) -> None:
        """Store the values that every action expects."""
        self.turn += 1
        self.store.put("changing", value(self.turn))
        self.store.put("leaving", value(self.turn))

    def acquire_and_release(self) -> None:
        with self.store.acquire(f"group {self.turn % GROUPS}") as lease:
            assert lease.tensors

    def rest_and_resume(self) -> None:
        with self.store.acquire(f"group {self.turn % GROUPS}") as lease:
            if make_revocable(lease) and resume(lease):
                assert lease.tensors

    def rest_and_be_called_in(self) -> None:
        with self.store.acquire("changing") as lease:
            make_revocable(lease)
            self.update()
            resume(lease)

    def put(self) -> None:
        self.store.put("changing", value(-self.turn))

    def put_for_now(self) -> None:
        self.store.put("changing", value(-self.turn), durable=False)

    def get(self) -> None:
        self.store.get(f"group {self.turn % GROUPS}")

    def update(self) -> None:
        with self.store.acquire("changing", Access.UPDATE) as lease:
            lease.tensor.fill_(-self.turn)

    def take(self) -> None:
        with self.store.acquire("leaving", Access.TAKE) as lease:
            assert lease.tensors

    def discard(self) -> None:
        self.store.discard("leaving")

    def hint(self) -> None:
        self.store.prefetch([f"group {(self.turn + i) % GROUPS}" for i in range(3)])
        self.store.offload(f"group {(self.turn + 5) % GROUPS}")

    def flush(self) -> None:
        self.store.flush()

    def hold(self) -> None:
        with mutable(self.store).lease_in_host("state", HostAccess.UPDATE) as lease:
            lease.tensors["a"].fill_(self.turn)
        mutable(self.store).move_to_disk(["state"])

    def look(self) -> None:
        """Check that values are the old or new ones, and that the whole budget is available."""
        store = self.store
        changed = self.got("changing")
        assert float(changed[0]) in (self.turn, -self.turn)
        assert (changed == changed[0]).all()
        if "leaving" in store:
            assert torch.equal(self.got("leaving"), value(self.turn))
        number = self.turn % GROUPS
        assert torch.equal(self.got(f"group {number}"), value(number))
        with store.acquire("state", timeout=self.patience) as lease:
            state = lease.tensors["a"].cpu()
            assert (state == state[0]).all()
        del lease, state  # the store waits for memory that is still viewed
        store.put("all there is", torch.zeros(BUDGET // 4), durable=False, timeout=self.patience)
        with store.acquire("all there is", timeout=self.patience) as lease:
            assert not lease.tensor.any()
        store.discard("all there is")
        gc.collect()
        assert_at_rest(store)

    def look_at_all(self) -> None:
        for number in range(GROUPS):
            assert torch.equal(self.got(f"group {number}"), value(number))

    def got(self, key: str) -> torch.Tensor:
        found = self.store.get(key, timeout=self.patience)
        assert isinstance(found, torch.Tensor)
        return found.cpu()


ACTIONS = [
    Scene.acquire_and_release,
    Scene.rest_and_resume,
    Scene.rest_and_be_called_in,
    Scene.put,
    Scene.put_for_now,
    Scene.get,
    Scene.update,
    Scene.take,
    Scene.discard,
    Scene.hint,
    Scene.flush,
    Scene.hold,
]


def turns(scene: Scene, action: Callable[[Scene], Any], stride: int) -> Iterator[Interrupter]:
    """Interrupt an action at one instruction after another, each time from the start."""
    turn = 0
    while True:
        scene.prepare()
        interrupter = Interrupter(turn)
        interrupter.run(lambda: action(scene))
        yield interrupter
        if not interrupter.fired:
            return
        turn += stride


# An interrupt in a finalizer is not propagated; pytest would report it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
@on_both
@pytest.mark.full(
    "a put and an update use all hops that the others use, on an accelerator, too",
    keep=[
        *("cpu-put", "cpu-hold", "cpu-flush", "cpu-acquire_and_release", "cpu-discard"),
        *(f"{ACCELERATOR}-put", f"{ACCELERATOR}-update"),
    ],
)
@pytest.mark.timeout(4 * 3600)
def test_interrupt_at_any_instruction_leaves_the_store_whole(
    device: str, action: Callable[[Scene], Any], quick_dir: Path
) -> None:
    budget = {"device_budget": BUDGET} if device != "cpu" else {}
    stride = by_lane(11 * STRIDE, 3 * STRIDE, 1)
    with TierStore(BUDGET, quick_dir, device=device, **budget) as store:
        scene = Scene(store)
        count = 0
        for interrupter in turns(scene, action, stride):
            try:
                scene.look()
            except BaseException as error:
                error.add_note(f"interrupted at {interrupter.where}, number {interrupter.turn}")
                raise
            count += interrupter.fired
        scene.look_at_all()
        assert count >= max(1, 500 // stride)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_without_rebuild_leaves_it_torn(
    quick_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the control: the same with a store that does not rebuild after an interrupt."""
    monkeypatch.setattr(Core, "rebuild", lambda self: None)
    store = TierStore(BUDGET, quick_dir, device="cpu")
    scene = Scene(store, patience=1.0)
    found = []
    for interrupter in turns(scene, Scene.acquire_and_release, STRIDE):
        try:
            scene.look()
        except BaseException as error:
            found.append((interrupter.where, error))
            break
    assert found
    core_of(store).finalizer()


def test_lock_in_a_with_statement_may_never_be_released() -> None:
    """Check why the library does not take its locks by `with lock:`."""
    lock, other = threading.RLock(), threading.RLock()
    place = {"__name__": "inside"}
    code = "def use(lock):\n    with lock:\n        pass\n"
    exec(compile(code, PACKAGE + "/inside.py", "exec"), place)
    lost = kept = 0
    for turn in range(60):
        Interrupter(turn).run(lambda: place["use"](lock))
        lost += lock._is_owned()
        while lock._is_owned():
            lock.release()
        Interrupter(turn).run(lambda: under(other, lambda: None))
        kept += other._is_owned()
    assert lost > 0
    assert kept == 0


def test_library_error_in_a_step_needs_no_rebuild(quick_dir: Path) -> None:
    """Check that no learned order is lost."""
    with TierStore(BUDGET, quick_dir, device="cpu") as store:
        before = core_of(store).planner
        with pytest.raises(UnknownKeyError):
            store.acquire("nothing")
        with pytest.raises(BudgetError):
            store.put("too large", torch.zeros(BUDGET))
        assert not core_of(store).dirty
        assert core_of(store).planner is before
