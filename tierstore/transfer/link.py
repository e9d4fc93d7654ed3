"""The link between host memory and an accelerator: copies that its own streams make.

A copy to the device is only queued, which takes microseconds, so whoever needs it queues it: to
have another thread do it would cost two wake-ups and as many waits for the GIL. Nothing here waits
for the device but `offload`.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from contextlib import suppress

import torch

from tierstore.model.tiers import Tier
from tierstore.transfer.arena import Arena, Slot, device_arena
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.streams import entered, is_captured, on
from tierstore.transfer.timing import DeviceTimes, Mark


def part(memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Some bytes of a slot's memory: mostly all of them, and then no view has to be made."""
    whole = offset == 0 and nbytes == memory.numel()
    return memory if whole else memory[offset : offset + nbytes]


def _copy_all(places: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in places:
        target.copy_(source, non_blocking=True)


def _copy_group(
    cargo: Cargo, host: torch.Tensor | None, device: torch.Tensor | None, *, up: bool
) -> None:
    """Copy each run of a group's bytes between its slots' memory, `up` to the device or down."""
    assert host is not None
    assert device is not None
    for run in cargo.spec.runs:
        here = part(host, run.host_offset, run.nbytes)
        there = part(device, run.device_offset, run.nbytes)
        target, source = (there, here) if up else (here, there)
        target.copy_(source, non_blocking=True)


class Link:
    """Two streams of `device`, one for each direction, between `host` and memory of the device.

    Of that there are never more than `budget` bytes (None: no limit). `times` tells when what was
    queued was done.
    """

    def __init__(self, device: torch.device, budget: int | None, host: Arena) -> None:
        self.up, self.down = torch.Stream(device), torch.Stream(device)
        self.arena = device_arena(budget, device, self.up)
        self.times = DeviceTimes(device, self.up)
        self._device = device
        self._host = host

    def only_queues(self, src: Slot) -> bool:
        """Whether a copy to the device from this slot is only queued by who asks for it now.

        A driver copies pageable memory while its caller waits. And what is queued by a thread whose
        work is captured may be refused.
        """
        pinned = src.memory is not None and src.memory.is_pinned()
        return pinned and not is_captured(self._device)

    def onload(self, cargo: Cargo, src: Slot, dst: Slot) -> tuple[Mark, Mark]:
        """Queue the copy of a group to the device. Returns where the device begins and ends it."""
        memory, up = self.arena.fill(dst), self.up
        for event in [*src.look(), *dst.pending]:  # a put may still be filling the source
            up.wait_event(event)
        dst.pending.clear()
        began = self.times.mark(up)
        try:
            on(up, lambda: _copy_group(cargo, src.memory, memory, up=True))
        finally:  # if one of them failed, those before it still read the source
            ended = self.times.mark(up)
            src.pending.append(ended.event)
        cargo.arrival = ended.event
        return began, ended

    def offload(self, cargo: Cargo, src: Slot, dst: Slot) -> tuple[Mark, Mark]:
        """Copy a group to host memory, and wait for it."""
        memory = self._host.fill(dst)
        dst.wait()
        for event in [*src.pending, cargo.arrival]:
            if event is not None:
                self.down.wait_event(event)
        began = self.times.mark(self.down)
        with entered(self.down):
            _copy_group(cargo, memory, src.memory, up=False)
        # Host memory has arrived when the bytes are there: a save to disk may read them next.
        ended = self.times.mark(self.down)
        ended.event.synchronize()
        return began, ended

    def fetch(
        self, slot: Slot, places: list[tuple[torch.Tensor, torch.Tensor]], behind: bool
    ) -> tuple[Mark, Mark]:
        """Have the device fill parts of a host slot, each from a tensor of its own.

        In order with the current stream; or `behind` it, while that goes on. Who reads the slot
        waits for what is pending there.
        """
        stream = torch.accelerator.current_stream(self._device)
        if behind:
            self.down.wait_event(self.times.mark(stream).event)
            stream = self.down
        for event in slot.look():  # of those who had the room before
            stream.wait_event(event)
        began = self.times.mark(stream)
        try:
            on(stream, lambda: _copy_all(places))
            ended = self.times.mark(stream)
            slot.pending.append(ended.event)
        except BaseException:
            stream.synchronize()  # the room may be another's next
            raise
        return began, ended

    def mend(self, known: Iterable[Cargo], coming: Set[str]) -> None:
        """See which slots are in use, after somebody was cut short who changed that.

        Of what is not `coming`, a copy that was not queued to the end is none. This is the one
        place that waits for the whole device: what is queued there may use slots that nobody knows.
        """
        with suppress(RuntimeError):  # a device that is lost is told of by what is done there
            torch.accelerator.synchronize(self._device)
        in_use = []
        for cargo in known:
            if cargo.arrival is None and cargo.key not in coming:
                cargo.slots.pop(Tier.DEVICE, None)
            slot = cargo.slots.get(Tier.DEVICE)
            if slot is None:
                cargo.views = cargo.arrival = None
            else:
                in_use.append(slot)
        self.arena.recount(in_use)
