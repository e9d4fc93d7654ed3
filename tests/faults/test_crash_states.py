"""No state that a power cut may leave breaks a promise, by enumeration.

The model (`crash_states.py`) assumes only what POSIX promises of syncs, which is less than any file
system keeps. So no result depends on the file systems of this machine.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.crash_states import Event, Failed, Made, Named, State, Synced, Told, states
from tests.faults.promised import BUDGET, Worker, contents, syncing_again, value, without_syncs
from tests.faults.recording import Recorder
from tests.lanes import by_lane
from tierstore import TierStore
from tierstore.errors import TierStoreError, TransferError

pytestmark = pytest.mark.timeout(3600)


# States -------------------------------------------------------------------------------------------


def record(root: Path, seed: int, without: str | None = None) -> list[Event]:
    """Run two sessions on a directory that did not exist before."""
    root.mkdir()
    with Recorder(root) as recorder, without_syncs(without):
        for session in (2 * seed, 2 * seed + 1):
            with TierStore(BUDGET, root / "store", device="cpu") as store:
                Worker(store, "0", session, recorder.tell).go_on(12)
            recorder.tell("all sure", "")
    return recorder.events


def wrong_with(state: State, place: Path) -> list[str]:
    """Create a state, open a store on it, and return the faults."""
    state.make(place)
    try:
        found, left = contents(place / "store")
    except (TierStoreError, OSError) as error:
        return [f"it could not be opened: {type(error).__name__}: {error}"]
    return state.promised.broken_by(found) + [f"left: {name}" for name in left]


def test_crash_state_allowed_by_posix_breaks_no_promise(quick_dir: Path, first_seed: int) -> None:
    wanted, seen, told = by_lane(30, 500, 20_000), 0, Counter[str]()
    few = by_lane(10, 1)  # sample states from all moments of a record
    for number in itertools.count(first_seed):
        events = record(quick_dir / f"recorded-{number}", number)
        told.update(event.words[0] for event in events if isinstance(event, Told))
        every = itertools.islice(states(events, number, by_chance=3), number % few, None, few)
        for state in every:
            wrong = wrong_with(state, quick_dir / "state")
            assert not wrong, (number, state.behind, events[state.behind], wrong)
            seen += 1
        shutil.rmtree(quick_dir / f"recorded-{number}")
        if seen >= wanted:
            break
    assert told["all sure"] >= 2
    assert told["begin"] >= 10
    print(f"{seen} states of {number - first_seed + 1} records")


@pytest.mark.parametrize("without", ["files", "directories"])
def test_crash_state_without_a_sync_loses_acknowledged_data(without: str, quick_dir: Path) -> None:
    events = record(quick_dir / f"without-{without}", 0, without)
    wrong = (
        each
        for state in states(events, 0, by_chance=1)
        for each in wrong_with(state, quick_dir / "state")
    )
    assert any("lost: 0/" in each for each in wrong)


# Syncs that fail ----------------------------------------------------------------------------------


class Trying:
    """Continues after the store reports failures, and reports the promises it was given."""

    def __init__(self, disk_dir: Path, tell: Callable[..., None]) -> None:
        self._disk_dir = disk_dir
        self._tell = tell
        self.failed = 0

    def again(self, do: Callable[[], Any]) -> Any:
        """Call `do`; if it fails, call it once more, when the fault has ended."""
        try:
            return do()
        except TransferError:
            self.failed += 1
            return do()

    def work(self) -> None:
        store = self.again(lambda: TierStore(BUDGET, self._disk_dir, device="cpu"))
        for number in (1, 2, 3):
            for key in ("one", "two"):
                self._tell("begin", key, key, number)
                store.put(key, value(key, number))
            self.again(store.flush)
            self._tell("all sure", "")
        self._tell("begin", "one", "one", None)
        try:
            store.discard("one")
            self._tell("sure", "one")
        except TransferError:
            self.failed += 1  # it may be there or not
        self._tell("begin", "two", "two", 4)
        store.put("two", value("two", 4))
        try:
            store.close()
        except TransferError:  # all resources were released; "two" may have its old value
            self.failed += 1
            return
        self._tell("sure", "two")


def attempts(
    root: Path, around: Callable[[], AbstractContextManager[None]] = nullcontext, step: int = 1
) -> Iterator[tuple[list[Event], int]]:
    """Yield records of the same work, each with another failing sync, and the number of errors.

    Every `step`th sync fails in turn, until the work has no more.
    """
    for failing in itertools.count(1, step):
        place = root / f"attempt-{failing}"
        place.mkdir()
        with Recorder(place, failing) as recorder, around():
            trying = Trying(place / "store", recorder.tell)
            trying.work()
        shutil.rmtree(place)
        if not any(isinstance(event, Failed) for event in recorder.events):
            return
        yield recorder.events, trying.failed


def faults_behind_reports(events: list[Event], place: Path) -> list[str]:
    """Return the faults in the states behind each acknowledgement."""
    return [
        each
        for state in states(events, 0, by_chance=1)
        if isinstance(events[state.behind], Told)
        for each in wrong_with(state, place)
    ]


def test_sync_failure_raises_and_its_file_is_rewritten(quick_dir: Path) -> None:
    files, step = 0, by_lane(5, 1)
    for count, (events, told) in enumerate(attempts(quick_dir, step=step), start=1):
        [at] = [at for at, event in enumerate(events) if isinstance(event, Failed)]
        it = events[at].it
        is_file = Made(it, False) in events
        if is_file:
            files += 1
            for event in events[at:]:
                assert event != Synced(it), "it was synced again"
                assert not (isinstance(event, Named) and event.it == it), "it was used"
        assert told == 1, "no error was raised" if not told else "it failed again"
        assert not faults_behind_reports(events, quick_dir / "state"), f"sync {count} failed"
    assert files >= by_lane(1, 7)
    assert count - files >= by_lane(1, 9)  # of directories


def test_sync_retried_on_the_same_file_loses_data(quick_dir: Path) -> None:
    told_of = attempts(quick_dir, syncing_again)
    assert any(
        "lost: " in str(faults_behind_reports(events, quick_dir / "state")) for events, _ in told_of
    )


def test_group_discarded_after_a_failed_sync_stays_gone(quick_dir: Path) -> None:
    for failing in itertools.count(1):
        place = quick_dir / f"given-up-{failing}"
        place.mkdir()
        with Recorder(place, failing) as recorder, suppress(TransferError):
            store = TierStore(BUDGET, place / "store", device="cpu")
            store.put("key", value("key", 1))
            try:
                store.flush()
            except TransferError:
                store.discard("key")
            store.close()
        failed = [event for event in recorder.events if isinstance(event, Failed)]
        found, left = contents(place / "store")
        shutil.rmtree(place)
        assert not left
        if not failed:
            assert found == {"key": ("key", 1)}
            break
        assert not found, f"sync {failing} failed"
    assert failing > 5
