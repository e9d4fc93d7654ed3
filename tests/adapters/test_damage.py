"""Files that change under a pipeline: failure (6) of diffusers, which notices nothing.

Weights that were cast lie in files of the store, which carry checksums. A checkpoint's own files
carry none: there, any change of the file itself is refused.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import pipelines
from tests.adapters.conftest import Checkpoints, diffusers_offload
from tests.helpers.files import flip_bit
from tierstore import CorruptDataError, TierStore, enable_group_offload
from tierstore.errors import StaleCheckpointError, TruncatedFileError

CAST = torch.float32


def cast_model(checkpoint: Checkpoints) -> Any:
    return pipelines.load("llama", checkpoint("llama"), torch_dtype=CAST)


def store_at(disk_dir: Path, verify: str = "first") -> TierStore:
    return TierStore("500KiB", disk_dir, device="cpu", verify=verify)


def flip(path: Path) -> None:
    """Change the exponent of the last number."""
    flip_bit(path, -1, 6)


def flip_every_file(directory: Path) -> set[str]:
    """The paths of all files of weights in a directory, one number of each damaged."""
    paths = sorted(directory.rglob("*.safetensors"))
    for path in paths:
        flip(path)
    assert paths
    return {str(path) for path in paths}


def test_6_flipped_bytes_of_a_written_file_are_an_error(
    checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = cast_model(checkpoint)
    expected = pipelines.run("llama", cast_model(checkpoint))
    with store_at(disk_dir) as store, enable_group_offload(model, store) as handle:
        damaged = flip_every_file(disk_dir)
        with pytest.raises(CorruptDataError) as caught:
            pipelines.run("llama", model)
        assert caught.value.key in handle.groups
        assert caught.value.path in damaged
        assert caught.value.key in str(caught.value) and caught.value.path in str(caught.value)
        flip_every_file(disk_dir)  # back again
        assert torch.equal(pipelines.run("llama", model), expected)


@pytest.mark.parametrize("verify", ("first", "always"))
def test_6_flipped_bytes_are_an_error_in_the_next_run(
    verify: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    with store_at(disk_dir) as store, enable_group_offload(cast_model(checkpoint), store):
        assert store.stats().bytes_written > 0
    damaged = flip_every_file(disk_dir)
    model = cast_model(checkpoint)
    with store_at(disk_dir, verify) as store, enable_group_offload(model, store):
        assert store.stats().bytes_written == 0
        with pytest.raises(CorruptDataError) as caught:
            pipelines.run("llama", model)
        assert caught.value.path in damaged


def test_6_without_verification_flipped_bytes_go_unnoticed(
    checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = cast_model(checkpoint)
    expected = pipelines.run("llama", cast_model(checkpoint))
    with store_at(disk_dir, "never") as store, enable_group_offload(model, store):
        flip_every_file(disk_dir)
        assert not torch.equal(pipelines.run("llama", model), expected)


def test_6_what_is_flipped_after_the_first_read_is_noticed_unless_nobody_looks(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    outputs = {}
    for verify in ("never", "first", "always"):
        model = cast_model(checkpoint)
        with store_at(tmp_path / verify, verify) as store, enable_group_offload(model, store):
            expected = pipelines.run("llama", model)
            flip_every_file(tmp_path / verify)
            try:
                outputs[verify] = pipelines.run("llama", model)
            except CorruptDataError as error:
                outputs[verify] = error
    assert not torch.equal(outputs["never"], expected)
    assert isinstance(outputs["first"], CorruptDataError)  # the files are not what they were
    assert isinstance(outputs["always"], CorruptDataError)


@pytest.mark.full("shows what another library does wrong; that tierstore does not is tested always")
def test_6_in_diffusers_flipped_bytes_go_unnoticed(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = cast_model(checkpoint)
    diffusers_offload(model, tmp_path)
    expected = pipelines.run("llama", cast_model(checkpoint))
    flip_every_file(tmp_path)
    assert not torch.equal(pipelines.run("llama", model), expected)


@pytest.fixture
def own_copy(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "checkpoint"))


@pytest.mark.parametrize("change", (flip, Path.touch))
def test_6_a_changed_checkpoint_is_an_error(
    change: Callable[[Path], None], own_copy: Path, disk_dir: Path
) -> None:
    expected = pipelines.run("llama", pipelines.load("llama", own_copy))
    model = pipelines.load("llama", own_copy)
    with store_at(disk_dir) as store, enable_group_offload(model, store) as handle:
        assert torch.equal(pipelines.run("llama", model), expected)  # unchanged, all is well
        path = sorted(own_copy.glob("*.safetensors"))[-1].resolve()
        change(path)
        with pytest.raises(StaleCheckpointError) as caught:
            pipelines.run("llama", model)
        assert caught.value.path == str(path)
        assert caught.value.key in handle.groups
        assert str(path) in str(caught.value)


def assert_runs_on(model: Any, store: TierStore, expected: torch.Tensor) -> None:
    for _ in range(2):
        read = store.stats().bytes_read
        assert torch.equal(pipelines.run("llama", model), expected)
        assert store.stats().bytes_read > read


def test_a_checkpoint_that_is_removed_is_read_on(own_copy: Path, disk_dir: Path) -> None:
    """A temporary directory, or a cache that somebody clears: what is mapped is there, too."""
    model = pipelines.load("llama", own_copy)
    expected = pipelines.run("llama", model)
    with store_at(disk_dir) as store:
        with enable_group_offload(model, store):
            shutil.rmtree(own_copy)
            assert_runs_on(model, store, expected)
            assert store.stats().bytes_written == 0
            copied = copy.deepcopy(model)
        assert torch.equal(pipelines.run("llama", model), expected)
        with enable_group_offload(model, store):  # there is no file for the weights any more
            assert_runs_on(model, store, expected)
        assert store.stats().bytes_written > 0
    assert torch.equal(pipelines.run("llama", copied), expected)


@pytest.mark.full("a whole pipeline; tests/dispatch saves a model")
def test_a_model_that_is_saved_where_it_came_from_runs_on(own_copy: Path, disk_dir: Path) -> None:
    """Its weights lie in the file that was there before, as they do in plain torch."""
    pipelines.load("llama", own_copy).save_pretrained(own_copy)  # in one file
    model = pipelines.load("llama", own_copy)
    expected = pipelines.run("llama", model)
    [path] = own_copy.glob("*.safetensors")
    with store_at(disk_dir) as store, enable_group_offload(model, store):
        before = path.stat().st_ino
        model.save_pretrained(own_copy)
        assert path.stat().st_ino != before
        assert_runs_on(model, store, expected)
        model.model.embed_tokens.weight.data.mul_(2)
        changed = pipelines.run("llama", model)
        assert not torch.equal(changed, expected)
        model.save_pretrained(own_copy)
        assert_runs_on(model, store, changed)
    again = pipelines.load("llama", own_copy)
    assert torch.equal(pipelines.run("llama", again), changed)


def test_a_checkpoint_that_was_cut_off_is_an_error(own_copy: Path, disk_dir: Path) -> None:
    model = pipelines.load("llama", own_copy)
    with store_at(disk_dir) as store, enable_group_offload(model, store):
        path = sorted(own_copy.glob("*.safetensors"))[-1]
        os.truncate(path, path.stat().st_size - 4096)
        with pytest.raises(StaleCheckpointError, match="changed"):
            pipelines.run("llama", model)


def test_a_written_file_that_was_cut_off_is_an_error(
    checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = cast_model(checkpoint)
    with store_at(disk_dir) as store, enable_group_offload(model, store) as handle:
        for path in disk_dir.rglob("*.safetensors"):
            os.truncate(path, path.stat().st_size - 4096)
        with pytest.raises(TruncatedFileError) as caught:
            pipelines.run("llama", model)
        assert caught.value.key in handle.groups
