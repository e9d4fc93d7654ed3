"""Page-locked host memory, between which and an accelerator copies run beside everything else."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from tierstore.model.sizes import PAGE
from tierstore.tiers.pages import fresh_memory, leave_to_forks, populate


class RegisteredMemory:
    """Maps of our own that CUDA page-locks: torch's allocator would round to a power of two.

    Where the driver locks no more (it has limits, and low ones under WSL2), memory stays pageable:
    copies are slower, and right. A warning says so once.

    A fork would copy every locked page at once, as a device may write to it: each worker of a
    DataLoader could take the whole budget. So forked processes do not get them.

    `cuda` has the driver's functions: torch.cuda, or what stands for it.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._registered: set[int] = set()  # addresses
        self._warned = False
        self._lock = threading.Lock()

    def make(self, nbytes: int) -> torch.Tensor:
        """uint8 memory of `nbytes` bytes (whole pages), page-locked if that is possible."""
        memory = fresh_memory(nbytes)
        address = memory.data_ptr()
        # Populate first: registering huge pages is faster than small ones.
        if not populate(address, nbytes):
            memory.fill_(0)  # zeroes it a second time
        leave_to_forks(address, nbytes, False)
        # An error stays the last one of this thread, where a launch of a kernel would look for its
        # own. No kernel is launched by the threads that make memory.
        result = self._cuda.cudart().cudaHostRegister(address, nbytes, 0)
        try:
            self._cuda.check_error(int(result))
        except RuntimeError as error:
            leave_to_forks(address, nbytes, True)
            self._warn(nbytes, error)
        else:
            self._registered.add(address)
        return memory

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

    def unmake(self, memory: torch.Tensor) -> None:
        """The driver lets go of the memory. It goes with the last view of it."""
        address = memory.data_ptr()
        if address in self._registered:
            self._registered.remove(address)
            self._cuda.check_error(int(self._cuda.cudart().cudaHostUnregister(address)))
            leave_to_forks(address, memory.nbytes, True)


def pinned_memory(nbytes: int) -> torch.Tensor:
    """uint8 memory of `nbytes` bytes (whole pages) that torch page-locks for other accelerators."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return fresh_memory(nbytes)  # this accelerator has no page-locked memory
    if memory.data_ptr() % PAGE:
        return fresh_memory(nbytes)  # direct reads need whole pages
    return memory
