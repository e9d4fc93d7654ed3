"""Coverage-guided fuzzing of all readers of untrusted files.

    python tools/fuzz.py header -runs=200000
    python tools/fuzz.py header -max_total_time=120 some/corpus

Options are those of libFuzzer. Requires `pip install atheris`. Without a corpus directory, starts
from built-in seeds in a temporary directory. If a property fails, exits with an error and leaves
the input in a file `crash-*`:

- `header`: the input is a whole safetensors file. If this library accepts it, safetensors must
  accept it and find the same tensors; if it rejects it, the error must name the file. The length in
  the first eight bytes is usually corrected; else few inputs would get past it.
- `object`: the input is the header of an object file, with its checksum corrected, as an attacker
  would. If it is accepted, every tensor must lie inside its block, and safetensors must find the
  blocks that the header names.
- `index`: the input is `model.safetensors.index.json`. It must name files of its directory, or be
  rejected with an error that names it. If it is JSON, all files that it names must be found.
- `marker`: the input is STORE.json or LOCK. The marker must have this format, or be rejected with
  an error that names it. For any content of LOCK, a message must be able to name the owner.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import atheris

WATCHED = [
    "tierstore.model",
    "tierstore.engine.checkpoints",
    "tierstore.system.objects",
    "tierstore.system.locking",
]
"""Modules whose coverage guides the fuzzer."""

with atheris.instrument_imports(include=WATCHED):
    from tests.faults.mutating import LENGTH_BYTES, Mutant, Seed, file_of, sealed, seeds
    from tests.faults.test_hostile_headers import judge
    from tierstore import TierStoreError, TransferError
    from tierstore.engine.checkpoints import checkpoint_files
    from tierstore.errors import InvalidHeaderError
    from tierstore.system.locking import describe_owner
    from tierstore.system.objects import LOCK, MARKER, STORE_FORMAT, read_marker

LARGEST = 1 << 16
SHARD = "model-00001-of-00002.safetensors"
INDEXES = [
    {"metadata": {"total_size": 64}, "weight_map": {"a.weight": SHARD, "b": SHARD}},
    {"weight_map": {}},
    {"metadata": {"a": [1, {"b": None}], "c": "\u6f22\n"}, "weight_map": {"a": "x"}},
]
MARKERS = [
    b'{"format": 1, "uuid": "0", "created_by": "tierstore"}',
    b'{"format": 2}',
    b'{"pid": 1234, "host": "machine"}',
]
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
FOLDER = tempfile.TemporaryDirectory(prefix="tierstore-fuzz-", dir=MEMORY)
PLACE = Path(FOLDER.name)
DATA = {len(seed.data): seed.data for seed in seeds() if seed.ours}


def check_header(raw: bytes) -> None:
    judge(Mutant(Seed("an input", raw, ours=False), raw, "fuzzed"))


def check_object(head: bytes) -> None:
    for data in DATA.values():
        raw = file_of(sealed(head), data)
        judge(Mutant(Seed("an input", raw, ours=True), raw, "fuzzed", sealed=True))


def check_index(raw: bytes) -> None:
    index = PLACE / "model.safetensors.index.json"
    index.write_bytes(raw)
    try:
        found = checkpoint_files(index)
    except (InvalidHeaderError, TransferError) as error:
        assert str(index) in str(error)
        return
    assert {Path(path).parent for path in found} == {PLACE}, found
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):  # other members are skipped, not parsed
        return
    named = set(document["weight_map"].values())
    assert {Path(path).name for path in found} >= named, (found, named)


def check_marker(raw: bytes) -> None:
    (PLACE / MARKER).write_bytes(raw)
    try:
        marker = read_marker(PLACE)
    except TierStoreError as error:
        assert str(PLACE / MARKER) in str(error)
    else:
        assert marker is not None and marker["format"] == STORE_FORMAT
    (PLACE / LOCK).write_bytes(raw)
    descriptor = os.open(PLACE / LOCK, os.O_RDONLY)
    try:
        assert describe_owner(descriptor).isprintable()
    finally:
        os.close(descriptor)


def mutate_header(raw: bytes, largest: int, seed: int) -> bytes:
    rnd = random.Random(seed)
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if len(raw) < LENGTH_BYTES or length > len(raw) - LENGTH_BYTES or rnd.random() < 0.1:
        return bytes(atheris.Mutate(raw, largest))
    head, data = raw[LENGTH_BYTES : LENGTH_BYTES + length], raw[LENGTH_BYTES + length :]
    room = largest - LENGTH_BYTES - len(data)
    return file_of(atheris.Mutate(head, max(room, 1)), data)[:largest]


FUZZERS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "header": (check_header, [seed.raw for seed in seeds()]),
    "object": (check_object, [seed.head.rstrip() for seed in seeds() if seed.ours]),
    "index": (check_index, [json.dumps(seed).encode() for seed in INDEXES]),
    "marker": (check_marker, MARKERS),
}


def main() -> None:
    """Fuzz until libFuzzer ends the process. Does not return."""
    if sys.argv[1:2] not in [[name] for name in FUZZERS]:
        sys.exit(f"{__doc__}\nName one of: {', '.join(FUZZERS)}")
    program, name, *words = sys.argv
    check, corpus = FUZZERS[name]
    if not any(word.startswith("-max_len") for word in words):
        words.append(f"-max_len={LARGEST}")
    if all(word.startswith("-") for word in words):
        (PLACE / "corpus").mkdir()
        for number, seed in enumerate(corpus):
            (PLACE / "corpus" / f"seed-{number}").write_bytes(seed)
        words.append(str(PLACE / "corpus"))
    options = {"custom_mutator": mutate_header} if name == "header" else {}
    atheris.Setup([program, *words], check, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
