"""Inference: a transformer of the size of FLUX.1-dev denoises with half of its weights on the GPU.

    python -m tools.gpu.inference --out inference.json

23.8 GB of weights, 4,096 + 512 tokens, 2 steps to warm up and 6 that count. Whoever offloads may
reserve 24 GB of the GPU, as on a smaller one, and a store gets 12 GB of that. The bound of a step
is the longest of: computing, what is missing on the device over the link, what is missing in RAM
from the disk. All figures are by step, and medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, enable_group_offload
from tools.gpu import flux_shaped
from tools.gpu.bench import Bench, command, cpu_seconds, installed
from tools.gpu.flux_shaped import FluxShaped
from tools.gpu.lines import Figures, Goal, Group, Line

RESIDENT, IN_RAM, HALF = "resident", "all in RAM", "half in RAM"
STREAMED = "diffusers, from RAM on a stream"
TIGHT = "a budget of 0.8 GB"

EQUAL = Goal("differing", at_most=0)
WITHIN = Goal("device_budgets_taken", at_most=1)


@dataclass(frozen=True)
class Case:
    """What is run. `limit` is what may be reserved of the device, `device` the store's budget."""

    shape: flux_shaped.Shape
    steps: int
    warm_up: int
    limit: int | None
    device: int
    tight: int


FULL = Case(flux_shaped.FLUX_1_DEV, 6, 2, 24 * 10**9, 12 * 10**9, 8 * 10**8)
SMALL = Case(flux_shaped.SMALL, 2, 2, None, 96_000, 48_000)

Prepared = Callable[[Path], AbstractContextManager[tuple[FluxShaped, TierStore | None]]]


class Inference:
    """The contenders, and what they share: the checkpoint, and the image of the resident model."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.case = SMALL if bench.small else FULL
        self._checkpoint: Path | None = None
        self._image: torch.Tensor | None = None

    @property
    def checkpoint(self) -> Path:
        """The weights' files, written when they are wanted first."""
        if self._checkpoint is None:
            place = self.bench.place / "checkpoint"
            self._checkpoint = flux_shaped.save(self.case.shape, place, self.bench.device)
        return self._checkpoint

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return flux_shaped.weight_bytes(flux_shaped.on_meta(self.case.shape))

    # Contenders ------------------------------------------------------------------------------

    @contextmanager
    def resident(self, place: Path) -> Iterator[tuple[FluxShaped, None]]:
        yield self._in_ram().to(self.bench.device), None

    def ours(self, ram: float, device: int, **cut: Any) -> Prepared:
        """A store with RAM for the share `ram` of the weights, and `device` bytes of the device."""

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
                yield model, store  # nobody needs an ordinary model again: that takes its memory

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

    def run(self, prepared: Prepared, *, limited: bool = True) -> Figures:
        """Denoise as a contender does."""
        case, accelerator = self.case, self.bench.accelerator
        accelerator.start_over()
        base = accelerator.reserved()
        with (
            self.bench.folder() as place,
            accelerator.limited(case.limit if limited else None),
            prepared(place) as (model, store),
        ):
            seconds, cpu, moved = [], [], []
            images: list[torch.Tensor] = []
            began, used = time.perf_counter(), cpu_seconds()
            for image in flux_shaped.denoise(model, case.warm_up + case.steps, self.bench.device):
                images[:] = [image]
                accelerator.synchronize()
                seconds.append(time.perf_counter() - began)
                cpu.append(cpu_seconds() - used)
                stats = None if store is None else store.stats()
                moved.append((0, 0) if stats is None else (stats.bytes_onloaded, stats.bytes_read))
                began, used = time.perf_counter(), cpu_seconds()
            figures = {
                "seconds": statistics.median(seconds[case.warm_up :]),
                "cpu_seconds": statistics.median(cpu[case.warm_up :]),
                "peak_reserved_gb": (accelerator.peak_reserved() - base) / 1e9,
                "differing": float(self._differs(images[0].cpu())),
            }
            if store is not None:
                figures |= self._of_the_store(store, moved)
        accelerator.start_over()
        return figures

    def _differs(self, image: torch.Tensor) -> bool:
        if self._image is None:
            self._image = image
        return not torch.equal(image, self._image)

    def _of_the_store(self, store: TierStore, moved: list[tuple[int, int]]) -> dict[str, float]:
        stats = store.stats()
        first, last = moved[self.case.warm_up - 1], moved[-1]
        onloaded, read = ((b - a) / self.case.steps for a, b in zip(first, last, strict=True))
        budget = stats.budget_bytes["DEVICE"] or 1
        return {
            "overlap": stats.overlap,
            "onloaded_gb": onloaded / 1e9,
            "read_gb": read / 1e9,
            "groups": float(len(store.snapshot().groups)),
            "device_budgets_taken": stats.peak_bytes["DEVICE"] / budget,
        }

    def compared(self, prepared: Prepared, ram: float, device: int) -> Figures:
        """Denoise as a store does, and compare with the bound."""
        compute = self.bench.figure(RESIDENT, "seconds")
        figures = dict(self.run(prepared))
        on_link = max(0, self.weights - device) / self.bench.link_speed
        on_disk = max(0, self.weights - device - int(ram * self.weights)) / self.bench.disk_speed
        figures["bound_seconds"] = max(compute, on_link, on_disk)
        figures["to_bound"] = figures["seconds"] / figures["bound_seconds"]
        return figures

    def tight(self) -> Figures:
        """With next to nothing on the device: what a group costs beyond its bytes."""
        figures = dict(self.compared(self.ours(1.1, self.case.tight), 1.1, self.case.tight))
        moving = figures["onloaded_gb"] * 1e9 / self.bench.link_speed
        beyond = figures["seconds"] - max(moving, self.bench.figure(RESIDENT, "seconds"))
        figures["microseconds_per_group"] = 1e6 * beyond / max(figures["groups"], 1)
        return figures

    def speeds(self) -> Figures:
        """What the link and the disk can do, for the bounds."""
        return {
            "link_gb_per_second": self.bench.link_speed / 1e9,
            "disk_gb_per_second": self.bench.disk_speed / 1e9,
            "weights_gb": self.weights / 1e9,
        }

    def peers(self) -> Figures:
        """Our seconds with all in RAM to those of diffusers."""
        seconds = [self.bench.figure(name, "seconds") for name in (IN_RAM, STREAMED)]
        return {"to_diffusers": seconds[0] / seconds[1]}

    # Lines -----------------------------------------------------------------------------------

    def groups(self) -> Sequence[Group]:
        """All lines."""
        by_bytes = [
            self._ours(f"groups of {size} MB", 1.1, group_size=self._scaled(size))
            for size in (32, 128, 256)
        ]
        return [
            Group(
                "ours",
                [
                    Line("speeds", "the link and the disk", self.speeds),
                    self._line(
                        RESIDENT,
                        "the whole model on the GPU, without a limit: what computing takes",
                        lambda: self.run(self.resident, limited=False),
                    ),
                    self._ours(IN_RAM, 1.1, at_most=1.15),
                    self._ours(HALF, 0.5, at_most=1.2),
                    *by_bytes,
                    self._ours("whole blocks", 1.1, num_blocks_per_group=1),
                    self._line(
                        TIGHT, "almost all crosses the link: what a group costs", self.tight,
                        EQUAL, WITHIN,
                    ),
                ],
            ),
            Group(
                "peers",
                [
                    self._peer(STREAMED, "its groups are blocks", self.by_diffusers(None)),
                    self._peer(
                        "accelerate, cpu_offload", "from RAM", self.by_accelerate(on_disk=False)
                    ),
                    self._peer(
                        "diffusers, from files",
                        "on a stream; its files stay in the page cache",
                        self.by_diffusers("files"),
                    ),
                    self._peer(
                        "accelerate, disk_offload",
                        "its files stay in the page cache",
                        self.by_accelerate(on_disk=True),
                    ),
                    Line(
                        "compared",
                        f"ours, {IN_RAM}, to {STREAMED}",
                        self.peers,
                        [Goal("to_diffusers", at_most=1)],
                    ),
                ],
            ),
        ]  # fmt: skip

    def _scaled(self, megabytes: int) -> int:
        return self.bench.scaled(megabytes * 10**6, megabytes * 100)

    def _ours(self, name: str, ram: float, at_most: float | None = None, **cut: Any) -> Line:
        device = self.case.device
        goals = [EQUAL, WITHIN]
        if at_most is not None:
            goals.append(Goal("to_bound", at_most=at_most))
        return self._line(
            name,
            f"a store with {device / 1e9:g} GB of the GPU, RAM for {ram:g} of the weights",
            lambda: self.compared(self.ours(ram, device, **cut), ram, device),
            *goals,
        )

    def _line(self, name: str, about: str, measure: Callable[[], Figures], *goals: Goal) -> Line:
        return Line(name, about, self.bench.keep(name, measure), goals)

    def _peer(self, name: str, about: str, prepared: Prepared) -> Line:
        measure = self.bench.keep(name, lambda: self.run(prepared))
        return Line(name, about, measure, peer=True)


def groups(bench: Bench) -> Sequence[Group]:
    """The lines of this command."""
    return Inference(bench).groups()


if __name__ == "__main__":
    sys.exit(command("inference", __doc__.splitlines()[0], groups))
