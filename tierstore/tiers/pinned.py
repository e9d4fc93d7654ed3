"""Page-locked host memory, for copies to and from an accelerator in parallel to other work.

Note: unmapping registered memory. The driver keeps copying from the pages that it locked, whatever
is mapped at their addresses later: a copy from there returns old bytes, in any library of the
process, and a kernel launch may fail with an unrelated error. Therefore each range has one owner, a
`Registration`, which holds the map. It drops the map only when (1) no tensor uses the memory, (2)
the device work that uses it is done and (3) the driver has unregistered it. Until then the owner is
in `_live`, and stays there if it is interrupted.

Note: locking in parallel to reading. Zeroing pages and locking them may take as long as filling
them from a disk. `RegisteredMemory.make` therefore only maps, in microseconds, and memory is locked
later, on any thread, while other threads read into it: direct reads and the driver both find the
existing pages, or have the kernel create them, and neither changes the other's bytes.
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
from tierstore.tiers.pages import LateViews, fresh_map, fresh_memory, populate, set_fork_inheritance
from tierstore.tiers.slabs import SLAB
from tierstore.torch_private import clear_last_error

logger = logging.getLogger("tierstore.tiers")

_SLABS = 64
"""A slab has at most 1/64 of the budget, which limits the cost of its unused pages."""

_SMALL = 8
"""Minimum number of slots per slab, which limits the waste at its end to an eighth."""

_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered; HIP has the same number


class Registration:
    """Owner of one map that the driver page-locks. All views of the memory hold `buffer`.

    `pending` are events of device work that uses the memory, by the addresses of slots.
    """

    def __init__(
        self, mapped: mmap.mmap, buffer: ctypes.Array[ctypes.c_uint8], maker: RegisteredMemory
    ) -> None:
        self.address = ctypes.addressof(buffer)
        self.nbytes = len(mapped)
        self.maker = maker
        self.pending: dict[int, list[torch.Event]] = {}
        self.registering = False  # set before the driver call, which may succeed unnoticed
        self.settled = False  # True once it is locked, or stays pageable
        self._mapped = mapped
        self._pid = os.getpid()
        self._buffer = weakref.ref(buffer, release_dropped)

    def is_dropped(self) -> bool:
        """Return whether no view of the memory is left. Always False in a forked child."""
        return self._buffer() is None and self._pid == os.getpid()

    def release(self) -> None:
        """Wait for the device, unregister, and drop the map. If one of these fails, do nothing.

        Several threads may run this at once, and an interrupt may come between any two
        instructions. Unregistering twice is refused harmlessly: each caller holds the map, so these
        addresses cannot be reused yet.
        """
        if self.registering and not self.maker.unregister(self):
            return
        _live.pop(self.address, None)  # the map is freed with the last reference to this owner


class RegisteredSlab:
    """Page-locked memory that many small slots share: one map, and one registration.

    Unused pages stay locked with the others, and count towards the budget. When other slots need
    the memory, the slab is unlocked, and its unused pages are freed; its slots stay where they are,
    in pageable memory. Hold `lock`, which prevents this, while queueing device work on a slot or
    handing out views of it.
    """

    def __init__(self, buffer: ctypes.Array[ctypes.c_uint8], registration: Registration) -> None:
        self.buffer = buffer
        self.registration = registration
        self.free = FreeRuns(registration.nbytes)
        self.lock = RLock()
        self.unlocked = False
        self.users: dict[int, weakref.ref[SlabUser]] = {}  # by the addresses of slots

    def may_have_views(self) -> bool:
        """Return whether other code may have a view of a slot, and rely on it being locked."""
        users = [reference() for reference in self.users.values()]
        return any(user is not None and user.may_have_views() for user in users)

    def release(self, address: int, nbytes: int) -> None:
        """Free a slot. Its events are kept: others may still have to wait for them."""
        self.users.pop(address, None)
        if self.unlocked:
            self.registration.nbytes -= nbytes
            libc.madvise(address, nbytes, mmap.MADV_DONTNEED)
        else:
            self.free.release(address - self.registration.address, nbytes)

    def release_free(self) -> None:
        """Free the unused pages, after unlocking. The slab serves no new slots."""
        self.unlocked = True
        address = self.registration.address
        set_fork_inheritance(address, len(self.buffer), True)
        for offset, nbytes in self.free:
            libc.madvise(address + offset, nbytes, mmap.MADV_DONTNEED)
        self.registration.nbytes -= self.free.nbytes


class SlabUser(Protocol):
    """The interface of a slot to its slab."""

    pending: list[torch.Event]

    def may_have_views(self) -> bool:
        """Return whether other code may have a view of its memory."""


# Nothing is unmapped when the interpreter ends: maps and registrations end with the process. This
# dict must outlive the modules that are cleared by then.
_live: dict[int, Registration] = {}  # by address
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_live))


def release_dropped(
    _: object = None, *, is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> None:
    """Release all registered memory that no tensor uses any more.

    Called on any thread when the last view of some memory is dropped, and before each allocation,
    for memory that could not be released earlier. `is_finalizing` is a default argument because
    the names of this module may be gone when the interpreter ends.
    """
    if is_finalizing():
        return
    for registration in list(_live.values()):
        if registration.is_dropped():
            registration.release()


class RegisteredMemory:
    """Memory that is mapped here and page-locked by CUDA.

    torch's allocator would round sizes up to a power of two. `make` allocates memory, and `lock`
    page-locks it, once. Where the driver refuses to lock more (its limits are low under WSL2),
    memory stays pageable: copies are slower, but correct. A warning reports that once.

    Locked pages are excluded from forks. A fork would copy all of them at once, because a device
    may write to them: each worker of a DataLoader could take the whole budget.

    `cuda` has the driver's functions: torch.cuda, or a substitute. `device` is the device that they
    are called for. Memory whose views outlive their slot stays registered, and counts towards
    `budget` (bytes; None: no limit): further allocations wait briefly for it to be released.
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
        self._detached_bytes = 0  # bytes of detached slots
        self._slab_bytes = 0 if budget is None else min(SLAB, budget // _SLABS) // PAGE * PAGE
        self._slabs: list[RegisteredSlab] = []
        self._parts: dict[int, RegisteredSlab] = {}  # by the addresses of slots
        self._returned: deque[tuple[RegisteredSlab, int, int]] = deque()
        self._accounting = threading.Lock()
        self._warned = False
        self._lock = threading.Lock()

    def make(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory of `nbytes` bytes (whole pages), for `lock` to page-lock.

        It contains zeros or, in a slab, undefined bytes. It is unregistered and unmapped with its
        last view. Raises OSError.
        """
        with self._accounting:
            if nbytes * _SMALL <= self._slab_bytes:
                buffer = self._part(nbytes)
            else:
                self._reclaim_slabs(nbytes)
                buffer, _ = self._mapped(nbytes)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _mapped(self, nbytes: int) -> tuple[ctypes.Array[ctypes.c_uint8], Registration]:
        map_limit.count(1)
        mapped = fresh_map(nbytes)
        buffer = (ctypes.c_uint8 * nbytes).from_buffer(mapped)
        registration = Registration(mapped, buffer, self)
        _live[registration.address] = registration
        return buffer, registration

    def needs_lock(self, memory: torch.Tensor) -> bool:
        """Return whether a slot's memory must still be page-locked by `lock`."""
        slab = self.slab_of(memory)
        if slab is not None:
            return not (slab.unlocked or slab.registration.settled)
        registration = _live.get(memory.data_ptr())
        return registration is not None and not registration.settled

    def lock(self, memory: torch.Tensor) -> None:
        """Page-lock a slot's memory if possible, once.

        Its bytes do not change: other threads may read into it. Several threads may lock different
        slots at once.
        """
        slab = self.slab_of(memory)
        if slab is not None:
            under(slab.lock, functools.partial(self._lock_slab, slab))
        else:
            self._register(_live[memory.data_ptr()])

    def _lock_slab(self, slab: RegisteredSlab) -> None:
        if not slab.unlocked:
            self._register(slab.registration)

    def _register(self, registration: Registration) -> None:
        if not (registration.settled or registration.registering):  # not retried after interrupts
            self._call_register(registration)
        registration.settled = True

    def _call_register(self, registration: Registration) -> None:
        address, nbytes = registration.address, registration.nbytes
        # Populate first: registering huge pages is faster than small ones. A kernel without support
        # for it populates while it locks.
        populate(address, nbytes)
        set_fork_inheritance(address, nbytes, False)
        registration.registering = True
        result = self._cuda.cudart().cudaHostRegister(address, nbytes, 0)
        try:
            self._check(result)
        except RuntimeError as error:
            registration.registering = False  # it stays an ordinary map, and still counts
            set_fork_inheritance(address, nbytes, True)
            self._warn(nbytes, error)

    # Small slots ---------------------------------------------------------------------------------

    def _part(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Return memory for a small slot, from a slab with space or a new one."""
        self._collect_returned()
        found = self._take_from_slab(nbytes)
        if found is None:
            self._reclaim_slabs(nbytes)
            found = self._take_from_slab(nbytes) or self._new_slab(nbytes)
        slab, offset = found
        part = (ctypes.c_uint8 * nbytes).from_buffer(slab.buffer, offset)
        address = ctypes.addressof(part)
        self._parts[address] = slab
        weakref.finalize(part, self._on_release, slab, address, nbytes).atexit = False
        return part

    def _take_from_slab(self, nbytes: int) -> tuple[RegisteredSlab, int] | None:
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

    def _on_release(self, slab: RegisteredSlab, address: int, nbytes: int) -> None:
        # May run anywhere (garbage collection): never waits for a lock.
        self._returned.append((slab, address, nbytes))
        if self._accounting.acquire(blocking=False):
            try:
                self._collect_returned()
            finally:
                self._accounting.release()

    def _collect_returned(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                slab, address, nbytes = self._returned.popleft()
                self._parts.pop(address, None)
                slab.release(address, nbytes)
                if slab in self._slabs and slab.free.nbytes == slab.registration.nbytes:
                    self._slabs.remove(slab)  # freed with its last reference

    def _reclaim_slabs(self, nbytes: int) -> None:
        """Free unused slab memory for `nbytes` bytes, and wait for late views."""
        for slab in sorted(self._slabs, key=lambda slab: slab.free.nbytes, reverse=True):
            above = 0 if self._budget is None else self._used() + nbytes - self._budget
            if above <= 0 or not slab.free.nbytes:
                break
            under(slab.lock, functools.partial(self._unlock, slab))
        self._late_views.wait(nbytes, self._used)

    def _unlock(self, slab: RegisteredSlab) -> None:
        registration = slab.registration
        if slab.may_have_views() or (
            registration.registering and not self.unregister(registration)
        ):
            return
        registration.registering = False
        self._slabs.remove(slab)
        slab.release_free()

    def slab_of(self, memory: torch.Tensor) -> RegisteredSlab | None:
        """Return the slab that contains a slot's memory, or None."""
        return self._parts.get(memory.data_ptr())

    # Accounting -------------------------------------------------------------------------------

    def used(self) -> int:
        """Return the bytes of slots that are not detached, and of unused slab memory."""
        with self._accounting:
            return self._used()

    def _used(self) -> int:
        self._collect_returned()
        release_dropped()
        return sum(e.nbytes for e in list(_live.values()) if e.maker is self) - self._detached_bytes

    def set_detached(self, memory: torch.Tensor, spans: object) -> None:
        """Stop counting a slot's memory, which views outlive; with None, count it again."""
        with self._lock:
            self._detached_bytes += memory.nbytes if spans is not None else -memory.nbytes

    def track_user(self, memory: torch.Tensor, user: SlabUser) -> None:
        """Delay the release of memory until the pending events of its user are complete."""
        address = memory.data_ptr()
        slab = self._parts.get(address)
        registration = _live.get(address) if slab is None else slab.registration
        if registration is not None:
            registration.pending[address] = user.pending
        if slab is not None:
            slab.users[address] = weakref.ref(user)

    def close(self) -> None:
        """Retry the releases that failed when the last view was dropped."""
        with self._accounting:
            self._collect_returned()
            self._slabs.clear()  # each is freed with its last slot
        release_dropped()

    def unregister(self, registration: Registration) -> bool:
        """Have the driver unlock memory, once its device work is done.

        Returns whether the memory is unregistered. It stays registered while this thread captures a
        graph, which waiting would break, and if the device is lost.
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
                str(error),  # as text: its frames hold the map
            )
            return False
        return True

    def _is_captured(self) -> bool:
        ask = getattr(self._cuda, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def _selected(self) -> contextlib.AbstractContextManager[object]:
        """Make the device current in the block; the driver would initialise another one."""
        if self._device is None or self._device.index is None:
            return contextlib.nullcontext()
        return torch.accelerator.device_index(self._device.index)

    def _check(self, result: Any, *fine: int) -> None:
        """Raise RuntimeError for an error code, and clear it for later launches of this thread."""
        if int(result):
            clear_last_error(self._cuda.cudart())
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
    """Return uint8 memory of `nbytes` bytes (whole pages) that torch page-locks."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return fresh_memory(nbytes)  # this accelerator has no page-locked memory
    if memory.data_ptr() % PAGE:
        return fresh_memory(nbytes)  # direct reads need whole pages
    return memory
