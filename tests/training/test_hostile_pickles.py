"""Hostile training checkpoints run no code, and are refused before anything changes.

They may cost time and memory.
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

from tierstore import CorruptDataError, load_training, save_training
from tierstore.adapters.training.checkpoint_files import METADATA, Encoded
from tierstore.adapters.training.checkpoint_metadata import parsed_metadata


class Call:
    """An object whose pickle is a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A saved training without checksums, as torch itself saves one."""
    save_training(tmp_path / "run", nn.Linear(2, 3), extra={"step": 1})
    path = tmp_path / "run" / METADATA
    path.write_bytes(path.read_bytes().rsplit(b"\n", 2)[0])
    yield tmp_path / "run"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_parsed_metadata_calls_and_imports_nothing(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "made"
    for planted in (
        Call(os.mkdir, str(target)),
        Call(eval, f"__import__('os').mkdir({str(target)!r})"),
        {Call(os.mkdir, str(target)): [Call(exec, "raise SystemExit")]},
    ):
        with pytest.raises((ValueError, AttributeError)):
            parsed_metadata(pickle.dumps(planted, protocol))
    assert not target.exists()
    with pytest.raises(TypeError):
        parsed_metadata(b"cthis_is_no_module_of_anybody\nname\n.")
    pickle.loads(pickle.dumps(Call(os.mkdir, str(target)), protocol))  # the control
    assert target.exists()


def test_parsed_metadata_changes_no_class_of_torch() -> None:
    kind = torch.distributed.checkpoint.metadata.MetadataIndex
    before = dict(vars(kind))
    name = f"c{kind.__module__}\n{kind.__qualname__}\n".encode()
    with pytest.raises(TypeError):
        parsed_metadata(b"\x80\x02" + name + b"N}X\x01\x00\x00\x00aNs\x86b.")
    assert dict(vars(kind)) == before


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_parsed_metadata_equals_torchs(protocol: int, run: Path) -> None:
    theirs = pickle.loads((run / METADATA).read_bytes())
    ours = parsed_metadata(pickle.dumps(theirs, protocol))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


def outside(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../secret"


def compressed(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def lacking(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].chunks.clear()


def larger(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].size = torch.Size([1 << 40, 2])


def beside(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].chunks[0].offsets = torch.Size([1, 0])


def unstored(metadata: Any) -> None:
    del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "model.bias")]


def negative(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = -1


def no_text(metadata: Any) -> None:
    metadata.state_dict_metadata[3] = metadata.state_dict_metadata["model.weight"]


def no_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].properties.dtype = torch.Size


CHANGES = [outside, compressed, lacking, larger, beside, unstored, negative, no_text, no_dtype]


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_load_training_of_false_metadata_raises(
    change: Callable[[Any], None] | None, run: Path
) -> None:
    metadata = pickle.loads((run / METADATA).read_bytes())
    model = nn.Linear(2, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if change is not None:
        change(metadata)
    del metadata.state_dict_metadata["tierstore"]  # as torch alone would save it
    (run / METADATA).write_bytes(pickle.dumps(metadata))
    if change is None:
        load_training(run, model)
        return
    with pytest.raises(CorruptDataError, match=re.escape(str(run / METADATA))):
        load_training(run, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_load_training_without_its_checksums_raises(run: Path) -> None:
    with pytest.raises(CorruptDataError, match="does not match its checksum"):
        load_training(run, nn.Linear(2, 3))


def test_torch_load_of_a_truncated_storage_raises() -> None:
    """torch must check this: otherwise the tensor would show memory beyond its storage."""
    whole, file = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(300, dtype=torch.uint8), whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(file, "w") as new:
        for each in old.namelist():
            new.writestr(each, old.read(each).replace(b"M\x2c\x01", b"M\xff\xff"))
    file.seek(0)
    with pytest.raises(RuntimeError, match="does not match expected size"):
        torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "value",
    [
        {"step": 3, "rng": torch.arange(5), "text": "é", "list": [1.5, (2, None)], b"k": {1, 2}},
        {"same": [torch.ones(2)] * 3, "bool": torch.tensor([True]), "half": torch.ones(3).half()},
        {"none": torch.empty(0), "scalar": torch.tensor(3.0), "view": torch.arange(10)[2:5]},
        {"parameter": nn.Parameter(torch.ones(2)), "size": torch.Size([2]), "d": torch.float16},
    ],
)
def test_encoded_plain_values_are_bytes(value: Any) -> None:
    assert Encoded(value, "extra").getvalue()


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"a": object()}, r"extra\['a'\] is of type object"),
        ({"n": 1, "b": [(0, {2: object})]}, r"extra\['b'\]\[0\]\[1\]\[2\] is of type type"),
        (object(), "extra is of type object"),
    ],
)
def test_save_training_error_names_the_wrong_part(extra: Any, part: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"^{part}, which cannot .*: extra may hold tensors"):
        save_training(tmp_path / "run", nn.Linear(2, 3), extra=extra)


def test_save_training_of_too_deep_an_extra_raises(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(TypeError, match="extra is nested too deeply"):
        save_training(tmp_path / "run", nn.Linear(2, 3), extra=deep)
    assert not (tmp_path / "run").exists()
