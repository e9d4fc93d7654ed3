"""Files with unusual times, inodes or devices: a service handles them as a store does."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tests.service.serving import serving
from tierstore import TierStore
from tierstore.wire import messages as m

TIMES = [-(10**18), -1, 0, 10**9 - 1, 4_650_000_000 * 10**9]
"""1938, just before 1970, 1970, and 2117."""


@pytest.mark.parametrize("time", TIMES)
def test_checkpoint_with_any_timestamp_is_served(time: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(2048.0)}, path)
    os.utime(path, ns=(time, time))
    assert abs(path.stat().st_mtime_ns - time) < 10**9, "this file system has no such times"
    with TierStore("1MB", tmp_path / "store", device="cpu") as store:
        store.register_checkpoint(path)
        assert torch.equal(store.get("w"), torch.arange(2048.0))
    with serving(tmp_path / "served", 1 << 20) as service, service.connect() as store:
        store.register_checkpoint(path)
        assert torch.equal(store.get("w"), torch.arange(2048.0))


@pytest.mark.parametrize("time", [*TIMES, -(2**63), 2**63, 2**64 + 1, 10**27, -(10**27)])
def test_timestamp_arrives_unchanged(time: int) -> None:
    row = m.File("a", (1, 2, 3, m.time_of(time), m.time_of(0)), None, False)
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=m.File)
    assert m.nanoseconds_of(found.stamp[3]) == time


@pytest.mark.parametrize("number", [0, 2**62, 2**64 - 1])
def test_device_and_inode_numbers_use_all_bits(number: int) -> None:
    row = m.File("a", (number, number, 3, (0, 0), (0, 0)), None, False)
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=m.File)
    assert found.stamp[:2] == (number, number)


@pytest.mark.parametrize("stamp", [[-1, 0, 0, [0, 0], [0, 0]], [0, 0, 0, [0, 10**9], [0, 0]]])
def test_malformed_stamp_is_none(stamp: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["a", stamp, None, False]), type=m.File)
