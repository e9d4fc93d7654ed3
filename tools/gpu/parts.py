"""The parts of `python -m tools.gpu`, the most important first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu import correctness, hazards, inference, per_group, training
from tools.gpu.bench import Bench, found_device
from tools.gpu.lines import Figures, Group


@dataclass(frozen=True)
class Part:
    """Lines that are measured in separate processes and written to `NAME.json`.

    Parts of the same step run concurrently. `page` is the name of the page for the results.
    """

    name: str
    step: int
    page: str
    groups: Callable[[Bench], Sequence[Group]]


PARTS = (
    Part("suite", 1, "correctness", correctness.suite),
    Part("correctness", 1, "correctness", correctness.groups),
    Part("hazards", 1, "correctness", hazards.groups),
    Part("per_group", 2, "inference", per_group.groups),
    Part("inference", 3, "inference", inference.groups),
    Part("activations", 4, "training", training.activations),
    Part("training", 5, "training", training.states),
    Part("disk_peers", 6, "inference", inference.disk_peers),
)


def lines_of(
    name: str, device: str, small: bool, place: Path, ends: float
) -> tuple[Sequence[Group], dict[str, Figures]]:
    """Create the lines of a part, in the process that measures them."""
    bench = Bench(found_device(device), small, place, ends)
    (part,) = (part for part in PARTS if part.name == name)
    return part.groups(bench), bench.figures
