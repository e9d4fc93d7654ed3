"""Page-locked host memory, between which and an accelerator copies run beside everything else.

Note: unmapping registered memory. The driver goes on copying the pages that it locked, whatever is
mapped at their addresses since: a copy from there gives old bytes, in any library of the process,
and a kernel launch may fail with an error that it has nothing to do with. So each range has one
owner, a `Registration`, which keeps the map. It lets go of the map only when (1) no tensor shows
the memory any more, (2) the device work that uses it is over and (3) the driver has unregistered
it. Until all of that is so the owner is among `_live`, and stays there if it is interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tierstore.model.sizes import PAGE
from tierstore.tiers.pages import LateViews, fresh_map, fresh_memory, leave_to_forks, populate
from tierstore.torch_private import forget_last_error

logger = logging.getLogger("tierstore.tiers")

_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered; HIP has the same number


class Registration:
    """Owner of one map that the driver page-locks. All views of the memory keep `buffer`.

    `pending` are events of device work that uses the memory.
    """

    def __init__(
        self, mapped: mmap.mmap, buffer: ctypes.Array[ctypes.c_uint8], maker: RegisteredMemory
    ) -> None:
        self.address = ctypes.addressof(buffer)
        self.nbytes = len(mapped)
        self.maker = maker
        self.pending: list[torch.Event] = []
        self.registering = False  # from before the driver is asked: it may have done it
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

    Where the driver locks no more (it has limits, and low ones under WSL2), memory stays pageable:
    copies are slower, and right. A warning says so once.

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
        self._late_views = LateViews(budget)
        self._left = 0  # bytes of slots that are left to views
        self._warned = False
        self._lock = threading.Lock()

    def make(self, nbytes: int) -> torch.Tensor:
        """uint8 memory of `nbytes` bytes (whole pages), of zeros, page-locked if that is possible.

        It is unregistered and unmapped when its last view is gone.
        """
        self._late_views.wait(nbytes, self._used)
        mapped = fresh_map(nbytes)
        buffer = (ctypes.c_uint8 * nbytes).from_buffer(mapped)
        registration = Registration(mapped, buffer, self)
        address = registration.address
        _live[address] = registration
        memory = torch.frombuffer(buffer, dtype=torch.uint8)
        # Populate first: registering huge pages is faster than small ones.
        if not populate(address, nbytes):
            memory.fill_(0)  # zeroes it a second time
        leave_to_forks(address, nbytes, False)
        registration.registering = True
        result = self._cuda.cudart().cudaHostRegister(address, nbytes, 0)
        try:
            self._check(result)
        except RuntimeError as error:
            registration.registering = False
            leave_to_forks(address, nbytes, True)
            del _live[address]  # an ordinary map
            self._warn(nbytes, error)
        return memory

    def _used(self) -> int:
        release_dropped()
        return sum(e.nbytes for e in list(_live.values()) if e.maker is self) - self._left

    def leave(self, memory: torch.Tensor, spans: object) -> None:
        """Stop counting a slot's memory, which views outlive; with None, count it again."""
        with self._lock:
            self._left += memory.nbytes if spans is not None else -memory.nbytes

    def keep_for(self, memory: torch.Tensor, pending: list[torch.Event]) -> None:
        """Let device work use the memory up to the events that are in `pending` when it goes."""
        registration = _live.get(memory.data_ptr())
        if registration is not None:
            registration.pending = pending

    def close(self) -> None:
        """Release what could not be released when its last view went."""
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
                for event in list(registration.pending):
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
