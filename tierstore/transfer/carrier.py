"""Lifts bytes between the tiers, off the caller's thread, and decides nothing.

The planner's instructions are accepted in order. A clerk, one thread, keeps the books (which slot
belongs to which group). Bytes move on worker threads: several for the disk, one for each direction
of the link to an accelerator. What is urgent goes before what is hoped for. Nothing that a caller's
thread does here can be cut short half-way.

*Arrived* means two things. In host memory and on disk the bytes are there. On a device the copy is
queued on a side stream and an event is recorded; whoever uses the tensors makes its own stream wait
for that event. Nothing ever synchronises a whole stream or device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from tierstore.model.errors import TierStoreError
from tierstore.model.groups import name_of
from tierstore.model.journal import Journal, Span, hop
from tierstore.model.moves import Copy, Drop, Forget, Instruction, Reserve
from tierstore.model.tiers import Tier
from tierstore.transfer.arena import Slot, device_arena, host_arena
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.directory import ObjectDirectory
from tierstore.transfer.disk import FileTable
from tierstore.transfer.figures import disk_threads
from tierstore.transfer.reading import Reader, Reading, explained
from tierstore.transfer.saver import Saver
from tierstore.transfer.streams import entered, selecting
from tierstore.transfer.timing import DeviceTimes, Mark
from tierstore.transfer.views import view_all
from tierstore.transfer.workers import EARLY, PATIENCE, URGENT, Answer, Clerk, Job, Workers

T = TypeVar("T")

Report = Callable[[Copy, BaseException | None], None]


class Carrier(Protocol):
    """What the store needs of whoever moves the bytes."""

    def accept(self, instructions: Iterable[Instruction]) -> None:
        """Take instructions, in order. Never blocks."""

    def view(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of a group's copy on the fastest tier."""


class ThreadCarrier:
    """Moves groups between an accelerator (if any), host memory and files.

    `report` is called, on a worker thread, when a copy is done or has failed; `ending`, when the
    last bytes of a copy from disk are asked for. `top` is HOST when the device is the CPU.
    """

    def __init__(
        self,
        device: torch.device,
        budgets: dict[Tier, int | None],
        directory: ObjectDirectory,
        verify: str,
        report: Report,
        ending: Callable[[Copy], None],
    ) -> None:
        self.device = device
        self.stopped = False
        self.top = min(budgets)
        self.journal = Journal()
        self.times: DeviceTimes | None = None
        self.files = FileTable(directory.path)
        self._report = report
        self._ending = ending
        self._cargo: dict[str, Cargo] = {}
        self._removing: dict[int, str] = {}
        self._moving: dict[tuple[str, Tier], Copy] = {}
        self.arenas = {Tier.HOST: host_arena(budgets[Tier.HOST], device)}
        if self.top is Tier.DEVICE:  # before there are threads: there may be no such device
            self._up, self._down = torch.Stream(device), torch.Stream(device)
            self.arenas[Tier.DEVICE] = device_arena(budgets[Tier.DEVICE], device, self._up)
            self.times = DeviceTimes(device, self._up)
        self._clerk = Clerk()
        self._disk = Workers(disk_threads(), "disk", selecting(device))
        self.saver = Saver(directory, self.files, self._disk)
        self._reader = Reader(self.arenas[Tier.HOST], self.files, self._disk, verify)
        self._links: dict[Tier, Workers] = {}
        if self.top is Tier.DEVICE:
            for tier, name in (Tier.DEVICE, "onload"), (Tier.HOST, "offload"):
                self._links[tier] = Workers(1, name, selecting(device))

    # Books, kept by the clerk ------------------------------------------------------------------

    def add(self, cargo: Cargo) -> None:
        """Make a group known, before any instruction names it."""
        self._cargo[cargo.key] = cargo
        name = name_of(cargo.key)
        self._clerk.give(lambda: self.saver.known.update((name,)))

    def cargo(self, key: str) -> Cargo:
        """What is known of a group."""
        return self._cargo[key]

    def all_cargo(self) -> list[tuple[str, Cargo]]:
        """What is known of all groups, the oldest first."""
        return list(self._cargo.items())

    def accept(self, instructions: Iterable[Instruction]) -> None:
        self._clerk.give(functools.partial(self._execute, instructions))

    def catch_up(self) -> None:
        """Wait until all instructions are in the books. Waits for no bytes."""
        if not self.stopped:
            self._clerk.ask(lambda: None)

    def moving(self) -> list[Copy]:
        """The copies that are under way. `report` was not called for them yet, or is at it."""
        return list(self._moving.values())

    def moved(self, copy: Copy) -> None:
        """`report` has been told of a copy."""
        del self._moving[copy.key, copy.dst]

    def idle_for(self) -> float:
        """For how many seconds the disk has begun and ended nothing."""
        return time.monotonic() - self._disk.busy_since

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Copy):
                self._begin(instruction, self._cargo[instruction.key])
            elif isinstance(instruction, Reserve):
                self._reserve(self._cargo[instruction.key], instruction.tier)
            elif isinstance(instruction, Drop):
                self._drop(instruction.tier, self._cargo[instruction.key])
            else:
                self._forget(instruction)

    def _reserve(self, cargo: Cargo, tier: Tier) -> None:
        slot = self.arenas[tier].take(cargo.spec.nbytes)
        if self.top is Tier.HOST:
            with suppress(MemoryError, OSError):  # who fills it tries again, and is told
                self.arenas[tier].fill(slot)
        cargo.slots[tier] = slot

    def _forget(self, instruction: Forget) -> None:
        del self._cargo[instruction.key]
        self.saver.forget(name_of(instruction.key))

    def _drop(self, tier: Tier, cargo: Cargo) -> None:
        if tier is Tier.DISK:
            room = self.saver.drop(cargo)
            if room is not None:
                self._disk.submit(URGENT, room)
            return
        slot = cargo.slots.pop(tier)
        if tier is self.top:
            cargo.views = None
            if cargo.arrival is not None:
                slot.pending.append(cargo.arrival)
                cargo.arrival = None
        if tier is Tier.DEVICE and cargo.handed_over:
            cargo.handed_over = False
            self.arenas[tier].forget(slot)
        else:
            self.arenas[tier].give(slot, keep=tier is not Tier.DEVICE or not cargo.settled)

    def _begin(self, copy: Copy, cargo: Cargo) -> None:
        priority = URGENT if copy.urgent else EARLY
        span = Span(hop(copy.src, copy.dst), name_of(copy.key))
        self._moving[copy.key, copy.dst] = copy
        slot = None
        if copy.dst is not Tier.DISK:
            slot = self.arenas[copy.dst].take(cargo.spec.nbytes)
            cargo.slots[copy.dst] = slot
        if copy.src is Tier.DISK:
            assert slot is not None
            finish = functools.partial(self._finish, span)
            reading = Reading(self._reader, copy, cargo, slot, finish, self._ending)
            self._disk.submit(priority, functools.partial(self._read, span, reading))
        elif copy.dst is Tier.DISK:
            job = self._reported(span, copy, cargo, cargo.slots[copy.src], None)
            self._disk.submit(priority, job)
        else:
            job = self._reported(span, copy, cargo, cargo.slots[copy.src], slot)
            self._links[copy.dst].submit(priority, job)

    def _read(self, span: Span, reading: Reading) -> None:
        self.journal.begin(span)
        reading.begin()

    def _reported(
        self, span: Span, copy: Copy, cargo: Cargo, src: Slot, dst: Slot | None
    ) -> Callable[[], None]:
        def job() -> None:
            error: BaseException | None = None
            marks: tuple[Mark, ...] = ()
            span.start = time.monotonic()
            try:
                if dst is None:
                    self.journal.begin(span)
                    self.saver.save(cargo, src)
                elif copy.dst is Tier.DEVICE:
                    marks = self._onload(cargo, src, dst)
                else:
                    marks = self._offload(cargo, src, dst)
            except BaseException as failure:  # every failure must reach whoever waits
                error = explained(failure, copy)
            self._finish(span, copy, error, marks)

        return job

    def _finish(
        self, span: Span, copy: Copy, error: BaseException | None, marks: tuple[Mark, ...] = ()
    ) -> None:
        """Count and report a copy. `marks` are where the accelerator begins and ends it."""
        if error is None:
            source = self._cargo[copy.key].source if copy.src is Tier.DISK else None
            span.nbytes = copy.nbytes if source is None else source.nbytes
            self.journal.count(span.kind, span.nbytes)
            if copy.dst is self.top:
                with suppress(MemoryError, RuntimeError):  # who leases it tries again, and is told
                    self.view(copy.key)  # here, as every torch call may cost who computes the GIL
        else:
            span.note = "failed"
        if self.times is None or not marks:
            self.journal.end(span)
        else:
            self.times.tell(functools.partial(self.journal.end_between, span), *marks)
        self.look()
        self._report(copy, error)

    def look(self) -> None:
        """Learn what the accelerator has done meanwhile, for the journal."""
        if self.times is not None:
            self.times.look()

    def fill(self, key: str, blocks: Mapping[str, torch.Tensor]) -> None:
        """Copy a group's blocks (uint8, any device) into the host memory reserved for it.

        What comes from the store's device is copied by the device, in order with the current
        stream. Nobody waits for that here.
        """
        self._fill(key, blocks, behind=False)

    def fill_behind(self, key: str, blocks: Mapping[str, torch.Tensor]) -> torch.Event | None:
        """`fill`, but beside what the current stream does next.

        The caller must neither change nor let go of the blocks before the event that is returned.
        None: they are copied.
        """
        return self._fill(key, blocks, behind=True)

    def _fill(
        self, key: str, blocks: Mapping[str, torch.Tensor], behind: bool
    ) -> torch.Event | None:
        cargo = self._cargo[key]
        assert cargo.packing is not None
        slot, memory = self._host_memory(cargo)
        slot.wait()
        places = [
            (memory[at : at + block.nbytes], blocks[block.name])
            for block, at in zip(cargo.packing.blocks, cargo.packing.offsets, strict=True)
        ]
        if self.top is Tier.DEVICE and all(source.device == self.device for _, source in places):
            return self._fetch(key, slot, places, behind)
        for target, source in places:
            target.copy_(source)
        return None

    def _host_memory(self, cargo: Cargo) -> tuple[Slot, torch.Tensor]:
        """The room of a group in host memory, for a caller: made by a thread of ours."""
        self.catch_up()  # a slot that is in the books may be about to be dropped
        slot = cargo.slots[Tier.HOST]
        if slot.memory is not None:
            return slot, slot.memory
        make = functools.partial(self.arenas[Tier.HOST].fill, slot)
        makers = self._links.get(Tier.HOST, self._disk)  # page-locking takes long
        return slot, self._ask(makers, make).wait()

    def _ask(self, workers: Workers, question: Callable[[], T]) -> Answer[T]:
        """What `question` gives on a thread of `workers`."""
        submit, give = functools.partial(workers.submit, URGENT), self._clerk.give
        return Answer(question, lambda job: give(lambda: submit(job)), workers.alive)

    def _fetch(
        self, key: str, slot: Slot, places: list[tuple[torch.Tensor, torch.Tensor]], behind: bool
    ) -> torch.Event:
        """Have the device fill a host slot. Who reads the slot waits for what is pending there."""
        assert self.times is not None
        stream = torch.accelerator.current_stream(self.device)
        if behind:
            self._down.wait_event(self.times.mark(stream).event)
            stream = self._down
        began = self.times.mark(stream)
        try:
            with entered(stream):
                for target, source in places:
                    target.copy_(source, non_blocking=True)
            ended = self.times.mark(stream)
            slot.pending.append(ended.event)
        except BaseException:
            stream.synchronize()  # the room may be another's next
            raise
        nbytes = sum(source.nbytes for _, source in places)
        span = Span(hop(Tier.DEVICE, Tier.HOST), name_of(key), nbytes)
        self.journal.count(span.kind, nbytes)
        self.times.tell(functools.partial(self.journal.end_between, span), began, ended)
        return ended.event

    def hand_over(self, key: str) -> None:
        """The copy on the device is its borrower's as well: no other group gets its memory."""
        self._cargo[key].handed_over = True

    # Between host and device -------------------------------------------------------------------

    def _onload(self, cargo: Cargo, src: Slot, dst: Slot) -> tuple[Mark, Mark]:
        memory = self.arenas[Tier.DEVICE].fill(dst)
        assert src.memory is not None and self.times is not None
        for event in [*src.look(), *dst.pending]:  # a put may still be filling the source
            self._up.wait_event(event)
        dst.pending.clear()
        began = self.times.mark(self._up)
        with entered(self._up):
            for run in cargo.spec.runs:
                source = src.memory[run.host_offset : run.host_offset + run.nbytes]
                target = memory[run.device_offset : run.device_offset + run.nbytes]
                target.copy_(source, non_blocking=True)
        ended = self.times.mark(self._up)
        src.pending.append(ended.event)
        cargo.arrival = ended.event
        return began, ended

    def _offload(self, cargo: Cargo, src: Slot, dst: Slot) -> tuple[Mark, Mark]:
        memory = self.arenas[Tier.HOST].fill(dst)
        dst.wait()
        assert src.memory is not None and self.times is not None
        for event in [*src.pending, cargo.arrival]:
            if event is not None:
                self._down.wait_event(event)
        began = self.times.mark(self._down)
        with entered(self._down):
            for run in cargo.spec.runs:
                source = src.memory[run.device_offset : run.device_offset + run.nbytes]
                target = memory[run.host_offset : run.host_offset + run.nbytes]
                target.copy_(source, non_blocking=True)
        # Host memory has arrived when the bytes are there: a save to disk may read them next.
        ended = self.times.mark(self._down)
        ended.event.synchronize()
        return began, ended

    # For callers, on a disk's thread -----------------------------------------------------------

    def remove(self, key: str, order: int, durable: bool) -> Answer[None] | None:
        """Begin to remove the file of `key`, and see that no version up to `order` is written.

        None: there is nothing. A failure is told to who waits for the answer, and to who flushes.
        """
        if not durable and not self.saver.has_file(key):
            return None

        def remove() -> None:
            try:
                self.saver.remove(key, order, durable)
            finally:
                del self._removing[order]

        def begin(job: Job) -> None:
            self._removing[order] = key
            self._disk.submit(URGENT, job)

        give = self._clerk.give
        return Answer(remove, lambda job: give(lambda: begin(job)), self._disk.alive)

    def removing(self) -> set[str]:
        """The keys whose object files are being removed."""
        self.catch_up()
        return set(list(self._removing.values()))

    def remove_leftovers(self) -> list[BaseException]:
        """Try again to remove what could not be removed. Returns what went wrong."""
        errors: list[BaseException] = []
        for remove in self.saver.leftovers():
            try:
                self._ask(self._disk, remove).wait()
            except TierStoreError as error:
                errors.append(error)
        return errors

    def place(self, cargo: Cargo) -> None:
        """Let the copy on disk of a settled group be whatever lies in its place.

        Raises DiskFullError or TransferError.
        """
        self._ask(self._disk, functools.partial(self.saver.place, cargo)).wait()

    # Looking -----------------------------------------------------------------------------------

    def view(self, key: str) -> dict[str, torch.Tensor]:
        cargo = self._cargo[key]
        if cargo.views is None:
            memory = cargo.slots[self.top].memory
            assert memory is not None
            offsets = {t.name: t.offset for t in cargo.spec.tensors}
            on_device = self.top is Tier.DEVICE
            cargo.views = view_all(
                cargo.spec, memory, cargo.spec.device_offsets if on_device else offsets
            )
        return cargo.views

    def host_view(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of a group's copy in host memory. Waits for the device to be done with it."""
        cargo = self._cargo[key]
        slot, memory = self._host_memory(cargo)
        slot.wait()
        return view_all(cargo.spec, memory, {t.name: t.offset for t in cargo.spec.tensors})

    def used_on(self, key: str, event: Any) -> None:
        """Device work up to `event` uses the group's copy: its memory is not reused before."""
        pending = self._cargo[key].slots[self.top].pending
        pending[:] = [old for old in pending if not old.query()]
        pending.append(event)

    def stop(self) -> bool:
        """End the threads and give memory and files back.

        False if some thread does not end, because a disk does not answer. Then the files stay
        open, as it may still use them.
        """
        self.stopped = True
        ends = time.monotonic() + PATIENCE
        ended = self._clerk.stop(ends)
        for workers in (self._disk, *self._links.values()):
            ended &= workers.stop(ends)
        if not ended:
            return False
        for cargo in self._cargo.values():
            cargo.views = None
            for tier, slot in cargo.slots.items():
                self.arenas[tier].give(slot)  # leases that are still out keep what they look at
            cargo.slots.clear()
        for arena in self.arenas.values():
            arena.close()
        self.files.close()
        self.saver.close()
        return True
