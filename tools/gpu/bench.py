"""What the three commands share: the device, a place for files, options, speeds."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from tierstore.cli.disk_speed import SMALLEST, DiskSpeed, measure
from tierstore.tiers.arena import host_arena
from tools.gpu.lines import Figures, Group, Run, Unavailable, chosen

SECONDS = 570.0
"""A command ends after so many seconds, within ten minutes."""

CYCLES_PER_SECOND = 1.7e9
"""About as many as a data centre's GPU makes: delays need not be exact."""

PACKAGES = ("torch", "tierstore", "diffusers", "accelerate", "torchtune", "torchao", "deepspeed")


class Accelerator:
    """A device, asked in the words that torch's device modules share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)

    def synchronize(self) -> None:
        """Wait for all of its work."""
        self.module.synchronize(self.device)

    def reserved(self) -> int:
        """Bytes that torch's allocator has of the device."""
        return int(self.module.memory_reserved(self.device))

    def allocated(self) -> int:
        """Bytes of the tensors there."""
        return int(self.module.memory_allocated(self.device))

    def peak_reserved(self) -> int:
        """The most bytes that were reserved since `start_over`."""
        return int(self.module.max_memory_reserved(self.device))

    def start_over(self) -> None:
        """Give back what nobody uses, and begin peaks anew."""
        gc.collect()
        self.synchronize()
        self.module.empty_cache()
        self.module.reset_peak_memory_stats(self.device)

    @contextmanager
    def limited(self, nbytes: int | None) -> Iterator[None]:
        """Inside, torch's allocator may reserve so many bytes, as on a smaller device."""
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
        """Let the device be busy, in the current stream, before what comes next there."""
        if self.device.type == "cuda":
            self.module._sleep(int(seconds * CYCLES_PER_SECOND))
            return
        busy = torch.ones(8, device=self.device)
        for _ in range(64):
            busy = busy + 1


class Bench:
    """Where and on what a command measures.

    `figures` are those of the lines that were measured before, by name: later ones refer to them.
    """

    def __init__(self, device: torch.device, small: bool, place: Path) -> None:
        self.device = device
        self.small = small
        self.place = place
        self.accelerator = Accelerator(device)
        self.figures: dict[str, Figures] = {}

    def keep(self, name: str, action: Callable[[], Figures]) -> Callable[[], Figures]:
        """The same, and its figures are known from then on."""

        def measured() -> Figures:
            found = self.figures[name] = dict(action())
            return found

        return measured

    def figure(self, line: str, name: str) -> float:
        """A figure of another line. Raises Unavailable if that has none."""
        found = self.figures.get(line, {}).get(name)
        if found is None:
            raise Unavailable(f"needs the line {line!r}")
        return found

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A directory that is gone afterwards: disks are small beside what is written here."""
        with tempfile.TemporaryDirectory(dir=self.place) as name:
            yield Path(name)

    @functools.cached_property
    def disk(self) -> DiskSpeed:
        """How fast the disk is, past the page cache."""
        return measure(str(self.place), SMALLEST if self.small else 4 << 30)

    @property
    def disk_speed(self) -> float:
        """Bytes per second that reads reach."""
        return self.disk.read

    @functools.cached_property
    def link_speed(self) -> float:
        """Bytes per second from page-locked memory of a store to the device."""
        return self.copy_speed(self.store_memory(self.scaled(256 << 20, 1 << 20)))

    def store_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory as a store has it for this device."""
        arena = host_arena(None, self.device)
        return arena.fill(arena.take(nbytes))

    def copy_speed(self, memory: torch.Tensor, *, back: bool = False) -> float:
        """Bytes per second from host memory to the device, or back: a median of five."""
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
        """A size: that of a real run, or that of a trial."""
        return small if self.small else full


def installed(package: str) -> None:
    """Raises Unavailable where a package is not installed, or cannot be imported."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error.name} is not installed") from error


def cpu_seconds() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# What a file says of where it comes from ----------------------------------------------------------


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine, for a page to name."""
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
    """The version of a package that is installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _said_by(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


# The command line ---------------------------------------------------------------------------------


def command(
    name: str,
    about: str,
    groups: Callable[[Bench], Sequence[Group]],
    words: Sequence[str] | None = None,
) -> int:
    """Run one of the commands with these words, or those of the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.gpu.{name}", description=about)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", default="cuda", help="the device (cuda)")
    parser.add_argument("--setup", help="a module whose load() makes the device known to torch")
    parser.add_argument("--dir", type=Path, help="where weights and stores have their files")
    parser.add_argument("--small", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="when to stop (570)")
    parser.add_argument("--only", action="append", default=[], help="a group or a line")
    options = parser.parse_args(words)
    if options.setup:
        importlib.import_module(options.setup).load()
    try:
        device = found_device(options.device)
        place = Path(tempfile.mkdtemp(prefix="tierstore-gpu-", dir=options.dir))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    tidy = functools.partial(shutil.rmtree, place, ignore_errors=True)
    try:
        bench = Bench(device, options.small, place)
        selected = chosen(groups(bench), options.only)
        said = {
            "command": name,
            "small": options.small,
            "began": time.strftime("%Y-%m-%d %H:%M:%S"),
            "hardware": hardware(device),
        }
        return Run(selected, options.out, said, options.seconds, tidy=tidy).run()
    except ValueError as error:
        parser.error(str(error))
    finally:
        tidy()


def found_device(name: str) -> torch.device:
    """The device with its index. Raises ValueError if it is not here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        raise ValueError(
            f"there is no {device.type} device here; on the tests' pretend accelerator: "
            "--device pretend --setup tests.device.pretend"
        )
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= torch.accelerator.device_count():
        raise ValueError(f"there is no device {device}")
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)
