"""Replays a disk up to some moment, without some of its unflushed writes.

    python -m tests.faults.replaying '[{"kind": "ext4", "place": ..., "states": 100}]'

A store works on a file system whose disk records every write (`block_device.py`). Flushed writes
are on the disk; any of the later ones may be missing after a power cut. So each write is followed
by many possible states. The kernel mounts the file system in such a state, and a store opens there.

Processes are forked from this one, which computes nothing itself. Prints a line of JSON for each
state: the number of the plan, and a `Cut`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.faults.block_device import FLUSH, MARK, WRITE, Device, Entry, block_device, read_log
from tests.faults.facilities import Unusable, loop_mounted, make_image, program, run
from tests.faults.promised import BUDGET, Promised, Worker, contents, read_back, without_syncs
from tests.helpers.processes import Tell, forked, messages_from
from tierstore import TierStore

SIZES = {"ext4": 48 << 20, "xfs": 320 << 20}  # xfs needs as much
STEPS = 15
SECTOR = 512


@dataclass
class Plan:
    """Replay `states` states of one disk, with all syncs or `without` those of one kind.

    `without` is `"files"` or `"directories"`. With `until_lost`, the replay ends at the first
    state in which an acknowledged value is lost.
    """

    kind: str
    place: str
    states: int
    seed: int = 0
    without: str | None = None
    until_lost: bool = False


@dataclass
class Cut:
    """A state: the log entry before it, and the number of unflushed writes lost.

    `broken` lists broken promises, and `left` the files that belong to no group.
    """

    behind: int
    lost: int
    acknowledged: int
    found: int = 0
    broken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def lost_a_value(self) -> bool:
        return any(each.startswith("lost: ") for each in self.broken)


# Recording ----------------------------------------------------------------------------------------


def work(device: Device, disk_dir: Path, plan: Plan) -> None:
    """Run two sessions. The disk records their reports between its writes."""
    marks = os.open(device.marks, os.O_WRONLY)

    def tell(*told: Any) -> None:
        os.write(marks, json.dumps(told).encode())

    for session in (2 * plan.seed, 2 * plan.seed + 1):
        with TierStore(BUDGET, disk_dir, device="cpu") as store, without_syncs(plan.without):
            Worker(store, "0", session, tell).go_on(STEPS)
            store.flush()
            tell("all sure", "")


def record(plan: Plan, image: Path) -> list[Entry]:
    """Work on a disk that begins as `image`. Returns the disk's log."""
    place = Path(plan.place)
    disk, log = place / "disk.image", place / "log"
    copy(image, disk)
    log.unlink(missing_ok=True)
    with (
        block_device(disk, place / f"{plan.kind}.device", log) as device,
        loop_mounted(device.disk, place / "worked-on") as directory,
    ):

        def at_work(tell: Tell) -> None:
            work(device, directory / "store", plan)

        told = list(messages_from(*forked(at_work)))
    (place / f"{plan.kind}.device").rmdir()
    assert told == [["died", 0]], told
    return read_log(log)


def copy(source: Path, target: Path) -> None:
    """Copy a sparse file."""
    run(program("cp"), "--sparse=always", source, target)


# States -------------------------------------------------------------------------------------------


@dataclass
class Moment:
    """A moment after a log entry: the unflushed writes, and the promises made so far."""

    behind: int
    given: Sequence[Entry]
    promised: Promised


def moments(entries: Sequence[Entry], image: Path, wanted: Sequence[int]) -> Iterator[Moment]:
    """Yield the wanted moments in order. `image` then holds all writes flushed before."""
    given: list[Entry] = []
    promised = Promised()
    left = list(wanted)
    with open(image, "r+b", buffering=0) as file:
        for behind, entry in enumerate(entries):
            if entry.kind == WRITE:
                given.append(entry)
            elif entry.kind == FLUSH:
                for each in given:
                    os.pwrite(file.fileno(), each.data, each.offset)
                given.clear()
            else:
                what, *about = json.loads(entry.data)
                promised.told(what, *about)
            while left and left[0] == behind:
                yield Moment(left.pop(0), given, promised)


def choose(entries: Sequence[Entry], count: int, chosen: random.Random) -> list[int]:
    """Choose moments: a third right after an acknowledgement, the others after a store's writes."""
    marks = [at for at, entry in enumerate(entries) if entry.kind == MARK]
    sure = [at for at in marks if "sure" in json.loads(entries[at].data)[0]]
    writes = [at for at in range(marks[0], marks[-1]) if entries[at].kind == WRITE]
    moments = chosen.sample(sure, min(len(sure), -(-count // 3)))
    return sorted(moments + chosen.choices(writes, k=count - len(moments)))


def keep_some(image: Path, given: Sequence[Entry], chosen: random.Random) -> int:
    """Write some of the unflushed data. Returns the number of writes lost."""
    share = chosen.choice((0, 0.5, 0.5, 1))
    lost = 0
    with open(image, "r+b", buffering=0) as file:
        for entry in given:
            if chosen.random() >= share:
                lost += 1
                continue
            torn = chosen.random() < 0.1
            end = chosen.randrange(0, len(entry.data), SECTOR) if torn else len(entry.data)
            os.pwrite(file.fileno(), entry.data[:end], entry.offset)
    return lost


def look(disk_dir: Path, promised: Promised, result: Cut) -> None:
    """Open the store in another process, read everything, and record the findings."""
    told, *_ = messages_from(*forked(lambda tell: tell("found", *contents(disk_dir))))
    if told[0] != "found":
        result.broken.append(f"surprise: it could not be opened: {told}")
        return
    found, result.left = read_back(told[1]), told[2]
    result.found = len(found)
    result.broken += promised.broken_by(found)


def replay(plan: Plan) -> Iterator[Cut]:
    """Yield the result of each state."""
    place = Path(plan.place)
    image, state = place / "replayed.image", place / "state.image"
    make_image(image, plan.kind, SIZES[plan.kind])
    entries = record(plan, image)
    chosen = random.Random(f"{plan.kind} {plan.seed}")
    for moment in moments(entries, image, choose(entries, plan.states, chosen)):
        copy(image, state)
        lost = keep_some(state, moment.given, chosen)
        result = Cut(moment.behind, lost, moment.promised.acknowledged)
        try:
            with loop_mounted(state, place / "looked-at") as directory:
                look(directory / "store", moment.promised, result)
        except Unusable as error:
            result.broken.append(f"it could not be mounted: {error}")
        yield result
        if plan.until_lost and result.lost_a_value:
            return


def main(plans: list[Plan]) -> None:
    torch.set_num_threads(1)
    for number, plan in enumerate(plans):
        place = Path(plan.place) / f"plan-{number}"
        place.mkdir()
        plan.place = str(place)
        for result in replay(plan):
            print("RESULT " + json.dumps([number, asdict(result)]), flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main([Plan(**plan) for plan in json.loads(sys.argv[1])])
