"""Bandwidths that later parts refer to, and the cost per group: 64 groups, a quarter on the device.

The loop by hand is minimal offloading: weights in torch's page-locked memory, six slots on the
device, copies on a side stream, events. It uses as much device memory as the store: ten resident
groups, besides its slots.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import nn

from tierstore import TierStore, enable_group_offload
from tierstore.system.machine import direct_reads, huge_pages
from tools.gpu.bench import Bench, checksum
from tools.gpu.lines import Figures, Goal, Group, Line

SIZES = (2, 8, 32)
"""Group sizes in MiB (in KiB for a trial)."""
COUNT, ON_DEVICE, SLOTS = 64, 16, 6
WARM_UP, PASSES = 4, 10

Forward = Callable[[torch.Tensor], torch.Tensor]
Prepared = Callable[[nn.Sequential, Path], AbstractContextManager[Forward]]


class Machine:
    """Measurements of the machine."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.device = bench.device
        self.accelerator = bench.accelerator

    def environment(self) -> Figures:
        """Check the system features that a store uses."""
        place = str(self.bench.place)
        return {
            "direct_reads": float(direct_reads(place) == "yes"),
            "huge_pages": float(huge_pages() in ("always", "madvise")),
            "pagemap": float(os.access("/proc/self/pagemap", os.R_OK)),
        }

    def disk(self) -> Figures:
        """Measure the disk with the store's own read and write code."""
        found = self.bench.disk
        return {
            "read_gb_per_second": found.read / 1e9,
            "write_gb_per_second": found.new / 1e9,
            "overwrite_gb_per_second": found.again / 1e9,
            "direct": float(found.direct),
        }

    def registering(self) -> Figures:
        """Measure the milliseconds to create and free page-locked memory, by size."""
        figures = {}
        for size in [1, 16, 256, 1024] if not self.bench.small else [1, 2]:
            began = time.perf_counter()
            with self.bench.store_memory(size << 20):
                made = time.perf_counter()
            figures[f"make_{size}_mib_ms"] = 1e3 * (made - began)
            figures[f"unmake_{size}_mib_ms"] = 1e3 * (time.perf_counter() - made)
        return figures

    def link(self) -> Figures:
        """Measure copies from and to a store's memory, compared to torch's page-locked memory."""
        nbytes = self.bench.scaled(256 << 20, 1 << 20)
        theirs = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        plain = torch.ones(nbytes, dtype=torch.uint8)
        figures = {}
        with self.bench.store_memory(nbytes) as ours:
            for name, back in ("onload", False), ("offload", True):
                speed, other = (self.bench.copy_speed(m, back=back) / 1e9 for m in (ours, theirs))
                figures[f"{name}_gb_per_second"] = speed
                figures[f"{name}_to_pin_memory"] = speed / other
        figures["pageable_gb_per_second"] = self.bench.copy_speed(plain) / 1e9
        return figures

    def launches(self) -> Figures:
        """Measure the duration of a launch when idle, and while memory is being page-locked."""
        idle = self._launch_seconds(lambda: time.sleep(0.01))
        nbytes = self.bench.scaled(256 << 20, 1 << 20)

        def register() -> None:
            with self.bench.store_memory(nbytes):
                pass

        busy = self._launch_seconds(register)
        return {
            "idle_us": 1e6 * statistics.median(idle),
            "registering_us": 1e6 * statistics.median(busy),
            "longest_registering_us": 1e6 * max(busy),
        }

    def _launch_seconds(self, meanwhile: Callable[[], object]) -> list[float]:
        x = torch.ones(8, device=self.device)
        ended = threading.Event()

        def others() -> None:
            try:
                self.accelerator.module.set_device(self.device)
                for _ in range(self.bench.scaled(20, 2)):
                    meanwhile()
            finally:
                ended.set()

        thread = threading.Thread(target=others)
        thread.start()
        seconds: list[float] = []
        try:
            while not ended.is_set() or not seconds:
                began = time.perf_counter()
                x.add_(1)
                seconds.append(time.perf_counter() - began)
                if len(seconds) % 100 == 0:
                    self.accelerator.synchronize()
        finally:
            thread.join()
        return seconds

    def group(self) -> Group:
        """Return the lines from which later parts derive their bounds."""
        names = ("onload_to_pin_memory", "offload_to_pin_memory")
        as_fast = [Goal(name, at_least=0.95) for name in names]
        lines = [
            Line("disk", "past the page cache", self.disk, seconds=15),
            Line("link", "copies beside torch's own page-locked memory", self.link, as_fast),
            Line("environment", "1 for yes, 0 for no", self.environment, seconds=1),
            Line("registering", "making and unmaking slots", self.registering),
            Line("launches", "while another thread page-locks", self.launches, seconds=10),
        ]
        return Group("machine", lines)


# The cost of a group ------------------------------------------------------------------------------


class Layer(nn.Module):
    """A group: one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class PerGroup:
    """Passes through 64 layers, whose groups have `nbytes` bytes."""

    def __init__(self, bench: Bench, size: int) -> None:
        self.bench = bench
        self.name = f"{size} {'KiB' if bench.small else 'MiB'}"
        self.nbytes = size << (10 if bench.small else 20)

    def layers(self) -> nn.Sequential:
        """Return the model, always the same."""
        width = round((self.nbytes // 2) ** 0.5)
        torch.manual_seed(0)
        return nn.Sequential(*(Layer(width) for _ in range(COUNT))).requires_grad_(False)

    def run(self, prepared: Prepared) -> Figures:
        """Measure the median seconds of a pass."""
        accelerator = self.bench.accelerator
        accelerator.reset()
        layers = self.layers()
        width = layers[0].linear.in_features
        rows = self.bench.scaled(256, 8)
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
        x = x.to(self.bench.device, torch.bfloat16)
        seconds = []
        with torch.no_grad(), self.bench.folder() as place, prepared(layers, place) as forward:
            for _ in range(WARM_UP + PASSES):
                accelerator.synchronize()
                began = time.perf_counter()
                y = forward(x)
                accelerator.synchronize()
                seconds.append(time.perf_counter() - began)
            found = checksum([y])
        return {
            "seconds": statistics.median(seconds[WARM_UP:]),
            "slowest_seconds": max(seconds[WARM_UP:]),
            "checksum": found,
        }

    @contextmanager
    def resident(self, layers: nn.Sequential, place: Path) -> Iterator[Forward]:
        yield layers.to(self.bench.device)

    @contextmanager
    def by_hand(self, layers: nn.Sequential, place: Path) -> Iterator[Forward]:
        device = self.bench.device
        kept = ON_DEVICE - SLOTS
        stay = {number * COUNT // kept for number in range(kept)}
        moving = [n for n in range(COUNT) if n not in stay]
        for number in stay:
            layers[number].to(device)
        pinned = [layers[n].linear.weight.pin_memory() for n in moving]
        slots = [torch.empty_like(pinned[0], device=device) for _ in range(SLOTS)]
        side, main = torch.Stream(device), torch.accelerator.current_stream()
        ready, free = ([torch.Event(device) for _ in range(SLOTS)] for _ in range(2))
        for event in free:
            event.record(main)

        def onload(turn: int) -> None:
            slot = turn % SLOTS
            side.wait_event(free[slot])
            with side:
                slots[slot].copy_(pinned[turn % len(pinned)], non_blocking=True)
            ready[slot].record(side)

        turn = 0

        def forward(x: torch.Tensor) -> torch.Tensor:
            nonlocal turn
            for number, layer in enumerate(layers):
                if number in stay:
                    x = layer(x)
                    continue
                slot = turn % SLOTS
                main.wait_event(ready[slot])
                x = torch.tanh(nn.functional.linear(x, slots[slot]))
                free[slot].record(main)
                onload(turn + SLOTS)
                turn += 1
            return x

        for number in range(SLOTS):
            onload(number)
        yield forward
        self.bench.accelerator.synchronize()

    @contextmanager
    def ours(self, layers: nn.Sequential, place: Path) -> Iterator[Forward]:
        with TierStore(
            2 * COUNT * self.nbytes,
            place / "store",
            device=self.bench.device,
            device_budget=ON_DEVICE * max(self.nbytes, 4096),
        ) as store:
            enable_group_offload(layers, store, offload_type="leaf_level", group_size=self.nbytes)
            yield layers
            self.stats = store.stats()
            keys = [group.key for group in store.snapshot().groups]
            self.groups = sum(not key.startswith("weights/") for key in keys)  # repartitioned

    def compared(self, prepared: Prepared, moving: int) -> dict[str, float]:
        """Compare a pass to the bound: computing, or moving `moving` groups over the link."""
        compute = self.bench.figure(f"{self.name}, resident", "seconds")
        figures = dict(self.run(prepared))
        bound = max(compute, moving * self.nbytes / self.bench.link_speed)
        return figures | {
            "differing": self.bench.differing(int(figures["checksum"]), f"{self.name}, resident"),
            "to_resident": figures["seconds"] / compute,
            "to_bound": figures["seconds"] / bound,
            "us_per_group": 1e6 * (figures["seconds"] - bound) / COUNT,
        }

    def store(self) -> Figures:
        """Compare the store to the loop by hand."""
        by_hand = self.bench.figure(f"{self.name}, by hand", "seconds")
        figures = self.compared(self.ours, COUNT - ON_DEVICE)
        return figures | {
            "to_by_hand": figures["seconds"] / by_hand,
            "groups": self.groups,
            "onloaded_to_least": self.stats.bytes_onloaded
            / ((WARM_UP + PASSES) * (COUNT - ON_DEVICE) * self.nbytes),
        }

    def group(self) -> Group:
        """Return the lines of one group size."""
        name, moving = self.name, COUNT - ON_DEVICE
        equal, all_groups = Goal("differing", at_most=0), Goal("groups", COUNT, COUNT)

        def by_hand() -> Figures:
            return self.compared(self.by_hand, moving + SLOTS)

        lines = [
            Line(f"{name}, resident", "all on the GPU", lambda: self.run(self.resident)),
            Line(f"{name}, by hand", "ten groups on the GPU, and six slots", by_hand, [equal]),
            Line(f"{name}, a store", "16 groups of the GPU", self.store, [equal, all_groups]),
        ]
        return Group(f"64 groups of {name}", lines)


def groups(bench: Bench) -> Sequence[Group]:
    """Return the lines of this part."""
    return [Machine(bench).group(), *(PerGroup(bench, size).group() for size in SIZES)]
