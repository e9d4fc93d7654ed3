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
from tierstore.engine.directories import chosen_directory, default_explained, tell_of_file_system
from tierstore.engine.engine import Engine
from tierstore.engine.keys import check_callers_key
from tierstore.engine.settings import (
    Settings,
    Size,
    TierSettings,
    checked_verify,
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


def _close_on_exit(store: TierStore, *_exception: object) -> None:
    store.close()


def _each_key(store: TierStore) -> Iterator[str]:
    return iter(store.keys())


def _look(store: TierStore) -> Shown:
    engine = getattr(store, "_engine", None)  # it may be asked for while a store is made
    return Shown("TierStore, not open") if engine is None else engine.reporting.look()


class TierStore(AbstractContextManager["TierStore"]):
    """Keeps groups of tensors by key on three tiers, each within a hard budget.

        with TierStore("8GB", "/nvme/tierstore") as store:
            store.put("layer", {"weight": torch.randn(256, 256)})
            with store.acquire("layer") as lease:
                y = x.to(store.device) @ lease.tensors["weight"]

    Thread-safe. Use it as a context manager, or call `close`. Methods raise ClosedError after that
    (not those that only tell) and in a forked process; UnknownKeyError for a key of no group; and,
    if they may wait, CaptureError while a CUDA graph is captured.

    Args:
        ram_budget: bytes of host memory that the store may take: an int, `"8GB"`, `"8GiB"`,
            `"50%"` or 0.5 (of the memory that this process may use), or `"auto"`: half of what is
            available when the store opens, however much is free later. `tierstore-inspect plan`
            tells which budget a model needs.
        disk_dir: a directory for this store alone, made if missing. None: what the variable
            `TIERSTORE_DIR` names, else `tierstore/store` in the user's cache directory.
        device: where leased tensors are. None: the current accelerator, else `"cpu"`. There is
            one memory then, and `ram_budget` covers it.
        device_budget: bytes of the accelerator's memory, written like `ram_budget`. None or
            `"auto"`: half of what is free when the store opens, and, once every model in the store
            has run, half of what is still free then besides.
        disk_budget: bytes that may be in `disk_dir`; None: no limit. Checkpoints do not count.
        policy: `"next-use"` (give up what is needed last, by a learned order) or `"lru"`.
        verify: compare the checksums of what is read the `"first"` time, `"always"` or `"never"`.

    Attributes:
        device: the torch.device of leased tensors, with its index.

    Raises:
        StoreLockedError: another live store has the directory.
        BudgetError: `disk_dir` has more bytes than `disk_budget`.
        TransferError: `disk_dir` cannot be used (TierStoreError: it has another format).
        DeviceError: there is no such device here.
        ValueError: an argument cannot be (or TypeError).
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
        device = resolve_device(device)
        directory = chosen_directory(disk_dir)
        budgets = resolve_budgets(device, ram_budget, device_budget, disk_budget, Path(directory))
        grows = device.type != "cpu" and not is_chosen(device_budget)
        self.device = device
        settings = Settings(
            tiers=TierSettings(device=device, budgets=budgets, verify=checked_verify(verify)),
            disk_dir=directory,
            policy=policy,
            device_budget_may_grow=grows,
        )
        with default_explained(disk_dir):
            self._engine = Engine(settings)
        tell_of_file_system(directory)

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
        """Open a store whose weights `tierstore-serve` has, one copy for all its workers.

        What is registered is leased of the service: read from disk once, in one host memory with
        one budget. What this process writes (puts, weights that it changes, activations, training
        state) stays in memory and in a directory of its own.

        Args:
            socket: the path of the service's Unix socket.
            device: as for `TierStore`.
            device_budget: bytes, as for `TierStore`.
            ram_budget: bytes of this process's own memory, as for `TierStore`; by default none.
            disk_dir: a directory for this process alone; None: it never writes.

        Returns:
            The store. Its methods raise ServiceLostError within a second while the service is gone,
            and go on by themselves when it is back.

        Raises:
            ServiceLostError: nobody serves there (TierStoreError: it refuses, or it is a process of
                another user, to whom nothing is sent).
            ModuleNotFoundError: the extra `tierstore[serve]` is not installed.
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
        """Store a copy of one tensor, or of a dict of tensors, under a key.

        A group that is there is replaced at once: readers see the old one or the new one. Waits for
        room in host memory. If it raises, nothing was put.

        Args:
            key: any text of 1 to 1,024 bytes.
            tensors: of any shape, strides (which are kept) and device, and of the dtypes that
                safetensors knows. Those that share memory still do so when they come back.
            durable: True: on disk after `flush` or `close`. False: it never outlives the store.
            timeout: for how many seconds to wait; None: as long as it takes.

        Raises:
            BudgetError: the group is larger than the budget, or finds no room beside leases.
            StoreTimeoutError: its room did not come in time.
            TransferError: others cannot be written to make room (DiskFullError: the disk is full).
            TypeError: something is no tensor, or of a kind that cannot be stored.
            ValueError: the key or a name cannot be.
        """
        check_callers_key(key)
        self._engine.puts.put(key, tensors, durable=durable, timeout=timeout)

    async def aput(
        self,
        key: str,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        durable: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Async `put`. If it is cancelled, the group is either fully stored or absent when the call
        returns."""
        check_callers_key(key)
        await self._engine.puts.put_async(key, tensors, durable=durable, timeout=timeout)

    # Taking by reference -----------------------------------------------------------------------

    def register_checkpoint(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        *,
        groups: Mapping[str, Iterable[str]] | None = None,
    ) -> list[str]:
        """Know the tensors of a safetensors checkpoint where they lie. Nothing is copied.

        If a file is changed in place later, reads of it raise StaleCheckpointError; one that is
        removed or replaced is read on, as far as there are descriptors to keep it open.

        Args:
            path: a file, an index, a directory (sharded or not), or a URL of an object store, such
                as `s3://bucket/model/`: then the disk is a cache.
            prefix: what the keys begin with.
            groups: keys (without the prefix) to the names of tensors that move together; None: each
                tensor is a group of its own, under its name.

        Returns:
            The keys.

        Raises:
            TransferError: a file cannot be read, or is none (InvalidHeaderError: malformed).
            DuplicateKeyError: a key is there already.
            UnknownKeyError: `groups` names a tensor that the checkpoint does not have.
            ValueError: a name cannot be a key, or is there twice.
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
        """Async `register_checkpoint`. Headers are read on another thread."""
        known = self._engine.groups
        files = await aread_checkpoint(path)
        held = await asyncio.to_thread(known.hold, files)
        return list(known.register_files(files, held, prefix, groups))

    def register(self, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take tensors as a group without copying what a file already has.

        Tensors that still are a file's own bytes (as `from_pretrained` leaves them) are read there.
        The rest is written once, to a file named by its content, which is removed when neither a
        group nor a tensor shows it any more.

        Args:
            key: as for `put`.
            tensors: CPU tensors by name; kinds as for `put`.

        Returns:
            For each name, a CPU tensor of the true value, same shape and dtype. It takes no memory
            until it is read: it is a copy-on-write map of the file.

        Raises:
            DuplicateKeyError: the key is there already.
            BudgetError: the group is larger than a budget.
            TransferError: a file cannot be read or written (DiskFullError: for want of room).
            TypeError: something is no tensor, or of a kind that cannot be stored.
        """
        return self._engine.groups.register(key, tensors)

    # Getting -----------------------------------------------------------------------------------

    def acquire(
        self, key: str, access: Access = Access.READ, *, timeout: float | None = None
    ) -> Lease:
        """Have a group on the device until the lease is released. Waits until it is there.

        Args:
            key: which group.
            access: what you will do with it: see `Access`.
            timeout: for how many seconds to wait; None: as long as it takes.

        Returns:
            A lease, whose `tensors` are on the store's device. Use it in a `with` statement.

        Raises:
            BudgetError: it can never fit, or not beside the caller's own leases.
            LeaseError: callers wait for each other's leases, so that none can get on.
            StoreTimeoutError: it did not come in time. It goes on coming.
            TransferError: it cannot be read, or is not what was written: CorruptDataError,
                TruncatedFileError and StaleCheckpointError say which.
        """
        return self._engine.leases.acquire(key, access, timeout)

    async def aacquire(
        self, key: str, access: Access = Access.READ, *, timeout: float | None = None
    ) -> Lease:
        """Async `acquire`. It never blocks the event loop. Cancelled, it leaves nothing leased."""
        return await self._engine.leases.acquire_async(key, access, timeout)

    def get(
        self, key: str, *, timeout: float | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Copies of a group's tensors, on the store's device. They are the caller's own.

        Args:
            key: which group.
            timeout: for how many seconds to wait; None: as long as it takes.

        Returns:
            What was put: a tensor, or a dict of tensors, with shapes, dtypes and strides.

        Raises:
            TierStoreError: as for `acquire`.
        """
        return self._engine.leases.get(key, timeout)

    async def aget(
        self, key: str, *, timeout: float | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Async `get`."""
        return await self._engine.leases.get_async(key, timeout)

    # Hints and housekeeping --------------------------------------------------------------------

    def prefetch(self, keys: str | Iterable[str]) -> None:
        """Say what comes next, in order. A hint: it never waits, and never takes needed room.

        Args:
            keys: one key, or several.
        """
        self._engine.groups.expect([keys] if isinstance(keys, str) else list(keys))

    def offload(self, key: str) -> None:
        """Say that a group is not needed on the device for now. A hint: it never waits.

        Args:
            key: which group.
        """
        self._engine.groups.offload(key)

    def keep(self, key: str) -> None:
        """Say that a group should stay in memory once it was used, if others can go. A hint.

        Args:
            key: which group.
        """
        self._engine.groups.make_sticky(key)

    def discard(self, key: str) -> None:
        """Forget a group, on disk too. Leases of it stay valid; a checkpoint stays untouched.

        Args:
            key: which group.

        Raises:
            TransferError: its file cannot be removed; `flush`, `close` and `discard` try again.
        """
        self._engine.groups.discard(key)

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until every durable group is on disk, where it survives a power cut.

        Args:
            timeout: for how many seconds to wait; None: as long as it takes.

        Raises:
            StoreTimeoutError: some are not there in time.
            TransferError: the first error (DiskFullError: for want of room), after all were tried.
        """
        self._engine.core.check_open()
        self._engine.saves.flush(timeout)

    def __contains__(self, key: object) -> bool:
        return key in self._engine.core.current

    def __len__(self) -> int:
        return len(self._engine.core.current)

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all groups that begin with a prefix, sorted.

        Args:
            prefix: what they begin with; by default all.
        """
        return self._engine.reporting.keys(prefix)

    def stats(self) -> Stats:
        """What the store has done so far."""
        return self._engine.reporting.stats()

    def report(self) -> str:
        """A few lines about what the store has and did, for logs and people.

        Bytes on each tier against its budget, how acquires were met, seconds stalled, bytes and
        bytes per second on each way. Never waits, never raises; the numbers may be of slightly
        different moments. `print(store)` is one line of it; rich and notebooks draw tables.
        """
        return text(_look(self))

    def trace(
        self, path: str | os.PathLike[str], *, merge: str | os.PathLike[str] | None = None
    ) -> None:
        """Write what the store did, as a Chrome trace that Perfetto opens. Never waits.

        It shows transfers, computing and waiting for groups (the newest events, if there were very
        many), the passes of offloaded models, and the bytes on each tier, and has what
        `tierstore-inspect replay` plays.

        Args:
            path: the file to write; compressed if it ends with `.gz`.
            merge: a trace that `torch.profiler` exported; `path` then has both, on one clock.

        Raises:
            OSError: the file cannot be written, or `merge` not be read.
            InvalidTraceError: `merge` is no trace.
        """
        trace = document(self._engine.reporting.notes())
        save(trace if merge is None else merged(trace, load(merge)), path)

    def snapshot(self) -> Snapshot:
        """What is where now."""
        return self._engine.reporting.snapshot()

    def close(self) -> None:
        """Flush, then give memory, threads and the directory back. A second call does nothing.

        Leases that are still out stay readable. A disk that has done nothing for half a minute is
        not waited for any more.

        Raises:
            TransferError: what `flush` raises, after everything was given back.
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
