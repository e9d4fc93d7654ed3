"""What the fuzzers share: where they begin, and how they are run.

A fuzzer is run with the options of libFuzzer, such as

    python tools/fuzz/fuzz_header.py -runs=200000
    python tools/fuzz/fuzz_header.py -max_total_time=120 some/corpus

It needs `pip install atheris`, which nothing else here needs. Without a directory for its corpus
it begins with seeds of its own, in a temporary directory. It ends with an error, and leaves the
input in a file `crash-*`, when a promise is broken: each says which.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import atheris

WATCHED = [
    "tierstore.model",
    "tierstore.engine.checkpoints",
    "tierstore.system.objects",
    "tierstore.system.locking",
]
"""What is told apart by which of its lines an input reaches."""

LARGEST = 1 << 16

with atheris.instrument_imports(include=WATCHED):
    import tierstore.engine.checkpoints
    import tierstore.model.header
    import tierstore.model.objects
    import tierstore.system.objects  # noqa: F401 - instrumented for whoever imports it next


def temporary(name: str) -> Path:
    """A directory for files that are written anew for each input: in memory, if possible."""
    memory = "/dev/shm"
    place = memory if Path(memory).is_dir() else None
    made = tempfile.mkdtemp(prefix=f"tierstore-fuzz-{name}-", dir=place)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


Mutator = Callable[[bytes, int, int], bytes]


def run(
    check: Callable[[bytes], None], seeds: Iterable[bytes], mutator: Mutator | None = None
) -> None:
    """Fuzz until libFuzzer has had enough. Does not return."""
    words = list(sys.argv)
    options = {} if mutator is None else {"custom_mutator": mutator}
    if not any(word.startswith("-max_len") for word in words):
        words.append(f"-max_len={LARGEST}")
    with tempfile.TemporaryDirectory(prefix="tierstore-fuzz-") as place:
        if all(word.startswith("-") for word in words[1:]):
            for number, seed in enumerate(seeds):
                Path(place, f"seed-{number}").write_bytes(seed)
            words.append(place)
        atheris.Setup(words, check, **options)
        atheris.Fuzz()
