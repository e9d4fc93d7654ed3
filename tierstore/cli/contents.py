"""What a checkpoint has that is to be planned: its models, and the tensors of each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.cli.output import Failure
from tierstore.cli.sources import INDEX, CheckpointSource
from tierstore.model.weight_files import has_weights, is_pickle, main_file, variants_among

if TYPE_CHECKING:
    from tierstore.model.groups import FileTensor

LOOPS = ("transformer", "unet", "prior")
"""How the components begin that run in every step of a pipeline."""

_AUTOENCODER_BLOCKS = ("quant_conv", "post_quant_conv", "encoder", "decoder")


@dataclass(frozen=True)
class Model:
    """A model of a checkpoint, as its files tell; its name is empty if it is the only one.

    `blocks` names modules of it that count as blocks.
    """

    name: str
    tensors: tuple[FileTensor, ...]
    blocks: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, in the files."""
        return sum(tensor.extent.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class FoundModels:
    """What was found: models, components that only have `pickles`, and `variants` there are."""

    models: tuple[Model, ...]
    pickles: tuple[str, ...]
    variants: tuple[str, ...]


def contents_of(
    source: CheckpointSource, typed: str, only: str | None, variant: str | None
) -> FoundModels:
    """The models of a checkpoint, `only` one of them if that is a name.

    Of each, the files are taken that `from_pretrained` takes (see `main_file`). `typed` is how the
    checkpoint is called in errors.

    Raises TierStoreError, OSError or ValueError for what cannot be read; Failure if there is no
    component `only`, or no `variant`.
    """
    root = source.names("")
    folders = dict(entries(source.content(INDEX))) if INDEX in root else {"": ""}
    names = {folder: source.names(folder) if folder else root for folder in folders}
    is_model = {f: not f or has_weights(names[f]) for f in folders}
    if only is not None and not (only and is_model.get(only)):
        there = ", ".join(filter(None, (f for f in folders if is_model[f])))
        raise Failure(
            f"{typed} has no component {only!r} with safetensors files",
            f"It has these: {there}." if there else "It has no components: leave --component out.",
        )
    wanted = [f for f in folders if is_model[f] and only in (None, f)]
    variants = sorted({each for folder in wanted for each in variants_among(names[folder])})
    if variant is not None and variant not in variants:
        there = ", ".join(variants) or "none"
        raise Failure(f"{typed} has no variant {variant!r}", f"It has these: {there}.")
    models = [
        Model(
            folder,
            tuple(source.tensors(folder, main_file(names[folder], variant))),
            _AUTOENCODER_BLOCKS if folders[folder].startswith("AutoencoderKL") else (),
        )
        for folder in wanted
    ]
    pickles = [f for f in folders if not has_weights(names[f]) and any(map(is_pickle, names[f]))]
    return FoundModels(tuple(models), tuple(pickles if only is None else ()), tuple(variants))


def entries(raw: bytes) -> Iterator[tuple[str, str]]:
    """Each component that a pipeline's index names, and its class. Raises ValueError."""
    try:
        document = json.loads(raw)
    except RecursionError as error:
        raise ValueError(f"{INDEX} is nested too deep") from error
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    for name, value in document.items():
        kind = value[-1] if isinstance(value, list) and value else None
        if isinstance(kind, str) and _is_file_name(name):
            yield name, kind


def _is_file_name(name: str) -> bool:
    return os.path.basename(name) == name and name not in ("", ".", "..")


def in_every_step(models: Iterable[Model]) -> list[Model]:
    """The models that run in every step: those with the usual names, else the largest."""
    filled = [model for model in models if model.nbytes]
    usual = [model for model in filled if model.name.startswith(LOOPS)]
    return usual or [max(filled, key=lambda model: model.nbytes)]
