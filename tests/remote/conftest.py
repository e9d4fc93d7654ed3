"""A server for all tests of a process, and a checkpoint in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.remote.servers import BUCKET, Proxy, environment, proxied, s3_server, upload
from tierstore.tiers.object_store import retry_policy

_names = count()


@dataclass(frozen=True)
class Uploaded:
    """A checkpoint in the server: `groups` of the tensors `values`, in the object `name`."""

    name: str
    url: str
    values: dict[str, torch.Tensor]
    groups: dict[str, list[str]]
    nbytes: int


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Start a proxy before the server, and point obstore at it. Retries have short pauses."""
    with retry_policy(pauses=(0.05, 0.1)), proxied(s3) as found:
        for name, value in environment(found.address).items():
            monkeypatch.setenv(name, value)
        yield found


def values_of(count: int, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return two tensors for each of `count` blocks: one of `rows` KiB, and one of an odd size."""
    maker = torch.Generator().manual_seed(seed)
    found = {}
    for i in range(count):
        found[f"blocks.{i}.weight"] = torch.randn(rows, 256, generator=maker)
        found[f"blocks.{i}.bias"] = torch.randn(7, generator=maker).to(torch.bfloat16)
    return found


def uploaded(s3: str, count: int = 8, rows: int = 128, name: str | None = None) -> Uploaded:
    """Upload a checkpoint of this many groups to a separate directory."""
    name = name or f"{next(_names)}/model.safetensors"
    values = values_of(count, rows)
    upload(s3, name, save(values))
    groups = {f"{i}": [f"blocks.{i}.weight", f"blocks.{i}.bias"] for i in range(count)}
    nbytes = sum(tensor.nbytes for tensor in values.values())
    return Uploaded(name, f"s3://{BUCKET}/{name}", values, groups, nbytes)


def assert_holds(store: Any, checkpoint: Uploaded, key: str) -> None:
    """Check that a group's tensors are those that were uploaded."""
    with store.acquire(key) as lease:
        assert lease.tensors.keys() == set(checkpoint.groups[key])
        for name, tensor in lease.tensors.items():
            assert torch.equal(tensor, checkpoint.values[name]), name
