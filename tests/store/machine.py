"""A store that one thread uses at random, with a dict as the model of its content."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file

from tests.store.helpers import (
    PAGE,
    assert_group,
    assert_sound,
    open_store,
    random_tensor,
)
from tierstore import Access, Lease, TierStore
from tierstore.errors import BudgetError, LeaseError
from tierstore.system.views import DTYPES

HOST_PAGES, DEVICE_PAGES = 12, 8
LARGEST = 5  # pages of a group
KEYS = [f"key{i}" for i in range(8)]
SHARDS = {f"layer{i}": i % LARGEST + 1 for i in range(6)}  # name -> pages
PREFIX = "checkpoint/"


@dataclass
class Known:
    """The value that the store must hold under a key. `lasts` until the next store if flushed."""

    tensors: dict[str, torch.Tensor]
    lasts: bool


class Machine:
    """Makes one random step at a time; then the model and the store must agree."""

    def __init__(self, seed: int, device: str, directory: Path, policy: str) -> None:
        self.random = random.Random(seed)
        self.device = device
        self.policy = policy
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.known: dict[str, Known] = {}
        self.leases: list[Lease] = []
        self.done: Counter[str] = Counter()
        self.checkpoint = directory / "model.safetensors"
        self.original = {name: self._tensor(size * PAGE) for name, size in SHARDS.items()}
        save_file(self.original, self.checkpoint)
        self.store = self._open()
        self._register()

    def _open(self) -> TierStore:
        return open_store(
            self.directory / "store",
            HOST_PAGES * PAGE,
            self.device,
            policy=self.policy,
            verify="always",
            **({} if self.device == "cpu" else {"device_budget": DEVICE_PAGES * PAGE}),
        )

    def _register(self) -> None:
        missing = [name for name in SHARDS if PREFIX + name not in self.known]
        groups = {name: [name] for name in missing}
        self.store.register_checkpoint(self.checkpoint, PREFIX, groups=groups)
        for name in missing:
            self.known[PREFIX + name] = Known({name: self.original[name]}, lasts=False)

    def _tensor(self, nbytes: int) -> torch.Tensor:
        dtype = self.random.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
        return random_tensor(dtype, nbytes // dtype.itemsize, seed=self.random.getrandbits(30))

    def _group(self) -> dict[str, torch.Tensor]:
        """Return one to three tensors of any kind, together at most `LARGEST` pages."""
        tensors = {}
        for i in range(self.random.randint(1, 3)):
            dtype = self.random.choice(list(DTYPES.values()))
            count = self.random.randint(0, PAGE * LARGEST // 4) // dtype.itemsize
            tensor = random_tensor(dtype, count, seed=self.random.getrandbits(30))
            tensors[f"t{i}"] = tensor[:: self.random.choice([1, 1, 2])]
        return tensors

    # Playing -----------------------------------------------------------------------------------

    STEPS: ClassVar[dict[str, int]] = {  # relative frequencies
        "put": 12,
        "read": 12,
        "update": 8,
        "take": 2,
        "get": 10,
        "hold": 5,
        "release": 6,
        "prefetch": 8,
        "offload": 6,
        "discard": 2,
        "flush": 2,
        "reopen": 1,
        "register": 1,
    }

    def play(self, steps: int) -> None:
        names, weights = list(self.STEPS), list(self.STEPS.values())
        for _ in range(steps):
            name = self.random.choices(names, weights)[0]
            getattr(self, name)()
            self.done[name] += 1
            assert_sound(self.store)
            assert set(self.store.keys()) == set(self.known)

    def finish(self) -> None:
        """Check that every group is there, in this store and in a new one."""
        self.release_all()
        self.verify()
        self.reopen()
        self.verify()
        self.release_all()

    def verify(self) -> None:
        for key, known in self.known.items():
            assert_group(self.store.get(key), known.tensors)

    def _key(self) -> str:
        return self.random.choice(sorted(self.known))

    def _acquire(self, key: str, access: Access) -> Lease | None:
        """Acquire a lease, or return None if this thread's own leases prevent it."""
        try:
            return self.store.acquire(key, access)
        except (BudgetError, LeaseError):
            assert self.leases, f"{key} was refused although nothing is leased"
            self.done["refused"] += 1
            self.release_all()
            return None

    # Steps -------------------------------------------------------------------------------------

    def put(self) -> None:
        key, group = self.random.choice(KEYS), self._group()
        lasts = self.random.random() < 0.6
        try:
            self.store.put(key, group, durable=lasts)
        except BudgetError:
            assert self.leases
            self.release_all()
            return
        self.known[key] = Known(group, lasts)

    def read(self) -> None:
        key = self._key()
        lease = self._acquire(key, Access.READ)
        if lease is not None:
            with lease:
                assert_group(dict(lease.tensors), self.known[key].tensors)

    def get(self) -> None:
        key = self._key()
        lease = self._acquire(key, Access.READ)
        if lease is not None:
            lease.release()
            assert_group(self.store.get(key), self.known[key].tensors)

    def hold(self) -> None:
        lease = self._acquire(self._key(), Access.READ)
        if lease is not None:
            self.leases.append(lease)

    def release(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            if lease.key in self.known:
                # It may have been replaced, but never changed under its reader.
                assert lease.tensors
            lease.release()

    def release_all(self) -> None:
        while self.leases:
            self.leases.pop().release()

    def update(self) -> None:
        key = self._key()
        lease = self._acquire(key, Access.UPDATE)
        if lease is None:
            return
        old = self.known[key]
        new = {}
        with lease:
            for name, tensor in old.tensors.items():
                fresh = random_tensor(
                    tensor.dtype, tensor.numel(), seed=self.random.getrandbits(30)
                )
                new[name] = tensor.clone(memory_format=torch.preserve_format)
                # The store keeps the gaps of a stride, and so must the model.
                new[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                new[name].copy_(fresh.reshape(tensor.shape))
                lease.tensors[name].copy_(new[name])
        self.known[key] = Known(new, lasts=old.lasts or key.startswith(PREFIX))

    def take(self) -> None:
        key = self._key()
        lease = self._acquire(key, Access.TAKE)
        if lease is not None:
            with lease:
                assert_group(dict(lease.tensors), self.known[key].tensors)
            del self.known[key]

    def prefetch(self) -> None:
        count = self.random.randint(1, 4)
        self.store.prefetch(self.random.choices(sorted(self.known), k=count))

    def offload(self) -> None:
        self.store.offload(self._key())

    def discard(self) -> None:
        key = self._key()
        self.store.discard(key)
        del self.known[key]

    def flush(self) -> None:
        self.store.flush()

    def register(self) -> None:
        self._register()

    def reopen(self) -> None:
        self.release_all()
        stats = self.store.stats()
        for name in ("bytes_read", "bytes_written", "bytes_onloaded", "bytes_offloaded"):
            self.done[name] += getattr(stats, name)
        self.store.close()
        self.known = {key: known for key, known in self.known.items() if known.lasts}
        self.store = self._open()
        assert set(self.store.keys()) == set(self.known)
        self._register()
