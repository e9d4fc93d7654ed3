"""The store: one cache of named groups of tensors over device, RAM and disk.

`put`, `acquire`, `get`, `flush`, `close` and their async twins may wait; so do `register`, where it
writes weights that no file holds, and `discard` and the release of a `TAKE` lease, for the removal
of a file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from tierstore.engine.checkpoints import aread_checkpoint, read_checkpoint
from tierstore.engine.connecting import connected_engine
from tierstore.engine.directories import chosen_directory, default_explained
from tierstore.engine.engine import Engine
from tierstore.engine.keys import check_callers_key
from tierstore.engine.settings import (
    Settings,
    Size,
    TierSettings,
    is_chosen,
    resolve_budgets,
    resolve_device,
)
from tierstore.lease import Lease
from tierstore.model.tiers import Access
from tierstore.observe.report import Shown, shown_by, text
from tierstore.observe.stats import Snapshot, Stats
from tierstore.observe.trace import load
from tierstore.observe.trace_writer import document, merged, save

VERIFY = ("first", "always", "never")


def _close_on_exit(store: TierStore, *_exception: object) -> None:
    store.close()


def _each_key(store: TierStore) -> Iterator[str]:
    return iter(store.keys())


def _look(store: TierStore) -> Shown:
    engine = getattr(store, "_engine", None)  # it may be asked for while a store is made
    return Shown("TierStore, not open") if engine is None else engine.reporting.look()


class TierStore(AbstractContextManager["TierStore"]):
    """Serves groups of tensors by key, within hard budgets.

    Args:
        ram_budget: host memory that the store may take, as bytes, `"8GB"`, `"8GiB"`, `"50%"` or
            0.5 (of the memory this process may use), or `"auto"`: half of what is available when
            the store opens, however much is free later.
        disk_dir: a directory of the store's own, made if missing. One live store per directory.
            None: what the environment variable `TIERSTORE_DIR` names, else `tierstore/store` in
            the user's cache directory.
        device: where leases are; None for the current accelerator, else `cpu`. On `cpu`, device
            and host memory are one and `ram_budget` covers it.
        device_budget: memory of the accelerator, like `ram_budget`; None or `"auto"`: half of what
            is free when the store opens, and, once every model in the store has run, half of what
            is still free then besides.
        disk_budget: what may be written to `disk_dir`; None for no limit. Checkpoints that are
            used where they lie do not count.
        policy: `"next-use"` (give up what is needed last, by a learned order) or `"lru"`.
        verify: check the checksums of what is read `"first"` time only, `"always"` or `"never"`.

    Raises StoreLockedError if another live store has the directory, ValueError or TypeError for
    arguments that cannot be, BudgetError if `disk_dir` holds more than `disk_budget`, TransferError
    if it cannot be used. Its methods raise UnknownKeyError for keys of no group, ClosedError later.
    Thread-safe. Use it as a context manager, or call `close`. Budgets that are `"auto"` are logged
    with what they came to (logger `tierstore`, INFO).
    """

    def __init__(  # noqa: PLR0913 - all are optional, and most by name
        self,
        ram_budget: Size = "auto",
        disk_dir: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device | None = None,
        device_budget: Size | None = None,
        disk_budget: Size | None = None,
        policy: str = "next-use",
        verify: str = "first",
    ) -> None:
        if verify not in VERIFY:
            raise ValueError(f"verify={verify!r} is not one of {', '.join(VERIFY)}")
        device = resolve_device(device)
        directory = chosen_directory(disk_dir)
        budgets = resolve_budgets(device, ram_budget, device_budget, disk_budget, Path(directory))
        grows = device.type != "cpu" and not is_chosen(device_budget)
        self.device = device
        settings = Settings(
            tiers=TierSettings(device=device, budgets=budgets, verify=verify),
            disk_dir=directory,
            policy=policy,
            device_budget_may_grow=grows,
        )
        with default_explained(disk_dir):
            self._engine = Engine(settings)

    @classmethod
    def connect(
        cls,
        socket: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        device_budget: Size | None = None,
        ram_budget: Size = "0",
        disk_dir: str | os.PathLike[str] | None = None,
    ) -> TierStore:
        """A store whose weights are served by `tierstore-serve`, one copy for all of its workers.

        What is registered, by whatever adapter, is leased of the service at the Unix socket
        `socket`: read from disk once, in one host memory with one budget. What this process writes
        itself (puts, weights that it changes, activations, training state) stays in a store of its
        own, in `ram_budget` bytes of its own memory (none, if not said; `"auto"` as above) and in
        `disk_dir`; None: it is never written.

        Raises ServiceLostError if nobody serves there, TierStoreError if the service refuses, and
        what `TierStore` raises. Later, every call that needs the service raises ServiceLostError
        within a second while it is gone, and goes on by itself when it is back.
        """
        made = cls.__new__(cls)
        made.device, made._engine = connected_engine(
            os.fspath(socket), device, device_budget, ram_budget, disk_dir
        )
        return made

    # Putting -----------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        durable: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Store a copy of one tensor, or of a dict of tensors, under `key`.

        Dtypes that safetensors knows, any shape, any stride (kept), any device; tensors that share
        memory still do so when they come back. A group that is there is replaced at once: readers
        see the old one or the new one. `durable` groups are on disk after `flush` or `close`;
        others never outlive the store (if the file of a durable group that they replace cannot be
        removed, `flush` and `close` try again, and tell). Waits for room in host memory, for up to
        `timeout` seconds (None: as long as it takes).

        Raises BudgetError if the group is larger than the budget, TypeError or ValueError for what
        cannot be stored, DiskFullError or TransferError if room can only be made by a write that
        failed, StoreTimeoutError if it does not come in time; then nothing was put.
        """
        check_callers_key(key)
        self._engine.puts.put(key, tensors, durable=durable, timeout=timeout)

    async def aput(
        self,
        key: str,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        durable: bool = True,
    ) -> None:
        """`put` for coroutines. Cancelled, it is whole or not there, and over when told."""
        check_callers_key(key)
        await self._engine.puts.put_async(key, tensors, durable=durable)

    # Taking by reference -----------------------------------------------------------------------

    def register_checkpoint(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        *,
        groups: Mapping[str, Iterable[str]] | None = None,
    ) -> list[str]:
        """Know the tensors of a safetensors checkpoint, where they lie. Nothing is copied.

        `path` is a file or a directory (sharded or not), or a URL of an object store, such as
        `s3://bucket/model/`: then the disk is a cache. Every tensor becomes a group of its own
        under `prefix` + its name; or `groups` maps keys to the names of tensors that move
        together. Returns the keys. From now on a change in a file raises StaleCheckpointError; one
        that is removed or replaced is read on, as far as there are descriptors to keep it open.

        Raises InvalidHeaderError, TransferError, DuplicateKeyError, UnknownKeyError for a name in
        `groups` that the checkpoint does not hold, or ValueError for a name that cannot be a key or
        is there twice; then nothing was registered.
        """
        known = self._engine.groups
        files = read_checkpoint(path)
        return list(known.register_files(files, known.hold(files), prefix, groups))

    async def aregister_checkpoint(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        *,
        groups: Mapping[str, Iterable[str]] | None = None,
    ) -> list[str]:
        """`register_checkpoint` for coroutines: headers are read off the event loop's thread."""
        known = self._engine.groups
        files = await aread_checkpoint(path)
        held = await asyncio.to_thread(known.hold, files)
        return list(known.register_files(files, held, prefix, groups))

    def register(self, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take tensors as a group without copying what a file already holds.

        Tensors that still are a file's own bytes (as `from_pretrained` leaves them) are used by
        reference. The rest is written once, under `weights/` and the hash of its content: the same
        content is never written twice. Returns, for each name, a CPU tensor of the true value that
        costs no memory until it is read: a copy-on-write map of the file.

        Raises DuplicateKeyError, BudgetError, TypeError, DiskFullError or TransferError.
        """
        return self._engine.groups.register(key, tensors)

    # Getting -----------------------------------------------------------------------------------

    def acquire(
        self, key: str, access: Access = Access.READ, *, timeout: float | None = None
    ) -> Lease:
        """Have a group on the device until the lease is released. Waits until it is there.

        For up to `timeout` seconds: then StoreTimeoutError is raised, and what is on its way goes
        on coming. None: as long as it takes. Raises UnknownKeyError; BudgetError if it can never
        fit, or not beside the leases that the caller itself holds; the error of a read that failed
        (CorruptDataError, TruncatedFileError, StaleCheckpointError, TransferError).
        """
        return self._engine.leases.acquire(key, access, timeout)

    async def aacquire(self, key: str, access: Access = Access.READ) -> Lease:
        """`acquire` for coroutines: never blocks the event loop; cancelled, it leaves nothing."""
        return await self._engine.leases.acquire_async(key, access)

    def get(
        self, key: str, *, timeout: float | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Copies, on the store's device, that the caller owns: what was put, tensor or dict.

        Raises what `acquire` raises.
        """
        return self._engine.leases.get(key, timeout)

    async def aget(self, key: str) -> torch.Tensor | dict[str, torch.Tensor]:
        """`get` for coroutines."""
        return await self._engine.leases.get_async(key)

    # Hints and housekeeping --------------------------------------------------------------------

    def prefetch(self, keys: str | Iterable[str]) -> None:
        """Say what comes next, in order. A hint: it never waits, and never takes needed room."""
        self._engine.groups.expect([keys] if isinstance(keys, str) else list(keys))

    def offload(self, key: str) -> None:
        """Say that a group is not needed on the device for now. Never waits."""
        self._engine.groups.offload(key)

    def keep(self, key: str) -> None:
        """Say that a group should stay in memory once it was used: others are given up first.

        A hint: what somebody waits for takes its room if there is no other.
        """
        self._engine.groups.make_sticky(key)

    def discard(self, key: str) -> None:
        """Forget a group, on disk too. Who holds a lease keeps it; a checkpoint stays untouched.

        Raises UnknownKeyError; TransferError if its file cannot be removed: then the group is gone
        for readers, and `flush`, `close` and another `discard` try again.
        """
        self._engine.groups.discard(key)

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until every durable group is on disk. Raises the first error, after trying all.

        StoreTimeoutError, if some are not there after so many seconds (None: as long as it takes).
        """
        self._engine.core.check_open()
        self._engine.saves.flush(timeout)

    def __contains__(self, key: object) -> bool:
        return key in self._engine.core.current

    def __len__(self) -> int:
        return len(self._engine.core.current)

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all groups that begin with `prefix`, sorted."""
        return self._engine.reporting.keys(prefix)

    def stats(self) -> Stats:
        """What the store has done so far."""
        return self._engine.reporting.stats()

    def report(self) -> str:
        """A few lines about what the store has and did, for logs and people.

        Bytes on each tier against its budget, how acquires were met, seconds stalled, and bytes and
        bytes per second on each way. Never waits and never raises, also when the store is closed or
        this process was forked from its own; the numbers may be of slightly different moments.
        `print(store)` is one line of it, and rich and notebooks draw tables.
        """
        return text(_look(self))

    def trace(
        self, path: str | os.PathLike[str], *, merge: str | os.PathLike[str] | None = None
    ) -> None:
        """Write what the store did, as a Chrome trace that Perfetto opens.

        It shows transfers, computing and waiting for groups (the newest events, if there were very
        many), the passes of offloaded models, and the bytes on each tier, and holds what
        `tierstore-inspect replay` plays. `path` is compressed if it ends with `.gz`. `merge` names
        a trace that `torch.profiler` exported: `path` then holds both, on one clock. Never waits.

        Raises OSError, or InvalidTraceError if `merge` is no trace.
        """
        trace = document(self._engine.reporting.notes())
        save(trace if merge is None else merged(trace, load(merge)), path)

    def snapshot(self) -> Snapshot:
        """What is where now."""
        return self._engine.reporting.snapshot()

    def close(self) -> None:
        """Flush, then give memory, threads and the directory back. A second call does nothing.

        Raises the flush's error, after everything was given back. Leases that are still out stay
        readable. A disk that has done nothing for half a minute is not waited for any more.
        """
        self._engine.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._engine.core.closed

    __iter__ = _each_key
    __exit__ = _close_on_exit
    __repr__, __rich__, _repr_html_ = shown_by(_look)


def engine_of(store: TierStore) -> Engine:
    """What serves a store, for adapters and tests."""
    return store._engine


def check_store(store: object) -> None:
    """Raise TypeError for what is no store."""
    if not isinstance(store, TierStore):
        raise TypeError(
            f"store is a {type(store).__name__}: pass a TierStore(ram_budget, disk_dir)"
        )
