"""Kills a repair at its n-th system call, for every n, and inspects the result.

`python -m tests.inspection.repairing DIRECTORY WAY` prints one JSON list for each n: the name of
the call at which the process died, and the location of the damaged object then (`in place`, `in
quarantine`, or a fault). The last line is of a complete repair. The script forks, so it is a
separate process, which imports no torch and starts no threads.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.system_calls import Call, system_call, until_the_end
from tests.tiers.dying import DEAD, DONE, KEY, NEW, attempt, data_of, packing
from tierstore.inspection import quarantine
from tierstore.inspection.directories import locked_store
from tierstore.inspection.survey import survey
from tierstore.system.objects import object_name
from tierstore.tiers.directory import ObjectDirectory

DAMAGED, PLACE = b"damaged but precious" * 500, f"objects/{object_name(KEY)}"


def repair(directory: str) -> None:
    """Make the calls of `verify --repair` that change files."""
    with locked_store(directory) as root:
        quarantine.move_to_quarantine(directory, root, survey(directory).unusable)


def moved(call: Call) -> Any:
    return call.go_on()


def by_copying(call: Call) -> None:
    """Copy before removing, a faulty repair: for a while there are two files, or a partial one."""
    leaf, name = call.args
    descriptor = os.open(name, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=call.options["dst_dir_fd"])
    os.pwrite(descriptor, DAMAGED, 0)
    os.fsync(descriptor)
    os.close(descriptor)
    os.unlink(leaf, dir_fd=call.options["src_dir_fd"])


def by_deleting(call: Call) -> None:
    """Remove before writing, another faulty repair."""
    os.unlink(call.args[0], dir_fd=call.options["src_dir_fd"])


WAYS: dict[str, Callable[[Call], Any]] = {
    "moving": moved,
    "copying": by_copying,
    "deleting": by_deleting,
}
"""Replacements for the rename of a damaged object."""


def prepare(directory: Path) -> None:
    """Create a store with an intact group and a damaged one."""
    store = ObjectDirectory(directory)
    store.write(KEY, packing(), data_of(NEW), single=False)
    store.write("whole", packing(), data_of(NEW), single=False)
    store.close()
    (directory / PLACE).write_bytes(DAMAGED)


def look(directory: Path) -> str:
    """Return where the damaged object is, and whether a store opens and serves the other one."""
    store = ObjectDirectory(directory)
    intact = [stored.key for stored in store.objects()]
    store.close()
    if intact != ["whole"]:
        return f"intact: {intact}"
    room = directory / quarantine.QUARANTINE
    away = sorted(room.glob("*.safetensors")) if room.exists() else []
    places = [path for path in [directory / PLACE, *away] if path.exists()]
    if len(places) != 1:
        return f"{len(places)} places"
    if places[0].read_bytes() != DAMAGED:
        return "other bytes"
    if places == away:
        note = json.loads(Path(f"{away[0]}{quarantine.NOTE_SUFFIX}").read_text())
        return "in quarantine" if note["was"] == PLACE else f"the note says {note}"
    return "in place"


def main(directory: Path, way: str) -> None:
    first = directory.with_name("first")
    prepare(first)
    until_the_end(system_call("rename", answer=WAYS[way]))
    for number in range(1, 1000):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(first, directory)
        status, name = attempt(lambda: repair(str(directory)), number)
        if status not in (DEAD, DONE):
            raise SystemExit(f"the repair ended with {status} at call {number}")
        found = look(directory)
        repair(str(directory))  # in any case the next repair completes this one
        print(json.dumps([name, found, look(directory)]), flush=True)
        if status == DONE:
            return
    raise SystemExit("the repair has no end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
