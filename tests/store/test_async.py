"""Async methods: the event loop keeps running, and cancellation leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file

from tests.accelerator import ACCELERATOR, DEVICE_0
from tests.helpers.engine import core_of
from tests.helpers.system_calls import held_calls
from tests.store.helpers import (
    PAGE,
    PATIENCE,
    assert_at_rest,
    assert_group,
    assert_same,
    join,
    on_both,
    open_store,
    pages,
    push_out,
    wait_until_idle,
)
from tierstore import Access, TierStore, TierStoreError
from tierstore.engine.copy_threads import MAX_THREADS
from tierstore.errors import (
    BudgetError,
    ClosedError,
    LeaseError,
    StoreTimeoutError,
    UnknownKeyError,
)
from tierstore.store import engine_of

T = TypeVar("T")
TICKS = 200


class Ticker:
    """Counts the iterations of the event loop."""

    def __init__(self) -> None:
        self.ticks = 0
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            self.ticks += 1
            await asyncio.sleep(0)

    async def some(self) -> None:
        """Wait for many ticks, which never come on a blocked loop."""
        enough = self.ticks + TICKS
        while self.ticks < enough:
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def within_reason(awaitable: Awaitable[T]) -> T:
    """Return the result, or raise instead of hanging."""
    return await asyncio.wait_for(awaitable, PATIENCE)


def run(store: TierStore, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine. If it fails, close the store: no thread of the loop waits forever."""

    async def guarded() -> T:
        try:
            return await within_reason(main())
        except BaseException:
            threading.Thread(target=store.close, daemon=True).start()
            raise

    return asyncio.run(guarded())


def one_at_a_time(disk_dir: Path, device: str = "cpu") -> TierStore:
    """Open a store with two groups, and space for one."""
    store = open_store(disk_dir, 4 * PAGE, device)
    store.put("held", pages(1, 4))
    store.put("wanted", pages(2, 4))
    return store


WAITING: dict[str, Callable[[TierStore], Coroutine[Any, Any, Any]]] = {
    "aacquire": lambda store: store.aacquire("wanted"),
    "aget": lambda store: store.aget("wanted"),
    "aput": lambda store: store.aput("new", pages(3, 4)),
}


# The loop goes on --------------------------------------------------------------------------------


@pytest.mark.parametrize("call", WAITING)
def test_event_loop_runs_while_a_call_waits_for_space(call: str, disk_dir: Path) -> None:
    store = one_at_a_time(disk_dir)
    lease = store.acquire("held")  # by this thread, not by a task: no call raises

    async def main() -> None:
        ticker = Ticker()
        waiting = asyncio.ensure_future(WAITING[call](store))
        await ticker.some()
        assert not waiting.done()
        await asyncio.to_thread(lease.release)
        result = await within_reason(waiting)
        if call == "aacquire":
            result.release()
        await ticker.stop()

    run(store, main)
    assert_group(store.get("wanted"), pages(2, 4))
    assert ("new" in store) == (call == "aput")
    assert_at_rest(store)
    store.close()


def test_blocking_call_would_stop_the_event_loop(disk_dir: Path) -> None:
    """The control: the same wait with the blocking `acquire`."""
    store = one_at_a_time(disk_dir)
    lease = store.acquire("held")

    async def main() -> None:
        ticker = Ticker()
        await ticker.some()
        before = ticker.ticks
        threading.Timer(0.2, lease.release).start()
        store.acquire("wanted").release()
        assert ticker.ticks == before
        await ticker.stop()

    run(store, main)
    store.close()


def test_event_loop_runs_while_a_disk_hangs(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("key", pages(1))
    push_out(store, "key")
    with held_calls("preadv") as gate:

        async def main() -> None:
            ticker = Ticker()
            reading = asyncio.ensure_future(store.aget("key"))
            assert await asyncio.to_thread(gate.reached.wait, PATIENCE)
            await ticker.some()
            assert not reading.done()
            gate.open()
            assert_group(await within_reason(reading), pages(1))
            await ticker.stop()

        run(store, main)
        assert store.stats().bytes_read == PAGE
        store.close()


@pytest.mark.parametrize("step", ["discard", "release of a TAKE lease"])
def test_ephemeral_release_does_not_wait_for_the_disk(step: str, disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("ephemeral", pages(1), durable=False)
    store.put("durable", pages(2))
    lease = store.acquire("ephemeral", Access.TAKE) if step != "discard" else None
    with held_calls("rename") as gate:
        flushing = threading.Thread(target=store.flush, daemon=True)
        flushing.start()
        assert gate.reached.wait(PATIENCE)
        act = (lambda: store.discard("ephemeral")) if lease is None else lease.release
        try:
            letting_go = threading.Thread(target=act, daemon=True)
            letting_go.start()
            join(letting_go)
            assert "ephemeral" not in store
        finally:
            gate.open()
        join(flushing)
        store.close()


def test_event_loop_runs_while_a_file_is_removed(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("key", pages(1))
    store.put("other", pages(2))
    store.flush()
    with held_calls("unlink") as gate:
        discarding = threading.Thread(target=lambda: store.discard("key"), daemon=True)
        discarding.start()
        assert gate.reached.wait(PATIENCE)

        async def main() -> None:
            ticker = Ticker()
            assert_group(await store.aget("other"), pages(2))
            await store.aput("new", pages(3))
            await ticker.some()
            await ticker.stop()

        run(store, main)
        assert discarding.is_alive()
        gate.open()
        join(discarding)
        store.close()


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", WAITING)
def test_task_blocked_by_its_own_lease_raises(call: str, disk_dir: Path) -> None:
    store = one_at_a_time(disk_dir)

    async def main() -> None:
        with await store.aacquire("held"), pytest.raises(BudgetError) as caught:
            await WAITING[call](store)
        assert caught.value.nbytes == 4 * PAGE
        assert caught.value.budget == 4 * PAGE
        assert f"{4 * PAGE:,}" in str(caught.value)

    run(store, main)
    assert_at_rest(store)
    store.close()


def test_two_tasks_in_deadlock_raise_in_one(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("a", pages(1))
    store.put("b", pages(2))

    async def take_both(first: str, second: str, meet: asyncio.Barrier) -> bool:
        with await store.aacquire(first, Access.UPDATE):
            await meet.wait()
            try:
                with await store.aacquire(second, Access.UPDATE):
                    return True
            except LeaseError:
                return False

    async def main() -> list[bool]:
        meet = asyncio.Barrier(2)
        both = asyncio.gather(take_both("a", "b", meet), take_both("b", "a", meet))
        return list(await within_reason(both))

    assert sorted(run(store, main)) == [False, True]
    assert_at_rest(store)
    store.close()


def test_errors_reach_the_coroutine(disk_dir: Path) -> None:
    store = open_store(disk_dir, 4 * PAGE)

    async def main() -> None:
        with pytest.raises(UnknownKeyError, match="'nothing'"):
            await store.aget("nothing")
        with pytest.raises(UnknownKeyError, match="'nothing'"):
            await store.aacquire("nothing")
        with pytest.raises(BudgetError) as caught:
            await store.aput("large", pages(1, 5))
        assert (caught.value.nbytes, caught.value.budget) == (5 * PAGE, 4 * PAGE)
        with pytest.raises(TypeError):
            await store.aput("meta", torch.empty(3, device="meta"))

    run(store, main)
    assert_at_rest(store)
    store.close()
    with pytest.raises(ClosedError):
        asyncio.run(store.aget("held"))


def test_close_wakes_every_waiter(disk_dir: Path) -> None:
    store = one_at_a_time(disk_dir)
    lease = store.acquire("held")

    async def main() -> list[Any]:
        waiting = [asyncio.ensure_future(call(store)) for call in WAITING.values()]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(store.close)
        return list(await within_reason(asyncio.gather(*waiting, return_exceptions=True)))

    assert [type(result) for result in run(store, main)] == [ClosedError] * len(WAITING)
    assert_same(lease.tensor, pages(1, 4))
    lease.release()


# Cancellation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", WAITING)
def test_call_cancelled_while_waiting_leaves_nothing(call: str, disk_dir: Path) -> None:
    store = one_at_a_time(disk_dir)
    lease = store.acquire("held")

    async def main() -> None:
        waiting = asyncio.ensure_future(WAITING[call](store))
        await Ticker().some()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with core_of(store).lock:  # at once, not once there is space
            assert not core_of(store).planner.waited_for()

    run(store, main)
    lease.release()
    assert_at_rest(store)
    assert "new" not in store
    with store.acquire("held", Access.UPDATE) as again:
        assert_same(again.tensor, pages(1, 4))
    store.close()


KEYS = 6
TASKS = 40
ROUNDS = 12


def value(key: int, tag: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((700,), tag * 10 + key), "b": torch.full((300,), tag * 10 + key)}


def assert_whole(key: int, group: Any) -> None:
    values = {int(v) for tensor in group.values() for v in tensor.cpu().unique()}
    assert len(values) == 1, f"a mix of {values}"
    assert values.pop() % 10 == key


def test_call_cancelled_on_wakeup_is_cancelled(disk_dir: Path) -> None:
    """`asyncio.wait_for` of Python 3.11 would continue, and the error would be lost."""

    async def cancelled_after(store: TierStore, rounds: int) -> bool:
        lease = store.acquire("a", Access.UPDATE)
        task = asyncio.ensure_future(store.aacquire("a"))
        await asyncio.sleep(0.01)
        lease.release()
        for _ in range(rounds):
            await asyncio.sleep(0)
        if not task.cancel():
            task.result().release()
            return False
        with pytest.raises(asyncio.CancelledError):
            await task
        return True

    async def main(store: TierStore) -> None:
        outcomes = [await within_reason(cancelled_after(store, rounds)) for rounds in range(12)]
        assert set(outcomes) == {True, False}

    with open_store(disk_dir) as store:
        store.put("a", pages(1))
        asyncio.run(main(store))
        assert_at_rest(store)


def test_get_timed_out_leaves_no_obstacle(disk_dir: Path) -> None:
    """A thread copies for it. The wait ends at the timeout, and no lease remains."""

    async def main(store: TierStore) -> None:
        stop = threading.Event()
        copiers = [
            asyncio.create_task(engine_of(store).copy_threads.run(stop.wait))
            for _ in range(MAX_THREADS)
        ]
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.3, stop.set)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await store.aget("large")
        assert stop.is_set()
        async with asyncio.timeout(PATIENCE):
            lease = await store.aacquire("other")
        with lease:
            assert_group(lease.tensor, pages(2, 7))
        await asyncio.gather(*copiers)

    with open_store(disk_dir, 8 * PAGE) as store:
        store.put("other", pages(2, 7))
        store.put("large", pages(1, 7))
        push_out(store, "other")
        asyncio.run(main(store))
        assert_at_rest(store)


def test_loop_closed_during_a_call_leaves_no_obstacle(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("a", pages(1))
        lease = store.acquire("a", Access.UPDATE)
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(store.aacquire("a"))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        lease.release()
        assert_group(store.get("a"), pages(1))
        waiting.get_coro().close()
        assert_at_rest(store)


async def act(store: TierStore, rng: random.Random, tag: int) -> None:
    """Run an operation that may be cancelled anywhere."""
    key = rng.randrange(KEYS)
    name = f"key{key}"
    what = rng.choice(["read", "update", "get", "put", "put", "pair"])
    if what == "get":
        assert_whole(key, await store.aget(name))
    elif what == "put":
        await store.aput(name, value(key, tag), durable=rng.random() < 0.3)
    elif what == "pair":
        with await store.aacquire(name), await store.aacquire(f"key{(key + 1) % KEYS}") as other:
            await asyncio.sleep(0)
            assert_whole((key + 1) % KEYS, other.tensors)
    else:
        access = Access.UPDATE if what == "update" else Access.READ
        with await store.aacquire(name, access) as lease:
            assert_whole(key, lease.tensors)
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            assert_whole(key, lease.tensors)
            if what == "update":
                for tensor in lease.tensors.values():
                    tensor.fill_(tag * 10 + key)


async def cancel_at_random(store: TierStore, rng: random.Random) -> list[str]:
    """Start many tasks, cancel about half of them at random moments; return each outcome."""
    outcomes = []
    for number in range(ROUNDS):
        tasks = [
            asyncio.ensure_future(act(store, random.Random(rng.random()), number * TASKS + i))
            for i in range(TASKS)
        ]
        for task in rng.sample(tasks, TASKS // 2):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        for result in await within_reason(asyncio.gather(*tasks, return_exceptions=True)):
            if isinstance(result, BaseException) and not isinstance(
                result, (asyncio.CancelledError, BudgetError, LeaseError)
            ):
                raise result
            outcomes.append(type(result).__name__)
    return outcomes


@on_both
@pytest.mark.parametrize("seed", range(3))
def test_random_cancellation_leaves_nothing_behind(seed: int, device: str, disk_dir: Path) -> None:
    store = open_store(disk_dir, 6 * PAGE, device)
    for key in range(KEYS):
        store.put(f"key{key}", value(key, 0))
    outcomes = run(store, lambda: cancel_at_random(store, random.Random(seed)))
    assert outcomes.count("CancelledError") > ROUNDS
    assert outcomes.count("NoneType") > ROUNDS
    wait_until_idle(store)
    assert_at_rest(store)
    for key in range(KEYS):
        with store.acquire(f"key{key}", Access.UPDATE) as lease:
            assert_whole(key, lease.tensors)
    assert store.stats().bytes_read > 0
    assert_at_rest(store)
    store.close()


# Many --------------------------------------------------------------------------------------------


@on_both
def test_many_coroutines_share_a_small_budget(device: str, disk_dir: Path) -> None:
    store = open_store(disk_dir, 4 * PAGE, device)
    many = 12
    for key in range(many):
        store.put(f"key{key}", pages(key, 2))
    done = []

    async def use(number: int) -> None:
        key = number % many
        with await store.aacquire(f"key{key}") as lease:
            await asyncio.sleep(0)
            assert_same(lease.tensor, pages(key, 2))
            done.append(number)

    async def main() -> None:
        await within_reason(asyncio.gather(*(use(number) for number in range(20 * many))))

    run(store, main)
    assert sorted(done) == list(range(20 * many))
    assert store.stats().bytes_read >= many * 2 * PAGE - 4 * PAGE
    assert_at_rest(store)
    store.close()


def test_waiting_puts_let_a_get_finish(disk_dir: Path) -> None:
    """More puts wait than a loop has threads, and a get holds the space they need."""
    store = one_at_a_time(disk_dir)

    async def main() -> None:
        lease = await store.aacquire("held")
        puts = [asyncio.ensure_future(store.aput(f"new{i}", pages(i, 4))) for i in range(40)]
        await Ticker().some()
        getting = asyncio.ensure_future(store.aget("held"))
        await Ticker().some()
        lease.release()
        await within_reason(asyncio.gather(getting, *puts))
        assert_group(getting.result(), pages(1, 4))

    run(store, main)
    assert_group(store.get("new39"), pages(39, 4))
    assert_at_rest(store)
    store.close()


def test_two_event_loops_share_a_store(disk_dir: Path) -> None:
    store = open_store(disk_dir, 4 * PAGE)
    errors: list[BaseException] = []

    async def main(name: str) -> None:
        for number in range(30):
            await store.aput(name, pages(number, 2), durable=False)
            assert_group(await store.aget(name), pages(number, 2))

    def run(name: str) -> None:
        try:
            asyncio.run(within_reason(main(name)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert errors == []
    assert_at_rest(store)
    store.close()


def test_register_from_a_coroutine_works(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": pages(1), "b": pages(2)}, path)
    store = open_store(disk_dir)

    async def main() -> None:
        assert sorted(await store.aregister_checkpoint(path, "m/")) == ["m/a", "m/b"]
        assert_group(await store.aget("m/b"), pages(2))
        with pytest.raises(TierStoreError, match="nowhere"):
            await store.aregister_checkpoint(tmp_path / "nowhere")

    run(store, main)
    assert store.stats().bytes_read == PAGE
    store.close()


# Accelerators ------------------------------------------------------------------------------------


@pytest.mark.pretend_only("late")
def test_put_from_a_side_stream_stores_queued_values(late_pretend: Any, disk_dir: Path) -> None:
    with open_store(disk_dir, device=ACCELERATOR) as store:
        source = pages(3).pin_memory()

        async def main() -> None:
            with torch.Stream(device=DEVICE_0):
                there = torch.empty_like(source, device=ACCELERATOR)
                there.copy_(source, non_blocking=True)
                await store.aput("key", there)

        run(store, main)
        assert_group(store.get("key"), pages(3))


@pytest.mark.pretend_only("late")
def test_get_on_a_side_stream_is_ordered_with_it(late_pretend: Any, disk_dir: Path) -> None:
    with open_store(disk_dir, device=ACCELERATOR) as store:
        store.put("key", pages(3))

        async def main() -> None:
            with torch.Stream(device=DEVICE_0):
                assert_same(await store.aget("key") * 2, pages(6))
                push_out(store, "key")
                with await store.aacquire("key") as lease:
                    assert_same(lease.tensor * 2, pages(6))

        run(store, main)
        assert store.stats().bytes_read >= PAGE


def test_async_calls_time_out_and_leave_nothing(disk_dir: Path) -> None:
    async def main(store: TierStore) -> None:
        # Another thread's: a caller never waits for its own lease.
        with await asyncio.to_thread(store.acquire, "held", Access.UPDATE):
            waiting: list[Coroutine[Any, Any, object]] = [
                store.aput("new", pages(5, 4), timeout=0.05),
                store.aget("held", timeout=0.05),
                store.aacquire("held", timeout=0.05),
            ]
            for call in waiting:
                with pytest.raises(StoreTimeoutError, match=r"0\.05"):
                    await call
        assert "new" not in store
        assert_group(await store.aget("held", timeout=PATIENCE), pages(6, 6))
        await store.aput("new", pages(5, 4), timeout=PATIENCE)

    with open_store(disk_dir, 8 * PAGE) as store:
        store.put("held", pages(6, 6))
        asyncio.run(main(store))
        assert_at_rest(store)
