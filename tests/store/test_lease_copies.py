"""A lease cannot be copied: a dropped copy would release it while its tensors are in use."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.store.helpers import open_store
from tierstore import Access, Lease
from tierstore.errors import LeaseError

WAYS: list[Callable[[Lease], object]] = [
    copy.copy,
    copy.deepcopy,
    pickle.dumps,
    lambda lease: copy.deepcopy({"kept": [lease]}),
]


@pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", "pickle", "inside"])
def test_lease_copy_raises_and_lease_stays_out(
    way: Callable[[Lease], object], disk_dir: Path
) -> None:
    with open_store(disk_dir) as store:
        store.put("k", torch.zeros(10))
        with store.acquire("k") as lease:
            with pytest.raises(TypeError, match=r"lease of 'k' cannot be copied.*store\.get"):
                way(lease)
            gc.collect()
            with pytest.raises(LeaseError, match="release it first"):
                store.acquire("k", Access.UPDATE, timeout=0.05)
            assert torch.equal(lease.tensor, torch.zeros(10))
        with store.acquire("k", Access.UPDATE, timeout=5) as lease:
            lease.tensor.fill_(5)
        assert torch.equal(store.get("k"), torch.full((10,), 5.0))
