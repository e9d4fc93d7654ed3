"""Random files and messages of strangers, and what each costs: see `test_hostile_fuzz.py`.

    python -m tests.faults.strangers COUNT SEED BYTES SECONDS

Half are changed ones of those that are written, half are made of the parts of which such files are
made. Prints a line for each that takes more than BYTES beside its size, or longer than SECONDS.
"""

from __future__ import annotations

import io
import json
import random
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.faults.mutating import edit, mutants, parsed, written
from tests.service.mangling import bodies_of, mangled
from tests.service.test_framing import SIDES
from tierstore import TierStoreError
from tierstore.adapters.training import checkpoint_files as files
from tierstore.adapters.training.checkpoint_archives import loaded_value
from tierstore.adapters.training.checkpoint_metadata import parsed_metadata
from tierstore.adapters.training.checkpoint_pickles import UnpicklingError
from tierstore.adapters.training.saving import save_training
from tierstore.engine.checkpoints import indexed
from tierstore.model.header import LENGTH_BYTES, header_length, parse_header
from tierstore.wire.framing import Incoming, NonsenseError

OF_METADATA = "torch.distributed.checkpoint.metadata"
NAMES = [
    f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode()
    for name in (
        *("torch.Size", "torch.float32", "torch.FloatStorage", "torch._utils._rebuild_tensor_v2"),
        *(f"{OF_METADATA}.{name}" for name in ("MetadataIndex", "TensorStorageMetadata")),
        *("pathlib.PosixPath", "collections.OrderedDict", "__builtin__.set"),
        *("__builtin__.bytearray", "_codecs.encode", f"{OF_METADATA}.Metadata"),
    )
]
VALUES = [
    *(b")", b"]", b"}", b"N", b"K\x01", b"J\xff\xff\xff\x7f", b"X\x01\x00\x00\x00a"),
    *(b"\x8a\x04\xff\xff\xff\x7f", *NAMES),
]


class Program:
    """A pickle whose instructions find what they take, and often what was made before."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._made = [b"\x80\x02"]
        self._depths = [0]  # values on the stack since each mark
        self._memory = 0

    def _put(self, code: bytes, change: int) -> None:
        self._made.append(code)
        self._depths[-1] += change

    def _close(self, code: bytes, change: int) -> None:
        self._depths.pop()
        self._put(code, change)

    def _value(self) -> None:
        self._put(self._chance.choice(VALUES), 1)

    def _remember(self) -> None:
        if self._depths[-1] and self._memory < 250:
            self._put(b"q%c" % self._memory, 0)
            self._memory += 1

    def _again(self) -> None:
        if self._memory:
            back = self._chance.choice([0, 0, 0, 1, 2, self._memory])
            self._put(b"h%c" % max(self._memory - 1 - back, 0), 1)

    def _join(self) -> None:
        codes = {
            1: [b"\x85"],
            2: [b"\x86", b"\x86", b"R", b"\x81", b"a", b"b"],
            3: [b"\x87", b"s"],
        }
        count = self._chance.choice([1, 2, 2, 3])
        if self._depths[-1] >= count:
            self._put(self._chance.choice(codes[count]), 1 - count)

    def _twice(self) -> None:
        """A key of pairs of the same, pairs of those, and so on; or what is called so."""
        levels = self._chance.choice([2, 5, 24, 40])
        if self._memory + levels < 250 and self._chance.random() < 0.3:
            call = self._chance.choice([b"", *NAMES])
            first = self._chance.choice([b")", b"X\x01\x00\x00\x00a"])
            self._put(b"}" + first, 1)
            for _ in range(levels):
                again = b"h%c" % self._memory
                made = b"%b%b%b\x86R\x86" % (call, again, again) if call else again + b"\x86"
                self._put(b"q%c" % self._memory + made, 0)
                self._memory += 1
            self._put(b"Ns", 0)

    def _mark(self) -> None:
        if len(self._depths) < 60:
            self._put(b"(", 0)
            self._depths.append(0)

    def _end(self) -> None:
        if len(self._depths) > 1:
            into = self._depths[-2] and self._depths[-1] % 2 == 0 and self._chance.random() < 0.5
            self._close(*((self._chance.choice([b"e", b"u"]), 0) if into else (b"t", 1)))

    def written(self) -> bytes:
        """The whole of it."""
        acts = (self._value, self._remember, self._again, self._again, self._join, self._join)
        for _ in range(self._chance.choice([20, 200, 3000])):
            self._chance.choice([*acts, self._twice, self._mark, self._end])()
        while len(self._depths) > 1:
            self._close(b"t", 1)
        while self._depths[-1] > 1:
            self._put(b"\x86", -1)
        return b"".join([*self._made, b"."])


class Strangers:
    """Makes what strangers send, and reads it."""

    def __init__(self, seed: int, place: Path) -> None:
        self.chance = random.Random(seed)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        save_training(place / "run", model, optimizer, extra={"rng": torch.arange(9)})
        self._metadata = (place / "run" / files.METADATA).read_bytes()
        self._sums = b"{" + (place / "run" / files.SUMS).read_bytes().partition(b"\n")[2][:-1]
        value = {"a": torch.ones(3), "b": [(1, "x")], "c": {2.5: b"y"}}
        self._chunk = files.Encoded(value, "c").getvalue()
        self._index = json.dumps({"metadata": {"n": 9}, "weight_map": {"a": "b"}}).encode()
        self._heads = mutants(self.chance, 1 << 40)

    def kinds(self) -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], object]]]:
        """How each kind is made, and read."""
        kinds, sent = self.chance.choice(SIDES).values
        return {
            "metadata": (lambda: self._pickle(self._metadata), parsed_metadata),
            "sums": (lambda: self._document(self._sums), read_sums),
            "chunk": (self._archive, lambda raw: loaded_value(io.BytesIO(raw))),
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

    def _pickle(self, raw: bytes) -> bytes:
        return Program(self.chance).written() if self.chance.random() < 0.5 else self._altered(raw)

    def _document(self, raw: bytes) -> bytes:
        if self.chance.random() < 0.3:
            return self._altered(raw)
        value = parsed(raw)
        for _ in range(self.chance.choice([1, 1, 2, 3])):
            if isinstance(value, list):
                edit(value, self.chance)
        text = written(value, ascii_only=self.chance.random() < 0.8)
        return text.encode("utf-8", "surrogatepass")

    def _archive(self) -> bytes:
        if self.chance.random() < 0.3:
            return self._altered(self._chunk)
        file = io.BytesIO()
        method = self.chance.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED])
        with (
            zipfile.ZipFile(io.BytesIO(self._chunk)) as old,
            zipfile.ZipFile(file, "w", method) as new,
        ):
            for name in old.namelist():
                data = old.read(name)
                if name.endswith("data.pkl") and self.chance.random() < 0.8:
                    data = self._pickle(data)
                if name.endswith("/data/0") and self.chance.random() < 0.3:
                    data = bytes(self.chance.choice([0, 1, 100_000, 3_000_000]))
                new.writestr(name, data)
        return file.getvalue()


def read_sums(raw: bytes) -> object:
    """What says the sums of the files of a training."""
    return files.read_sums(files.sealed(raw), "the file")


def read_header(raw: bytes) -> object:
    """A header, as it is read of a file."""
    end = LENGTH_BYTES + header_length(raw[:LENGTH_BYTES], len(raw), "the file")
    return parse_header(raw[LENGTH_BYTES:end], len(raw), "the file")


def high_water() -> int:
    """The most bytes of memory that this process has had since it was last asked to forget that."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def read_all(count: int, seed: int, most_bytes: int, most_seconds: float) -> Iterator[str]:
    """What to print of so many files and messages."""
    outcomes: Counter[tuple[str, str]] = Counter()
    largest, longest = 0, 0.0
    with tempfile.TemporaryDirectory() as place:
        strangers = Strangers(seed, Path(place))
    for number in range(count):
        name, (make, read) = strangers.chance.choice(list(strangers.kinds().items()))
        raw = make()
        with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
            refs.write("5")
        before, began = high_water(), time.process_time()
        try:
            read(raw)
            outcome = "accepted"
        except (TierStoreError, ValueError, UnpicklingError, NonsenseError):
            outcome = "refused"
        except Exception:  # torch's own reader of values, which knows no errors of ours
            if name != "chunk":
                raise
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
