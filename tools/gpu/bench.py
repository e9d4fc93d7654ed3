"""Shared by all parts: the device, a directory for files, figures and speeds."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from tierstore.tiers.arena import host_arena
from tierstore.tiers.disk_speed import SMALLEST, DiskSpeed, measure
from tools.gpu.lines import Figures, Postponed, Unavailable

SETUP = {"pretend": "tests.device.pretend"}
"""Modules whose `load()` registers a device with torch."""

CYCLES_PER_SECOND = 1.7e9
"""Approximate clock of a data-centre GPU; delays need not be exact."""

PACKAGES = ("torch", "tierstore", "diffusers", "accelerate", "torchtune", "torchao", "deepspeed")


class Accelerator:
    """A device, through the functions common to torch's device modules."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)

    def synchronize(self) -> None:
        """Block until all work on the device is done."""
        self.module.synchronize(self.device)

    def reserved(self) -> int:
        """Return the bytes of device memory that torch's allocator has reserved."""
        return int(self.module.memory_reserved(self.device))

    def allocated(self) -> int:
        """Return the bytes of tensors on the device."""
        return int(self.module.memory_allocated(self.device))

    def peak_reserved(self) -> int:
        """Return the peak of reserved bytes since `reset`."""
        return int(self.module.max_memory_reserved(self.device))

    def reset(self) -> None:
        """Free cached device memory, and reset the peaks."""
        gc.collect()
        self.synchronize()
        self.module.empty_cache()
        self.module.reset_peak_memory_stats(self.device)

    @contextmanager
    def limited(self, nbytes: int | None) -> Iterator[None]:
        """In the block, limit torch's allocator to `nbytes` bytes, as on a smaller device."""
        if nbytes is not None:
            self._limit(nbytes)
        try:
            yield
        finally:
            if nbytes is not None:
                self._limit(None)

    def _limit(self, nbytes: int | None) -> None:
        if self.device.type == "cuda":
            total = self.module.get_device_properties(self.device).total_memory
            share = 1.0 if nbytes is None else min(1.0, nbytes / total)
            self.module.set_per_process_memory_fraction(share, self.device)
        elif hasattr(self.module, "set_memory_limit"):
            self.module.set_memory_limit(nbytes, self.device)

    def delay(self, seconds: float) -> None:
        """Keep the device busy for `seconds` in the current stream."""
        if self.device.type == "cuda":
            self.module._sleep(int(seconds * CYCLES_PER_SECOND))
            return
        busy = torch.ones(8, device=self.device)
        for _ in range(64):
            busy = busy + 1


class Bench:
    """The environment of a part: device, sizes, directory, and the deadline `ends` (monotonic).

    `figures` are those of finished lines, by name, for lines that refer to them.
    """

    def __init__(self, device: torch.device, small: bool, place: Path, ends: float) -> None:
        self.device = device
        self.small = small
        self.place = place
        self.ends = ends
        self.accelerator = Accelerator(device)
        self.arena = host_arena
        self.figures: dict[str, Figures] = {}

    def figure(self, line: str, name: str) -> float:
        """Return a figure of another line.

        Raises Postponed if the line was not measured yet, and Unavailable if it has no such figure.
        """
        if line not in self.figures:
            raise Postponed(f"needs the line {line!r}")
        found = self.figures[line].get(name)
        if found is None:
            raise Unavailable(f"needs the line {line!r}")
        return found

    def differing(self, found: float, reference: str) -> float:
        """Return 1.0 if a checksum differs from that of the line `reference`, else 0.0."""
        return float(found != self.figure(reference, "checksum"))

    @contextmanager
    def locking(self) -> Iterator[list[float]]:
        """In the block, record the seconds of each page-locking call of the driver in a list."""
        seconds: list[float] = []
        real = getattr(self.accelerator.module, "cudart", None)
        if real is None:
            yield seconds
            return

        class Timed:
            def cudaHostRegister(self, *words: int) -> Any:
                began = time.perf_counter()
                try:
                    return real().cudaHostRegister(*words)
                finally:
                    seconds.append(time.perf_counter() - began)

            def __getattr__(self, name: str) -> Any:
                return getattr(real(), name)

        with mock.patch.object(self.accelerator.module, "cudart", Timed):
            yield seconds

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield a directory that is deleted afterwards, since the files are large."""
        with tempfile.TemporaryDirectory(dir=self.place, ignore_cleanup_errors=True) as name:
            yield Path(name)

    @functools.cached_property
    def disk(self) -> DiskSpeed:
        """Measure the speed of the disk with direct I/O."""
        return measure(str(self.place), SMALLEST if self.small else 4 << 30)

    @functools.cached_property
    def disk_speed(self) -> float:
        """Return the disk's read bandwidth in bytes per second, from the line `disk` if done."""
        known = self.figures.get("disk", {}).get("read_gb_per_second")
        return self.disk.read if known is None else known * 1e9

    @functools.cached_property
    def link_speed(self) -> float:
        """Return the bandwidth from page-locked memory to the device, from the line `link` if done.

        In bytes per second.
        """
        known = self.figures.get("link", {}).get("onload_gb_per_second")
        if known is not None:
            return known * 1e9
        with self.store_memory(self.scaled(256 << 20, 1 << 20)) as memory:
            return self.copy_speed(memory)

    @contextmanager
    def store_memory(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield host memory as a store allocates it for this device.

        Afterwards it is unregistered and unmapped, once the device has finished using it: memory
        that is unmapped while registered corrupts later mappings.
        """
        arena = self.arena(None, self.device)
        slot = arena.take(nbytes)
        try:
            yield arena.fill(slot)
        finally:
            self.accelerator.synchronize()
            arena.release(slot, keep=False)
            arena.close()

    def copy_speed(self, memory: torch.Tensor, *, back: bool = False) -> float:
        """Return the copy bandwidth to the device, or `back`: bytes per second, median of five."""
        there = torch.empty_like(memory, device=self.device)
        source, target = (there, memory) if back else (memory, there)
        target.copy_(source, non_blocking=True)
        rates = []
        for _ in range(5):
            self.accelerator.synchronize()
            started = time.perf_counter()
            for _ in range(5):
                target.copy_(source, non_blocking=True)
            self.accelerator.synchronize()
            rates.append(5 * memory.nbytes / (time.perf_counter() - started))
        return statistics.median(rates)

    def scaled(self, full: int, small: int) -> int:
        """Return the size for a full run, or the one for a trial."""
        return small if self.small else full


def installed(package: str) -> None:
    """Raise Unavailable if a package is not installed or cannot be imported."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error.name} is not installed") from error


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return a checksum of the bits of tensors."""
    found = 0
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found = zlib.crc32(data.numpy().data, found)
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# Provenance of results ----------------------------------------------------------------------------


def hardware(device: torch.device) -> dict[str, Any]:
    """Describe the machine, for a page."""
    accelerator = Accelerator(device)
    found: dict[str, Any] = {
        "device": str(device),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
        "commit": _said_by("git", "rev-parse", "HEAD"),
    }
    if device.type == "cuda":
        properties = accelerator.module.get_device_properties(device)
        found["name"] = properties.name
        found["device_gib"] = round(properties.total_memory / 2**30, 1)
        found["cuda"] = torch.version.cuda
        found["link"] = _said_by(
            "nvidia-smi",
            f"--id={device.index or 0}",
            "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current",
            "--format=csv,noheader",
        )
    else:
        found["name"] = f"{device.type} (no GPU)"
    return found


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _said_by(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def found_device(name: str) -> torch.device:
    """Return the device with its index. Raises ValueError if it does not exist."""
    kind = name.partition(":")[0]
    if kind in SETUP:
        importlib.import_module(SETUP[kind]).load()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        raise ValueError(
            f"there is no {device.type} device: use --device pretend for the tests' pretend "
            "accelerator"
        )
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= torch.accelerator.device_count():
        raise ValueError(f"there is no device {device}")
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)
