"""The event log suffices to replay every decision, also from a file."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.histories import logs, mutants
from tests.histories.machine import MEMORY, REMOTE, World, play
from tierstore.errors import TransferError
from tierstore.model import events
from tierstore.model.events import Event
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Forget, Instruction, Reserve
from tierstore.model.tiers import TIERS, Access, HostAccess, Tier, UseOrder
from tierstore.observe.event_log import (
    EventLog,
    EventRecord,
    Handled,
    from_document,
    from_row,
    replay_events,
    to_document,
    to_row,
)
from tierstore.plan.planner import Planner
from tierstore.plan.policy import policy_named
from tierstore.plan.schedule import LearnedOrder

A, B = GroupId("a\x00é", 1), GroupId("b", 2)
HOST, DISK = Tier.HOST, Tier.DISK
BUDGETS = {HOST: 10, DISK: None}

BARE = events.RecoveredGroup(A, 5, ())
WHOLE = events.RecoveredGroup(
    B,
    6,
    (HOST, DISK),
    moves=((HOST, DISK), (DISK, HOST)),
    leases=((Access.READ, True), (Access.TAKE, False)),
    host_lease=HostAccess.PERMANENT,
    backing=DISK,
    use_order=UseOrder.PREFETCHED,
    sticky=True,
    visible=False,
    claimed=True,
    shared=True,
)
ALL: list[Event] = [
    events.Registered(A, 5),
    events.Registered(A, 5, True, UseOrder.PREFETCHED, HOST, True),
    events.Recovered(()),
    events.Recovered((BARE, WHOLE)),
    events.Claimed(A, 5, UseOrder.ROUTED),
    events.Filled(A),
    events.Demanded(A),
    events.Withdrawn(A),
    *(events.Leased(A, access, True, False) for access in Access),
    events.Leased(A, Access.READ, stream=7),
    events.StreamEnded(7),
    *(events.Released(A, access, True) for access in Access),
    *(events.HostDemanded(A, purpose) for purpose in HostAccess),
    events.HostWithdrawn(A, HostAccess.RENEW),
    events.HostLeased(A, HostAccess.UPDATE),
    events.HostReleased(A),
    events.Expected(()),
    events.Expected((A, B), HOST),
    events.Offloaded(A),
    events.MemoryReleased(A),
    events.DeviceVacated(),
    events.MadeSticky(A),
    events.BudgetChanged(7),
    events.SharedBudgetChanged(8),
    events.MemoryBorrowed(HOST, 9),
    events.SaveRequested(A),
    events.SpillAdvised(A),
    events.ErrorReported(A),
    events.Discarded(A),
    events.Ending(A, DISK, HOST),
    events.Arrived(A, DISK, HOST, False),
    events.TransferMeasured(DISK, HOST, 5, 0.25, 1.5),
    events.UseMeasured(A, 0.25, 1.5),
]


def through_json(row: list[Any]) -> list[Any]:
    read: list[Any] = json.loads(json.dumps(row))
    return read


def test_event_types_are_all_tested() -> None:
    assert {type(event) for event in ALL} | {events.Failed} == set(get_args(Event))


@pytest.mark.parametrize("event", ALL, ids=lambda event: type(event).__name__)
def test_event_survives_json(event: Event) -> None:
    now, read = from_row(through_json(to_row(1.5, event)))
    assert (now, read) == (1.5, event)
    for field in fields(event):
        assert type(getattr(read, field.name)) is type(getattr(event, field.name))


def test_row_of_an_older_version_gets_the_default() -> None:
    older = to_row(1.5, events.Leased(A, Access.READ, True, False))[:-1]
    assert from_row(through_json(older)) == (1.5, events.Leased(A, Access.READ, True, False, 0))
    for wrong in ([1.5, "Leased", ["a", 0]], [*older, 0, 0]):
        with pytest.raises(ValueError, match="is not an event"):
            from_row(through_json(wrong))


def test_error_survives_json_as_text() -> None:
    failed = events.Failed(A, DISK, HOST, OSError(5, "no such luck"))
    _, read = from_row(through_json(to_row(0, failed)))
    assert isinstance(read, events.Failed)
    assert isinstance(read.error, TransferError)
    assert str(read.error) == str(failed.error)
    assert (read.group, read.src, read.dst) == (A, DISK, HOST)


def test_tiers_are_known_by_name() -> None:
    """Read the identical tiers: the planner distinguishes tiers by identity."""
    row = through_json(to_row(0, events.Registered(A, 5, tier=REMOTE)))
    with pytest.raises(ValueError, match="REMOTE"):
        from_row(row)
    _, read = from_row(row, {**TIERS, "REMOTE": REMOTE})
    assert isinstance(read, events.Registered)
    assert read.tier is REMOTE
    _, known = from_row(through_json(to_row(0, events.Registered(A, 5))))
    assert isinstance(known, events.Registered)
    assert known.tier is DISK


def test_record_of_an_older_version_gets_defaults() -> None:
    whole = through_json(to_row(0, events.Registered(A, 5)))
    assert whole[-1] is False, "the last field says whether the group is shared"
    assert from_row(whole[:-1]) == from_row(whole)
    with pytest.raises(ValueError, match="is not an event"):
        from_row([*whole, False])


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ([], "not enough values"),
        ([1.0], "not enough values"),
        (None, "NoneType"),
        ([1.0, "Leasd", ["a", 1]], "Leasd"),
        ([1.0, ["Leased"], ["a", 1]], "unhashable"),
        (["noon", "Filled", ["a", 1]], "'noon' is not of type int or float"),
        ([True, "Filled", ["a", 1]], "True is not of type int or float"),
        ([1.0, "Filled"], "shorter"),
        ([1.0, "Filled", ["a", 1], 2], "longer"),
        ([1.0, "Filled", "ab"], "'ab' is not of type list"),
        ([1.0, "Filled", ["a", "1"]], "'1' is not of type int"),
        ([1.0, "Filled", ["a", 1, 2]], "too many values"),
        ([1.0, "Filled", [None, 1]], "None is not of type str"),
        ([1.0, "Claimed", ["a", 1], 2.5, "learned"], "2.5 is not of type int"),
        ([1.0, "Claimed", ["a", 1], 2, "often"], "'often' is not a valid UseOrder"),
        ([1.0, "Registered", ["a", 1], 2, 0, "learned", "DISK"], "0 is not of type bool"),
        ([1.0, "Ending", ["a", 1], "HOST", "ATTIC"], "ATTIC"),
        ([1.0, "Released", ["a", 1], "borrow", False], "borrow"),
        ([1.0, "HostLeased", ["a", 1], "borrow"], "borrow"),
        ([1.0, "Failed", ["a", 1], "DISK", "HOST", 5], "5 is not of type str"),
        ([1.0, "Expected", "ab", None], "'ab' is not of type list"),
        ([1.0, "Recovered", [["a", 1]]], "'a' is not of type list"),
        ([1.0, "Recovered", [[["a", 1], 5]]], "shorter"),
        ([1.0, "TransferMeasured", "DISK", "HOST", 5, 10**400, 1.0], "too large"),
    ],
)
def test_malformed_event_raises_with_the_reason(row: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match="is not an event") as caught:
        from_row(row)
    assert wrong in str(caught.value)


def test_log_keeps_the_newest_and_counts_dropped() -> None:
    log = EventLog(BUDGETS, "lru", kept=3)
    assert log.record() == EventRecord(BUDGETS, "lru", False, 0, ())
    drop = Drop(A, 5, HOST)
    handled = tuple(Handled(float(n), events.BudgetChanged(n), (drop,) * n) for n in range(5))
    for count, (now, event, instructions) in enumerate(handled, 1):
        log.note(now, event, list(instructions))
        assert log.record().handled == handled[max(0, count - 3) : count]
        assert log.record().dropped == max(0, count - 3)


def test_record_is_a_snapshot() -> None:
    log = EventLog(BUDGETS, "lru")
    before = log.record()
    log.note(1.0, events.Filled(A), [])
    assert (len(before.handled), len(log.record().handled)) == (0, 1)


RECORD = EventRecord(
    {Tier.DEVICE: 10, HOST: 20, DISK: None, REMOTE: 30},
    "next-use",
    True,
    7,
    (
        Handled(0.5, events.Registered(A, 5, tier=REMOTE), ()),
        Handled(
            1.5,
            events.Demanded(A),
            (Copy(A, 5, REMOTE, DISK, urgent=True), Drop(A, 5, DISK), Reserve(B, 6, HOST)),
        ),
        Handled(2.5, events.Discarded(A), (Forget(A),)),
    ),
)


def document() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(to_document(RECORD)))
    return read


def test_record_survives_json() -> None:
    read = from_document(document())
    assert read == RECORD
    assert [(tier.name, tier.persistent) for tier in read.budgets] == [
        (tier.name, tier.persistent) for tier in RECORD.budgets
    ]
    assert {type(i) for one in read.handled for i in one.instructions} == set(get_args(Instruction))


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("tiers", None, "it has no 'tiers'"),
        ("tiers", [5], "5 is not a tier"),
        ("tiers", [[1, "HOST", False]], "is not a tier: ValueError: not enough values"),
        ("tiers", [[1, "HOST", False, 0.5]], "0.5 is not of type int"),
        ("tiers", [[1, ["HOST"], False, 5]], "is not of type str"),
        ("tiers", [[2, "HOST", False, 5]], "HOST is another tier"),
        ("tiers", [[1, "HOST", True, 5]], "HOST is another tier"),
        ("tiers", [[1, "HOST", False, 5], [1, "HOST", False, 5]], "lists a tier twice"),
        ("tiers", [[1, "HOST", False, 5], [1, "ATTIC", False, 5]], "lists a tier twice"),
        ("tiers", [[3, "ATTIC", True, 5], [4, "ATTIC", True, 5]], "lists a tier twice"),
        ("policy", 5, "it has no 'policy'"),
        ("timed_by_device", 1, "it has no 'timed_by_device'"),
        ("dropped", "7", "it has no 'dropped'"),
        ("dropped", -1, "it has no 'dropped'"),
        ("handled", {}, "it has no 'handled'"),
        ("handled", [5], "event 1: TypeError: 5 is not of type list"),
        ("handled", [[]], "event 1: ValueError: not enough values"),
        ("handled", [[[0, "DeviceVacated"]], [[0, "Leasd"]]], "event 2: .* is not an event"),
        ("handled", [[[0, "DeviceVacated"], 5]], "5 is not an instruction"),
        ("handled", [[[0, "DeviceVacated"], ["Burn", ["a", 1]]]], "KeyError: 'Burn'"),
        ("handled", [[[0, "DeviceVacated"], ["Forget", ["a", 1], 5]]], "longer"),
        ("handled", [[[0, "DeviceVacated"], ["Drop", ["a", 1], 1 << 63, "HOST"]]], "too large"),
        ("handled", [[["x" * 100_000, "x" * 100_000]]], "is not an event"),
        ("handled", [[[0, "x" * 100_000]]], "is not an event"),
    ],
)
def test_malformed_record_raises_with_the_reason(field: str, value: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as caught:
        from_document({**document(), field: value})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [None, 5, [], {}, "tiers"])
def test_record_that_is_no_object_raises(value: Any) -> None:
    with pytest.raises(ValueError, match="it has no 'tiers'"):
        from_document(value)


def replay_rows(world: World, policy: str, rows: list[list[Any]]) -> Iterator[list[Instruction]]:
    tiers = {tier.name: tier for tier in world.books.budgets}
    log = [from_row(through_json(row), tiers) for row in rows]
    schedule, budgets = LearnedOrder(MEMORY), world.books.budgets
    planner = Planner(budgets, policy_named(policy, schedule, budgets), schedule)
    answers = replay_events(log, planner)
    return (instructions for _, instructions in answers)


def first_difference(
    answers: Iterator[list[Instruction]], told: list[list[Instruction]]
) -> int | None:
    """Return the first event with other instructions; later ones do not fit the events."""
    for number, (one, other) in enumerate(zip(answers, told, strict=False)):
        if one != other:
            return number
    return None


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_log_replayed_gives_the_same_instructions(policy: str, remote: bool) -> None:
    events_seen: set[str] = set()
    for seed in range(30):
        world = play(seed, policy, remote=remote)
        rows = [to_row(now, event) for now, event in world.log]
        assert len(rows) == len(world.told) > 0
        assert list(replay_rows(world, policy, rows)) == world.told
        events_seen.update(row[1] for row in rows)
    assert {"Failed", "Recovered", "Expected", "HostLeased", "Registered"} <= events_seen


def test_other_policy_gives_other_instructions() -> None:
    """Check the control: equal instructions are not a matter of course."""
    others = 0
    for seed in range(30):
        world = play(seed, "lru")
        rows = [to_row(now, event) for now, event in world.log]
        differs = first_difference(replay_rows(world, "next-use", rows), world.told)
        others += differs is not None
    assert others


class Failing(mutants.LendsToTwo):
    """Answers wrongly; its instructions are right, and can be replayed."""


def fail(folder: Path) -> tuple[list[list[Any]], AssertionError]:
    """Play a failing history. Returns the instructions up to the failure, and the error."""
    told: list[list[Any]] = []

    class Remembers(Failing):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            told.clear()

        def handle(self, event: Event, now: float = 0.0) -> list[Any]:
            told.append(super().handle(event, now))
            return told[-1]

    with pytest.raises(AssertionError, match="the planner says True") as caught:
        for seed in range(50):
            play(seed, "next-use", planner=Remembers, logs=folder)
    return told, caught.value


def test_failing_history_names_a_replayable_file(tmp_path: Path) -> None:
    told, error = fail(tmp_path)
    (file,) = tmp_path.iterdir()
    assert any(f"replay({str(file)!r})" in note for note in error.__notes__)
    assert any("play(" in note for note in error.__notes__)
    again = list(logs.replay(file))
    assert [instructions for _, instructions in again] == told
    assert sum(map(len, told)) > 10


def test_changed_row_gives_other_instructions(tmp_path: Path) -> None:
    told, _ = fail(tmp_path)
    (file,) = tmp_path.iterdir()
    head, *lines = file.read_text().splitlines()
    changed = max(number for number, instructions in enumerate(told) if instructions)
    lines[changed] = json.dumps(to_row(json.loads(lines[changed])[0], events.DeviceVacated()))
    file.write_text("\n".join([head, *lines]) + "\n")
    answers = (instructions for _, instructions in logs.replay(file))
    assert first_difference(answers, told) == changed


def test_failing_history_without_folder_writes_a_temporary_file() -> None:
    before = set(Path(tempfile.gettempdir()).glob("tierstore-history-*"))
    with pytest.raises(AssertionError) as caught:
        for seed in range(50):
            play(seed, "next-use", planner=Failing)
    notes = "".join(caught.value.__notes__)
    made = set(Path(tempfile.gettempdir()).glob("tierstore-history-*")) - before
    (folder,) = (folder for folder in made if str(folder) in notes)  # other tests may make some
    (file,) = folder.glob("*.jsonl")
    assert str(file) in notes
    shutil.rmtree(folder)


def test_event_that_raises_is_in_the_file(tmp_path: Path) -> None:
    """After a failure in the planner, the last event is the cause."""

    class Breaks(mutants.FaultyPlanner):
        def handle(self, event: Event, now: float = 0.0) -> list[Any]:
            if isinstance(event, events.Discarded):
                raise RuntimeError("broken")
            return super().handle(event, now)

    with pytest.raises(RuntimeError, match="broken"):
        for seed in range(50):
            play(seed, "lru", planner=Breaks, logs=tmp_path)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text().splitlines()[-1])[1] == "Discarded"


def test_error_is_kept_as_text_only() -> None:
    """Drop its traceback, which would keep all objects on its path alive."""
    log = EventLog(BUDGETS, "lru")
    try:
        raise TransferError("no room")
    except TransferError as error:
        log.note(1.0, events.Failed(A, HOST, DISK, error), [])
    [(_, event, _)] = log.record().handled
    assert isinstance(event, events.Failed)
    assert str(event.error) == "no room" and event.error.__traceback__ is None
