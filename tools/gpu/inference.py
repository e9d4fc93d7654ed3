"""Inference: a transformer of the size of FLUX.1-dev denoises with half of its weights on the GPU.

23.8 GB of weights, 4,096 + 512 tokens, 2 warm-up steps and 6 measured ones; slow peers run 1 and 2.
Each contender except the resident model may reserve 24 GB of the GPU, as on a smaller one, and a
store gets 12 GB of that. The lower bound of a step is the longest of: computing, copying the groups
that are not on the device, reading those that are not in RAM. Figures are medians over steps.
Figures of the first step are named as such; its parts (reading, page-locking, computing) overlap.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, enable_group_offload
from tools.gpu import flux_shaped
from tools.gpu.bench import Bench, checksum, cpu_seconds, installed
from tools.gpu.flux_shaped import FluxShaped
from tools.gpu.lines import Figures, Goal, Group, Line

RESIDENT, IN_RAM, HALF, QUARTER = "resident", "all in RAM", "half in RAM", "a quarter in RAM"
STREAMED = "diffusers, from RAM on a stream"
TIGHT = "a budget of 0.8 GB"

EQUAL = Goal("differing", at_most=0)
WITHIN = Goal("device_budgets_taken", at_most=1)


Steps = tuple[int, int]
"""Numbers of warm-up steps and of measured steps."""
STEPS: Steps = (2, 6)
FEW: Steps = (1, 2)


@dataclass(frozen=True)
class Case:
    """A model and its device memory in bytes: `limit` in all, `device` for the store."""

    shape: flux_shaped.Shape
    limit: int | None
    device: int
    tight: int


FULL = Case(flux_shaped.FLUX_1_DEV, 24 * 10**9, 12 * 10**9, 8 * 10**8)
SMALL = Case(flux_shaped.SMALL, None, 96_000, 48_000)

Prepared = Callable[[Path], AbstractContextManager[tuple[FluxShaped, TierStore | None]]]


class Inference:
    """The contenders."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.case = SMALL if bench.small else FULL

    @property
    def checkpoint(self) -> Path:
        """The weight files; the first process that needs them writes them for all."""
        place = self.bench.place / "checkpoint"
        if not place.exists():
            draft = place.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)  # left by a crashed process
            flux_shaped.save(self.case.shape, draft, self.bench.device).rename(place)
        return place

    @property
    def weights(self) -> int:
        """Bytes of all weights of the model."""
        return flux_shaped.weight_bytes(flux_shaped.on_meta(self.case.shape))

    # Contenders ------------------------------------------------------------------------------

    @contextmanager
    def resident(self, place: Path) -> Iterator[tuple[FluxShaped, None]]:
        yield self._in_ram().to(self.bench.device), None

    def ours(self, ram: float, device: int, **cut: Any) -> Prepared:
        """Use a store with RAM for `ram` of the weights, and `device` bytes of device memory."""

        @contextmanager
        def prepared(place: Path) -> Iterator[tuple[FluxShaped, TierStore]]:
            model = flux_shaped.load(self.case.shape, self.checkpoint)
            with TierStore(
                int(ram * self.weights),
                place / "store",
                device=self.bench.device,
                device_budget=device,
            ) as store:
                enable_group_offload(model, store, **cut)
                yield model, store  # no `disable`, which would need memory for an ordinary model

        return prepared

    def by_diffusers(self, folder: str | None) -> Prepared:
        @contextmanager
        def prepared(place: Path) -> Iterator[tuple[FluxShaped, None]]:
            installed("diffusers")
            from diffusers.hooks import apply_group_offloading

            model = self._in_ram()
            apply_group_offloading(
                model,
                onload_device=self.bench.device,
                offload_device=torch.device("cpu"),
                offload_type="block_level",
                num_blocks_per_group=1,
                use_stream=True,
                record_stream=True,
                offload_to_disk_path=str(place / folder) if folder else None,
            )
            yield model, None

        return prepared

    def by_accelerate(self, on_disk: bool) -> Prepared:
        @contextmanager
        def prepared(place: Path) -> Iterator[tuple[FluxShaped, None]]:
            installed("accelerate")
            import accelerate

            model = self._in_ram()
            if on_disk:
                accelerate.disk_offload(model, str(place), execution_device=self.bench.device)
            else:
                accelerate.cpu_offload(model, execution_device=self.bench.device)
            yield model, None

        return prepared

    def _in_ram(self) -> FluxShaped:
        return flux_shaped.load(self.case.shape, self.checkpoint, in_ram=True)

    # Measuring -------------------------------------------------------------------------------

    def run(
        self, prepared: Prepared, *, limited: bool = True, steps: Steps = STEPS
    ) -> dict[str, float]:
        """Denoise with a contender."""
        case, accelerator, (warm_up, counted) = self.case, self.bench.accelerator, steps
        _ = self.checkpoint  # write it before timing
        accelerator.reset()
        base = accelerator.reserved()
        entered = time.perf_counter()
        with (
            self.bench.folder() as place,
            accelerator.limited(case.limit if limited else None),
            self.bench.locking() as locking,
            prepared(place) as (model, store),
        ):
            seconds, cpu, moved, checksums = [], [], [], []
            first: dict[str, float] = {"setup_seconds": time.perf_counter() - entered}
            began, used = time.perf_counter(), cpu_seconds()
            for image in flux_shaped.denoise(model, warm_up + counted, self.bench.device):
                accelerator.synchronize()
                seconds.append(time.perf_counter() - began)
                cpu.append(cpu_seconds() - used)
                if store is not None:
                    stats = store.stats()
                    moved.append((stats.bytes_onloaded, stats.bytes_read))
                    if len(seconds) == 1:
                        first["first_reading_seconds"] = stats.busy_seconds.get("DISK>HOST", 0.0)
                        first["first_locking_seconds"] = sum(locking)
                checksums.append(checksum([image]))
                began, used = time.perf_counter(), cpu_seconds()
            figures = {
                "seconds": statistics.median(seconds[warm_up:]),
                "cpu_seconds": statistics.median(cpu[warm_up:]),
                "peak_reserved_gb": (accelerator.peak_reserved() - base) / 1e9,
                **first,
                "first_seconds": seconds[0],
            }
            if store is not None:
                figures |= self._of_the_store(store, moved[warm_up - 1], moved[-1], counted)
        accelerator.reset()
        return figures | {f"checksum_{n}": found for n, found in enumerate(checksums, start=1)}

    def _of_the_store(
        self, store: TierStore, first: tuple[int, int], last: tuple[int, int], steps: int
    ) -> dict[str, float]:
        stats = store.stats()
        onloaded, read = ((b - a) / steps for a, b in zip(first, last, strict=True))
        budget = stats.budget_bytes["DEVICE"] or 1
        return {
            "overlap": stats.overlap,
            "onloaded_gb": onloaded / 1e9,
            "read_gb": read / 1e9,
            "groups": float(len(store.snapshot().groups)),
            "device_budgets_taken": stats.peak_bytes["DEVICE"] / budget,
        }

    def beside(self, prepared: Prepared, steps: Steps = STEPS) -> dict[str, float]:
        """Denoise, and compare the image to that of the resident model."""
        name = f"checksum_{sum(steps)}"
        expected = self.bench.figure(RESIDENT, name)
        figures = self.run(prepared, steps=steps)
        return figures | {"differing": float(figures[name] != expected)}

    def compared(self, prepared: Prepared, ram: float, device: int) -> dict[str, float]:
        """Denoise with a store, and compare the time to the bound."""
        compute = self.bench.figure(RESIDENT, "seconds")
        figures = self.beside(prepared)
        on_link = max(0, self.weights - device) / self.bench.link_speed
        on_disk = max(0, self.weights - device - int(ram * self.weights)) / self.bench.disk_speed
        figures["bound_seconds"] = max(compute, on_link, on_disk)
        figures["to_bound"] = figures["seconds"] / figures["bound_seconds"]
        figures["first_computing_seconds"] = compute
        return figures

    def tight(self) -> Figures:
        """Measure the cost per group, with almost all groups crossing the link."""
        figures = self.compared(self.ours(1.1, self.case.tight), 1.1, self.case.tight)
        moving = figures["onloaded_gb"] * 1e9 / self.bench.link_speed
        beyond = figures["seconds"] - max(moving, self.bench.figure(RESIDENT, "seconds"))
        figures["microseconds_per_group"] = 1e6 * beyond / max(figures["groups"], 1)
        return figures

    def peers(self) -> Figures:
        """Compare a store with all weights in RAM to diffusers."""
        seconds = [self.bench.figure(name, "seconds") for name in (IN_RAM, STREAMED)]
        return {"to_diffusers": seconds[0] / seconds[1]}

    # Lines -----------------------------------------------------------------------------------

    def groups(self) -> Sequence[Group]:
        """Return the lines of the store and of peers that work from RAM, most important first."""
        return [
            Group(
                "ours",
                [
                    Line(
                        RESIDENT,
                        "the whole model on the GPU, without a limit: compute time",
                        lambda: self.run(self.resident, limited=False),
                        seconds=40,
                    ),
                    self._ours(IN_RAM, 1.1, at_most=1.15),
                    self._ours(HALF, 0.5, at_most=1.2),
                    self._ours(QUARTER, 0.25, at_most=1.2),
                    Line(
                        TIGHT,
                        "almost all groups cross the link: the cost per group",
                        self.tight,
                        [EQUAL, WITHIN],
                        seconds=35,
                    ),
                ],
            ),
            Group(
                "peers",
                [
                    self._peer(STREAMED, "its groups are blocks", self.by_diffusers(None), STEPS),
                    Line(
                        "compared",
                        f"ours, {IN_RAM}, to {STREAMED}",
                        self.peers,
                        [Goal("to_diffusers", at_most=1)],
                        seconds=0,
                    ),
                    self._peer("accelerate, cpu_offload", "from RAM", self.by_accelerate(False)),
                ],
            ),
            Group("blocks", [self._ours("whole blocks", 1.1, num_blocks_per_group=1)]),
        ]

    def disk_peers(self) -> Sequence[Group]:
        """Return the lines of peers that work from files."""
        about = "its files stay in the page cache"
        return [
            Group(
                "disk peers",
                [
                    self._peer(
                        "diffusers, from files", f"on a stream; {about}", self.by_diffusers("files")
                    ),
                    self._peer("accelerate, disk_offload", about, self.by_accelerate(True)),
                ],
            )
        ]

    def _ours(self, name: str, ram: float, at_most: float | None = None, **cut: Any) -> Line:
        device = self.case.device
        goals = [EQUAL, WITHIN]
        if at_most is not None:
            goals.append(Goal("to_bound", at_most=at_most))
        return Line(
            name,
            f"a store with {device / 1e9:g} GB of GPU memory and RAM for {ram:g} of the weights",
            lambda: self.compared(self.ours(ram, device, **cut), ram, device),
            goals,
            seconds=45 if name == QUARTER else 35,
        )

    def _peer(self, name: str, about: str, prepared: Prepared, steps: Steps = FEW) -> Line:
        return Line(name, about, lambda: self.beside(prepared, steps), peer=True, seconds=60)


def groups(bench: Bench) -> Sequence[Group]:
    """Return the lines of the part `inference`."""
    return Inference(bench).groups()


def disk_peers(bench: Bench) -> Sequence[Group]:
    """Return the lines of the part `disk_peers`."""
    return Inference(bench).disk_peers()
