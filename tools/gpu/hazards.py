"""Hazards of page-locked memory that is unmapped before it is unregistered.

The device then reads stale values from memory that is later mapped at the same addresses, in any
library of the process. Each line may leave the driver in that state, so it is the last of its
process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from tierstore.tiers.arena import host_arena
from tools.gpu.bench import Bench
from tools.gpu.lines import Figures, Goal, Group, Line, Unavailable

OLD, NEW = 7, 9


class Pages:
    """mmap and munmap of the C library, at given addresses."""

    READ_WRITE = 1 | 2
    FLAGS = 0x02 | 0x20 | 0x100000  # private, anonymous, nothing replaced

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3]
        self._library.mmap.argtypes += [ctypes.c_long]
        self._library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def map(self, nbytes: int, address: int | None, value: int) -> torch.Tensor:
        """Return new memory, at `address` if given, filled with `value`.

        Raises Unavailable if the addresses are in use.
        """
        flags = self.FLAGS if address else 0x02 | 0x20
        found = self._library.mmap(address, nbytes, self.READ_WRITE, flags, -1, 0)
        if found == ctypes.c_void_p(-1).value:
            raise Unavailable(f"the addresses are in use: {os.strerror(ctypes.get_errno())}")
        memory = (ctypes.c_uint8 * nbytes).from_address(found)
        return torch.frombuffer(memory, dtype=torch.uint8).fill_(value)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap memory."""
        self._library.munmap(address, nbytes)


class Hazards:
    """The lines."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.module: Any = bench.accelerator.module
        self.nbytes = bench.scaled(64 << 20, 1 << 20)

    def runtime(self) -> Any:
        """The driver's functions that register memory. Raises Unavailable if there are none."""
        if not hasattr(self.module, "cudart"):
            raise Unavailable(f"{self.bench.device.type} registers no memory")
        return self.module.cudart()

    def launch_raises(self) -> float:
        """Return 1.0 if a launch on this thread reports an earlier call's error, else 0.0."""
        try:
            torch.ones(8, device=self.bench.device).add_(1)
            self.bench.accelerator.synchronize()
        except RuntimeError:
            return 1.0
        return 0.0

    def unmapped(self) -> Figures:
        """Map, register, unmap and map again, and check whether the device reads old memory.

        Raises Unavailable on a device that neither raises an error nor reads old memory.
        """
        runtime, pages = self.runtime(), Pages()
        old = pages.map(self.nbytes, None, OLD)
        address = old.data_ptr()
        if code := int(runtime.cudaHostRegister(address, self.nbytes, 0)):
            raise RuntimeError(f"cudaHostRegister returned {code}")
        try:
            pages.unmap(address, self.nbytes)
            new = pages.map(self.nbytes, address, NEW)
            found = new.to(self.bench.device).cpu()
            pinned = new.is_pinned()
            again = int(runtime.cudaHostRegister(address, self.nbytes, 0))
        except RuntimeError:
            return {"raised": 1.0}
        stale = int((found == OLD).sum()) / self.nbytes
        if self.bench.device.type != "cuda" and not stale:
            raise Unavailable(f"{self.bench.device.type} does not detect the hazard")
        return {
            "raised": 0.0,
            "stale": stale,
            "pinned": float(pinned),
            "registering_again": float(again),
            "launch_raises": self.launch_raises(),
        }

    def dropped(self) -> Figures:
        """Drop an arena without closing it, and check that its addresses can be reused."""
        runtime = self.runtime()
        address = self._dropped_address()
        gc.collect()
        new = Pages().map(self.nbytes, address, NEW)
        wrong = int((new.to(self.bench.device) != NEW).sum())
        refused = int(runtime.cudaHostRegister(address, self.nbytes, 0))
        if not refused:
            runtime.cudaHostUnregister(address)
        return {"wrong": wrong, "refused": refused, "launch_raises": self.launch_raises()}

    def _dropped_address(self) -> int:
        arena = host_arena(None, self.bench.device)
        memory = arena.fill(arena.take(self.nbytes)).fill_(OLD)
        memory.to(self.bench.device)
        return memory.data_ptr()

    def refused(self) -> Figures:
        """Make the driver reject a registration; expect one warning and correct values."""
        asked: list[int] = []
        with self._refusing(asked), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with self.bench.store_memory(self.nbytes) as memory:
                if not asked:
                    raise Unavailable(f"a store registers no memory for {self.bench.device.type}")
                raises = self.launch_raises()
                wrong = int((memory.fill_(NEW).to(self.bench.device) != NEW).sum())
        warned = sum("page-lock" in str(each.message) for each in caught)
        return {"warnings": warned, "wrong": wrong, "launch_raises": raises}

    @contextmanager
    def _refusing(self, asked: list[int]) -> Iterator[None]:
        real = self.runtime()

        class Refusing:
            def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
                asked.append(nbytes)
                return real.cudaHostRegister(address, 0, flags)  # the driver's own error

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        with mock.patch.object(self.module, "cudart", Refusing):
            yield


def groups(bench: Bench) -> Sequence[Group]:
    """Return the lines of this part."""
    hazards = Hazards(bench)
    right = [Goal("wrong", at_most=0), Goal("launch_raises", at_most=0)]
    warned = [Goal("warnings", 1, 1), *right]
    refused = [Goal("refused", at_most=0), *right]
    about = "the hazard itself, without a store: raw shares and error codes"
    lines = [
        Line("a refused registration", "by the driver", hazards.refused, warned),
        Line("a dropped arena", "its addresses, mapped again", hazards.dropped, refused),
        Line("unmapped while registered", about, hazards.unmapped, peer=True),
    ]
    return [Group("hazards", [replace(line, poisons=True) for line in lines])]
