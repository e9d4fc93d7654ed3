"""The store: one cache of named groups of tensors over device, RAM and disk.

This is the only module that knows both the planner, which decides, and the carrier, which moves.
Every call follows one pattern: under the lock, ask the planner and hand its instructions to the
carrier, so that their order is kept; outside the lock, wait. The carrier's threads report back in
the same way. Only `put`, `acquire`, `get`, `flush`, `close` and their async twins may wait.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from tierstore.adoption import adopt, checkpoint_groups
from tierstore.checkpoints import CheckpointFile, aread_checkpoint, read_checkpoint
from tierstore.lease import Lease
from tierstore.metrics import GroupSnapshot, Snapshot, Stats
from tierstore.model.errors import (
    BudgetError,
    ClosedError,
    DuplicateKeyError,
    LeaseError,
    TierStoreError,
    UnknownKeyError,
)
from tierstore.model.groups import GroupSpec, Source, group_of, name_of, pack, version_id
from tierstore.model.moves import Copy
from tierstore.model.tiers import Access, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.policy import policy_named
from tierstore.plan.records import State
from tierstore.plan.schedule import LearnedOrder
from tierstore.settings import Size, resolve_budgets, resolve_device
from tierstore.transfer.carrier import Cargo, Report, ThreadCarrier
from tierstore.transfer.directory import ObjectDirectory, check_key, object_name
from tierstore.transfer.maps import AddressSpace
from tierstore.transfer.views import blocks_of, clone_all

T = TypeVar("T")
VERIFY = ("first", "always", "never")


@dataclass(eq=False)
class _Request:
    """A caller that wants something of `key`. `tried` is the epoch of its last vain attempt."""

    key: str
    owner: object
    access: Access = Access.READ
    version: str = ""
    since: float = 0.0
    tried: int = -1


class TierStore:
    """Serves groups of tensors by key, within hard budgets.

    Args:
        ram_budget: host memory that the store may take, as bytes, `"8GB"`, `"8GiB"`, `"50%"` or
            0.5 (of the memory this process may use), or `"auto"` (half of what is available now).
        disk_dir: a directory of the store's own, made if missing. One live store per directory.
        device: where leases are; None for the current accelerator, else `cpu`. On `cpu`, device
            and host memory are one and `ram_budget` covers it.
        device_budget: memory of the accelerator, written like `ram_budget`; None for half of what
            is free.
        disk_budget: what may be written to `disk_dir`; None for no limit. Checkpoints that are
            used where they lie do not count.
        policy: `"next-use"` (give up what is needed last, by a learned order) or `"lru"`.
        verify: check the checksums of what is read `"first"` time only, `"always"` or `"never"`.

    Raises StoreLockedError if another live store has the directory, ValueError or TypeError for
    arguments that cannot be, BudgetError if `disk_dir` already holds more than `disk_budget`.
    Thread-safe. Use it as a context manager, or call `close`.
    """

    def __init__(
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
        schedule = LearnedOrder()
        ranking = policy_named(policy, schedule)
        self.device = resolve_device(device)
        self._directory = ObjectDirectory(Path(disk_dir))
        try:
            budgets = resolve_budgets(
                self.device, ram_budget, device_budget, disk_budget, self._directory.path
            )
            self._planner = Planner(budgets, ranking, schedule)
            self._versions: dict[str, str] = {}
            self._next_version = 1
            report = _weak_report(weakref.WeakMethod(self._arrived))
            self._carrier = ThreadCarrier(self.device, budgets, self._directory, verify, report)
            self._changed = threading.Condition()
            self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
            self._requests: set[_Request] = set()
            self._epoch = 0
            self._held: dict[object, Counter[str]] = {}
            self._lost_leases: deque[tuple[str, Access, object]] = deque()
            self._counts: Counter[str] = Counter()
            self._stalled = 0.0
            self._pid = os.getpid()
            self._closed = False
            self._recover()
        except BaseException:
            self._directory.close()
            raise
        self._finalizer = weakref.finalize(self, _shut_down, self._carrier, self._directory)

    def _recover(self) -> None:
        for stored in self._directory.objects():
            version = version_id(stored.key, 0)
            spec = stored.spec(version)
            source = stored.source(self._directory.path_of(stored.key))
            self._carrier.add(
                Cargo(version, spec, source, stored.packing, single=stored.single)
            )
            self._planner.register(version, spec.nbytes, backed=False)
            self._carrier.add_file(stored.key)
            self._versions[stored.key] = version
        budget, held = self._planner.budgets[Tier.DISK], self._planner.used[Tier.DISK]
        if budget is not None and held > budget:
            raise BudgetError(
                self._directory.path,
                Tier.DISK.name,
                held,
                budget,
                "raise disk_budget, or remove groups with tierstore-inspect rm",
            )

    # Putting -----------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        durable: bool = True,
    ) -> None:
        """Store a copy of one tensor, or of a dict of tensors, under `key`.

        Dtypes that safetensors knows, any shape, any stride (kept), any device; tensors that share
        memory still do so when they come back. A group that is there is replaced at once: readers
        see the old one or the new one. `durable` groups are on disk after `flush` or `close`;
        others never outlive the store. Waits for room in host memory.

        Raises BudgetError if the group is larger than the budget, TypeError for what cannot be
        stored, DiskFullError or TransferError if room can only be made by a write that failed.
        """
        check_key(key)
        single = isinstance(tensors, torch.Tensor)
        named = {key: tensors} if isinstance(tensors, torch.Tensor) else dict(tensors)
        sources = {block.name: (block, data) for block, data in blocks_of(named)}
        packing = pack([block for block, _ in sources.values()])
        with self._locked():
            version = self._new_version(key)
            by_name = {t.name: t for t in packing.specs()}
            spec = group_of(version, [by_name[name] for name in named], packing.nbytes)
            self._planner.claim(version, spec.nbytes)
            self._carrier.add(Cargo(version, spec, None, packing, durable, single))
            self._deliver()
        try:
            self._wait(_Request(key, _caller(), version=version), self._granted)
            self._carrier.fill(version, {name: data for name, (_, data) in sources.items()})
        except BaseException:
            with self._changed:
                self._planner.withdraw(version)
                self._deliver()
            raise
        with self._changed:
            replaced = self._versions.get(key)
            self._versions[key] = version
            self._planner.arrived(version, Tier.HOST)
            if replaced is not None:
                self._planner.discard(replaced)
            self._deliver()

    async def aput(
        self,
        key: str,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        durable: bool = True,
    ) -> None:
        """`put` for coroutines. Cancelled, it still happens wholly or not at all."""
        await asyncio.to_thread(self.put, key, tensors, durable=durable)

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

        Raises InvalidHeaderError, TransferError, DuplicateKeyError, or UnknownKeyError for a name
        in `groups` that the checkpoint does not hold; then nothing was registered.
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

    def _register_files(
        self,
        files: list[CheckpointFile],
        prefix: str,
        groups: Mapping[str, Iterable[str]] | None,
    ) -> list[str]:
        found = checkpoint_groups(files, prefix, groups)
        with self._locked():
            for key in found:
                self._refuse_duplicate(check_key(key))
            for file in files:
                self._carrier.files.expect(file.path, file.stamp)
            for key, (spec, source) in found.items():
                self._know(key, spec, source, single=groups is None)
        return list(found)

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
        check_key(key)
        with self._locked():
            self._refuse_duplicate(key)
        adoption = adopt(tensors, self, space or AddressSpace())
        with self._locked():
            self._refuse_duplicate(key)
            for path, stamp in adoption.stamps.items():
                self._carrier.files.expect(path, stamp)
            self._know(key, adoption.spec, adoption.source, single=False)
        return adoption.homes

    def _refuse_duplicate(self, key: str) -> None:
        if key in self._versions:
            raise DuplicateKeyError(key)

    def _know(self, key: str, spec: GroupSpec, source: Source, *, single: bool) -> None:
        version = self._new_version(key)
        spec = GroupSpec(version, spec.tensors, spec.nbytes)
        self._carrier.add(Cargo(version, spec, source, single=single))
        self._planner.register(version, spec.nbytes, backed=True)
        self._versions[key] = version

    def _new_version(self, key: str) -> str:
        self._next_version += 1
        return version_id(key, self._next_version - 1)

    # Getting -----------------------------------------------------------------------------------

    def acquire(self, key: str, access: Access = Access.READ) -> Lease:
        """Hold a group on the device until the lease is released. Waits until it is there.

        Raises UnknownKeyError; BudgetError if it can never fit, or not beside the leases that the
        caller itself holds; the error of a read that failed (CorruptDataError, TruncatedFileError,
        StaleCheckpointError, TransferError).
        """
        request = self._begin(key, access)
        try:
            return self._wait(request, self._attempt)
        except BaseException:
            self._give_up(request)
            raise

    async def aacquire(self, key: str, access: Access = Access.READ) -> Lease:
        """`acquire` for coroutines: never blocks the event loop; cancelled, it leaves nothing."""
        loop = asyncio.get_running_loop()
        request = self._begin(key, access)
        woken = asyncio.Event()
        with self._changed:
            self._listeners.add((loop, woken))
            self._requests.add(request)
        try:
            while True:
                woken.clear()
                with self._changed:
                    lease = self._attempt(request)
                    if lease is None:
                        self._refuse_the_hopeless(request)
                if lease is not None:
                    return lease
                await woken.wait()
        except BaseException:
            self._give_up(request)
            raise
        finally:
            with self._changed:
                self._listeners.discard((loop, woken))
                self._requests.discard(request)

    def get(self, key: str) -> torch.Tensor | dict[str, torch.Tensor]:
        """Copies, on the store's device, that the caller owns: what was put, tensor or dict.

        Raises what `acquire` raises.
        """
        with self.acquire(key) as lease:
            return self._owned(lease)

    async def aget(self, key: str) -> torch.Tensor | dict[str, torch.Tensor]:
        """`get` for coroutines."""
        lease = await self.aacquire(key)
        copying = asyncio.ensure_future(asyncio.to_thread(self._owned, lease))
        # The copy reads the leased memory until it is done, whether or not anybody still waits.
        copying.add_done_callback(lambda _: lease.release())
        return await asyncio.shield(copying)

    def _owned(self, lease: Lease) -> torch.Tensor | dict[str, torch.Tensor]:
        cargo = self._carrier.cargo(lease._version)
        copies = clone_all(cargo.spec, lease.tensors)
        return next(iter(copies.values())) if cargo.single else copies

    def _begin(self, key: str, access: Access) -> _Request:
        with self._locked():
            request = _Request(key, _caller(), Access(access), since=time.monotonic())
            state = self._planner.state_of(self._lookup(key))
            self._demand(request)
            count = {State.PRESENT: "hits", None: "misses"}.get(state, "late")
            self._counts[count] += 1
            return request

    def _demand(self, request: _Request) -> None:
        """Insist on the newest version of the key."""
        request.version = self._lookup(request.key)
        self._planner.demand(request.version)
        self._deliver()

    def _attempt(self, request: _Request) -> Lease | None:
        """Lease the group if it is there. With the lock held."""
        self._check_open()
        self._collect_lost()
        if self._versions.get(request.key) != request.version:
            self._demand(request)  # it was replaced (or discarded, which raises) meanwhile
        version = request.version
        error = self._planner.error_of(version)
        if error is not None:
            raise error
        if not self._planner.lease(version, request.access):
            return None
        self._planner.withdraw(version)
        self._deliver()
        self._held.setdefault(request.owner, Counter())[version] += 1
        if request.tried >= 0:
            self._stalled += time.monotonic() - request.since
        request.version = ""
        tensors = self._carrier.view(version)
        self._order_after_arrival(version)
        return Lease(self, request.key, version, request.access, request.owner, dict(tensors))

    def _order_after_arrival(self, version: str) -> None:
        arrival = self._carrier.cargo(version).arrival
        if arrival is not None:
            torch.accelerator.current_stream(self.device).wait_event(arrival)

    def _wait(self, request: _Request, attempt: Callable[[_Request], T | None]) -> T:
        """Try until `attempt` gives something, sleeping until something has changed."""
        with self._changed:
            self._requests.add(request)
            try:
                while (result := attempt(request)) is None:
                    self._refuse_the_hopeless(request)
                    self._changed.wait()
                return result
            finally:
                self._requests.discard(request)

    def _granted(self, request: _Request) -> bool | None:
        """Whether the room for a put is there. With the lock held."""
        self._check_open()
        self._collect_lost()
        error = self._planner.error_of(request.version)
        if error is not None:
            raise error
        return self._planner.granted(request.version) or None

    def _give_up(self, request: _Request) -> None:
        with self._changed:
            if request.version in self._planner:
                self._planner.withdraw(request.version)
                self._deliver()

    def _refuse_the_hopeless(self, request: _Request) -> None:
        """Raise if whoever could give the room back is waiting too, and nothing is on its way."""
        request.tried = self._epoch
        holders = {owner for owner, held in self._held.items() if +held}
        waiting = {r.owner for r in self._requests}
        all_tried = all(r.tried == self._epoch for r in self._requests)
        if not holders or not holders <= waiting or not all_tried or not self._planner.idle():
            return
        held = {version for owner in holders for version in +self._held[owner]}
        if request.version in held:
            raise LeaseError(
                f"group {request.key!r} is leased by callers that all wait for something: release "
                "those leases first"
            )
        nbytes = sum(self._carrier.cargo(version).spec.nbytes for version in held)
        top = self._planner.top
        raise BudgetError(
            request.key,
            top.name,
            self._carrier.cargo(request.version).spec.nbytes,
            self._planner.budgets[top] or 0,
            f"the leases of callers that all wait hold {nbytes:,} bytes; release some of them "
            "first, or raise the budget",
        )

    def _release(self, version: str, access: Access, owner: object) -> None:
        with self._changed:
            self._end_lease(version, access, owner)

    def _end_lease(self, version: str, access: Access, owner: object) -> None:
        if self._closed:
            return
        held = self._held[owner]
        held[version] -= 1
        if not +held:
            del self._held[owner]
        if self.device.type != "cpu":
            event = torch.accelerator.current_stream(self.device).record_event()
            self._carrier.used_on(version, event)
        durable = self._carrier.cargo(version).durable
        self._planner.release(version, access)
        self._deliver()
        key = name_of(version)
        if access is Access.TAKE and self._versions.get(key) == version:
            del self._versions[key]
            self._remove_file(key, durable)

    def _remove_file(self, key: str, durable: bool) -> None:
        """No version made so far may be on disk from now on."""
        self._next_version += 1
        self._carrier.remove(key, self._next_version - 1, durable)

    def _lost(self, version: str, access: Access, owner: object) -> None:
        self._lost_leases.append((version, access, owner))

    def _collect_lost(self) -> None:
        while self._lost_leases:
            self._end_lease(*self._lost_leases.popleft())

    # Hints and housekeeping --------------------------------------------------------------------

    def prefetch(self, keys: str | Iterable[str]) -> None:
        """Say what comes next, in order. A hint: it never waits, and never takes needed room."""
        keys = [keys] if isinstance(keys, str) else list(keys)
        with self._locked():
            self._planner.prefetch([self._lookup(key) for key in keys])
            self._deliver()

    def offload(self, key: str) -> None:
        """Say that a group is not needed on the device for now. Never waits."""
        with self._locked():
            self._planner.offload(self._lookup(key))
            self._deliver()

    def discard(self, key: str) -> None:
        """Forget a group, on disk too. Who holds a lease keeps it; a checkpoint stays untouched."""
        with self._locked():
            version = self._lookup(key)
            del self._versions[key]
            durable = self._carrier.cargo(version).durable
            backed = self._planner.backed(version)
            self._planner.discard(version)
            self._deliver()
            if not backed:
                self._remove_file(key, durable)

    def flush(self) -> None:
        """Wait until every durable group is on disk. Raises the first error, after trying all."""
        with self._locked():
            dirty = [key for key, version in self._versions.items() if self._is_dirty(version)]
        errors = [error for error in map(self._save_error, dirty) if error is not None]
        if errors:
            raise errors[0]

    def _save_error(self, key: str) -> BaseException | None:
        try:
            self._flush_one(key)
        except TierStoreError as error:
            return error
        return None

    def _flush_one(self, key: str) -> None:
        with self._changed:
            version = self._versions.get(key)
            if version is None or not self._is_dirty(version):
                return
            self._planner.save(version)
            self._deliver()
        self._wait(_Request(key, _caller(), version=version), self._saved)

    def _is_dirty(self, version: str) -> bool:
        return self._carrier.cargo(version).durable and not self._planner.saved(version)

    def _saved(self, request: _Request) -> bool | None:
        """Whether a save is over. With the lock held."""
        version = request.version
        self._check_open()
        self._collect_lost()
        if version not in self._planner or self._planner.saved(version):
            return True
        error = self._planner.error_of(version)
        if error is not None:
            self._planner.forgive(version)
            raise error
        return None

    def __contains__(self, key: object) -> bool:
        return key in self._versions

    def __len__(self) -> int:
        return len(self._versions)

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all groups that begin with `prefix`, sorted."""
        with self._changed:
            return sorted(key for key in self._versions if key.startswith(prefix))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def stats(self) -> Stats:
        """What the store has done so far."""
        with self._changed:
            planner, moved = self._planner, self._carrier.totals.get
            peak = {t.name: planner.peak[t] for t in planner.tiers}
            for tier, arena in self._carrier.arenas.items():
                peak[tier.name] = arena.peak_held
            return Stats(
                hits=self._counts["hits"],
                late=self._counts["late"],
                misses=self._counts["misses"],
                stalled_seconds=self._stalled,
                bytes_read=moved(Tier.DISK, Tier.HOST),
                bytes_written=moved(Tier.HOST, Tier.DISK),
                bytes_onloaded=moved(Tier.HOST, Tier.DEVICE),
                bytes_offloaded=moved(Tier.DEVICE, Tier.HOST),
                used_bytes={t.name: planner.used[t] for t in planner.tiers},
                peak_bytes=peak,
                budget_bytes={t.name: planner.budgets[t] for t in planner.tiers},
            )

    def snapshot(self) -> Snapshot:
        """What is where now."""
        with self._changed:
            planner = self._planner
            groups = [self._group_snapshot(k, v) for k, v in sorted(self._versions.items())]
            return Snapshot(
                tuple(groups),
                {t.name: planner.used[t] for t in planner.tiers},
                {t.name: planner.budgets[t] for t in planner.tiers},
            )

    def _group_snapshot(self, key: str, version: str) -> GroupSnapshot:
        spec = self._carrier.cargo(version).spec
        tiers = tuple(tier.name for tier in self._planner.residence(version))
        return GroupSnapshot(key, spec.nbytes, tiers, len(spec.tensors))

    def close(self) -> None:
        """Flush, then give memory, threads and the directory back. A second call does nothing.

        Raises the flush's error, after everything was given back. Leases that are still out stay
        readable.
        """
        if self._closed:
            return
        try:
            self.flush()
        finally:
            with self._changed:
                self._closed = True
                self._notify()
            self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> TierStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Between the planner and the carrier -------------------------------------------------------

    def _locked(self) -> threading.Condition:
        """The lock, once it is known that the store may be used."""
        self._check_open()
        return self._changed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: open a new TierStore on its disk_dir")
        if os.getpid() != self._pid:
            raise ClosedError(
                "this process was forked from the one that opened the store: open a TierStore of "
                "its own, with another disk_dir, after the fork"
            )

    def _lookup(self, key: str) -> str:
        version = self._versions.get(key)
        if version is None:
            damage = self._directory.damaged.get(object_name(key)) if key else None
            raise damage or UnknownKeyError(key)
        return version

    def _deliver(self) -> None:
        """Hand the planner's instructions on, in order, and wake whoever waits. With the lock."""
        instructions = self._planner.instructions()
        if instructions:
            self._carrier.accept(instructions)
        self._notify()

    def _notify(self) -> None:
        self._epoch += 1
        self._changed.notify_all()
        for loop, woken in self._listeners:
            if not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)

    def _arrived(self, copy: Copy, error: BaseException | None) -> None:
        with self._changed:
            if error is None:
                self._planner.arrived(copy.key, copy.dst, copy.src)
            else:
                self._planner.failed(copy.key, copy.dst, copy.src, error)
            self._deliver()


def _caller() -> object:
    """Who is asking: the running task, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task if task is not None else threading.get_ident()


def _weak_report(method: weakref.WeakMethod[Report]) -> Report:
    """Carrier threads must not keep a forgotten store alive."""

    def report(copy: Copy, error: BaseException | None) -> None:
        arrived = method()
        if arrived is not None:
            arrived(copy, error)

    return report


def _shut_down(carrier: ThreadCarrier, directory: ObjectDirectory) -> None:
    carrier.stop()
    directory.close()
