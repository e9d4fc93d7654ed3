"""Random hostile files and messages, and the cost of each: see `test_hostile_fuzz.py`.

    python -m tests.faults.strangers COUNT SEED BYTES SECONDS

Half are valid ones with changes; the others are composed of the parts of such files. Prints a line
for each that takes more than BYTES beyond its size, or longer than SECONDS.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tests.faults.mutating import edit, mutants, parsed, written
from tests.service.mangling import bodies_of, mangled
from tests.service.test_framing import SIDES
from tierstore import TierStoreError
from tierstore.engine.checkpoints import indexed
from tierstore.model.header import LENGTH_BYTES, header_length, parse_header
from tierstore.wire.framing import Incoming, ProtocolError


class Strangers:
    """Makes hostile files and messages, and reads them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._index = json.dumps({"metadata": {"n": 9}, "weight_map": {"a": "b"}}).encode()
        self._heads = mutants(self.chance, 1 << 40)

    def kinds(self) -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], object]]]:
        """Return functions that make and read each kind of file."""
        kinds, sent = self.chance.choice(SIDES).values
        return {
            "index": (lambda: self._document(self._index), lambda raw: indexed(raw, "the file")),
            "header": (lambda: next(self._heads).raw, read_header),
            "message": (
                lambda: mangled(bodies_of(sent), self.chance),
                lambda raw: list(Incoming[Any](kinds).feed(raw)),
            ),
        }

    def _altered(self, raw: bytes) -> bytes:
        chance, changed = self.chance, bytearray(raw)
        for _ in range(chance.choice([1, 1, 2, 5])):
            at, source = chance.randrange(len(changed)), chance.randrange(len(changed))
            length, kept = chance.choice([(1, 1), (1, 1), (8, 8), (40, 20), (0, 8), (400, 0)])
            copied = changed[source : source + length]
            changed[at : at + kept] = chance.randbytes(length) if chance.random() < 0.4 else copied
        return bytes(changed[: chance.choice([len(changed)] * 9 + [chance.randrange(100)])])

    def _document(self, raw: bytes) -> bytes:
        if self.chance.random() < 0.3:
            return self._altered(raw)
        value = parsed(raw)
        for _ in range(self.chance.choice([1, 1, 2, 3])):
            if isinstance(value, list):
                edit(value, self.chance)
        text = written(value, ascii_only=self.chance.random() < 0.8)
        return text.encode("utf-8", "surrogatepass")


def read_header(raw: bytes) -> object:
    """Read a header as from a file."""
    end = LENGTH_BYTES + header_length(raw[:LENGTH_BYTES], len(raw), "the file")
    return parse_header(raw[LENGTH_BYTES:end], len(raw), "the file")


def high_water() -> int:
    """Return the peak memory of this process, in bytes, since the last reset."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def read_all(count: int, seed: int, most_bytes: int, most_seconds: float) -> Iterator[str]:
    """Read `count` inputs. Yields a line for each excessive one, and then totals."""
    outcomes: Counter[tuple[str, str]] = Counter()
    largest, longest = 0, 0.0
    strangers = Strangers(seed)
    for number in range(count):
        name, (make, read) = strangers.chance.choice(list(strangers.kinds().items()))
        raw = make()
        with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
            refs.write("5")
        before, began = high_water(), time.process_time()
        try:
            read(raw)
            outcome = "accepted"
        except (TierStoreError, ValueError, ProtocolError):
            outcome = "refused"
        seconds, nbytes = time.process_time() - began, high_water() - before - len(raw)
        largest, longest = max(largest, nbytes), max(longest, seconds)
        if nbytes > most_bytes or seconds > most_seconds:
            yield f"WRONG {number} {name}: {len(raw)} bytes took {nbytes} and {seconds} s"
        outcomes[name, outcome] += 1
    yield f"WORST {largest} bytes beside its size, {longest:.2f} s"
    yield from (f"{name}|{outcome}|{times}" for (name, outcome), times in sorted(outcomes.items()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    given = sys.argv[1:]
    for line in read_all(int(given[0]), int(given[1]), int(given[2]), float(given[3])):
        print(line, flush=True)
