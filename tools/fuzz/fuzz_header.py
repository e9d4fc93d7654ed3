"""Fuzz the header of a safetensors file

    python tools/fuzz/fuzz_header.py -runs=200000

An input is a whole file. What this library accepts, safetensors must accept, and find the same
tensors in; what it refuses, it must refuse with an error that names the file. The length in the
first eight bytes is mostly made to fit, or few inputs would come any further.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.fuzz.harness import atheris, run

# isort: split
from tests.faults.mutating import LENGTH_BYTES, Mutant, Seed, file_of, seeds
from tests.faults.test_hostile_headers import judge


def check(raw: bytes) -> None:
    judge(Mutant(Seed("an input", raw, ours=False), raw, "fuzzed"))


def mutate(raw: bytes, largest: int, seed: int) -> bytes:
    rnd = random.Random(seed)
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if len(raw) < LENGTH_BYTES or length > len(raw) - LENGTH_BYTES or rnd.random() < 0.1:
        return bytes(atheris.Mutate(raw, largest))
    head, data = raw[LENGTH_BYTES : LENGTH_BYTES + length], raw[LENGTH_BYTES + length :]
    room = largest - LENGTH_BYTES - len(data)
    return file_of(atheris.Mutate(head, max(room, 1)), data)[:largest]


if __name__ == "__main__":
    run(check, [seed.raw for seed in seeds()], mutate)
