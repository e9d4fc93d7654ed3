"""Hostile headers and objects are accepted only if safetensors accepts them, too.

This library and safetensors itself read each mutant (see `mutating`). If this library accepts one,
safetensors accepts it with the same tensors. If it rejects one, the error names the file. Seeds are
printed on failure.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors
import torch

from tests.faults.mutating import KEY, Mutant, mutants, seeds
from tests.faults.watching import watched
from tests.helpers.files import object_file
from tests.helpers.processes import output_of
from tests.lanes import by_lane
from tests.store.helpers import assert_group, open_store, pages
from tierstore import CorruptDataError, TierStoreError, TransferError
from tierstore.model import header as headers
from tierstore.model import objects
from tierstore.model.header import (
    LENGTH_BYTES,
    Entry,
    Header,
    header_length,
    header_matches_checksum,
)
from tierstore.model.objects import StoredObject, decode_object
from tierstore.model.scanning import Scanner
from tierstore.system.views import view_one

ROOT = Path(__file__).resolve().parents[2]
PATH = "some/file.safetensors"
LONGEST_MESSAGE = 2000
LONGEST_SECONDS = 2.0
MOST_MEMORY = 64 << 20
SEED = 20


class Wrong(AssertionError):
    """The wrong result of a mutant."""


def expect(holds: bool, mutant: Mutant, what: str) -> None:
    if not holds:
        raise Wrong(f"{what}; {mutant.seed.name}: {mutant.done}\n{mutant.raw[:3000]!r}")


# The parsers -------------------------------------------------------------------------------------


def read(raw: bytes, ours: bool) -> tuple[Header, StoredObject | None]:
    """Read a file as a store does."""
    length = header_length(raw[:LENGTH_BYTES], len(raw), PATH)
    head = raw[LENGTH_BYTES : LENGTH_BYTES + length]
    header = headers.parse_header(head, len(raw), PATH)
    if not ours:
        return header, None
    stored = decode_object(header, PATH)
    if not objects_are_intact(head, header):
        raise CorruptDataError(f"{PATH} has another checksum", path=PATH)
    return header, stored


def objects_are_intact(head: bytes, header: Header) -> bool:
    return header_matches_checksum(head, header)


def judge(mutant: Mutant) -> str:
    """Read a mutant both ways. Returns the outcome; raises Wrong."""
    started = time.perf_counter()
    try:
        header, stored = read(mutant.raw, mutant.seed.ours)
    except TransferError as error:
        message = str(error)
        expect(
            error.path == PATH and PATH in message, mutant, f"it is not told which file: {error}"
        )
        expect(len(message) <= LONGEST_MESSAGE, mutant, "it floods the message")
        expect(message.isprintable(), mutant, f"it steers terminals: {message!r}")
        return type(error).__name__
    except Exception as error:
        raise Wrong(f"{mutant.seed.name}: {mutant.done}\n{mutant.raw[:3000]!r}") from error
    finally:
        seconds = time.perf_counter() - started
        expect(seconds < LONGEST_SECONDS, mutant, f"it took {seconds:.1f} s")
    _compare(mutant, header)
    if stored is not None:
        _look_at(mutant, stored)
        rotten = not mutant.sealed and _head(mutant.raw) != mutant.seed.head
        expect(not rotten, mutant, "rot in a header was not noticed")
    return "accepted"


def _head(raw: bytes) -> bytes:
    return raw[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")]


def _compare(mutant: Mutant, header: Header) -> None:
    try:
        theirs = safetensors.deserialize(mutant.raw)
    except safetensors.SafetensorError as error:
        raise Wrong(f"safetensors refuses it ({error}): {mutant.done}\n{mutant.raw!r}") from error
    found = sorted(
        (e.name, e.dtype, _shape_in_file(e), mutant.raw[header.data_start :][e.begin : e.end])
        for e in header.entries
    )
    expected = sorted(
        (name, one["dtype"], list(one["shape"]), bytes(one["data"])) for name, one in theirs
    )
    expect(found == expected, mutant, f"safetensors finds others: {expected}")


def _shape_in_file(entry: Entry) -> list[int]:
    """Return a shape as files have it: numbers of four bits are counted singly."""
    packed = entry.dtype == "F4"
    return [*entry.shape[:-1], 2 * entry.shape[-1]] if packed else list(entry.shape)


def _look_at(mutant: Mutant, stored: StoredObject) -> None:
    """Read all tensors of an object. Those of one block must match the file."""
    blocks = stored.packing.blocks
    names = [view.name for block in blocks for view in block.views]
    expect(len(names) == len(set(names)), mutant, "two tensors have one name")
    for block in blocks:
        memory = torch.zeros(block.nbytes, dtype=torch.uint8)
        for view in block.views:
            try:
                shown = view_one(view, memory, view.offset)
            except Exception as error:
                raise Wrong(f"{view} cannot be shown: {mutant.done}\n{mutant.raw!r}") from error
            expect(tuple(shown.shape) == view.shape, mutant, "it has another shape")
        alone = len(block.views) == 1 and block.views[0].shape == block.shape
        expect(alone or block.dtype == "U8", mutant, "a tensor is not what the file says")


@dataclass
class Tally:
    """The results of all mutants."""

    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def accepted(self) -> float:
        return self.outcomes["accepted"] / self.outcomes.total()


def judged(count: int, seed: int = SEED) -> Tally:
    tally = Tally()
    for number, mutant in enumerate(mutants(random.Random(seed), count)):
        try:
            tally.outcomes[judge(mutant)] += 1
        except Wrong as wrong:
            raise Wrong(f"mutant {number} of seed {seed}: {wrong}") from wrong
    return tally


def test_every_seed_is_accepted() -> None:
    for seed in seeds():
        assert judge(Mutant(seed, seed.raw, "nothing")) == "accepted", seed.name


@pytest.mark.parametrize("part", range(10))
def test_header_accepted_is_accepted_by_safetensors(part: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with watched() as seen:
        tally = judged(by_lane(2_000, 2_000, 20_000), SEED + part)
    assert seen.events == [], "reading a header touched files or loaded code"
    assert 0.02 < tally.accepted < 0.5, tally.outcomes
    unsupported = {"TransferError"}  # these are few
    assert set(tally.outcomes) - unsupported == {
        "accepted",
        "InvalidHeaderError",
        "CorruptDataError",
    }
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown <= MOST_MEMORY, f"{grown:,} bytes of memory"
    print(tally.outcomes)


# Control: the same judgement catches a laxer reader ----------------------------------------------


def any_names(scanner: Scanner, most: int) -> Iterator[str]:
    """Read members as `Scanner.members` does, without checking for repeated names."""
    scanner.expect(b"{")
    if scanner.accept(b"}"):
        return
    while True:
        name = scanner.text()
        scanner.expect(b":")
        yield name
        if scanner.accept(b"}"):
            return
        scanner.expect(b",")


LAXER: dict[str, tuple[object, str, object, str]] = {
    "names that occur twice": (Scanner, "members", any_names, "duplicate|finds others|one name"),
    "holes and overlaps": (headers, "_check_cover", lambda *_: None, "safetensors refuses"),
    "sizes that overflow": (headers, "_overflows", lambda shape: False, "safetensors refuses"),
    "rot": (sys.modules[__name__], "objects_are_intact", lambda *_: True, "was not noticed"),
    "views": (objects, "_check_view", lambda *_: None, "cannot be shown"),
    "blocks": (objects, "block_of", lambda views, nbytes: ANYTHING, "not what the file says|shown"),
    "names that flood": (headers, "LONGEST_SHOWN", 10**6, "floods"),
}


class _Anything:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


ANYTHING = _Anything()


@pytest.mark.parametrize("kind", LAXER)
def test_laxer_reader_is_caught(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, laxer, what = LAXER[kind]
    monkeypatch.setattr(place, name, laxer)
    with pytest.raises(Wrong, match=what):
        judged(20_000)


# Whole stores ------------------------------------------------------------------------------------


OTHER = pages(3, 2)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import everything, and fill all caches."""
    place = tmp_path_factory.mktemp("warm")
    for seed in seeds():
        in_a_store(Mutant(seed, seed.raw, "nothing"), place)


def in_a_store(mutant: Mutant, place: Path) -> str:
    """Use a file as a store would: as an object, or as a checkpoint."""
    return _as_object(mutant, place) if mutant.seed.ours else _as_checkpoint(mutant, place)


def _as_object(mutant: Mutant, place: Path) -> str:
    disk_dir = place / "store"
    path = object_file(disk_dir, KEY)
    if not path.parent.exists():
        with open_store(disk_dir) as store:
            store.put("other", OTHER)
        path.parent.mkdir(exist_ok=True)
    path.write_bytes(mutant.raw)
    with open_store(disk_dir) as store:
        assert_group(store.get("other"), OTHER)
        try:
            found = store.get(KEY)
        except TierStoreError as error:
            return _explained(mutant, error)
    names = {name for _, stored in [read(mutant.raw, True)] for name in _names(stored)}
    expect(set(found) == names, mutant, f"the store finds {set(found)}")
    expect(mutant.sealed or mutant.raw == mutant.seed.raw, mutant, "rot was served")
    return "accepted"


def _names(stored: StoredObject | None) -> list[str]:
    assert stored is not None
    return [view.name for block in stored.packing.blocks for view in block.views]


def _as_checkpoint(mutant: Mutant, place: Path) -> str:
    path = place / "model.safetensors"
    path.write_bytes(mutant.raw)
    with open_store(place / "empty") as store:
        try:
            keys = store.register_checkpoint(path, "m/")
        except TierStoreError as error:
            return _explained(mutant, error)
        except ValueError as error:  # a tensor's name that is too long to be a key
            expect("a key has 1 to" in str(error), mutant, f"{error!r}")
            return "ValueError"
        theirs = dict(safetensors.deserialize(mutant.raw))
        expect(set(keys) == {f"m/{name}" for name in theirs}, mutant, f"keys are {keys}")
        for name, one in theirs.items():
            found = store.get(f"m/{name}")
            assert isinstance(found, torch.Tensor)
            same = found.flatten().view(torch.uint8).numpy().tobytes() == bytes(one["data"])
            expect(same, mutant, f"{name!r} has other bytes")
    return "accepted"


def _explained(mutant: Mutant, error: TierStoreError) -> str:
    if isinstance(error, TransferError):
        expect(error.path is not None, mutant, f"it is not told which file: {error}")
    # A key may be shown in full, with four characters for each of its bytes.
    expect(len(str(error)) <= 5 * LONGEST_MESSAGE, mutant, "it floods the message")
    return type(error).__name__


@pytest.mark.timeout(1800)
def test_store_serves_and_opens_only_valid_files(tmp_path: Path, warm: None) -> None:
    outcomes: Counter[str] = Counter()
    with watched() as seen:
        for mutant in mutants(random.Random(SEED), by_lane(50, 150, 5000)):
            outcomes[in_a_store(mutant, tmp_path)] += 1
            elsewhere = seen.outside(tmp_path)
            expect(not elsewhere, mutant, f"it did something elsewhere: {elsewhere}")
            expect(not seen.code(), mutant, f"it brought in code: {seen.code()}")
            seen.events.clear()
    assert outcomes["accepted"] > 0 and outcomes["InvalidHeaderError"] > 0, outcomes
    print(outcomes)


def test_watcher_would_see_other_opens(tmp_path: Path) -> None:
    """Check the control: the watcher records each kind of event."""
    with watched() as seen:
        (tmp_path / "inside").write_bytes(b"")
        Path("/etc/hostname").exists()
        open("/etc/passwd").close()
        exec(compile("1", "a file", "exec"))
    assert [event[0] for event in seen.outside(tmp_path)] == ["open"]
    assert {event for event, _ in seen.code()} >= {"exec", "compile"}
    (tmp_path / "link").symlink_to("/etc/passwd")
    directory = os.open(tmp_path, 0)
    with watched() as seen:
        os.close(os.open("link", 0, dir_fd=directory))
    os.close(directory)
    assert len(seen.outside(tmp_path)) == 1, (
        "opening a link below an open directory was not recorded"
    )


# Large files: in a separate process, whose memory is measured ------------------------------------


LARGE = r"""
import sys, time
from pathlib import Path
from tierstore import TierStoreError
from tierstore.engine.checkpoints import read_checkpoint
from tierstore.model.header import MAX_TENSORS
from tierstore.system.objects import read_object

place = Path(sys.argv[1])
MIB = 1 << 20

def tensors(count, of=b'"F32","shape":[],"data_offsets":[0,0]'):
    return b",".join(b'"%07d":{"dtype":%b}' % (i, of) for i in range(count))

NONE = b'"F32","shape":[0],"data_offsets":[0,0]'
HEADS = {
    "1.3 million tensors": lambda: b"{" + tensors(1_300_000, NONE) + b"}",
    "280,000 tensors": lambda: b"{" + tensors(280_000, NONE) + b"}",
    "as many tensors as may be": lambda: b"{" + tensors(MAX_TENSORS, NONE) + b"}",
    "100 MB of spaces": lambda: b"{}" + b" " * 100_000_000,
    "16 MB of spaces": lambda: b"{" + b" " * 16_000_000 + b"}",
    "lists": lambda: b'{"a":[' + b"[]," * 5_000_000 + b"[]]}",
    "objects": lambda: b'{"a":[' + b"{}," * 5_000_000 + b"{}]}",
    "nested lists": lambda: b'{"a":' + b"[" * 15_000_000,
    "nested objects": lambda: b'{"a":' * 3_000_000,
    "texts": lambda: b'{"a":[' + b'"ab",' * 3_000_000 + b"0]}",
    "numbers": lambda: b'{"a":{"shape":[' + b"257," * 4_000_000 + b"0]}}",
    "one number": lambda: b'{"a":{"shape":[' + b"9" * 16_000_000 + b"]}}",
    "a text of four bytes for each letter":
        lambda: b'{"__metadata__":{"a":"\xf0\x9f\x98\x80' + b"a" * 15_900_000 + b'"}}',
    "escapes": lambda: b'{"__metadata__":{"a":"' + rb"\ud83d\ude00" * 1_300_000 + b'"}}',
    "half escapes": lambda: b'{"__metadata__":{"a":"' + rb"\ud83d" * 2_600_000 + b'"}}',
    "backslashes": lambda: b'{"__metadata__":{"a":"' + b"\\" * 16_000_000,
    "metadata": lambda: b'{"__metadata__":{'
        + b",".join(b'"%07d":""' % i for i in range(1_200_000)) + b"}}",
    "a long name": lambda: b'{"' + b"a" * 16_000_000 + b'":0}',
    "views": lambda: b'{"__metadata__":{"tierstore.format":"1","tierstore.key":"k",'
        + b'"tierstore.views":"{' + b"[]," * 5_000_000 + b'}"}}',
    "names in views": lambda: b'{"__metadata__":{"tierstore.format":"1","tierstore.key":"k",'
        + rb'"tierstore.views":"{' + rb'\"a\":[\"a\",\"F32\",[],[],0],' * 400_000 + b'}"}}',
}
INDEXES = {
    "an index of many names": lambda: b'{"weight_map":{'
        + b",".join(b'"%09d":"a"' % i for i in range(4_000_000)) + b"}}",
    "an index of many files": lambda: b'{"weight_map":{'
        + b",".join(b'"%09d":"%09d"' % (i, i) for i in range(500_000)) + b"}}",
    "an index with much else": lambda: b'{"metadata":[' + b"[]," * 20_000_000 + b"0]}",
    "an index of spaces": lambda: b'{' + b" " * 60_000_000 + b"}",
    "an index that is too large": lambda: b'{' + b" " * 70_000_000 + b"}",
}

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def measure(read):
    Path("/proc/self/clear_refs").write_text("5")
    before, started = status("VmRSS"), time.perf_counter()
    try:
        read()
        outcome = "accepted"
    except Exception as error:
        outcome = type(error).__name__
        assert isinstance(error, TierStoreError), repr(error)[:500]
        assert str(place) in str(error) and len(str(error)) < 2000, str(error)[:500]
    return outcome, time.perf_counter() - started, status("VmHWM") - before

def look():
    found = read_object(str(place / "model.safetensors"))
    raise found.error or AssertionError("it is believed")

def tell(name, read):
    print(name, *measure(read), sep="|", flush=True)

WANTED = sys.argv[2:]

def chosen(cases):
    return [(name, make) for name, make in cases.items() if not WANTED or name in WANTED]

for name, make in chosen(HEADS):
    head = make()
    (place / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    del head
    tell(name, lambda: read_checkpoint(place / "model.safetensors"))
    tell(name + ", as an object", look)
for name, make in chosen(INDEXES):
    (place / "x.safetensors.index.json").write_bytes(make())
    tell(name, lambda: read_checkpoint(place))
"""


BELIEVED = {
    "as many tensors as may be",
    "16 MB of spaces",
    "a text of four bytes for each letter",
    "escapes",
    "views",  # in other files these are only metadata
    "names in views",
}
WORST = [
    *sorted(BELIEVED),
    "1.3 million tensors",
    "lists",
    "nested lists",
    "an index of many files",
]
"""Measured before every merge, a sample each time; all with `--long`."""


@pytest.mark.timeout(1800)
def test_large_claims_cost_neither_memory_nor_time(tmp_path: Path) -> None:
    wanted = by_lane(WORST[::3], WORST, [])
    output = output_of("-c", LARGE, tmp_path, *wanted, timeout=600)
    rows = [line.split("|") for line in output.splitlines()]
    print(output)
    assert {row[0] for row in rows} >= set(wanted)
    believed = {row[0] for row in rows if row[1] == "accepted"}
    assert believed == {row[0] for row in rows} & BELIEVED
    for name, _, seconds, nbytes in rows:
        own = 64 << 20 if "index" in name else 16 << 20  # the file's own bytes
        assert int(nbytes) <= own + MOST_MEMORY, f"{name}: {int(nbytes):,} bytes of memory"
        assert float(seconds) < 60, f"{name}: {seconds} s"
