"""The store: one cache of named groups of tensors over device, RAM and disk.

These calls may block: `put`, `acquire`, `get`, `flush` and `close`; `register_checkpoint`, while it
reads headers; `register`, if it writes weights that no file holds; `discard` and the release of a
`TAKE` lease, while a file is removed. The async calls wait without blocking the event loop.
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
from tierstore.engine.directories import (
    chosen_directory,
    explain_default_directory,
    warn_about_file_system,
)
from tierstore.engine.engine import Engine
from tierstore.engine.keys import check_callers_key
from tierstore.engine.settings import (
    Settings,
    Size,
    TierSettings,
    check_verify,
    is_explicit,
    resolve_budgets,
    resolve_device,
)
from tierstore.lease import Lease
from tierstore.model.tiers import Access
from tierstore.observe.report import Description, display_methods, text
from tierstore.observe.stats import Snapshot, Stats
from tierstore.observe.trace import load
from tierstore.observe.trace_writer import document, merged, save


def _close_on_exit(store: TierStore, *_exception: object) -> None:
    store.close()


def _each_key(store: TierStore) -> Iterator[str]:
    return iter(store.keys())


def _summary(store: TierStore) -> Description:
    engine = getattr(store, "_engine", None)  # unset while `__init__` runs
    return Description("TierStore, not open") if engine is None else engine.reporting.overview()


class TierStore(AbstractContextManager["TierStore"]):
    """A store of tensor groups on three tiers (device, RAM, disk), each within a hard budget.

        with TierStore("8GB", "/nvme/tierstore") as store:
            store.put("layer", {"weight": torch.randn(256, 256)})
            with store.acquire("layer") as lease:
                y = x.to(store.device) @ lease.tensors["weight"]

    Thread-safe. Use it as a context manager, or call `close`. Methods raise ClosedError in a forked
    process and, unless they only report, after `close`; UnknownKeyError for an unknown key; and, if
    they may block, CaptureError while a CUDA graph is captured.

    Args:
        ram_budget: host memory in bytes: an int, `"8GB"`, `"8GiB"`, `"50%"` or 0.5 (of the memory
            that this process may use), or `"auto"`: half of the memory available when the store
            opens. `"auto"` is not adjusted later. `tierstore-inspect plan` computes the budget that
            a model needs.
        disk_dir: a directory for this store alone, created if missing. None: the directory in the
            environment variable `TIERSTORE_DIR`, else `tierstore/store` in the user's cache
            directory.
        device: the device of leased tensors. None: the current accelerator, else `"cpu"`. On the
            CPU the store has only RAM and disk, and `ram_budget` covers leased tensors too.
        device_budget: accelerator memory in bytes, in the same forms as `ram_budget`. None or
            `"auto"`: half of the free memory when the store opens; once every model in the store
            has run, half of the memory that is still free is added.
        disk_budget: bytes that the store may write to `disk_dir`; None: no limit. Registered
            checkpoints do not count.
        policy: `"next-use"` (learn the order of use, and evict the group that is needed last) or
            `"lru"`.
        verify: compare checksums when data is read: the `"first"` time, `"always"` or `"never"`.

    Attributes:
        device: the torch.device of leased tensors, with its index.

    Raises:
        StoreLockedError: another live store uses the directory.
        BudgetError: `disk_dir` already holds more than `disk_budget` bytes.
        TransferError: `disk_dir` cannot be used (TierStoreError: it has another format).
        DeviceError: this machine has no such device.
        ValueError: an argument is invalid (TypeError: it has the wrong type).
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
        grows = device.type != "cpu" and not is_explicit(device_budget)
        self.device = device
        settings = Settings(
            tiers=TierSettings(device=device, budgets=budgets, verify=check_verify(verify)),
            disk_dir=directory,
            policy=policy,
            device_budget_may_grow=grows,
        )
        with explain_default_directory(disk_dir):
            self._engine = Engine(settings)
        warn_about_file_system(directory)

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
        """Open a store that shares its weights with other processes through `tierstore-serve`.

        Registered weights are leased from the service, which reads them from disk once and keeps
        one copy in RAM, under one budget, for all its workers. Data that this process writes (puts,
        changed weights, activations, training state) stays in its own memory and directory.

        Args:
            socket: path of the service's Unix socket.
            device: as for `TierStore`.
            device_budget: accelerator memory in bytes, as for `TierStore`.
            ram_budget: host memory of this process in bytes, as for `TierStore`; default none.
            disk_dir: a directory for this process alone; None: the process never writes to disk.

        Returns:
            The store. While the service is down, its methods raise ServiceLostError within a
            second; once it is back, they work again. There is no need to connect again.

        Raises:
            ServiceLostError: no service listens on the socket (TierStoreError: the service rejects
                the connection, or belongs to another user; nothing is sent to such a process).
            ModuleNotFoundError: the extra `tierstore[serve]` is not installed.
        """
        store = cls.__new__(cls)
        store.device, store._engine = connected_engine(
            os.fspath(socket), device, device_budget, ram_budget, disk_dir
        )
        return store

    # Putting -----------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        durable: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Store a copy of a tensor, or of a dict of tensors, under a key.

        Replaces an existing group atomically: readers see either the old or the new one. Blocks
        until host memory is free. If it raises, the store is unchanged.

        Args:
            key: any text of 1 to 1,024 bytes (UTF-8).
            tensors: one tensor, or tensors by name, of any shape, strides and device, and of any
                dtype that safetensors supports. Strides and shared memory between tensors are
                preserved.
            durable: True: the group is on disk after `flush` or `close`. False: it is lost when the
                store closes.
            timeout: seconds to wait; None: no limit.

        Raises:
            BudgetError: the group is larger than the budget, or does not fit beside open leases.
            StoreTimeoutError: host memory did not become free in time.
            TransferError: another group could not be written to disk to free memory
                (DiskFullError: the disk is full).
            TypeError: a value is not a tensor, or is a kind of tensor that cannot be stored.
            ValueError: the key or the name of a tensor is invalid.
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
        """Async `put`.

        If it is cancelled, the group is either fully stored or absent when the call returns.
        """
        check_callers_key(key)
        await self._engine.puts.put_async(key, tensors, durable=durable, timeout=timeout)

    # Registering in place ----------------------------------------------------------------------

    def register_checkpoint(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        *,
        groups: Mapping[str, Iterable[str]] | None = None,
    ) -> list[str]:
        """Register a safetensors checkpoint in place, without copying it.

        If a file is modified later, reading it raises StaleCheckpointError. A file that is removed
        or replaced stays readable as long as the process can keep its descriptor open.

        Args:
            path: a file, an index, a directory (sharded or not), or the URL of an object store,
                such as `s3://bucket/model/`. For a URL, the disk serves as a cache.
            prefix: text put before every key.
            groups: names of the tensors that move together, by key (without the prefix). None: each
                tensor is a group, under its own name.

        Returns:
            The registered keys.

        Raises:
            TransferError: a file cannot be read, or there is no checkpoint at `path`
                (InvalidHeaderError: a header or index is malformed).
            DuplicateKeyError: the store already has a group with one of the keys.
            UnknownKeyError: `groups` names a tensor that the checkpoint does not have.
            ValueError: a name is not a valid key, or occurs twice.
        """
        registry = self._engine.groups
        files = read_checkpoint(path)
        return list(registry.register_files(files, registry.open_files(files), prefix, groups))

    async def aregister_checkpoint(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        *,
        groups: Mapping[str, Iterable[str]] | None = None,
    ) -> list[str]:
        """Async `register_checkpoint`. Reads headers on another thread."""
        registry = self._engine.groups
        files = await aread_checkpoint(path)
        held = await asyncio.to_thread(registry.open_files, files)
        return list(registry.register_files(files, held, prefix, groups))

    def register(self, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Register tensors as a group, without copying those that are mapped from a file.

        Tensors that still are a file's own bytes (as `from_pretrained` leaves them) are read from
        that file. All others are written once, to a file named by a hash of its content. That file
        is removed once no group and no tensor uses it.

        Args:
            key: as for `put`.
            tensors: CPU tensors by name; dtypes and shapes as for `put`.

        Returns:
            A CPU tensor with the same value, shape and dtype for each name: a copy-on-write map of
            the file, which takes no memory until it is read.

        Raises:
            DuplicateKeyError: the store already has a group with this key.
            BudgetError: the group is larger than a budget.
            TransferError: a file cannot be read or written (DiskFullError: the disk is full).
            TypeError: a value is not a tensor, or is a kind of tensor that cannot be stored.
        """
        return self._engine.groups.register(key, tensors)

    # Leasing -----------------------------------------------------------------------------------

    def acquire(
        self, key: str, access: Access = Access.READ, *, timeout: float | None = None
    ) -> Lease:
        """Lease a group on the device. Blocks until it is resident.

        Args:
            key: the key of the group.
            access: how the caller uses the group: `Access.READ`, `UPDATE` or `TAKE`.
            timeout: seconds to wait; None: no limit.

        Returns:
            A lease, whose `tensors` are on the store's device until it is released. Use it in a
            `with` statement.

        Raises:
            BudgetError: the group can never fit, or does not fit beside the caller's own leases.
            LeaseError: a deadlock: every caller waits for leases that the others hold.
            StoreTimeoutError: the operation timed out. The transfer continues in the background.
            TransferError: the group cannot be read, or its data is wrong (CorruptDataError,
                TruncatedFileError or StaleCheckpointError).
        """
        return self._engine.leases.acquire(key, access, timeout)

    async def aacquire(
        self, key: str, access: Access = Access.READ, *, timeout: float | None = None
    ) -> Lease:
        """Async `acquire`. Never blocks the event loop. If cancelled, it leaves nothing leased."""
        return await self._engine.leases.acquire_async(key, access, timeout)

    def get(
        self, key: str, *, timeout: float | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return copies of a group's tensors, on the store's device.

        Args:
            key: the key of the group.
            timeout: seconds to wait; None: no limit.

        Returns:
            A tensor or a dict of tensors, as passed to `put`, with the same shapes, dtypes and
            strides.
            The caller owns the memory.

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
        """Hint: these groups are used next, in this order.

        Never blocks, and never evicts a group that is needed earlier.

        Args:
            keys: one key, or several in the order of use.
        """
        self._engine.groups.prefetch([keys] if isinstance(keys, str) else list(keys))

    def offload(self, key: str) -> None:
        """Hint: this group is not needed on the device for now. Never blocks.

        Args:
            key: the key of the group.
        """
        self._engine.groups.offload(key)

    def make_sticky(self, key: str) -> None:
        """Hint: evict this group last.

        Applies once the group has been loaded; it loads nothing.

        Args:
            key: the key of the group.
        """
        self._engine.groups.make_sticky(key)

    def discard(self, key: str) -> None:
        """Delete a group from the store, including its copy on disk.

        Open leases of it stay valid. Registered checkpoint files are not touched.

        Args:
            key: the key of the group.

        Raises:
            TransferError: its file cannot be removed; `flush`, `close` and another `discard` retry.
        """
        self._engine.groups.discard(key)

    def flush(self, *, timeout: float | None = None) -> None:
        """Write every durable group to disk, so that it survives a power cut. Blocks until done.

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            StoreTimeoutError: some groups were not written in time.
            TransferError: the first error (DiskFullError: the disk is full), once every group was
                tried.
        """
        self._engine.core.check_open()
        self._engine.saves.flush(timeout)

    def __contains__(self, key: object) -> bool:
        return key in self._engine.core.current

    def __len__(self) -> int:
        return len(self._engine.core.current)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the sorted keys of all groups, or of those that begin with a prefix.

        Args:
            prefix: text that the keys begin with; default: all keys.
        """
        return self._engine.reporting.keys(prefix)

    def stats(self) -> Stats:
        """Return counters and byte totals since the store was opened.

        The fields of `tierstore.types.Stats`: among others `hits`, `late` and `misses` (counts of
        acquires), `stalled_seconds`, `overlap` (0 to 1), `bytes_read` and `bytes_written`, and by
        tier `used_bytes`, `peak_bytes` and `budget_bytes`.
        """
        return self._engine.reporting.stats()

    def report(self) -> str:
        """Return a summary of a few lines, for logs and people.

        Shows bytes on each tier and its budget, hits and misses, seconds stalled, and the bytes and
        bandwidth of each hop. Never blocks and never raises. The numbers are not one consistent
        snapshot. `print(store)` prints one line of it; rich and notebooks draw tables.
        """
        return text(_summary(self))

    def trace(
        self, path: str | os.PathLike[str], *, merge: str | os.PathLike[str] | None = None
    ) -> None:
        """Write a Chrome trace of the store's activity, for Perfetto or `tierstore-inspect replay`.

        Shows transfers, compute and stalls (the newest events, if there are too many to keep), the
        passes of offloaded models, and the bytes on each tier. Does not wait for transfers.

        Args:
            path: the file to write; gzip-compressed if the name ends with `.gz`.
            merge: a trace that `torch.profiler` exported; `path` then has both, on one clock.

        Raises:
            OSError: `path` cannot be written, or `merge` cannot be read.
            InvalidTraceError: `merge` is not a trace.
        """
        trace = document(self._engine.reporting.notes())
        save(trace if merge is None else merged(trace, load(merge)), path)

    def snapshot(self) -> Snapshot:
        """Return the current location of every group."""
        return self._engine.reporting.snapshot()

    def close(self) -> None:
        """Flush, then release memory, threads and the directory. A second call does nothing.

        Tensors of open leases stay readable. Gives up on a disk that makes no progress for 30
        seconds.

        Raises:
            TransferError: an error of `flush`, once everything is released.
        """
        self._engine.close()

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._engine.core.closed

    __iter__ = _each_key
    __exit__ = _close_on_exit
    __repr__, __rich__, _repr_html_ = display_methods(_summary)


def engine_of(store: TierStore) -> Engine:
    """Return the engine of a store. For adapters and tests."""
    return store._engine


def check_store(store: object) -> None:
    """Raise TypeError if `store` is not a TierStore."""
    if not isinstance(store, TierStore):
        raise TypeError(
            f"store is a {type(store).__name__}: pass a TierStore(ram_budget, disk_dir)"
        )
