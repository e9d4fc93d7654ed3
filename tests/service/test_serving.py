"""The promises to a worker, with a service on a thread of the same process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.service.serving import ThreadService, serving, wait_until
from tierstore import Access, TierStore
from tierstore.errors import BudgetError, UnknownKeyError

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


def same(lease, expected: torch.Tensor, name: str) -> bool:
    return torch.equal(lease.tensors[name], expected)


def test_workers_see_the_checkpoints_values(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors")
    with service.connect() as one, service.connect() as other:
        for store, prefix in ((one, "a/"), (other, "b/")):
            store.register_checkpoint(tmp_path / "m.safetensors", prefix)
        for _ in range(3):
            for name, expected in tensors.items():
                for store, prefix in ((one, "a/"), (other, "b/")):
                    with store.acquire(prefix + name) as lease:
                        assert same(lease, expected, name)
        assert len(service.server.groups) == len(tensors)
        assert one.stats().bytes_read > 0


def test_group_read_by_one_worker_is_leased_by_another(service: ThreadService, tmp_path: Path):
    checkpoint(tmp_path / "m.safetensors", groups=3)
    with service.connect() as one, service.connect() as other:
        one.register_checkpoint(tmp_path / "m.safetensors")
        other.register_checkpoint(tmp_path / "m.safetensors", "other/")
        for name in ("w0", "w1", "w2"):
            with one.acquire(name):
                pass
        read = service.stats().bytes_read
        for name in ("w0", "w1", "w2"):
            with other.acquire("other/" + name):
                pass
        assert read >= 3 * MIB
        assert service.stats().bytes_read == read
        assert other.stats().bytes_read >= 3 * MIB  # it leased them


def test_write_to_leased_memory_reaches_no_other_worker(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=1)
    with service.connect() as one, service.connect() as other:
        one.register_checkpoint(tmp_path / "m.safetensors")
        other.register_checkpoint(tmp_path / "m.safetensors")
        with one.acquire("w0") as lease, other.acquire("w0") as theirs:
            lease.tensors["w0"].zero_()
            assert same(theirs, tensors["w0"], "w0")
        one.offload("w0")  # the next acquire leases it again
        with one.acquire("w0") as lease:
            assert same(lease, tensors["w0"], "w0")


def test_workers_changes_stay_private(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=2)
    own = {"ram_budget": 4 * MIB, "disk_dir": tmp_path / "own"}
    with service.connect(**own) as one, service.connect() as other:
        for store in (one, other):
            store.register_checkpoint(tmp_path / "m.safetensors")
        with one.acquire("w0", Access.UPDATE) as lease:
            lease.tensors["w0"].add_(1)
        one.flush()
        with one.acquire("w0") as lease, other.acquire("w0") as theirs:
            assert same(lease, tensors["w0"] + 1, "w0")
            assert same(theirs, tensors["w0"], "w0")
    with TierStore(4 * MIB, tmp_path / "own", device="cpu") as alone:
        assert torch.equal(alone.get("w0"), tensors["w0"] + 1)


def test_puts_stay_with_the_worker(service: ThreadService, tmp_path: Path):
    with (
        service.connect(ram_budget=MIB, disk_dir=tmp_path / "own") as one,
        service.connect() as other,
    ):
        for i in range(4):
            one.put(f"x{i}", torch.full((MIB // 8,), float(i)))
        one.flush()
        assert [float(one.get(f"x{i}").mean()) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
        assert one.snapshot().used_bytes["HOST"] <= MIB
        with pytest.raises(UnknownKeyError):
            other.get("x0")
        with pytest.raises(BudgetError, match="ram_budget"):
            other.put("y", torch.ones(8))


def test_casts_are_made_once_for_all(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=2)
    from safetensors.torch import load_file

    made = [torch.nn.Module(), torch.nn.Module()]
    written = []
    for _ in made:
        with service.connect() as store:
            loaded = load_file(tmp_path / "m.safetensors")
            homes = store.register("w", {k: v.to(torch.bfloat16) for k, v in loaded.items()})
            with store.acquire("w") as lease:
                for name, expected in tensors.items():
                    assert same(lease, expected.to(torch.bfloat16), name)
                    assert torch.equal(homes[name], expected.to(torch.bfloat16))
        written.append(service.stats().bytes_written)
    assert written[0] >= MIB
    assert written[1] == written[0]
    assert len(service.server.groups) == 1


def test_service_budget_holds(service: ThreadService, tmp_path: Path):
    checkpoint(tmp_path / "m.safetensors", groups=12)
    with service.connect() as one, service.connect() as other:
        for store in (one, other):
            store.register_checkpoint(tmp_path / "m.safetensors")
        for i in range(36):
            with one.acquire(f"w{i % 12}"), other.acquire(f"w{(i * 5) % 12}"):
                pass
    stats = service.stats()
    assert stats.bytes_read > 12 * MIB
    assert stats.peak_bytes["HOST"] <= stats.budget_bytes["HOST"] == 4 * MIB + 65536


def test_group_that_never_fits_raises(service: ThreadService, tmp_path: Path):
    checkpoint(tmp_path / "m.safetensors", groups=1, nbytes=5 * MIB)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with pytest.raises(BudgetError, match="--ram"):
            store.acquire("w0", timeout=10)


def test_leases_outlive_the_store(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=12)
    store = service.connect()
    store.register_checkpoint(tmp_path / "m.safetensors")
    lease = store.acquire("w0")
    store.close()
    with service.connect() as other:  # takes the space
        other.register_checkpoint(tmp_path / "m.safetensors")
        for i in range(1, 12):
            with other.acquire(f"w{i}"):
                pass
    assert same(lease, tensors["w0"], "w0")
    lease.release()


def test_ended_workers_leases_are_returned(service: ThreadService, tmp_path: Path):
    checkpoint(tmp_path / "m.safetensors", groups=4)
    store = service.connect()
    store.register_checkpoint(tmp_path / "m.safetensors")
    leases = [store.acquire(f"w{i}") for i in range(3)]
    assert service.leased() == 3
    store.close()
    wait_until(lambda: service.leased() == 0 and not service.server.connections)
    assert len(leases) == 3


def test_group_under_two_keys_outlives_one(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=1)
    with service.connect() as store:
        for prefix in ("a/", "b/"):
            store.register_checkpoint(tmp_path / "m.safetensors", prefix)
        with store.acquire("a/w0"):
            pass
        (connection,) = service.server.connections.values()
        store.discard("a/w0")
        for _ in range(2):
            with store.acquire("b/w0") as lease:
                assert same(lease, tensors["w0"], "w0")
            store.offload("b/w0")
            assert len(connection.groups) == 1
        store.discard("b/w0")
        assert list(service.server.connections.values()) == [connection]


def test_changed_tensor_keeps_its_name(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=1)
    with service.connect(ram_budget=4 * MIB, disk_dir=tmp_path / "own") as store:
        store.register_checkpoint(tmp_path / "m.safetensors", "a/")
        with store.acquire("a/w0", Access.UPDATE) as lease:
            lease.tensors["w0"].add_(1)
        with store.acquire("a/w0") as lease:
            assert same(lease, tensors["w0"] + 1, "w0")
        assert torch.equal(store.get("a/w0"), tensors["w0"] + 1)
