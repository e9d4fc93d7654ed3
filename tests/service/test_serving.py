"""What a worker is promised, by a service on a thread of the same process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.service.serving import ThreadService, serving

MIB = 1 << 20


def checkpoint(path: Path, groups: int = 8, nbytes: int = MIB) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = {f"w{i}": torch.randn(nbytes // 4, generator=generator) for i in range(groups)}
    save_file(tensors, path)
    return tensors


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path / "served", 4 * MIB + 65536) as running:
        yield running


def test_workers_see_what_the_checkpoint_holds(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors")
    with service.connect() as one, service.connect() as other:
        for store, prefix in ((one, "a/"), (other, "b/")):
            store.register_checkpoint(tmp_path / "m.safetensors", prefix)
        for _ in range(3):
            for name, expected in tensors.items():
                for store, prefix in ((one, "a/"), (other, "b/")):
                    with store.acquire(prefix + name) as lease:
                        assert torch.equal(lease[name], expected)
        assert len(service.server.groups) == len(tensors)
        assert one.stats().bytes_read > 0
