"""Other input files: indexes, markers, locks, disk speeds, traces.

Each is changed in every way that `mutating` offers, and read by its reader. It is accepted, or
rejected with a documented error; there is no other effect.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from tests.faults.mutating import KEY, edit, mutants, object_file, parsed, tensors, written
from tests.faults.watching import watched
from tests.helpers.files import object_file as object_path
from tests.lanes import by_lane
from tests.store.helpers import open_store, pages
from tierstore import TierStoreError, load_training, save_training
from tierstore.cli.commands import inspector
from tierstore.engine.checkpoints import read_checkpoint
from tierstore.errors import InvalidTraceError
from tierstore.model.header import digest
from tierstore.observe.trace import load
from tierstore.simulation import first_difference
from tierstore.system.locking import describe_owner
from tierstore.system.objects import STORE_FORMAT, read_marker
from tierstore.tiers.disk_speed import cache_file, known_speed, remember
from tierstore.trace import read_trace

# Python opens an encoding's files when it is first used: not a fault of the code that uses it.
for _name in ("unicode_escape", "raw_unicode_escape", "latin-1", "ascii"):
    codecs.lookup(_name)

SEED = 30
EXITS = {0, 1, 2, 3, 4}
"""Exit codes of the command, as in `failures.Code`."""


def variants(whole: bytes, count: int, rnd: random.Random) -> list[bytes]:
    """Change a document's structure or its bytes."""
    return [_structure(whole, rnd) if i % 4 else _bytes(whole, rnd) for i in range(count)]


def _structure(whole: bytes, rnd: random.Random) -> bytes:
    document = parsed(whole)
    for _ in range(rnd.choice([1, 1, 2, 3])):
        if isinstance(document, list):
            edit(document, rnd)
    text = written(document, ascii_only=rnd.random() < 0.8)
    return text.encode("utf-8", "surrogatepass")


def _bytes(whole: bytes, rnd: random.Random) -> bytes:
    changed = bytearray(whole)
    for _ in range(rnd.randint(1, 3)):
        at = rnd.randrange(len(changed) + 1)
        changed[at : at + rnd.choice([0, 1, 4])] = rnd.choice(
            [b"", b"{", b"[", b'"', b"\xff", b"9"]
        )
    return bytes(changed[: rnd.choice([len(changed), len(changed), rnd.randrange(len(changed))])])


def _with_other_bytes(whole: bytes, rnd: random.Random) -> bytes:
    """Change, copy or remove some bytes."""
    changed = bytearray(whole)
    for _ in range(rnd.choice([1, 1, 2, 5])):
        at, source = rnd.randrange(len(changed)), rnd.randrange(len(changed))
        length, kept = rnd.choice([(1, 1), (1, 1), (8, 8), (40, 20), (0, 8)])
        fresh = rnd.randbytes(length) if rnd.random() < 0.5 else changed[source : source + length]
        changed[at : at + kept] = fresh
    return bytes(changed[: rnd.choice([len(changed)] * 9 + [rnd.randrange(len(changed))])])


def tried(contents: list[bytes], use: Callable[[bytes], str], *places: Path) -> Counter[str]:
    """Use each content. Asserts no effects outside these places, and that none takes long."""
    outcomes: Counter[str] = Counter()
    for number, content in enumerate(contents):
        started = time.perf_counter()
        with watched() as seen:
            try:
                outcomes[use(content)] += 1
            except BaseException as error:
                error.add_note(f"content {number} of seed {SEED}: {content[:2000]!r}")
                raise
        outside = [event for event in seen.outside(*places) if not _shows_source(event)]
        assert not outside, (content, outside)
        assert not seen.code(), (content, seen.code())
        assert time.perf_counter() - started < 20, content
    return outcomes


def _shows_source(event: tuple[str, tuple[Any, ...]]) -> bool:
    """Return whether a traceback is being formatted, for which Python reads source files."""
    name, (path, mode, *_) = event
    return name == "open" and mode == "r" and str(path).endswith(".py")


# Indexes of checkpoints --------------------------------------------------------------------------


def test_hostile_index_stays_inside_its_directory(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    place.mkdir()
    shards = {name: f"{name}-of-the-model.safetensors" for name in tensors()}
    for name, shard in shards.items():
        save_file({name: tensors()[name]}, place / shard)
    save_file({"secret": pages(1)}, tmp_path / "a")
    index = place / "model.safetensors.index.json"
    whole = json.dumps({"metadata": {"total_size": 64}, "weight_map": shards}).encode()

    def use(content: bytes) -> str:
        index.write_bytes(content)
        try:
            files = read_checkpoint(place)
        except TierStoreError as error:
            assert str(place) in str(error)
            return type(error).__name__
        except ValueError as error:
            assert "both have a tensor" in str(error)
            return "ValueError"
        assert {Path(file.path).parent for file in files} <= {place}
        return "accepted"

    assert use(whole) == "accepted"
    contents = variants(whole, by_lane(400, 400, 20_000), random.Random(SEED))
    outcomes = tried(contents, use, place)
    assert min(outcomes["accepted"], outcomes["InvalidHeaderError"]) > 20, outcomes
    for odd in ("../a", "/etc/passwd", "..", ".", "", "a/../../a", "\udcff", "\ud800", "x" * 5000):
        assert use(json.dumps({"weight_map": {"a": odd}}).encode()) != "accepted", odd


# A store's own small files ------------------------------------------------------------------------


def test_hostile_marker_is_valid_or_refused(disk_dir: Path) -> None:
    open_store(disk_dir).close()
    marker = disk_dir / "STORE.json"
    whole = marker.read_bytes()

    def use(content: bytes) -> str:
        marker.write_bytes(content)
        try:
            found = read_marker(disk_dir)
        except TierStoreError as error:
            assert str(marker) in str(error)
            assert len(str(error)) < 2000, "the message is too long"
            return "TierStoreError"
        assert found is not None and found["format"] == STORE_FORMAT
        assert type(found["format"]) is int, f"{found['format']!r} is no format"
        return "accepted"

    assert use(whole) == "accepted"
    outcomes = tried(variants(whole, by_lane(400, 400, 20_000), random.Random(SEED)), use, disk_dir)
    assert min(outcomes.values()) > 20 and len(outcomes) == 2, outcomes


def test_hostile_lock_file_can_be_reported(tmp_path: Path) -> None:
    whole = b'{"pid": 1234567, "host": "a machine"}'
    path = tmp_path / "LOCK"

    def use(content: bytes) -> str:
        path.write_bytes(content)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            told = describe_owner(descriptor)
        finally:
            os.close(descriptor)
        assert told.isprintable()
        return "unknown" if told == "an unknown process" else "known"

    assert use(whole) == "known"
    outcomes = tried(variants(whole, by_lane(400, 400, 20_000), random.Random(SEED)), use, tmp_path)
    assert set(outcomes) == {"known", "unknown"}


def test_hostile_disk_speeds_are_valid_or_ignored(tmp_path: Path) -> None:
    path = remember(tmp_path, 1e9)
    assert path == cache_file()
    whole = path.read_bytes()

    def use(content: bytes) -> str:
        path.write_bytes(content)
        speed = known_speed(tmp_path)
        if speed is None:
            return "nothing"
        assert type(speed) in (int, float) and 0 < speed < math.inf
        return "speed"

    try:
        assert use(whole) == "speed"
        contents = variants(whole, by_lane(400, 400, 20_000), random.Random(SEED))
        outcomes = tried(contents, use, tmp_path, path.parent)
    finally:
        path.unlink()
    assert set(outcomes) == {"speed", "nothing"}


# Saved trainings ----------------------------------------------------------------------------------


@pytest.mark.full("hundreds of loads; tests/training/test_saving.py damages each file")
def test_load_training_of_changed_metadata_loads_or_raises(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam([{"params": [p], "lr": 0.1} for p in model.parameters()])
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    save_training(place, model, optimizer, extra={"step": 1})
    metadata = place / ".metadata"
    pickled, said, _ = metadata.read_bytes().rsplit(b"\n", 2)
    before = [parameter.clone() for parameter in model.parameters()]

    def use(pickled: bytes, said: bytes) -> str:
        body = pickled + b"\n" + said + b"\n"
        metadata.write_bytes(body + digest(body).encode())
        try:
            load_training(place, model, optimizer)
        except TierStoreError as error:
            assert str(place) in str(error)
            assert len(str(error)) < 2000, "the message is too long"
        except ValueError as error:
            assert "was saved" in str(error), error
        else:
            return "accepted"
        assert all(map(torch.equal, model.parameters(), before))
        return "refused"

    assert use(pickled, said) == "accepted"
    assert use(pickled, said.replace(b'"format":1', b'"format":2', 1)) == "refused"
    assert use(pickled, b'{"format":1,"files":' + b"[" * 100_000) == "refused"
    rnd = random.Random(SEED)
    contents = variants(said, by_lane(200, 200, 10_000), rnd)
    outcomes = tried(contents, lambda content: use(pickled, content), place)
    assert outcomes["refused"] > 100, outcomes
    contents = [_with_other_bytes(pickled, rnd) for _ in range(by_lane(400, 400, 20_000))]
    outcomes = tried(contents, lambda content: use(content, said), place)
    assert min(outcomes.values()) > 5 and len(outcomes) == 2, outcomes


# Files that the command reads ---------------------------------------------------------------------


def command(*words: Any) -> str:
    """Run the command. Asserts that its exit code is documented and its output escaped."""
    done = CliRunner().invoke(inspector, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise AssertionError(words) from done.exception
    assert done.exit_code in EXITS, done.output
    assert all(line.isprintable() for line in done.output.splitlines()), done.output
    return str(done.exit_code)


def trace_of(tmp_path: Path) -> bytes:
    with open_store(tmp_path / "store", 1 << 16) as store:
        for i in range(4):
            store.put(f"layer/{i}", pages(i, 2))
        store.flush()
        for i in range(8):
            store.get(f"layer/{i % 4}")
        store.trace(tmp_path / "whole.json")
    return (tmp_path / "whole.json").read_bytes()


@pytest.mark.timeout(1800)
def test_hostile_trace_is_whole_or_refused(tmp_path: Path) -> None:
    whole = trace_of(tmp_path)
    path = tmp_path / "changed.json"
    rnd = random.Random(SEED)

    def use(content: bytes) -> str:
        path.write_bytes(gzip.compress(content) if rnd.random() < 0.2 else content)
        try:
            read_trace(path)
        except InvalidTraceError as error:
            assert str(path) in str(error) and len(str(error)) < 20_000
            return "refused"
        return "accepted"

    def run(content: bytes) -> str:
        path.write_bytes(content)
        return command("trace", path) + command("replay", path)

    assert use(whole) == "accepted" and run(whole) == "00"
    path.write_bytes(gzip.compress(b" " * 101))
    with pytest.raises(InvalidTraceError, match="unpacks to more than 100 bytes"):
        load(path, largest=100)
    outcomes = tried(variants(whole, by_lane(60, 200, 10_000), rnd), use, tmp_path)
    assert min(outcomes["accepted"], outcomes["refused"]) > 10, outcomes
    tried(variants(whole, by_lane(6, 30, 1000), rnd), run, tmp_path, cache_file())


@pytest.mark.timeout(1800)
def test_hostile_event_record_is_replayed_or_refused(tmp_path: Path) -> None:
    """Check that replaying a record with arbitrary events to the planner does no harm."""
    whole = trace_of(tmp_path)
    events = json.loads(whole)["tierstore"]["events"]
    path = tmp_path / "changed.json"

    def use(content: bytes) -> str:
        path.write_bytes(content)
        try:
            record = read_trace(path).events
            assert record is not None
            return "differs" if first_difference(record) else "same"
        except InvalidTraceError as error:
            assert str(path) in str(error) and len(str(error)) < 2000
            return "refused"

    def changed(rnd: random.Random) -> bytes:
        """Change, replace or remove one event."""
        rows = [json.dumps(row).encode() for row in events["handled"]]
        at = rnd.randrange(len(rows))
        if rnd.random() < 0.5:
            rows[at] = _structure(rows[at], rnd)
        else:
            rows[at : at + rnd.choice([0, 1])] = rnd.choices(rows, k=rnd.choice([0, 1]))
        others = json.dumps({**events, "handled": []}).encode()
        return whole.replace(
            json.dumps(events, separators=(",", ":")).encode(),
            others.replace(b"[]", b"[" + b",".join(rows) + b"]"),
        )

    assert use(whole) == "same"
    rnd = random.Random(SEED)
    outcomes = tried([changed(rnd) for _ in range(by_lane(200, 400, 20_000))], use, tmp_path)
    assert min(outcomes["same"], outcomes["refused"], outcomes["differs"]) > 10, outcomes


@pytest.mark.full("runs a command for each")
@pytest.mark.timeout(1800)
def test_hostile_pipeline_index_is_planned_or_refused(tmp_path: Path) -> None:
    place = tmp_path / "pipeline"
    for name in ("transformer", "vae"):
        (place / name).mkdir(parents=True)
        save_file(
            {"blocks.0.weight": pages(1), "blocks.1.weight": pages(2)},
            place / name / "m.safetensors",
        )
    index = place / "model_index.json"
    whole = json.dumps(
        {
            "_class_name": "FluxPipeline",
            "transformer": ["diffusers", "FluxTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKL"],
            "scheduler": ["diffusers", "Euler"],
        }
    ).encode()

    def use(content: bytes) -> str:
        index.write_bytes(content)
        return command("plan", place, "--ram", "1MB")

    assert use(whole) == "0"
    outcomes = tried(
        variants(whole, by_lane(20, 80, 1500), random.Random(SEED)), use, place, cache_file()
    )
    assert {"0", "2"} <= set(outcomes), outcomes


@pytest.mark.full("runs four commands for each")
@pytest.mark.timeout(1800)
def test_inspect_of_any_object_ends(tmp_path: Path) -> None:
    disk_dir = tmp_path / "store"
    with open_store(disk_dir) as store:
        store.put("other", pages(1))
    path = object_path(disk_dir, KEY)
    path.parent.mkdir(exist_ok=True)
    checkpoint = tmp_path / "model.safetensors"
    known = [m for m in mutants(random.Random(SEED), by_lane(20, 80, 4000)) if m.seed.ours]
    path.write_bytes(object_file(KEY, tensors()))

    def use(content: bytes) -> str:
        path.write_bytes(content)
        checkpoint.write_bytes(content)
        words = [("ls", disk_dir), ("show", disk_dir, KEY), ("verify", disk_dir, "--data")]
        return "".join(command(*w) for w in [*words, ("plan", checkpoint, "--ram", "1MB")])

    assert use(path.read_bytes()) == "0000"
    outcomes = tried([m.raw for m in known], use, disk_dir, checkpoint, cache_file())
    assert any(outcome[2] == "3" for outcome in outcomes), "no damage was found"
