"""Lifts bytes between the tiers, off the caller's thread, and decides nothing.

The planner's instructions are accepted in order. Books are kept at once (which slot belongs to
which group), bytes move later on worker threads: several for the disk, one for each direction of
the link to an accelerator. What is urgent goes before what is hoped for.

*Arrived* means two things. In host memory and on disk the bytes are there. On a device the copy is
queued on a side stream and an event is recorded; whoever uses the tensors makes its own stream wait
for that event. Nothing ever synchronises a whole stream or device.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tierstore.model.errors import CorruptDataError, TransferError
from tierstore.model.groups import (
    Check,
    Extent,
    GroupSpec,
    Packing,
    Segment,
    Source,
    name_of,
    packing_of,
)
from tierstore.model.header import digest
from tierstore.model.moves import Copy, Drop, Forget, Instruction, Reserve
from tierstore.model.tiers import Tier
from tierstore.transfer.arena import Arena, Slot, device_arena, host_arena
from tierstore.transfer.directory import ObjectDirectory
from tierstore.transfer.disk import FileTable, ReadPiece, Spill, pieces, transfer_error
from tierstore.transfer.views import view_all

DISK_THREADS = 4
URGENT, EARLY = 0, 1

Report = Callable[[Copy, BaseException | None], None]


@dataclass(eq=False)
class Cargo:
    """One version of a group, as the carrier needs to know it.

    `source` says how to read it from disk; None while it is not there. `packing` is how to write
    it; None for what came from checkpoints, which is written only once it was changed. `durable` groups are written as object files, others
    into the spill.
    """

    key: str
    spec: GroupSpec
    source: Source | None = None
    packing: Packing | None = None
    durable: bool = True
    single: bool = False
    verified: bool = False
    spilled_at: int | None = None
    slots: dict[Tier, Slot] = field(default_factory=dict)
    views: dict[str, torch.Tensor] | None = None
    arrival: Any = None
    first_digests: list[str] | None = None


class Carrier(Protocol):
    """What the store needs of whoever moves the bytes."""

    def accept(self, instructions: Iterable[Instruction]) -> None:
        """Take instructions, in order. Never blocks."""

    def view(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of a group's copy on the fastest tier."""


@dataclass
class Totals:
    """What was moved so far, in bytes, by (source, destination)."""

    moved: dict[tuple[Tier, Tier], int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, src: Tier, dst: Tier, nbytes: int) -> None:
        """Count `nbytes` bytes."""
        with self.lock:
            self.moved[src, dst] = self.moved.get((src, dst), 0) + nbytes

    def get(self, src: Tier, dst: Tier) -> int:
        """Bytes moved from `src` to `dst`."""
        return self.moved.get((src, dst), 0)


class Workers:
    """Daemon threads that take jobs by priority, then age.

    Daemons, because a thread stuck in a dead disk must not keep the interpreter from ending; what
    they leave half-written has a temporary name.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._age = itertools.count()
        self._ready = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"tierstore-{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, job: Callable[[], None]) -> None:
        """Have `job` run on some thread. It must not raise."""
        with self._ready:
            heapq.heappush(self._jobs, (priority, next(self._age), job))
            self._ready.notify()

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._jobs and not self._stopping:
                    self._ready.wait()
                if not self._jobs:
                    return
                job = heapq.heappop(self._jobs)[2]
            job()
            del job  # it may hold the last reference to a buffer

    def stop(self) -> None:
        """Finish what is queued, then end."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(timeout=10)


class ThreadCarrier:
    """Moves groups between an accelerator (if any), host memory and files.

    `report` is called, on a worker thread, when a copy is done or has failed. `top` is the fastest
    tier: HOST when the device is the CPU.
    """

    def __init__(
        self,
        device: torch.device,
        budgets: dict[Tier, int | None],
        directory: ObjectDirectory,
        verify: str,
        report: Report,
    ) -> None:
        self.device = device
        self.top = min(budgets)
        self.totals = Totals()
        self.files = FileTable(directory.path)
        self._directory = directory
        self._verify = verify
        self._report = report
        self._cargo: dict[str, Cargo] = {}
        self._spill: Spill | None = None
        self._committed: dict[str, int] = {}  # key -> newest version that is on disk, or removed
        self._files: set[str] = set()  # keys that have an object file
        self._versions: Counter[str] = Counter()  # key -> versions of it that are known
        self._commit_lock = threading.Lock()
        self.arenas = {Tier.HOST: host_arena(budgets[Tier.HOST], device)}
        self._disk = Workers(DISK_THREADS, "disk")
        self._links: dict[Tier, Workers] = {}
        if self.top is Tier.DEVICE:
            self._up, self._down = torch.Stream(device), torch.Stream(device)
            self.arenas[Tier.DEVICE] = device_arena(budgets[Tier.DEVICE], device, self._up)
            self._links = {Tier.DEVICE: Workers(1, "onload"), Tier.HOST: Workers(1, "offload")}

    # Books, kept at once -----------------------------------------------------------------------

    def add(self, cargo: Cargo) -> None:
        """Make a group known, before any instruction names it."""
        self._cargo[cargo.key] = cargo
        self._versions[name_of(cargo.key)] += 1

    def add_file(self, key: str) -> None:
        """The directory has an object file of `key`."""
        self._files.add(key)

    def cargo(self, key: str) -> Cargo:
        """What is known of a group."""
        return self._cargo[key]

    def accept(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Copy):
                self._begin(instruction, self._cargo[instruction.key])
            elif isinstance(instruction, Reserve):
                cargo = self._cargo[instruction.key]
                cargo.slots[instruction.tier] = self.arenas[instruction.tier].take(cargo.spec.nbytes)
            elif isinstance(instruction, Drop):
                self._drop(instruction.tier, self._cargo[instruction.key])
            else:
                self._forget(instruction)

    def _forget(self, instruction: Forget) -> None:
        del self._cargo[instruction.key]
        key = name_of(instruction.key)
        self._versions[key] -= 1
        if not self._versions[key]:
            del self._versions[key]
            if key not in self._files:
                self._committed.pop(key, None)

    def _drop(self, tier: Tier, cargo: Cargo) -> None:
        if tier is Tier.DISK:
            self._drop_from_disk(cargo)
            return
        slot = cargo.slots.pop(tier)
        if tier is self.top:
            cargo.views = None
            if cargo.arrival is not None:
                slot.pending.append(cargo.arrival)
                cargo.arrival = None
        self.arenas[tier].give(slot)

    def _drop_from_disk(self, cargo: Cargo) -> None:
        """An object file stays until its key is written anew or removed; spilled room is freed."""
        cargo.source = None
        if cargo.spilled_at is not None and self._spill is not None:
            self._spill.give_back(cargo.spilled_at, cargo.spec.nbytes)
            cargo.spilled_at = None

    def _begin(self, copy: Copy, cargo: Cargo) -> None:
        priority = URGENT if copy.urgent else EARLY
        slot = None
        if copy.dst is not Tier.DISK:
            slot = self.arenas[copy.dst].take(cargo.spec.nbytes)
            cargo.slots[copy.dst] = slot
        if copy.src is Tier.DISK:
            assert slot is not None
            reading = _Reading(self, copy, cargo, slot, priority)
            self._disk.submit(priority, reading.begin)
        elif copy.dst is Tier.DISK:
            self._disk.submit(priority, self._reported(copy, cargo, cargo.slots[copy.src], None))
        else:
            job = self._reported(copy, cargo, cargo.slots[copy.src], slot)
            self._links[copy.dst].submit(priority, job)

    def _reported(
        self, copy: Copy, cargo: Cargo, src: Slot, dst: Slot | None
    ) -> Callable[[], None]:
        def job() -> None:
            error: BaseException | None = None
            try:
                if dst is None:
                    self._save(cargo, src)
                elif copy.dst is Tier.DEVICE:
                    self._onload(cargo, src, dst)
                else:
                    self._offload(cargo, src, dst)
            except BaseException as failure:  # every failure must reach whoever waits
                error = _explained(failure, copy)
            self.finish(copy, error)

        return job

    def finish(self, copy: Copy, error: BaseException | None) -> None:
        """Count and report a copy."""
        if error is None:
            source = self._cargo[copy.key].source
            nbytes = copy.nbytes if source is None or copy.src is not Tier.DISK else source.nbytes
            self.totals.add(copy.src, copy.dst, nbytes)
        self._report(copy, error)

    def fill(self, key: str, blocks: Mapping[str, torch.Tensor]) -> None:
        """Copy a group's blocks (uint8, any device) into the host memory reserved for it."""
        cargo = self._cargo[key]
        assert cargo.packing is not None
        slot = cargo.slots[Tier.HOST]
        memory = self.arenas[Tier.HOST].fill(slot)
        slot.wait()
        for block, at in zip(cargo.packing.blocks, cargo.packing.offsets, strict=True):
            memory[at : at + block.nbytes].copy_(blocks[block.name])

    # Between host and device -------------------------------------------------------------------

    def _onload(self, cargo: Cargo, src: Slot, dst: Slot) -> None:
        memory = self.arenas[Tier.DEVICE].fill(dst)
        assert src.memory is not None
        for event in dst.pending:
            self._up.wait_event(event)
        dst.pending.clear()
        with self._up:
            for run in cargo.spec.runs:
                source = src.memory[run.host_offset : run.host_offset + run.nbytes]
                target = memory[run.device_offset : run.device_offset + run.nbytes]
                target.copy_(source, non_blocking=True)
        event = self._up.record_event()
        src.pending.append(event)
        cargo.arrival = event

    def _offload(self, cargo: Cargo, src: Slot, dst: Slot) -> None:
        memory = self.arenas[Tier.HOST].fill(dst)
        dst.wait()
        assert src.memory is not None
        for event in [*src.pending, cargo.arrival]:
            if event is not None:
                self._down.wait_event(event)
        with self._down:
            for run in cargo.spec.runs:
                source = src.memory[run.device_offset : run.device_offset + run.nbytes]
                target = memory[run.host_offset : run.host_offset + run.nbytes]
                target.copy_(source, non_blocking=True)
        # Host memory has arrived when the bytes are there: a save to disk may read them next.
        self._down.record_event().synchronize()

    # Between host and disk ---------------------------------------------------------------------

    def _save(self, cargo: Cargo, slot: Slot) -> None:
        slot.wait()
        if cargo.durable:
            self._save_object(cargo, slot)
        else:
            self._save_spilled(cargo, slot)
        cargo.verified = False

    def _save_spilled(self, cargo: Cargo, slot: Slot) -> None:
        spill = self._the_spill()
        offset = spill.take(cargo.spec.nbytes)
        try:
            spill.write(slot.bytes(), offset)
        except BaseException:
            spill.give_back(offset, cargo.spec.nbytes)
            raise
        cargo.spilled_at = offset
        check = Check("the spilled group", 0, cargo.spec.nbytes, digest(slot.bytes()))
        segment = Segment(Extent(spill.path, offset, cargo.spec.nbytes), 0)
        cargo.source = Source((segment,), (), (check,))

    def _the_spill(self) -> Spill:
        with self._commit_lock:
            if self._spill is None:
                self._spill = Spill(self._directory.path)
            return self._spill

    def _save_object(self, cargo: Cargo, slot: Slot) -> None:
        key, version = name_of(cargo.key), _version(cargo.key)
        packing = cargo.packing or packing_of(cargo.spec)
        staged = self._directory.stage(key, packing, slot.bytes(), single=cargo.single)
        with self._commit_lock:
            if self._committed.get(key, -1) > version:
                self._directory.abandon(staged)  # a newer version, or its removal, was faster
            else:
                self._directory.commit(staged)
                self._committed[key] = version
                self._files.add(key)
                self.files.forget(self._directory.path_of(key))
        cargo.source = staged.stored.source(self._directory.path_of(key))

    def remove(self, key: str, version: int, durable: bool) -> None:
        """Remove the object file of `key`, and see that no version up to `version` is written."""
        with self._commit_lock:
            if durable and key in self._versions:
                self._committed[key] = version
            if key in self._files:
                self._files.discard(key)
                self._directory.remove(key)
                self.files.forget(self._directory.path_of(key))

    # What was read -----------------------------------------------------------------------------

    def check(self, cargo: Cargo, slot: Slot, source: Source) -> None:
        """Put bytes that were read into place, and see that they are the ones written."""
        data = slot.bytes()
        for move in source.moves:
            # Not a plain slice copy: where the two ranges overlap, that would be a guess.
            data[move.dst : move.dst + move.nbytes] = bytes(data[move.src : move.src + move.nbytes])
        if self._verify == "never" or (self._verify == "first" and cargo.verified):
            return
        for check in source.checks:
            found = digest(data[check.offset : check.offset + check.nbytes])
            if found != check.digest:
                raise self._corrupt(cargo, source, check.name, check.digest, found)
        if self._verify == "always" and not source.checks:
            self._check_against_first_read(cargo, source, data)
        cargo.verified = True

    def _check_against_first_read(self, cargo: Cargo, source: Source, data: memoryview) -> None:
        """A checkpoint carries no checksums: what it held at the first read must remain so."""
        found = [digest(data[s.at : s.at + s.extent.nbytes]) for s in source.segments]
        if cargo.first_digests is None:
            cargo.first_digests = found
        for expected, now in zip(cargo.first_digests, found, strict=True):
            if expected != now:
                raise self._corrupt(cargo, source, "the checkpoint's bytes", expected, now)

    def _corrupt(
        self, cargo: Cargo, source: Source, what: str, expected: str, found: str
    ) -> CorruptDataError:
        path = source.segments[0].extent.path if source.segments else ""
        return CorruptDataError(
            f"group {name_of(cargo.key)!r}: {what!r} in {path} is not what was written (checksum "
            f"{found} instead of {expected}): the disk or somebody changed it; remove it with "
            "tierstore-inspect rm and put the group again, or download the checkpoint again",
            key=name_of(cargo.key),
            path=path,
            expected=expected,
            found=found,
        )

    # Looking -----------------------------------------------------------------------------------

    def view(self, key: str) -> dict[str, torch.Tensor]:
        cargo = self._cargo[key]
        if cargo.views is None:
            memory = cargo.slots[self.top].memory
            assert memory is not None
            offsets = {t.name: t.offset for t in cargo.spec.tensors}
            on_device = self.top is Tier.DEVICE
            cargo.views = view_all(cargo.spec, memory, cargo.spec.device_offsets if on_device else offsets)
        return cargo.views

    def used_on(self, key: str, event: Any) -> None:
        """Device work up to `event` uses the group's copy: its memory is not reused before."""
        pending = self._cargo[key].slots[self.top].pending
        pending[:] = [old for old in pending if not old.query()]
        pending.append(event)

    def stop(self) -> None:
        """End the threads and give memory and files back."""
        for workers in (self._disk, *self._links.values()):
            workers.stop()
        for arena in self.arenas.values():
            arena.clear()
        self.files.close()
        if self._spill is not None:
            self._spill.close()
            self._spill = None


def _version(key: str) -> int:
    return int(key.rpartition("\0")[2])


def _explained(error: BaseException, copy: Copy) -> BaseException:
    """The library's error for a failed copy, with the cause attached."""
    key = name_of(copy.key)
    if isinstance(error, TransferError):
        error.key = error.key or key
        return error
    if isinstance(error, OSError):
        doing = "reading" if copy.src is Tier.DISK else "writing"
        return transfer_error(error, doing, key=key, path=str(error.filename or f"group {key!r}"))
    failed = TransferError(
        f"moving group {key!r} from {copy.src.name} to {copy.dst.name} failed "
        f"({type(error).__name__}: {error}): free memory on that tier or lower its budget",
        key=key,
    )
    failed.__cause__ = error
    return failed


class _Reading:
    """One group on its way from disk to host memory, in pieces that several threads read."""

    def __init__(
        self, carrier: ThreadCarrier, copy: Copy, cargo: Cargo, slot: Slot, priority: int
    ) -> None:
        assert cargo.source is not None
        self._carrier = carrier
        self._copy = copy
        self._cargo = cargo
        self._source = cargo.source
        self._slot = slot
        self._priority = priority
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._left = 0

    def begin(self) -> None:
        try:
            self._carrier.arenas[Tier.HOST].fill(self._slot)
            self._slot.wait()
            self._check_files()
        except BaseException as error:  # reported, like every failure of a job
            self._carrier.finish(self._copy, _explained(error, self._copy))
            return
        todo = list(pieces(self._source))
        self._left = len(todo)
        for piece in todo[1:]:
            self._carrier._disk.submit(self._priority, lambda piece=piece: self._read(piece))  # type: ignore[misc]
        if todo:
            self._read(todo[0])
        else:
            self._end()

    def _check_files(self) -> None:
        for path in {segment.extent.path for segment in self._source.segments}:
            self._carrier.files.check(self._carrier.files.get(path))

    def _read(self, piece: ReadPiece) -> None:
        try:
            if self._error is None:
                self._read_piece(piece)
        except OSError as error:
            self._error = transfer_error(error, "reading", key=None, path=piece.path)
        except BaseException as error:  # reported, like every failure of a job
            self._error = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._end()

    def _read_piece(self, piece: ReadPiece) -> None:
        # A function of its own: no reference to the memory may outlive the report of its arrival.
        room = self._slot.bytes()[piece.at : piece.at + piece.nbytes]
        self._carrier.files.get(piece.path).read_at_least(room, piece.offset, piece.needed)

    def _end(self) -> None:
        error = self._error
        try:
            if error is None:
                self._check_files()  # what changed while it was read is no good either
                self._carrier.check(self._cargo, self._slot, self._source)
        except BaseException as failure:  # reported, like every failure of a job
            error = failure
        self._carrier.finish(self._copy, None if error is None else _explained(error, self._copy))
