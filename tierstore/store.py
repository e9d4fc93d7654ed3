"""The store: one cache of named groups of tensors over device, RAM and disk.

Only `put`, `acquire`, `get`, `flush`, `close` and their async twins may wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from tierstore.adoption import WEIGHTS, Adoption, adopt, checkpoint_groups, content_hash
from tierstore.checkpoints import CheckpointFile, aread_checkpoint, read_checkpoint
from tierstore.lease import Lease
from tierstore.model import events
from tierstore.model.groups import GroupId, GroupSpec, Source
from tierstore.model.objects import StoredObject
from tierstore.model.tiers import Access
from tierstore.observe.journal import Summary
from tierstore.observe.stats import GroupSnapshot, Snapshot, Stats
from tierstore.observe.trace import load
from tierstore.observe.trace_writer import Notes, document, merged, save
from tierstore.settings import Settings, Size, is_chosen, resolve_budgets, resolve_device
from tierstore.state import KeepingState
from tierstore.steps import step
from tierstore.tiers.maps import AddressSpace
from tierstore.tiers.objects import intact_object
from tierstore.tiers.views import clone_all
from tierstore.tiers.workers import Answer
from tierstore.waiting import Request, Want

VERIFY = ("first", "always", "never")


class TierStore(KeepingState):
    """Serves groups of tensors by key, within hard budgets.

    Args:
        ram_budget: host memory that the store may take, as bytes, `"8GB"`, `"8GiB"`, `"50%"` or
            0.5 (of the memory this process may use), or `"auto"` (half of what is available now).
        disk_dir: a directory of the store's own, made if missing. One live store per directory.
        device: where leases are; None for the current accelerator, else `cpu`. On `cpu`, device
            and host memory are one and `ram_budget` covers it.
        device_budget: memory of the accelerator, like `ram_budget`; None for half of what is free,
            and, once every model in the store has run, half of what is still free then besides.
        disk_budget: what may be written to `disk_dir`; None for no limit. Checkpoints that are
            used where they lie do not count.
        policy: `"next-use"` (give up what is needed last, by a learned order) or `"lru"`.
        verify: check the checksums of what is read `"first"` time only, `"always"` or `"never"`.

    Raises StoreLockedError if another live store has the directory, ValueError or TypeError for
    arguments that cannot be, BudgetError if `disk_dir` holds more than `disk_budget`, TransferError
    if it cannot be used. Its methods raise UnknownKeyError for keys of no group, ClosedError later.
    Thread-safe. Use it as a context manager, or call `close`.
    """

    def __init__(  # noqa: PLR0913 - all but two are optional and by name
        self,
        ram_budget: Size,
        disk_dir: str | os.PathLike[str],
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
        budgets = resolve_budgets(device, ram_budget, device_budget, disk_budget, Path(disk_dir))
        grows = device.type != "cpu" and not is_chosen(device_budget)
        super().__init__(Settings(device, budgets, os.fspath(disk_dir), policy, verify, grows))

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
        request = Request(key, Want.ROOM)
        try:
            self._check_key(key)
            data = self._claim(request, tensors, durable)
            self._wait(request, self._granted, timeout)
            self._fill(request, data, durable)
        except BaseException:
            self._give_up(request)
            raise

    async def aput(
        self,
        key: str,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        durable: bool = True,
    ) -> None:
        """`put` for coroutines. Cancelled, it is whole or not there, and over when told."""
        request = Request(key, Want.ROOM)
        try:
            self._check_key(key)
            data = self._claim(request, tensors, durable)
            await self._wait_async(request, self._granted)
        except BaseException:
            self._give_up(request)
            raise
        await self._off_the_loop(lambda: self._fill_whole(request, data, durable))

    # Taking by reference -----------------------------------------------------------------------

    def register_checkpoint(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        *,
        groups: Mapping[str, Iterable[str]] | None = None,
    ) -> list[str]:
        """Know the tensors of a safetensors checkpoint, where they lie. Nothing is copied.

        `path` is a file or a directory (sharded or not). Every tensor becomes a group of its own
        under `prefix` + its name; or `groups` maps keys to the names of tensors that move
        together. Returns the keys. From now on a change of a file raises StaleCheckpointError.

        Raises InvalidHeaderError, TransferError, DuplicateKeyError, UnknownKeyError for a name in
        `groups` that the checkpoint does not hold, or ValueError for a name that cannot be a key or
        is there twice; then nothing was registered.
        """
        return self._register_files(read_checkpoint(path), prefix, groups)

    async def aregister_checkpoint(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        *,
        groups: Mapping[str, Iterable[str]] | None = None,
    ) -> list[str]:
        """`register_checkpoint` for coroutines: headers are read off the event loop's thread."""
        return self._register_files(await aread_checkpoint(path), prefix, groups)

    def _write_once(self, tensors: Mapping[str, torch.Tensor]) -> tuple[str, StoredObject]:
        """The object file with exactly these tensors: found by their content, or written."""
        key = WEIGHTS + content_hash(tensors)
        if key not in self:
            self.put(key, tensors)
        self._flush_one(key)  # another thread may have put it, or a write may have failed before
        self.offload(key)
        path = self._directory.path_of(key)
        return path, intact_object(path)

    def _register_files(
        self,
        files: list[CheckpointFile],
        prefix: str,
        groups: Mapping[str, Iterable[str]] | None,
    ) -> list[str]:
        found = checkpoint_groups(files, prefix, groups)
        for key in found:
            self._check_key(key)
        self._know_files(files, found, groups is None)
        return list(found)

    @step
    def _know_files(
        self,
        files: list[CheckpointFile],
        found: Mapping[str, tuple[GroupSpec, Source]],
        single: bool,
    ) -> None:
        self._check_open()
        for key in found:
            self._refuse_duplicate(key)
        for file in files:
            self._tiers.disk.files.expect(file.path, file.header_digest)
        stamps = {file.path: file.stamp for file in files}
        for key, (spec, source) in found.items():
            self._know(key, spec, source, stamps, single=single)

    def register(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        space: AddressSpace | None = None,
    ) -> dict[str, torch.Tensor]:
        """Take tensors as a group without copying what a file already holds.

        Tensors that still are a file's own bytes (as `from_pretrained` leaves them) are used by
        reference. The rest is written once, under `weights/` and the hash of its content: the same
        content is never written twice. Returns, for each name, a CPU tensor of the true value that
        costs no memory until it is read: a copy-on-write map of the file. `space` saves time where
        many groups are registered in a row: what is mapped where, looked up once.

        Raises DuplicateKeyError, BudgetError, TypeError, DiskFullError or TransferError.
        """
        self._check_key(key)
        self._check_open()
        self._refuse_duplicate(key)
        adoption = adopt(tensors, space or AddressSpace(), self._write_once)
        self._know_adopted(key, adoption)
        return adoption.homes

    @step
    def _know_adopted(self, key: str, adoption: Adoption) -> None:
        self._check_open()
        self._refuse_duplicate(key)
        for path in adoption.stamps:
            self._tiers.disk.files.expect(path)
        self._know(key, adoption.spec, adoption.source, adoption.stamps, single=False)

    # Getting -----------------------------------------------------------------------------------

    def acquire(
        self, key: str, access: Access = Access.READ, *, timeout: float | None = None
    ) -> Lease:
        """Hold a group on the device until the lease is released. Waits until it is there.

        For up to `timeout` seconds: then StoreTimeoutError is raised, and what is on its way goes
        on coming. None: as long as it takes. Raises UnknownKeyError; BudgetError if it can never
        fit, or not beside the leases that the caller itself holds; the error of a read that failed
        (CorruptDataError, TruncatedFileError, StaleCheckpointError, TransferError).
        """
        return self._wait(self._asked(key, access), self._attempt, timeout)

    async def aacquire(self, key: str, access: Access = Access.READ) -> Lease:
        """`acquire` for coroutines: never blocks the event loop; cancelled, it leaves nothing."""
        return await self._wait_async(self._asked(key, access), self._attempt)

    def get(
        self, key: str, *, timeout: float | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Copies, on the store's device, that the caller owns: what was put, tensor or dict.

        Raises what `acquire` raises.
        """
        with self.acquire(key, timeout=timeout) as lease:
            return self._owned(lease)

    async def aget(self, key: str) -> torch.Tensor | dict[str, torch.Tensor]:
        """`get` for coroutines."""
        request = self._asked(key, Access.READ)
        lease = await self._wait_async(request, self._attempt)
        self._hand_on(request.loan)

        def copy() -> torch.Tensor | dict[str, torch.Tensor]:
            # Released by who reads the leased memory, whether or not anybody still waits for it.
            with lease:
                return self._owned(lease)

        return await self._off_the_loop(copy)

    def _owned(self, lease: Lease) -> torch.Tensor | dict[str, torch.Tensor]:
        entry = self._mover.entry(lease.version)
        copies = clone_all(entry.spec, lease.tensors)
        return next(iter(copies.values())) if entry.single else copies

    # Hints and housekeeping --------------------------------------------------------------------

    def prefetch(self, keys: str | Iterable[str]) -> None:
        """Say what comes next, in order. A hint: it never waits, and never takes needed room."""
        self._prefetch([keys] if isinstance(keys, str) else list(keys))

    @step
    def _prefetch(self, keys: list[str]) -> None:
        self._check_open()
        self._tell(events.Expected(tuple(self._lookup(key) for key in keys)))

    @step
    def offload(self, key: str) -> None:
        """Say that a group is not needed on the device for now. Never waits."""
        self._check_open()
        self._tell(events.Offloaded(self._lookup(key)))

    @step
    def keep(self, key: str) -> None:
        """Say that a group should stay in memory once it was used: others are given up first.

        A hint: what somebody waits for takes its room if there is no other.
        """
        self._check_open()
        version = self._lookup(key)
        self._mover.entry(version).kept = True
        self._tell(events.MadeSticky(version))

    def discard(self, key: str) -> None:
        """Forget a group, on disk too. Who holds a lease keeps it; a checkpoint stays untouched.

        Raises UnknownKeyError; TransferError if its file cannot be removed: then the group is gone
        for readers, and `flush`, `close` and another `discard` try again.
        """
        removal = self._forget(key)
        if removal is not None:
            self._see_removed(removal)

    @step
    def _forget(self, key: str) -> Answer[None] | None:
        """Returns the removal of the group's file."""
        self._check_open()
        if key not in self._versions and self._tiers.disk.is_left(key):
            return self._tiers.disk.remove(key, self._newest_so_far(), True)
        version = self._lookup(key)
        durable = self._mover.entry(version).durable and not self._planner.backed(version)
        del self._versions[key]
        self._tell(events.Discarded(version))
        return self._tiers.disk.remove(key, self._newest_so_far(), durable)

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until every durable group is on disk. Raises the first error, after trying all.

        StoreTimeoutError, if some are not there after so many seconds (None: as long as it takes).
        """
        self._check_open()
        self._flush_all(timeout)

    def __contains__(self, key: object) -> bool:
        return key in self._versions

    def __len__(self) -> int:
        return len(self._versions)

    @step
    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all groups that begin with `prefix`, sorted."""
        self._tidy_up()
        return sorted(key for key in self._versions if key.startswith(prefix))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @step
    def stats(self) -> Stats:
        """What the store has done so far."""
        self._tidy_up()
        return self._stats(self._mover.journal.summary())

    def _stats(self, summary: Summary) -> Stats:
        drivers = self._mover.drivers.items()
        peak = {tier: d.peak_bytes for tier, d in drivers if d.peak_bytes is not None}
        return self._observer.stats(summary, self._planner, peak)

    def trace(
        self, path: str | os.PathLike[str], *, merge: str | os.PathLike[str] | None = None
    ) -> None:
        """Write what the store did, as a Chrome trace that Perfetto opens.

        It shows transfers, computing and waiting for groups (the newest events, if there were very
        many) and the bytes on each tier. `path` is compressed if it ends with `.gz`. `merge` names
        a trace that `torch.profiler` exported: `path` then holds both, on one clock. Never waits.

        Raises OSError, or InvalidTraceError if `merge` is no trace.
        """
        trace = document(self._notes())
        save(trace if merge is None else merged(trace, load(merge)), path)

    @step
    def _notes(self) -> Notes:
        self._tidy_up()
        journal, groups = self._mover.journal, self._versions.items()
        summary, spans = journal.read()
        return Notes(
            self._stats(summary),
            summary,
            spans,
            journal.uses.events(),
            journal.levels.events(),
            {key: self._mover.entry(version).spec.nbytes for key, version in groups},
            str(self.device),
            journal.dropped,
            journal.number,
            time.monotonic(),
        )

    @step
    def snapshot(self) -> Snapshot:
        """What is where now."""
        self._tidy_up()
        planner = self._planner
        groups = [self._group_snapshot(k, v) for k, v in sorted(self._versions.items())]
        return Snapshot(
            tuple(groups),
            {t.name: planner.used[t] for t in planner.tiers},
            {t.name: planner.budgets[t] for t in planner.tiers},
        )

    def _group_snapshot(self, key: str, version: GroupId) -> GroupSnapshot:
        spec = self._mover.entry(version).spec
        tiers = tuple(tier.name for tier in self._planner.residence(version))
        return GroupSnapshot(key, spec.nbytes, tiers, len(spec.tensors))

    def close(self) -> None:
        """Flush, then give memory, threads and the directory back. A second call does nothing.

        Raises the flush's error, after everything was given back. Leases that are still out stay
        readable. A disk that has done nothing for half a minute is not waited for any more.
        """
        if self._closed:
            return
        self._check_process()
        try:
            self._begin_to_close()
            self._flush_before_end()
        finally:
            self._end()
            self._copiers.stop()
            self._finalizer()

    @step
    def _begin_to_close(self) -> None:
        self._closing = True
        self._waiting.changed()

    @step
    def _end(self) -> None:
        self._closed = True
        self._waiting.changed()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> TierStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
