"""Files that change under a pipeline: failure (6) of diffusers, which detects nothing.

Cast weights lie in files of the store, which carry checksums. A checkpoint's own files carry none:
any change of the file itself raises.
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
    """Damage one number in each file of weights in a directory; return the paths."""
    paths = sorted(directory.rglob("*.safetensors"))
    for path in paths:
        flip(path)
    assert paths
    return {str(path) for path in paths}


def test_flipped_bytes_of_a_written_file_raise(checkpoint: Checkpoints, disk_dir: Path) -> None:
    model = cast_model(checkpoint)
    expected = pipelines.run("llama", cast_model(checkpoint))
    with store_at(disk_dir) as store, enable_group_offload(model, store) as handle:
        damaged = flip_every_file(disk_dir)
        with pytest.raises(CorruptDataError) as caught:
            pipelines.run("llama", model)
        assert caught.value.key in handle.groups
        assert caught.value.path in damaged
        assert caught.value.key in str(caught.value) and caught.value.path in str(caught.value)
        flip_every_file(disk_dir)  # restore them
        assert torch.equal(pipelines.run("llama", model), expected)


@pytest.mark.parametrize("verify", ("first", "always"))
def test_flipped_bytes_raise_in_the_next_run(
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


def test_flipped_bytes_without_verification_are_used(
    checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = cast_model(checkpoint)
    expected = pipelines.run("llama", cast_model(checkpoint))
    with store_at(disk_dir, "never") as store, enable_group_offload(model, store):
        flip_every_file(disk_dir)
        assert not torch.equal(pipelines.run("llama", model), expected)


def test_bytes_flipped_after_the_first_read_raise_if_verified(
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
    assert isinstance(outputs["first"], CorruptDataError)  # the files have changed
    assert isinstance(outputs["always"], CorruptDataError)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_diffusers_flipped_bytes_are_used(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = cast_model(checkpoint)
    diffusers_offload(model, tmp_path)
    expected = pipelines.run("llama", cast_model(checkpoint))
    flip_every_file(tmp_path)
    assert not torch.equal(pipelines.run("llama", model), expected)


@pytest.fixture
def own_copy(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """Return a checkpoint that the test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "checkpoint"))


@pytest.mark.parametrize("change", (flip, Path.touch))
def test_changed_checkpoint_raises(
    change: Callable[[Path], None], own_copy: Path, disk_dir: Path
) -> None:
    expected = pipelines.run("llama", pipelines.load("llama", own_copy))
    model = pipelines.load("llama", own_copy)
    with store_at(disk_dir) as store, enable_group_offload(model, store) as handle:
        # the control: unchanged, it works
        assert torch.equal(pipelines.run("llama", model), expected)
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


def test_removed_checkpoint_still_runs(own_copy: Path, disk_dir: Path) -> None:
    """Temporary directories are removed, and caches cleared; the mapped bytes remain."""
    model = pipelines.load("llama", own_copy)
    expected = pipelines.run("llama", model)
    with store_at(disk_dir) as store:
        with enable_group_offload(model, store):
            shutil.rmtree(own_copy)
            assert_runs_on(model, store, expected)
            assert store.stats().bytes_written == 0
            copied = copy.deepcopy(model)
        assert torch.equal(pipelines.run("llama", model), expected)
        with enable_group_offload(model, store):  # the weights have no file any more
            assert_runs_on(model, store, expected)
        assert store.stats().bytes_written > 0
    assert torch.equal(pipelines.run("llama", copied), expected)


@pytest.mark.full("a whole pipeline; tests/dispatch saves a model")
def test_model_saved_over_its_checkpoint_still_runs(own_copy: Path, disk_dir: Path) -> None:
    """Its weights lie in the replaced file, as they do in plain torch."""
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


def test_truncated_checkpoint_raises(own_copy: Path, disk_dir: Path) -> None:
    model = pipelines.load("llama", own_copy)
    with store_at(disk_dir) as store, enable_group_offload(model, store):
        path = sorted(own_copy.glob("*.safetensors"))[-1]
        os.truncate(path, path.stat().st_size - 4096)
        with pytest.raises(StaleCheckpointError, match="changed"):
            pipelines.run("llama", model)


def test_truncated_written_file_raises(checkpoint: Checkpoints, disk_dir: Path) -> None:
    model = cast_model(checkpoint)
    with store_at(disk_dir) as store, enable_group_offload(model, store) as handle:
        for path in disk_dir.rglob("*.safetensors"):
            os.truncate(path, path.stat().st_size - 4096)
        with pytest.raises(TruncatedFileError) as caught:
            pipelines.run("llama", model)
        assert caught.value.key in handle.groups
