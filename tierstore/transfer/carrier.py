"""Moves bytes between the tiers, and decides nothing.

The planner's instructions are accepted in order. A copy to a device is queued there and then, by
whoever has come to need it: that takes microseconds, and no other thread has to wake up. All else
is off the caller's thread. A clerk, one thread, keeps the books of host memory and of the disk
(which slot belongs to which group); nothing that it does can be cut short half-way. Files are read
and written by several threads, and what leaves the device is waited for by one. What is urgent goes
before what is hoped for.

The books of the device's memory are kept by callers, as part of a step of the store. If that is cut
short, `mend` finds what is true.

*Arrived* means two things. In host memory and on disk the bytes are there. On a device the copy is
queued on a side stream and an event is recorded; whoever uses the tensors makes its own stream wait
for that event. Nothing ever synchronises a whole stream or device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from tierstore.model.errors import TierStoreError
from tierstore.model.groups import name_of
from tierstore.model.journal import Journal, Span, hop
from tierstore.model.moves import Copy, Drop, Forget, Instruction, Reserve
from tierstore.model.tiers import Tier
from tierstore.transfer.arena import Slot, host_arena
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.directory import ObjectDirectory
from tierstore.transfer.disk import FileTable
from tierstore.transfer.figures import disk_threads
from tierstore.transfer.link import Link
from tierstore.transfer.reading import Reader, Reading, explained
from tierstore.transfer.saver import Saver
from tierstore.transfer.streams import selecting
from tierstore.transfer.timing import DeviceTimes, Mark
from tierstore.transfer.views import view_all
from tierstore.transfer.workers import EARLY, PATIENCE, URGENT, Answer, Clerk, Job, Workers

T = TypeVar("T")

Report = Callable[[Copy, BaseException | None], None]
Timed = Callable[[Copy, float, float], None]
Ended = tuple[Copy, BaseException | None]
"""A copy that is over, and why it could not be made; None: it was."""


class ThreadCarrier:
    """Moves groups between an accelerator (if any), host memory and files.

    `report` is called, on a worker thread, when a copy is done or has failed; `ending`, when the
    last bytes of a copy from disk are asked for; `timed`, when it is known from when to when (in
    seconds of `time.monotonic`) a device copied. `top` is HOST when the device is the CPU.
    """

    def __init__(  # noqa: PLR0913 - what it is made of, and whom it tells
        self,
        device: torch.device,
        budgets: dict[Tier, int | None],
        directory: ObjectDirectory,
        verify: str,
        report: Report,
        ending: Callable[[Copy], None],
        timed: Timed,
    ) -> None:
        self.device = device
        self.stopped = False
        self.top = min(budgets)
        self.journal = Journal()
        self.times: DeviceTimes | None = None
        self.files = FileTable(directory.path)
        self._report = report
        self._ending = ending
        self._timed = timed
        self._cargo: dict[str, Cargo] = {}
        self._removing: dict[int, str] = {}
        self._moving: dict[tuple[str, Tier], Copy] = {}
        self.arenas = {Tier.HOST: host_arena(budgets[Tier.HOST], device)}
        self._link: Link | None = None
        if self.top is Tier.DEVICE:  # before there are threads: there may be no such device
            self._link = Link(device, budgets[Tier.DEVICE], self.arenas[Tier.HOST])
            self.arenas[Tier.DEVICE] = self._link.arena
            self.times = self._link.times
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

    def accept(self, instructions: Iterable[Instruction]) -> list[Ended]:
        """Take instructions, in order, as part of a step of the store. Waits for nobody.

        What changes the device's memory is done by this thread. Returns the copies that it has
        queued, or has failed to: `report` is not called for these.
        """
        ended: list[Ended] = []
        others = []
        for instruction in instructions:
            if isinstance(instruction, Drop) and instruction.tier is Tier.DEVICE:
                self._drop(instruction.tier, self._cargo[instruction.key])
                continue
            if isinstance(instruction, Copy) and instruction.dst is Tier.DEVICE:
                now = self._onload(instruction, self._cargo[instruction.key])
                ended += now
                if now:
                    continue
            others.append(instruction)
        if others:
            self._clerk.give(functools.partial(self._execute, others))
        return ended

    def _onload(self, copy: Copy, cargo: Cargo) -> list[Ended]:
        """Queue a copy to the device. If that takes longer, only make room: others queue it."""
        assert self._link is not None
        src, dst = cargo.slots.get(Tier.HOST), self.arenas[Tier.DEVICE].take(cargo.spec.nbytes)
        cargo.slots[Tier.DEVICE] = dst
        if src is None or not self._link.only_queues(src):
            return []
        error: BaseException | None = None
        marks: tuple[Mark, ...] = ()
        span = Span(hop(copy.src, copy.dst), name_of(copy.key), start=time.monotonic())
        try:
            marks = self._link.onload(cargo, src, dst)
        except Exception as failure:  # an interrupt is none of the copy
            error = explained(failure, copy)
        self._note(span, copy, error, marks)
        return [(copy, error)]

    def mend(self) -> None:
        """Make the books of the device's memory anew, after a step was cut short.

        A copy to it that nobody makes, or that was not queued to the end, is none.
        """
        if self._link is not None:
            coming = {key for key, dst in self._moving if dst is Tier.DEVICE}
            self._link.mend(list(self._cargo.values()), coming)

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
        self.arenas[tier].give(slot, keep=tier is not Tier.DEVICE or not cargo.settled)

    def _begin(self, copy: Copy, cargo: Cargo) -> None:
        priority = URGENT if copy.urgent else EARLY
        span = Span(hop(copy.src, copy.dst), name_of(copy.key))
        self._moving[copy.key, copy.dst] = copy
        if copy.dst is Tier.HOST:
            cargo.slots[copy.dst] = self.arenas[copy.dst].take(cargo.spec.nbytes)
        slot = cargo.slots.get(copy.dst)
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
                else:
                    assert self._link is not None
                    up = copy.dst is Tier.DEVICE
                    marks = (self._link.onload if up else self._link.offload)(cargo, src, dst)
            except BaseException as failure:  # every failure must reach whoever waits
                error = explained(failure, copy)
            self._finish(span, copy, error, marks)

        return job

    def _finish(
        self, span: Span, copy: Copy, error: BaseException | None, marks: tuple[Mark, ...] = ()
    ) -> None:
        """Count and report a copy. `marks` are where the accelerator begins and ends it."""
        self._note(span, copy, error, marks)
        if error is None and copy.dst is self.top:
            with suppress(MemoryError, RuntimeError):  # who leases it tries again, and is told
                self.view(copy.key)  # here, as every torch call may cost who computes the GIL
        self.look()
        self._report(copy, error)

    def _note(
        self, span: Span, copy: Copy, error: BaseException | None, marks: tuple[Mark, ...]
    ) -> None:
        if error is None:
            source = self._cargo[copy.key].source if copy.src is Tier.DISK else None
            span.nbytes = copy.nbytes if source is None else source.nbytes
            self.journal.count(span.kind, span.nbytes)
        else:
            span.note = "failed"
        if self.times is None or not marks:
            self.journal.end(span)
        else:
            self.times.tell(functools.partial(self._note_times, span, copy), *marks)

    def _note_times(self, span: Span, copy: Copy, times: list[float]) -> None:
        self.journal.end_between(span, times)
        if copy.dst is Tier.DEVICE:
            self._timed(copy, *times)

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
        places = [
            (memory[at : at + block.nbytes], blocks[block.name])
            for block, at in zip(cargo.packing.blocks, cargo.packing.offsets, strict=True)
        ]
        if self._link is None or any(source.device != self.device for _, source in places):
            slot.wait()
            for target, source in places:
                target.copy_(source)
            return None
        began, ended = self._link.fetch(slot, places, behind)
        span = Span(hop(Tier.DEVICE, Tier.HOST), name_of(key), sum(s.nbytes for _, s in places))
        self.journal.count(span.kind, span.nbytes)
        self._link.times.tell(functools.partial(self.journal.end_between, span), began, ended)
        return ended.event

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
            cargo.views = self._new_views(cargo)
        return cargo.views

    @torch.inference_mode(mode=False)  # they are for others, too
    def _new_views(self, cargo: Cargo) -> dict[str, torch.Tensor]:
        memory = cargo.slots[self.top].memory
        assert memory is not None
        offsets = {t.name: t.offset for t in cargo.spec.tensors}
        on_device = self.top is Tier.DEVICE
        return view_all(cargo.spec, memory, cargo.spec.device_offsets if on_device else offsets)

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
