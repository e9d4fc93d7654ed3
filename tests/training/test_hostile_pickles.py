"""Checkpoints of a training from strangers: small files that would take for ever, or all memory.

They are read in a process of its own, whose memory is measured, and which has a limit of time. The
same in small is harmless, and is read.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.processes import output_of
from tierstore import CorruptDataError
from tierstore.adapters.training.checkpoint_archives import check_archive
from tierstore.adapters.training.checkpoint_files import METADATA, SUMS, Encoded
from tierstore.adapters.training.checkpoint_metadata import parsed_metadata
from tierstore.adapters.training.checkpoint_pickles import (
    DEPTH,
    Made,
    Named,
    Pairs,
    UnpicklingError,
    described,
)
from tierstore.adapters.training.saving import load_training, save_training

READ = r"""
import sys, time
from pathlib import Path
from tests.training.test_hostile_pickles import BOMBS
from tierstore.adapters.training.checkpoint_metadata import parsed_metadata

def high_water():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

for name, make in BOMBS.items():
    raw = make()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = high_water(), time.process_time()
    try:
        parsed_metadata(raw)
        outcome = "accepted"
    except Exception as error:
        outcome = type(error).__name__
    seconds = time.process_time() - began
    print(name, outcome, len(raw), high_water() - before, seconds, sep="|", flush=True)
"""


def twice(levels: int) -> bytes:
    """What is on the stack, and the same once more, made into a pair; so many times."""
    return b"".join(b"q%ch%c\x86" % (i, i) for i in range(levels))


def nested(levels: int) -> bytes:
    """A dict whose key is a tuple of a tuple and the same tuple, and so on."""
    return b"\x80\x04}(" + b")" + twice(levels) + b"Nu."


def paths(levels: int) -> bytes:
    """Paths of two paths each: texts that would be twice as long at each level."""
    name = b"cpathlib\nPosixPath\n"
    first = name + b"X\x01\x00\x00\x00a\x85Rq\x00"
    rest = b"".join(name + b"h%ch%c\x86Rq%c" % (i, i, i + 1) for i in range(levels))
    return b"\x80\x04](" + first + rest + b"e."


def sizes(count: int) -> bytes:
    """A long tuple, and as many calls that would each copy it."""
    start = b"\x80\x04(" + b"K\x00" * count + b"t\x94"
    return start + b"(" + b"ctorch\nSize\nh\x00\x85R" * (count // 8) + b"t\x86."


def attributes(count: int) -> bytes:
    """A dict with many members, which as many objects would each take over."""
    kind = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n"
    members = b"".join(b"X\x05\x00\x00\x00%05dK\x00" % i for i in range(count))
    return b"\x80\x04}(" + members + b"u\x94(" + (kind + b")\x81h\x00b") * (count // 8) + b"t\x86."


BOMBS: dict[str, Callable[[], bytes]] = {
    "nested tuples, hashed": lambda: nested(30),
    "nested lists": lambda: b"\x80\x04]" + twice(30) + b".",
    "paths of paths": lambda: paths(30),
    "sizes that are copied": lambda: sizes(20_000),
    "attributes that are copied": lambda: attributes(5_000),
    "a deep list": lambda: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a deep tuple as a key": lambda: b"\x80\x04})" + b"\x85" * 100_000 + b"Ns.",
    "a list in itself": lambda: b"\x80\x04]\x94h\x00a.",
    "bytes that are not there": lambda: b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "a text that is not there": lambda: b"\x80\x04X\xff\xff\xff\xff.",
    "too many lists": lambda: b"\x80\x04](" + b"]" * 400_000 + b"e.",
    "too many memories": lambda: b"\x80\x04]" + b"\x94" * 400_000 + b".",
    "a call of what is called": lambda: b"\x80\x04cos\nsystem\nX\x02\x00\x00\x00id\x85R.",
    "nothing": lambda: b"",
}


@pytest.mark.full("every bomb, in a process of its own")
@pytest.mark.timeout(300)
def test_a_small_pickle_takes_no_time_and_no_memory() -> None:
    rows = [line.split("|") for line in output_of("-c", READ, timeout=120).splitlines()]
    assert {row[0] for row in rows} == set(BOMBS)
    for name, outcome, nbytes, memory, seconds in rows:
        assert outcome in ("UnpicklingError", "ValueError"), f"{name}: {outcome}"
        assert int(memory) <= int(nbytes) + (64 << 20), f"{name}: {int(memory):,} bytes"
        assert float(seconds) < 20, f"{name}: {seconds} s"


def test_the_same_in_small_is_read_as_it_is() -> None:
    found = described(nested(3))
    assert type(found) is Pairs and found.members[1] is None
    one: Any = ()
    for _ in range(3):
        one = (one, one)
    assert found.members[0] == one
    assert described(b"\x80\x04" + b"]" * DEPTH + b"a" * (DEPTH - 1) + b".")
    named = described(b"\x80\x04ctorch\nSize\nK\x02K\x03\x86\x85R.")
    assert type(named) is Made and type(named.function) is Named
    assert (named.function.name, named.arguments) == ("torch.Size", ((2, 3),))


def test_pickles_of_python_are_described_as_they_are() -> None:
    value = {"a": [1, -2, 2**40, 0.5, None, True], "b": ("x", b"y", {"z": []}), "c": "é" * 300}

    def plain(node: Any) -> Any:
        if type(node) is Pairs:
            return dict(zip(node.members[::2], map(plain, node.members[1::2]), strict=True))
        if type(node) is Made:  # bytes, in the old protocol
            return node.arguments[0].encode(node.arguments[1])
        return type(node)(map(plain, node)) if isinstance(node, list | tuple) else node

    for protocol in (2, 3, 4, 5):
        assert plain(described(pickle.dumps(value, protocol))) == value


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A saved training without sums, as torch itself saves one."""
    save_training(tmp_path / "run", nn.Linear(2, 3), extra={"step": 1})
    os.unlink(tmp_path / "run" / SUMS)
    metadata = parsed_metadata((tmp_path / "run" / METADATA).read_bytes())
    assert {"model.weight", "model.bias", "tierstore"} == set(metadata.state_dict_metadata)
    yield tmp_path / "run"


def test_a_bomb_in_the_place_of_metadata_changes_nothing(run: Path) -> None:
    model = nn.Linear(2, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (run / METADATA).write_bytes(nested(30))
    assert (run / METADATA).stat().st_size < 200
    with pytest.raises(CorruptDataError, match=re.escape(str(run / METADATA))):
        load_training(run, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_metadata_are_what_torch_reads_of_them(run: Path) -> None:
    raw = (run / METADATA).read_bytes()
    ours, theirs = parsed_metadata(raw), pickle.loads(raw)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


@pytest.mark.parametrize("name", [METADATA, SUMS])
def test_a_file_that_is_too_large_is_not_read(name: str, run: Path) -> None:
    with open(run / name, "wb") as file:
        file.truncate(1 << 40)  # it takes nothing of the disk
    with pytest.raises(CorruptDataError, match="more than"):
        load_training(run, nn.Linear(2, 3))


# Archives of torch.save ---------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def again(
    raw: bytes, method: int = zipfile.ZIP_STORED, **changed: Callable[[bytes], bytes]
) -> bytes:
    """The archive, written by another program, with records changed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(file, "w", method) as new:
        for each in old.namelist():
            change = changed.get(each.rpartition("/")[2].partition(".")[0], lambda data: data)
            new.writestr(each, change(old.read(each)))
    return file.getvalue()


def check(raw: bytes) -> None:
    check_archive(io.BytesIO(raw))


def test_a_chunk_that_is_deflated_is_refused() -> None:
    whole = saved(torch.zeros(16 << 20, dtype=torch.uint8))
    deflated = again(whole, zipfile.ZIP_DEFLATED)
    assert len(deflated) < 100_000
    loaded = torch.load(io.BytesIO(deflated), weights_only=True)
    assert loaded.nbytes == 16 << 20, "torch reads it, and takes as much memory as it says"
    with pytest.raises(UnpicklingError, match="no archive"):
        check(deflated)
    check(whole)
    check(again(whole))


def test_a_storage_that_is_shorter_than_it_says_is_refused() -> None:
    """torch would show what lies behind it in memory."""
    whole = saved(torch.zeros(300, dtype=torch.uint8))
    longer = again(whole, data=lambda raw: raw.replace(b"M\x2c\x01", b"M\xff\xff"))
    assert longer != again(whole)
    with pytest.raises(UnpicklingError, match="not as long as it says"):
        check(longer)
    check(again(whole))


def test_a_tensor_that_is_expanded_without_end_is_refused() -> None:
    check(saved(torch.ones(1).expand(1000)))
    with pytest.raises(UnpicklingError, match="more elements"):
        check(saved(torch.ones(1).expand(1 << 40)))


def test_tuples_that_nest_in_a_value_are_refused() -> None:
    one: Any = ()
    for _ in range(30):
        one = (one, one)
    whole = saved(["here"])
    bomb = again(whole, data=lambda _: b"\x80\x02}(" + nested(30)[4:])
    with pytest.raises(UnpicklingError, match="as a tree"):
        check(bomb)
    check(again(whole, data=lambda _: b"\x80\x02}(" + nested(3)[4:]))


def test_two_directories_in_one_archive_are_refused() -> None:
    """Readers differ in which of them they believe."""
    whole = saved(torch.ones(3))
    check(whole)
    for changed in (
        whole + b"\0",
        whole[:-2] + b"\1\0",
        b"PK\x03\x04" + whole,
        whole + whole[-98:],
    ):
        with pytest.raises(UnpicklingError):
            check(changed)


@pytest.mark.parametrize(
    "value",
    [
        {"step": 3, "rng": torch.arange(5), "text": "é", "list": [1.5, (2, None)], b"k": {1, 2}},
        {"same": [torch.ones(2)] * 3, "bool": torch.tensor([True]), "half": torch.ones(3).half()},
        {"none": torch.empty(0), "scalar": torch.tensor(3.0), "view": torch.arange(10)[2:5]},
        {"parameter": nn.Parameter(torch.ones(2)), "size": torch.Size([2]), "d": torch.float16},
    ],
)
def test_whatever_could_be_saved_still_can(value: Any) -> None:
    check(Encoded(value, "extra").getvalue())


def test_what_is_too_deep_to_load_is_not_saved(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(DEPTH + 10):
        deep = [deep]
    with pytest.raises(TypeError, match="could not be loaded again"):
        save_training(tmp_path / "run", nn.Linear(2, 3), extra=deep)
    assert not (tmp_path / "run").exists()
