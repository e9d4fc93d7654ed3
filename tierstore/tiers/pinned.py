"""Page-locked host memory, between which and an accelerator copies run beside everything else.

Note: unmapping registered memory. The driver goes on copying the pages that it locked, whatever is
mapped at their addresses since: a copy from there gives old bytes, in any library of the process,
and a kernel launch may fail with an error that it has nothing to do with. So each range has one
owner, a `Registration`, which keeps the map. It lets go of the map only when (1) no tensor shows
the memory any more, (2) the device work that uses it is over and (3) the driver has unregistered
it. Until all of that is so the owner is among `_live`, and stays there if it is interrupted.

Note: locking beside reading. To zero pages and to lock them may take as long as to fill them from a
disk. So `RegisteredMemory.make` only maps, in microseconds, and memory is locked later, on
any thread, while others read into it: reads past the page cache and a driver both find the pages
that are there, or have the kernel make them, and neither changes a byte of the other's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

import torch

from tierstore.model.locks import RLock, under
from tierstore.model.sizes import PAGE
from tierstore.system.mapping import libc, map_limit
from tierstore.tiers.free_runs import FreeRuns
from tierstore.tiers.pages import LateViews, fresh_map, fresh_memory, leave_to_forks, populate
from tierstore.tiers.slabs import SLAB
from tierstore.torch_private import forget_last_error

logger = logging.getLogger("tierstore.tiers")

_SLABS = 64
"""A slab is no more than the budget divided by this, so that its spare pages do not matter."""

_SMALL = 8
"""So many slots at least share a slab: less than this part of it is lost to the last one."""

_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered; HIP has the same number


class Registration:
    """Owner of one map that the driver page-locks. All views of the memory keep `buffer`.

    `pending` are events of device work that uses the memory, by the addresses of slots.
    """

    def __init__(
        self, mapped: mmap.mmap, buffer: ctypes.Array[ctypes.c_uint8], maker: RegisteredMemory
    ) -> None:
        self.address = ctypes.addressof(buffer)
        self.nbytes = len(mapped)
        self.maker = maker
        self.pending: dict[int, list[torch.Event]] = {}
        self.registering = False  # from before the driver is asked: it may have done it
        self.settled = False  # it is locked, or stays pageable
        self._mapped = mapped
        self._pid = os.getpid()
        self._buffer = weakref.ref(buffer, release_dropped)

    def is_dropped(self) -> bool:
        """Whether no view of the memory is left. A fork has no such memory, and drops none."""
        return self._buffer() is None and self._pid == os.getpid()

    def release(self) -> None:
        """Wait for the device, unregister, and let go of the map; if one of these fails, not now.

        Several threads may be here at once, and an interrupt may come between any two
        instructions. Unregistering twice is refused and does no harm: whoever is here keeps the
        map, so these are nobody else's addresses yet.
        """
        if self.registering and not self.maker.unregister(self):
            return
        _live.pop(self.address, None)  # the map goes with the last reference to this owner


class RegisteredSlab:
    """Page-locked memory that many small slots share: one map, and one registration.

    Pages that no slot has stay locked with the others, and count towards the budget. Where it is
    needed for something else, the slab is unlocked, and gives them back; what its slots hold stays
    there, in pageable memory. So whoever queues device work on a slot, or lets others see its
    memory, does so under the `lock`, which keeps the slab as it is for so long.
    """

    def __init__(self, buffer: ctypes.Array[ctypes.c_uint8], registration: Registration) -> None:
        self.buffer = buffer
        self.registration = registration
        self.free = FreeRuns(registration.nbytes)
        self.lock = RLock()
        self.unlocked = False
        self.users: dict[int, weakref.ref[SlabUser]] = {}  # by the addresses of slots

    def is_seen(self) -> bool:
        """Whether anybody else may have a view of a slot: of locked memory, as far as he knows."""
        users = [reference() for reference in self.users.values()]
        return any(user is not None and user.is_seen() for user in users)

    def give(self, address: int, nbytes: int) -> None:
        """A slot has gone. Its events stay: others may yet have to wait for them."""
        self.users.pop(address, None)
        if self.unlocked:
            self.registration.nbytes -= nbytes
            libc.madvise(address, nbytes, mmap.MADV_DONTNEED)
        else:
            self.free.give(address - self.registration.address, nbytes)

    def give_up_free(self) -> None:
        """The memory is pageable from now on, and none of it serves a slot again."""
        self.unlocked = True
        address = self.registration.address
        leave_to_forks(address, len(self.buffer), True)
        for offset, nbytes in self.free:
            libc.madvise(address + offset, nbytes, mmap.MADV_DONTNEED)
        self.registration.nbytes -= self.free.nbytes


class SlabUser(Protocol):
    """A slot, to its slab."""

    pending: list[torch.Event]

    def is_seen(self) -> bool:
        """Whether anybody else may have a view of its memory."""


# Nothing is unmapped when the interpreter ends: the process takes its maps and its registrations
# with it. So this must outlive the modules that are cleared by then.
_live: dict[int, Registration] = {}  # by address
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_live))


def release_dropped(
    _: object = None, *, is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> None:
    """Release all registered memory that no tensor shows any more.

    Called when the last view of some memory goes, on whatever thread that is, and before memory is
    made, for what could not be released at its time. `is_finalizing` is a default since the names
    of this module may be gone when the interpreter ends.
    """
    if is_finalizing():
        return
    for registration in list(_live.values()):
        if registration.is_dropped():
            registration.release()


class RegisteredMemory:
    """Maps of our own that CUDA page-locks: torch's allocator would round to a power of two.

    Memory is made by `make`, and page-locked by `lock`, once. Where the driver locks no more (it
    has limits, and low ones under WSL2), memory stays pageable: copies are slower, and right. A
    warning says so once.

    A fork would copy every locked page at once, as a device may write to it: each worker of a
    DataLoader could take the whole budget. So forked processes do not get them.

    `cuda` has the driver's functions: torch.cuda, or what stands for it. `device` is the one that
    they are called for. Memory whose views outlive their slot stays registered, and counts towards
    `budget` (bytes; None: no limit): then more is made only after a moment of waiting for them.
    """

    def __init__(
        self,
        cuda: Any = torch.cuda,
        device: torch.device | None = None,
        budget: int | None = None,
    ) -> None:
        self._cuda = cuda
        self._device = device
        self._budget = budget
        self._late_views = LateViews(budget)
        self._left = 0  # bytes of slots that are left to views
        self._slab_bytes = 0 if budget is None else min(SLAB, budget // _SLABS) // PAGE * PAGE
        self._slabs: list[RegisteredSlab] = []
        self._parts: dict[int, RegisteredSlab] = {}  # by the addresses of slots
        self._returned: deque[tuple[RegisteredSlab, int, int]] = deque()
        self._books = threading.Lock()
        self._warned = False
        self._lock = threading.Lock()

    def make(self, nbytes: int) -> torch.Tensor:
        """uint8 memory of `nbytes` bytes (whole pages) that `lock` page-locks: of zeros, or of a
        slab, with whatever bytes it last held.

        It is unregistered and unmapped when its last view is gone. Raises OSError.
        """
        with self._books:
            if nbytes * _SMALL <= self._slab_bytes:
                buffer = self._part(nbytes)
            else:
                self._make_room(nbytes)
                buffer, _ = self._mapped(nbytes)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _mapped(self, nbytes: int) -> tuple[ctypes.Array[ctypes.c_uint8], Registration]:
        map_limit.count(1)
        mapped = fresh_map(nbytes)
        buffer = (ctypes.c_uint8 * nbytes).from_buffer(mapped)
        registration = Registration(mapped, buffer, self)
        _live[registration.address] = registration
        return buffer, registration

    def is_to_lock(self, memory: torch.Tensor) -> bool:
        """Whether `lock` has to page-lock a slot's memory."""
        slab = self.slab_of(memory)
        if slab is not None:
            return not (slab.unlocked or slab.registration.settled)
        registration = _live.get(memory.data_ptr())
        return registration is not None and not registration.settled

    def lock(self, memory: torch.Tensor) -> None:
        """Page-lock a slot's memory if it is possible, and was not done. Leaves its bytes as they
        are: others may be reading into it. Several threads may lock different slots at once."""
        slab = self.slab_of(memory)
        if slab is not None:
            under(slab.lock, functools.partial(self._lock_slab, slab))
        else:
            self._register(_live[memory.data_ptr()])

    def _lock_slab(self, slab: RegisteredSlab) -> None:
        if not slab.unlocked:
            self._register(slab.registration)

    def _register(self, registration: Registration) -> None:
        if not (registration.settled or registration.registering):  # if interrupted, never again
            self._ask_to_register(registration)
        registration.settled = True

    def _ask_to_register(self, registration: Registration) -> None:
        address, nbytes = registration.address, registration.nbytes
        # Populate first: registering huge pages is faster than small ones. A kernel that does not
        # know how populates while it locks.
        populate(address, nbytes)
        leave_to_forks(address, nbytes, False)
        registration.registering = True
        result = self._cuda.cudart().cudaHostRegister(address, nbytes, 0)
        try:
            self._check(result)
        except RuntimeError as error:
            registration.registering = False  # an ordinary map, which counts all the same
            leave_to_forks(address, nbytes, True)
            self._warn(nbytes, error)

    # Small slots ---------------------------------------------------------------------------------

    def _part(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Memory for a small slot, of a slab that has room, or of a new one."""
        self._sort_in()
        found = self._room_in_a_slab(nbytes)
        if found is None:
            self._make_room(nbytes)
            found = self._room_in_a_slab(nbytes) or self._new_slab(nbytes)
        slab, offset = found
        part = (ctypes.c_uint8 * nbytes).from_buffer(slab.buffer, offset)
        address = ctypes.addressof(part)
        self._parts[address] = slab
        weakref.finalize(part, self._come_back, slab, address, nbytes).atexit = False
        return part

    def _room_in_a_slab(self, nbytes: int) -> tuple[RegisteredSlab, int] | None:
        for slab in self._slabs:
            offset = slab.free.take(nbytes)
            if offset is not None:
                return slab, offset
        return None

    def _new_slab(self, nbytes: int) -> tuple[RegisteredSlab, int]:
        assert self._budget is not None
        left = (self._budget - self._used()) // PAGE * PAGE
        slab = RegisteredSlab(*self._mapped(max(nbytes, min(self._slab_bytes, left))))
        self._slabs.append(slab)
        offset = slab.free.take(nbytes)
        assert offset is not None
        return slab, offset

    def _come_back(self, slab: RegisteredSlab, address: int, nbytes: int) -> None:
        # Possibly in the middle of anything (garbage collection): never waits for a lock.
        self._returned.append((slab, address, nbytes))
        if self._books.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._books.release()

    def _sort_in(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                slab, address, nbytes = self._returned.popleft()
                self._parts.pop(address, None)
                slab.give(address, nbytes)
                if slab in self._slabs and slab.free.nbytes == slab.registration.nbytes:
                    self._slabs.remove(slab)  # it goes with its last reference

    def _make_room(self, nbytes: int) -> None:
        """Have what slabs do not use give way to `nbytes` bytes, and wait for late views."""
        for slab in sorted(self._slabs, key=lambda slab: slab.free.nbytes, reverse=True):
            above = 0 if self._budget is None else self._used() + nbytes - self._budget
            if above <= 0 or not slab.free.nbytes:
                break
            under(slab.lock, functools.partial(self._unlock, slab))
        self._late_views.wait(nbytes, self._used)

    def _unlock(self, slab: RegisteredSlab) -> None:
        registration = slab.registration
        if slab.is_seen() or (registration.registering and not self.unregister(registration)):
            return
        registration.registering = False
        self._slabs.remove(slab)
        slab.give_up_free()

    def slab_of(self, memory: torch.Tensor) -> RegisteredSlab | None:
        """The slab of which a slot's memory is a part; None if it is not."""
        return self._parts.get(memory.data_ptr())

    # Accounts ---------------------------------------------------------------------------------

    def used(self) -> int:
        """Bytes of memory that exist for slots that are not left, and that slabs have beside."""
        with self._books:
            return self._used()

    def _used(self) -> int:
        self._sort_in()
        release_dropped()
        return sum(e.nbytes for e in list(_live.values()) if e.maker is self) - self._left

    def leave(self, memory: torch.Tensor, spans: object) -> None:
        """Stop counting a slot's memory, which views outlive; with None, count it again."""
        with self._lock:
            self._left += memory.nbytes if spans is not None else -memory.nbytes

    def keep_for(self, memory: torch.Tensor, user: SlabUser) -> None:
        """Let device work use the memory up to the events that are pending for its user when it
        goes."""
        address = memory.data_ptr()
        slab = self._parts.get(address)
        registration = _live.get(address) if slab is None else slab.registration
        if registration is not None:
            registration.pending[address] = user.pending
        if slab is not None:
            slab.users[address] = weakref.ref(user)

    def close(self) -> None:
        """Release what could not be released when its last view went."""
        with self._books:
            self._sort_in()
            self._slabs.clear()  # each goes with its last slot
        release_dropped()

    def unregister(self, registration: Registration) -> bool:
        """Have the driver unlock memory, once its device work is over.

        Returns whether the memory is not registered any more. It stays so while this thread
        captures a graph, which waiting would break, and if the device is lost.
        """
        if self._is_captured():
            return False
        try:
            with self._selected():
                for event in chain.from_iterable(map(list, list(registration.pending.values()))):
                    if not event.query():
                        event.synchronize()
                result = self._cuda.cudart().cudaHostUnregister(registration.address)
                self._check(result, _NOT_REGISTERED)
        except RuntimeError as error:
            logger.warning(
                "%s bytes of host memory stay page-locked for now: %s",
                f"{registration.nbytes:,}",
                str(error),  # its frames have the map
            )
            return False
        return True

    def _is_captured(self) -> bool:
        ask = getattr(self._cuda, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def _selected(self) -> contextlib.AbstractContextManager[object]:
        """The device is the current one inside: another would be set up, if it is not in use."""
        if self._device is None or self._device.index is None:
            return contextlib.nullcontext()
        return torch.accelerator.device_index(self._device.index)

    def _check(self, result: Any, *fine: int) -> None:
        """Raise RuntimeError for a refusal, which is not left to a later launch of this thread."""
        if int(result):
            forget_last_error(self._cuda.cudart())
        if int(result) not in fine:
            self._cuda.check_error(int(result))

    def _warn(self, nbytes: int, error: RuntimeError) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            warnings.warn(
                f"CUDA could not page-lock {nbytes:,} bytes of host memory ({error}): copies "
                "between it and the GPU are slower; lower ram_budget, or raise the system's limit "
                "of page-locked memory",
                RuntimeWarning,
                stacklevel=2,
            )


def pinned_memory(nbytes: int) -> torch.Tensor:
    """uint8 memory of `nbytes` bytes (whole pages) that torch page-locks for other accelerators."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return fresh_memory(nbytes)  # this accelerator has no page-locked memory
    if memory.data_ptr() % PAGE:
        return fresh_memory(nbytes)  # direct reads need whole pages
    return memory
