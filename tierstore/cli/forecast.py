"""What a run would read, keep and wait for: a checkpoint's groups, played through the planner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tierstore.cli.output import Document, Failure
from tierstore.engine.checkpoints import read_checkpoint
from tierstore.model.groups import FileTensor, GroupSpec
from tierstore.model.module_tree import groups_of
from tierstore.model.outline import usual_sizes
from tierstore.model.tiers import Tier
from tierstore.simulation import Outcome, Use, Way, simulate

FROM_DISK = (Tier.DISK, Tier.HOST)
TO_DEVICE = (Tier.HOST, Tier.DEVICE)

INDEX = "model_index.json"
LARGEST_INDEX = 1 << 20

LOOPS = ("transformer", "unet", "prior")
"""How the components begin that run in every step of a pipeline."""

_AUTOENCODER_BLOCKS = ("quant_conv", "post_quant_conv", "encoder", "decoder")


@dataclass(frozen=True)
class PlannedComponent:
    """A model of a checkpoint, and the groups that it is cut into; its name is empty if alone.

    `in_files` says, by key, how many bytes of the files are read for a group.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    in_files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all its groups."""
        return sum(group.nbytes for group in self.groups)


def components_of(
    checkpoint: str, offload_type: str, budgets: Mapping[Tier, int | None], only: str | None
) -> list[PlannedComponent]:
    """The models of a checkpoint, each cut as `enable_group_offload` would cut it.

    Raises TransferError or InvalidHeaderError for files that cannot be read; fails if there is no
    component `only`.
    """
    found = []
    for name, (place, blocks) in _places(checkpoint, only).items():
        files = read_checkpoint(place)
        tensors: list[FileTensor] = [tensor for file in files for tensor in file.tensors]
        prefix = f"{name}/" if name else ""
        weights = sum(tensor.extent.nbytes for tensor in tensors)
        sizes = usual_sizes(offload_type, budgets, weights)
        named = [
            (replace(group, key=prefix + group.key), read)
            for group, read in groups_of(
                tensors, offload_type, sizes.group, blocks, largest_block=sizes.block
            )
        ]
        in_files = {group.key: read for group, read in named}
        found.append(PlannedComponent(name, tuple(group for group, _ in named), in_files))
    return found


def _places(checkpoint: str, only: str | None) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Where each component lies, and which modules of it count as blocks."""
    index = Path(checkpoint, INDEX)
    places: dict[str, tuple[str, tuple[str, ...]]] = {}
    if not index.is_file():
        places[""] = (checkpoint, ())
    else:
        for name, kind in _entries(index):
            place = index.parent / name
            if place.is_dir() and _has_weights(place):
                autoencoder = kind.startswith("AutoencoderKL")
                places[name] = (str(place), _AUTOENCODER_BLOCKS if autoencoder else ())
    if only is None:
        return places
    if not only or only not in places:
        raise Failure(
            f"{checkpoint} has no component {only!r} with safetensors files",
            "Leave --component out to see which there are.",
        )
    return {only: places[only]}


def _has_weights(place: Path) -> bool:
    """Whether there is a checkpoint, or the index of one: then all of it has to be there."""
    names = os.listdir(place)  # unlike glob, it tells that it may not look
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def _entries(index: Path) -> list[tuple[str, str]]:
    """Each component that a pipeline's index names, and its class."""
    try:
        with open(index, encoding="utf-8") as file:
            document = json.loads(file.read(LARGEST_INDEX))
    except RecursionError as error:
        raise ValueError(f"{INDEX} is nested too deep") from error
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    rows = [(name, value) for name, value in document.items() if isinstance(value, list)]
    kinds = [(name, value[-1] if value else None) for name, value in rows if _is_file_name(name)]
    return [(name, kind) for name, kind in kinds if isinstance(kind, str)]


def _is_file_name(name: str) -> bool:
    return os.path.basename(name) == name and name not in ("", ".", "..")


def in_every_step(components: Iterable[PlannedComponent]) -> list[PlannedComponent]:
    """The components that run in every step: those with the usual names, else the largest."""
    filled = [component for component in components if component.groups]
    usual = [component for component in filled if component.name.startswith(LOOPS)]
    return usual or [max(filled, key=lambda component: component.nbytes)]


def forecast(
    component: PlannedComponent,
    known: Mapping[str, int],
    budgets: Mapping[Tier, int | None],
    bandwidth: Mapping[Way, float],
    compute: float,
    steps: int,
) -> Document:
    """One step of a component's loop, once the planner knows the order: bytes and seconds.

    `steps` steps are played; what is told is the mean of their second half. `resident` are the
    bytes that need not be read in a step, as they stay in memory. `known` are all groups that the
    store has, by key, with their bytes. `bandwidth` gives bytes per second of each hop, as far as
    they are known: without the disk's, no seconds are told. A step computes for `compute` seconds.
    """
    half = steps // 2
    nbytes = component.nbytes
    uses = [Use(group.key, compute * group.nbytes / nbytes) for group in component.groups]
    first, earlier, whole = (
        simulate(known, uses * count, budgets, bandwidth=bandwidth) for count in (1, half, steps)
    )

    def each(told: Callable[[Outcome], float]) -> float:
        return (told(whole) - told(earlier)) / (steps - half)

    def read_by(outcome: Outcome) -> int:
        return sum(outcome.reads.get(key, 0) * n for key, n in component.in_files.items())

    read, timed = each(read_by), FROM_DISK in bandwidth
    return {
        "component": component.name,
        "resident": round(max(nbytes - read, 0.0)),
        "first_read": read_by(first),
        "read": round(read),
        "onloaded": round(each(lambda outcome: outcome.bytes_moved.get(TO_DEVICE, 0))),
        "seconds": each(lambda outcome: outcome.seconds) if timed else None,
        "stalled_seconds": each(lambda outcome: outcome.stalled_seconds) if timed else None,
    }
