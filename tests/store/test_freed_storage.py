"""Tensors whose memory was freed, or never existed: they raise, and stay unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.store.helpers import open_store
from tierstore.system.views import set_storage


@pytest.mark.parametrize("left", [0, 16])
def test_put_freed_storage_raises(left: int, disk_dir: Path) -> None:
    freed = torch.arange(10.0)
    freed.untyped_storage().resize_(left)
    with open_store(disk_dir) as store:
        with pytest.raises(ValueError, match=r"'w' has .* bytes.*freed"):
            store.put("k", {"w": freed, "v": torch.ones(3)})
        assert freed.untyped_storage().nbytes() == left
        assert "k" not in store
        freed.untyped_storage().resize_(40)
        freed.copy_(torch.arange(10.0))
        store.put("k", {"w": freed, "v": torch.ones(3)})
        assert torch.equal(store.get("k")["w"], torch.arange(10.0))


@pytest.mark.parametrize("left", [0, 16])
def test_set_over_freed_storage_raises(left: int) -> None:
    """The control is `Tensor.set_`, which makes the storage grow."""
    storage = torch.arange(10.0).untyped_storage()
    storage.resize_(left)
    with pytest.raises(ValueError, match="freed"):
        set_storage(torch.empty(0), storage, 0, (10,), (1,))
    assert storage.nbytes() == left
    torch.empty(0).set_(storage, 0, (10,), (1,))
    assert storage.nbytes() == 40


def test_set_over_whole_storage_shows_it() -> None:
    values = torch.arange(12.0)
    storage = values.untyped_storage()
    assert torch.equal(set_storage(torch.empty(0), storage, 2, (2, 3), (5, 1))[1], values[7:10])
    assert set_storage(torch.empty(0), storage, 12, (0, 4), (4, 1)).shape == (0, 4)
    with pytest.raises(ValueError, match="storage has 48 bytes, but the tensor needs 52"):
        set_storage(torch.empty(0), storage, 3, (2, 5), (5, 1))


def test_put_functorch_tensor_raises(disk_dir: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with open_store(disk_dir) as store:

        def keep(row: torch.Tensor) -> torch.Tensor:
            with pytest.raises(TypeError, match=r"'k' .*without data.*torch\.func"):
                store.put("k", row)
            return row * 2

        assert torch.equal(torch.vmap(keep)(x), x * 2)
        torch.func.grad(lambda row: keep(row).sum())(x)
        assert "k" not in store


def test_put_fake_tensor_raises(disk_dir: Path) -> None:
    with FakeTensorMode():
        fake = torch.ones(4)
    with open_store(disk_dir) as store:
        with pytest.raises(TypeError, match="'k' is a FakeTensor without data"):
            store.put("k", fake)
        assert "k" not in store
