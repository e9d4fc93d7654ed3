"""Fuzz the object files of a store

    python tools/fuzz/fuzz_object.py -runs=200000

An input is the header of an object file, which is given the checksum that it should have: so it
is the work of somebody hostile. Whatever is accepted must be possible: every tensor can be shown
inside its block, and safetensors finds the blocks that are said to be there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.fuzz.harness import run

# isort: split
from tests.faults.mutating import Mutant, Seed, file_of, sealed, seeds
from tests.faults.test_hostile_headers import judge

DATA = {len(seed.data): seed.data for seed in seeds() if seed.ours}


def check(head: bytes) -> None:
    head = sealed(head)
    for data in DATA.values():
        raw = file_of(head, data)
        judge(Mutant(Seed("an input", raw, ours=True), raw, "fuzzed", sealed=True))


if __name__ == "__main__":
    run(check, [seed.head.rstrip() for seed in seeds() if seed.ours])
