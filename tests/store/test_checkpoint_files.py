"""The files of a checkpoint, and the facts about each, with and without `await`."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.helpers.events import before, failing
from tierstore.engine import checkpoints
from tierstore.engine.checkpoints import (
    CheckpointFile,
    aread_checkpoint,
    checkpoint_files,
    indexed,
    read_checkpoint,
)
from tierstore.errors import InvalidHeaderError, TransferError
from tierstore.model.groups import Extent
from tierstore.tiers.object_store import memory_store

Read = Callable[[Path], list[CheckpointFile]]


def read_at_once(path: Path) -> list[CheckpointFile]:
    return read_checkpoint(path)


def read_by_awaiting(path: Path) -> list[CheckpointFile]:
    return asyncio.run(aread_checkpoint(path))


both = pytest.mark.parametrize("read", [read_at_once, read_by_awaiting])


def saved(path: Path, *names: str, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a file with a tensor of distinct numbers under each name."""
    tensors = {name: np.full((2, 3), place, np.float32) for place, name in enumerate(names)}
    save_file(tensors, path, metadata=dict(metadata) if metadata else None)
    return path


def index(directory: Path, weight_map: object, name: str = "model.safetensors") -> Path:
    path = directory / f"{name}.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def bytes_at(extent: Extent) -> bytes:
    return Path(extent.path).read_bytes()[extent.offset : extent.offset + extent.nbytes]


@both
def test_file_header_gives_the_extent_of_each_tensor(read: Read, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", "a", "b", metadata={"by": "somebody"})
    [file] = read(path)
    assert file.path == str(path)
    assert dict(file.metadata) == {"by": "somebody"}
    assert {t.name: (t.dtype, t.shape) for t in file.tensors} == {
        "a": ("F32", (2, 3)),
        "b": ("F32", (2, 3)),
    }
    for number, tensor in enumerate(sorted(file.tensors, key=lambda t: t.name)):
        assert bytes_at(tensor.extent) == np.full(6, number, np.float32).tobytes()
    status = path.stat()
    assert (file.stamp.size, file.stamp.inode) == (status.st_size, status.st_ino)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    again = saved(tmp_path / "copy.safetensors", "a", "b", metadata={"by": "somebody"})
    other = saved(tmp_path / "other.safetensors", "a", "c", metadata={"by": "somebody"})
    assert length == int.from_bytes(other.read_bytes()[:8], "little")
    assert read(again)[0].header_digest == file.header_digest
    assert read(other)[0].header_digest != file.header_digest


def test_directory_without_index_means_all_files(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{name}.safetensors", name) for name in "ba"]
    (tmp_path / "notes.txt").write_text("nothing")
    assert checkpoint_files(tmp_path) == sorted(map(str, paths))


def test_index_names_the_files_to_read(tmp_path: Path) -> None:
    for name in "abc":
        saved(tmp_path / f"{name}.safetensors", name)
    path = index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors", "a2": "a.safetensors"})
    expected = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
    assert checkpoint_files(tmp_path) == expected
    assert checkpoint_files(path) == expected


@pytest.mark.parametrize("bare", [False, True])
def test_index_given_by_path_or_mapping_is_used(bare: bool, tmp_path: Path) -> None:
    for name in "ab":
        saved(tmp_path / f"{name}.safetensors", name)
    named = {"a": "a.safetensors"}
    path = tmp_path / "which.json"
    path.write_text(json.dumps(named if bare else {"metadata": {}, "weight_map": named}))
    assert checkpoint_files(path) == [str(tmp_path / "a.safetensors")]


def test_pickle_index_given_raises(tmp_path: Path) -> None:
    path = index(tmp_path, {"a": "pytorch_model.bin"}, "pytorch_model.bin")
    with pytest.raises(TransferError, match="torch pickles are not supported"):
        checkpoint_files(path)


def test_pickle_index_found_is_skipped(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", "a")
    index(tmp_path, {"a": "pytorch_model.bin"}, "pytorch_model.bin")
    assert checkpoint_files(tmp_path) == [str(path)]


def test_two_indexes_without_a_choice_raise(tmp_path: Path) -> None:
    saved(tmp_path / "a.safetensors", "a")
    first = index(tmp_path, {"a": "a.safetensors"}, "model.safetensors")
    index(tmp_path, {"a": "a.safetensors"}, "model.fp16.safetensors")
    with pytest.raises(ValueError, match="has 2 index files: pass the path of one"):
        checkpoint_files(tmp_path)
    assert checkpoint_files(first) == [str(tmp_path / "a.safetensors")]


def test_links_are_resolved_to_the_same_files(tmp_path: Path) -> None:
    path = saved(tmp_path / "blob", "a")
    link = tmp_path / "model.safetensors"
    link.symlink_to(path)
    assert checkpoint_files(link) == [str(path)]
    assert checkpoint_files(tmp_path) == [str(path)]


@pytest.mark.parametrize("kind", ["empty", "pickles", "missing"])
def test_missing_checkpoint_error_names_accepted_paths(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "model"
    if kind != "missing":
        place.mkdir()
    if kind == "pickles":
        (place / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    match = "no file or directory" if kind == "missing" else "has no safetensors checkpoint"
    with pytest.raises(TransferError, match=match) as error:
        checkpoint_files(place)
    assert error.value.path == str(place)


@both
def test_two_files_with_one_tensor_name_raise(read: Read, tmp_path: Path) -> None:
    saved(tmp_path / "a.safetensors", "x", "y")
    saved(tmp_path / "b.safetensors", "z", "y")
    with pytest.raises(ValueError, match="both have a tensor 'y'") as error:
        read(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        assert str(tmp_path / name) in str(error.value)


# Indexes that lie --------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(InvalidHeaderError) as error:
        checkpoint_files(path)
    assert error.value.path == str(path)
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "", ".", "..", "sub/a.safetensors", "a\0b"]
)
def test_index_naming_files_elsewhere_raises(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "a.safetensors", "a")
    path = index(tmp_path, {"a": name, "b": "a.safetensors"})
    assert "names files outside its directory" in refused(path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}} x'],
)
def test_index_of_wrong_json_shape_raises(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    assert "the index is malformed" in refused(path)


def test_index_without_weight_map_raises(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"metadata": {"total_size": [1, {"a": "b"}]}}')
    assert "it has no weight_map" in refused(path)


def test_index_too_large_is_not_read(tmp_path: Path) -> None:
    path = index(tmp_path, {"a": "a.safetensors"})
    saved(tmp_path / "a.safetensors", "a")
    path.write_text(path.read_text().ljust(checkpoints.MAX_INDEX_BYTES))
    assert checkpoint_files(path) == [str(tmp_path / "a.safetensors")]
    with path.open("a") as file:
        file.write(" ")
    assert "too large to be one" in refused(path)


def test_index_of_too_many_files_raises(tmp_path: Path) -> None:
    most = checkpoints.MAX_SHARDS
    names = [f"{number}.safetensors" for number in range(most + 1)]
    path = index(tmp_path, {name: name for name in names[:most]} | {"again": names[0]})
    assert len(checkpoint_files(path)) == most
    path = index(tmp_path, {name: name for name in names})
    assert f"names more than {most} files" in refused(path)


# Files that cannot be read -----------------------------------------------------------------------


@both
def test_missing_shard_error_names_its_path(read: Read, tmp_path: Path) -> None:
    index(tmp_path, {"a": "a.safetensors"})
    with pytest.raises(TransferError, match=r"there is no file .*a\.safetensors,") as error:
        read(tmp_path)
    assert error.value.path == str(tmp_path / "a.safetensors")


@both
@pytest.mark.parametrize("kind", ["a pipe", "a directory"])
def test_special_file_does_not_block(kind: str, read: Read, tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors"
    if kind == "a pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    with pytest.raises(TransferError) as error:
        read(tmp_path)
    assert error.value.path == str(place)


def test_index_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors.index.json"
    os.mkfifo(place)
    with pytest.raises(TransferError, match="is not a regular file"):
        checkpoint_files(tmp_path)


def test_unreadable_index_raises(tmp_path: Path) -> None:
    path = index(tmp_path, {"a": "a.safetensors"})
    with (
        before("open", failing(errno.EIO)),
        pytest.raises(TransferError, match="Input/output") as error,
    ):
        checkpoint_files(path)
    assert error.value.path == str(path)


@both
@pytest.mark.parametrize("left", [0, 7, 20])
def test_truncated_file_raises(left: int, read: Read, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", "a")
    os.truncate(path, left)
    with pytest.raises(InvalidHeaderError) as error:
        read(path)
    assert error.value.path == str(path)


def test_path_no_system_accepts_raises(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 5000)
    with pytest.raises(TransferError, match="File name too long") as error:
        checkpoint_files(place)
    assert error.value.path == str(place)


# In an object store ------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_checkpoint, lambda url: asyncio.run(aread_checkpoint(url))])
def test_url_lists_the_same_as_its_file(read: Callable[[str], Any], tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(3, np.float32), "b": np.zeros((2, 2), np.int64)}, path)
    url = f"memory://headers-{os.urandom(4).hex()}/m"
    memory_store(url).put("m/model.safetensors", path.read_bytes())
    (far,), (near,) = read(url), read_checkpoint(path)
    assert far.path == f"{url}/model.safetensors"
    assert far.header_digest == near.header_digest
    told = [[(t.name, t.dtype, t.shape, t.extent.offset) for t in f.tensors] for f in (far, near)]
    assert told[0] == told[1]


def test_remote_index_too_large_raises() -> None:
    with pytest.raises(InvalidHeaderError, match="too large"):
        indexed(bytes(checkpoints.MAX_INDEX_BYTES + 1), "s3://bucket/index.json")
