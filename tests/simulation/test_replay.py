"""Replaying the trace of a real run reproduces the planner's decisions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conformance.archive import ARCHIVE, archive
from tests.helpers.engine import core_of
from tests.histories import logs
from tests.store.helpers import PAGE, on_both, open_store, pages, wait_until_idle
from tierstore import Access, TierStore
from tierstore.engine.engine import Engine
from tierstore.engine.settings import Settings, TierSettings
from tierstore.errors import BudgetError
from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy
from tierstore.model.tiers import Tier
from tierstore.observe.event_log import EventRecord, Handled, from_document, to_document
from tierstore.observe.trace import KINDS
from tierstore.simulation import Difference, first_difference, replay
from tierstore.store import engine_of
from tierstore.trace import read_trace

GROUPS = 8


def work(store: TierStore, place: Path) -> None:
    """Run some of every operation, failing ones too, on twice the bytes that fit."""
    save_file({f"weights.{n}": pages(n, 4) for n in range(GROUPS)}, place / "model.safetensors")
    keys = store.register_checkpoint(place / "model.safetensors")
    for n in range(GROUPS):
        store.put(f"made.{n}", pages(n, 4))
    with pytest.raises(BudgetError):
        store.put("giant", pages(0, 64))
    store.flush()
    for _ in range(6):
        for key in keys:
            with store.acquire(key) as lease:
                lease.tensor.sum()
        with store.acquire("made.0", Access.UPDATE) as lease:
            lease.tensor.add_(1)
    store.prefetch(["made.1", "made.2"])
    store.make_sticky("made.3")
    store.offload("made.0")
    store.put("made.4", pages(9, 2))
    store.discard("made.5")
    store.flush()


def run(place: Path, device: str = "cpu") -> Path:
    """Return the trace of a run on a device."""
    with open_store(place / "store", 32 * PAGE, device) as store:
        work(store, place)
        stats = None
        while stats != store.stats():  # prefetched groups are still arriving
            wait_until_idle(store)
            if device != "cpu":
                torch.accelerator.synchronize(store.device)
            stats = store.stats()
            store.trace(place / "run.json")
    return place / "run.json"


def record_of(trace: Path) -> EventRecord:
    record = read_trace(trace).events
    assert record is not None
    return record


def moves_of(record: EventRecord) -> Counter[tuple[str, str, int]]:
    """Return the current planner's moves, as far as the record reports their arrival."""
    moves: Counter[tuple[str, str, int]] = Counter()
    under_way: dict[tuple[GroupId, Tier, Tier], int] = {}
    for event, instructions in replay(record):
        if isinstance(event, events.Arrived):
            nbytes = under_way.pop((event.group, event.src, event.dst))
            moves[told(f"{event.src}>{event.dst}", event.group.key, nbytes)] += 1
        for one in instructions:
            if isinstance(one, Copy):
                under_way[one.group, one.src, one.dst] = one.nbytes
    assert not under_way, "the run had not ended"
    return moves


def told(hop: str, key: str, nbytes: int) -> tuple[str, str, int]:
    """Return a move. Reads of weights get size 0: theirs depends on the place in the file."""
    return KINDS[hop], key, 0 if hop == "DISK>HOST" and key.startswith("weights") else nbytes


def journal_of(trace: Path) -> Counter[tuple[str, str, int]]:
    """Return the moves of the run."""
    hops = {kind: hop for hop, kind in KINDS.items() if ">" in hop}
    slices = [one for one in read_trace(trace).slices if one.kind in hops]
    return Counter(told(hops[one.kind], one.name, one.args["nbytes"]) for one in slices)


@on_both
def test_replay_of_a_run_gives_its_instructions(device: str, tmp_path: Path) -> None:
    trace = run(tmp_path, device)
    record = record_of(trace)
    assert record.dropped == 0
    assert {type(one.event).__name__ for one in record.handled} >= {
        *("Registered", "Claimed", "Filled", "Leased", "Demanded", "Released", "Expected"),
        *("MadeSticky", "Offloaded", "SaveRequested", "Discarded", "Ending", "Arrived"),
    }
    assert sum(len(one.instructions) for one in record.handled) > 50
    assert first_difference(record) is None
    assert moves_of(record) == journal_of(trace)
    kinds = {kind for kind, _, _ in journal_of(trace)}
    assert kinds >= {"disk read", "disk write"}
    assert ("host to device" in kinds) == (device != "cpu")
    again = [tuple(instructions) for _, instructions in logs.replay(trace)]
    assert again == [one.instructions for one in record.handled]


def edited(record: EventRecord, number: int, one: Handled) -> EventRecord:
    """Return a record with an edited event or instruction."""
    handled = (*record.handled[:number], one, *record.handled[number + 1 :])
    return replace(record, handled=handled)


def difference_in(record: EventRecord) -> Difference:
    difference = first_difference(record)
    assert difference is not None, "the edit was not noticed"
    assert difference.recorded == record.handled[difference.number]
    return difference


def test_replay_of_an_edited_record_names_the_edited_event(tmp_path: Path) -> None:
    record = record_of(run(tmp_path))
    moving = [number for number, one in enumerate(record.handled) if one.instructions]
    for number in moving[:: len(moving) // 8]:
        one = record.handled[number]
        less = difference_in(edited(record, number, one._replace(instructions=())))
        assert (less.number, less.instructions, less.error) == (number, one.instructions, None)
        other = edited(record, number, one._replace(event=events.DeviceVacated()))
        assert difference_in(other).number == number
    arrivals = [n for n, one in enumerate(record.handled) if isinstance(one.event, events.Arrived)]
    for number in arrivals[:: len(arrivals) // 8]:
        never = events.Arrived(GroupId("never", 99), Tier.DISK, Tier.HOST)
        found = difference_in(edited(record, number, record.handled[number]._replace(event=never)))
        assert found.number == number and "KeyError" in str(found.error)


@pytest.mark.parametrize(
    "change", [{"policy": "lru"}, {"budgets": {Tier.HOST: 24 * PAGE, Tier.DISK: None}}]
)
def test_replay_with_another_planner_differs(change: dict[str, Any], tmp_path: Path) -> None:
    """Check the control: another planner gives other instructions."""
    assert first_difference(replace(record_of(run(tmp_path)), **change)) is not None


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"dropped": 5}, "lacks its 5 oldest events"),
        ({"policy": "fifo"}, "unknown policy 'fifo'"),
        ({"budgets": {Tier.DISK: None}}, "memory above a persistent tier"),
        ({"budgets": {}}, "memory above a persistent tier"),
    ],
)
def test_replay_without_a_beginning_raises(change: dict[str, Any], wrong: str) -> None:
    record = EventRecord({Tier.HOST: PAGE, Tier.DISK: None}, "lru", False, 0, ())
    assert first_difference(record) is None
    with pytest.raises(ValueError, match=wrong):
        first_difference(replace(record, **change))


@on_both
def test_record_begins_anew_with_each_planner(device: str, tmp_path: Path) -> None:
    """Replace the planner, as after an interrupted transaction, with the budgets of that moment."""
    with TierStore(32 * PAGE, tmp_path / "store", device=device) as store:
        store.put("a", pages(1))
        if device != "cpu":
            engine_of(store).device_memory.grow_budget()
        store.get("a")
        store.trace(tmp_path / "before.json")
        core_of(store).dirty = True
        store.put("b", pages(2))
        store.get("b")
        store.trace(tmp_path / "after.json")
        budgets = dict(core_of(store).planner.budgets)
    before, after = (record_of(tmp_path / f"{name}.json") for name in ("before", "after"))
    assert first_difference(before) is first_difference(after) is None
    assert isinstance(after.handled[0].event, events.Recovered)
    assert dict(after.budgets) == budgets
    grown = [one.event for one in before.handled if isinstance(one.event, events.BudgetChanged)]
    assert [event.nbytes for event in grown] == [
        size for tier, size in budgets.items() if tier is Tier.DEVICE
    ]


def test_record_of_too_many_events_raises(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.put("a", pages(1))
        core = core_of(store)
        with core.lock:
            while not core.events.dropped:
                core.apply(events.DeviceVacated())
        store.trace(tmp_path / "run.json")
    record = record_of(tmp_path / "run.json")
    assert (record.dropped, len(record.handled)) == (1, 1 << 16)
    with pytest.raises(ValueError, match="lacks its 1 oldest event"):
        replay(record)


def test_record_includes_a_foreign_tier(tmp_path: Path) -> None:
    budgets = {Tier.HOST: 8 * PAGE, Tier.DISK: 8 * PAGE, ARCHIVE: None}
    directory = str(tmp_path / "store")
    cpu = torch.device("cpu")
    tiers = TierSettings(device=cpu, budgets=budgets, verify="first", extra_tiers=(archive,))
    settings = Settings(tiers=tiers, disk_dir=str(directory), policy="next-use")
    engine = Engine(settings)
    for n in range(6):
        engine.puts.put(f"made.{n}", pages(n, 4), durable=False, timeout=None)
    with engine.core.lock:
        record = engine.core.events.record()
        assert engine.core.planner.used[ARCHIVE] > 0
    engine.close()
    read = from_document(json.loads(json.dumps(to_document(record))))
    assert read == record
    assert first_difference(read) is None
