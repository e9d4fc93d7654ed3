"""On a full disk the command frees space; other failed reads and writes exit with a message."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Inspect, command, environment
from tests.helpers.events import before
from tests.helpers.system_calls import system_call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_rm_on_a_full_disk_removes(number: int, store: Path, inspect: Inspect) -> None:
    """There is no space to write the lock owner's name."""
    with system_call("pwrite", fails_with=number) as failed:
        assert inspect("rm", store, "a", "-y").exit_code == 0
    assert failed
    assert [group["key"] for group in inspect.json("ls", store)["groups"]] == ["b", "layers/0"]


def test_rm_lock_write_fails_exits_1(store: Path, inspect: Inspect) -> None:
    with system_call("pwrite", fails_with=errno.EIO):
        result = inspect("rm", store, "a", "-y")
    assert result.exit_code == 1
    assert "LOCK failed" in result.stderr
    assert len(inspect.json("ls", store)["groups"]) == 3


def test_rm_failure_reports_the_removed_count(store: Path, inspect: Inspect) -> None:
    done: list[object] = []

    def once(path: object, *_: object) -> None:
        if done:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        done.append(path)

    with before("os.remove", once):
        result = inspect("rm", store, "a", "b", "-y")
    assert result.exit_code == 1
    assert "after 1 of them" in result.stderr


@pytest.mark.parametrize("arguments", [["ls"], ["df"], ["env"], ["--help"]])
def test_output_device_full_exits_with_an_error(arguments: list[str], store: Path) -> None:
    words = command([*arguments, *([store] if arguments[0] in ("ls", "df") else [])])
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60
        )
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
    assert done.returncode


def test_rm_unreadable_directory_exits_1(store: Path, inspect: Inspect) -> None:
    def denied(path: object, *_: object) -> None:
        if path == "objects":  # the user may be root, who may read everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with before("open", denied):
        result = inspect("rm", store, "a", "-y")
    assert result.exit_code == 1
    assert "Permission denied" in result.stderr


def pipeline(place: Path) -> Path:
    for name in ("transformer", "vae"):
        (place / name).mkdir(parents=True)
        save_file({"blocks.0.w": torch.zeros(1024)}, place / name / "model.safetensors")
    index = {"_class_name": "P", "transformer": ["d", "FluxTransformer2DModel"]}
    (place / "model_index.json").write_text(json.dumps({**index, "vae": ["d", "AutoencoderKL"]}))
    return place


def test_plan_missing_shards_exits_with_an_error(tmp_path: Path, inspect: Inspect) -> None:
    place = pipeline(tmp_path / "pipe")
    assert inspect("plan", place, "--ram", "1MB").exit_code == 0
    (place / "transformer" / "model.safetensors").unlink()
    weights = {"metadata": {}, "weight_map": {"blocks.0.w": "model-00001-of-00001.safetensors"}}
    (place / "transformer" / "model.safetensors.index.json").write_text(json.dumps(weights))
    result = inspect("plan", place, "--ram", "1MB")
    assert result.exit_code != 0
    assert "model-00001-of-00001.safetensors" in result.stderr


def test_plan_unreadable_checkpoint_exits_1(tmp_path: Path, inspect: Inspect) -> None:
    place = pipeline(tmp_path / "pipe")

    def denied(path: object, *_: object) -> None:
        if str(path).endswith(".safetensors"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with before("open", denied):
        result = inspect("plan", place / "vae", "--ram", "1MB")
    assert (result.exit_code, "Permission denied" in result.stderr) == (1, True), result.stderr
    assert inspect("plan", tmp_path / "missing", "--ram", "1MB").exit_code == 2
