"""The command and a real store agree on the content of a directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Inspect
from tests.helpers.files import flip_bit, object_file
from tierstore import TierStore


@pytest.fixture
def live(disk_dir: Path) -> Iterator[TierStore]:
    """Return a store of three groups, all on disk."""
    weight = torch.arange(6.0).reshape(2, 3)
    with TierStore(64 << 20, disk_dir, device="cpu") as store:
        store.put("latents", torch.ones(4, dtype=torch.bfloat16))
        store.put("tied", {"weight": weight, "turned": weight.t(), "bias": torch.ones(3)})
        store.put("mixed", {"half": torch.ones(5).half(), "flags": torch.ones(7).bool()})
        store.flush()
        yield store


def test_ls_lists_groups_of_a_live_store(live: TierStore, disk_dir: Path, inspect: Inspect) -> None:
    document = inspect.json("ls", disk_dir)
    found = {group["key"]: (group["tensors"], group["dtypes"]) for group in document["groups"]}
    assert found == {
        "latents": (1, ["BF16"]),
        "mixed": (2, ["BOOL", "F16"]),
        "tied": (3, ["F32"]),
    }
    assert document["temporary"] == document["stray"] == []
    assert document["locked_by"].startswith("process ")
    assert inspect("verify", disk_dir, "--data").exit_code == 0


def test_show_prints_ties_and_strides_of_a_live_store(
    live: TierStore, disk_dir: Path, inspect: Inspect
) -> None:
    rows = {row["name"]: row for row in inspect.json("show", disk_dir, "tied")["tensors"]}
    assert rows["weight"]["tied"] == rows["turned"]["tied"] == 1
    assert rows["turned"]["shape"] == [3, 2]
    assert rows["turned"]["stride"] == [1, 3]
    assert rows["bias"]["tied"] is None
    begin = rows["weight"]["offset"]
    raw = object_file(disk_dir, "tied").read_bytes()[begin:][: rows["weight"]["nbytes"]]
    assert torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist() == [*range(6)]


def test_live_store_blocks_removal(
    live: TierStore, disk_dir: Path, tmp_path: Path, inspect: Inspect
) -> None:
    assert inspect("rm", disk_dir, "latents", "-y").exit_code == 11
    assert inspect("prune", disk_dir, "-y").exit_code == 11
    live.close()
    assert inspect("rm", disk_dir, "latents", "-y").exit_code == 0
    with TierStore(64 << 20, disk_dir, device="cpu") as store:
        assert sorted(store.keys()) == ["mixed", "tied"]
        assert store.get("mixed")["flags"].tolist() == [True] * 7


def test_verify_finds_damage_that_the_store_raises(
    live: TierStore, disk_dir: Path, inspect: Inspect
) -> None:
    live.close()
    path = object_file(disk_dir, "tied")
    shutil.copy(path, whole := disk_dir.parent / "whole")
    flip_bit(path, path.stat().st_size - 1)
    assert inspect("verify", disk_dir, "--data").exit_code == 3
    shutil.copy(whole, path)
    assert inspect("verify", disk_dir, "--data").exit_code == 0
