"""torchao: quantising weights while a model is loaded, a few at a time, once.

diffusers and transformers have torchao's `quantize_` quantise each layer when they have loaded it,
in memory. Here that is put off until all layers are loaded, as maps of their files. Then it is done
for some of them at a time, and what comes of it goes to the store's directory. At the next start
that is found by the files' bytes and the configuration: `quantize_` then runs on the meta device,
where nothing is computed, and says which tensors a weight consists of.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tierstore.adapters.codecs import leaves_of, rebuilt
from tierstore.adapters.codecs.memory import tensor_bytes
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.adapters.compat import Library
from tierstore.adapters.contents import named_parameters_of
from tierstore.engine.adoption import derivation_of
from tierstore.engine.groups import Groups
from tierstore.model.outline import in_portions
from tierstore.progress import bar
from tierstore.system.allocator import FreedMemory

_HOLDER = "diffusers.quantizers.torchao.torchao_quantizer"
"""A module, besides torchao's own, in which a library looks `quantize_` up."""
_IN_BETWEEN = 8
"""What it computes of a weight until it is done, in sizes of the weight: several tensors of
float32 at a time."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer to be quantised, and how."""

    module: nn.Module
    quantize: Callable[[], None]
    how: str

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(named_parameters_of(self.module, recurse=False))

    @property
    def nbytes(self) -> int:
        return sum(map(tensor_bytes, self.tensors().values()))

    def quantised(
        self, dtypes: Mapping[int, torch.dtype], device: torch.device | None
    ) -> dict[str, torch.Tensor]:
        """Those of its tensors that were quantised. All others are as they were.

        They are cast before as `dtypes` says (by id), and brought to a device if one is given.
        """
        before = self.tensors()
        for name, tensor in before.items():
            dtype = dtypes.get(id(tensor), tensor.dtype)
            value = tensor.detach().to(device=device or tensor.device, dtype=dtype)
            self._give(name, nn.Parameter(value, requires_grad=False))
        try:
            self.quantize()
            return {name: tensor for name, tensor in self.tensors().items() if is_wrapper(tensor)}
        finally:
            for name, tensor in before.items():
                self._give(name, tensor)

    def take(self, name: str, weight: torch.Tensor) -> None:
        """Have a quantised weight from now on."""
        self._give(name, weight)

    def _give(self, name: str, weight: Any) -> None:
        self.module.register_parameter(name, weight)


class DeferredQuantize:
    """The calls of `quantize_` that were deferred while a model was loaded: a `Deferred`."""

    def __init__(self, quantize: Callable[..., None]) -> None:
        self._quantize = quantize
        self._layers: list[_Layer] = []
        self._version = importlib.metadata.version("torchao")

    def quantize(self, module: nn.Module, *arguments: Any, **named: Any) -> None:
        """In the place of `quantize_`: leave a layer as it is for now."""
        if next(module.children(), None) is not None:
            self._quantize(module, *arguments, **named)
            return
        # Functions say where they are in memory; they only choose layers, and this one is chosen.
        said = [each for each in (*arguments, *named.values()) if not callable(each)]
        how = f"{self._version} {said!r}"

        def quantize() -> None:
            self._quantize(module, *arguments, **named)

        self._layers.append(_Layer(module, quantize, how))

    def finish(self, groups: Groups, dtypes: Mapping[int, torch.dtype], target: int) -> None:
        """Quantise all of them, of up to `target` bytes at a time; tensors that have another dtype
        in `dtypes` (by id) are cast before."""
        layers, self._layers = self._layers, []
        freed = FreedMemory()
        parts = list(in_portions(layers, lambda layer: layer.nbytes, target))
        for part in bar(parts, "Quantising", "parts"):
            freed.add(_IN_BETWEEN * sum(layer.nbytes for layer in part))
            _finish(groups, dict(enumerate(part)), dtypes)
        freed.give_back()


def _finish(groups: Groups, part: Mapping[int, _Layer], dtypes: Mapping[int, torch.dtype]) -> None:
    tensors = {f"{i}.{n}": t for i, layer in part.items() for n, t in layer.tensors().items()}
    casts = {n: dtypes[id(t)] for n, t in tensors.items() if id(t) in dtypes}
    how = [layer.how for layer in part.values()]
    derivation = derivation_of(tensors, casts, repr(how))
    found = groups.made_before(derivation)
    device = None if found is None else torch.device("meta")
    made = {i: layer.quantised(dtypes, device) for i, layer in part.items()}
    leaves = {
        f"{i}.{name}.{attribute}": leaf
        for i, weights in made.items()
        for name, weight in weights.items()
        for attribute, leaf in leaves_of(weight).items()
    }
    if not leaves:
        return
    if found is None:
        found = groups.keep_made(derivation, leaves)
    for i, weights in made.items():
        for name, weight in weights.items():
            homes = {each: found[f"{i}.{name}.{each}"] for each in leaves_of(weight)}
            part[i].take(name, rebuilt(weight, homes))


class Torchao(Library):
    """Defers its `quantize_`."""

    name = "torchao"

    def loading(self) -> AbstractContextManager[DeferredQuantize] | None:
        """Return a context in which `quantize_` leaves layers as they are; None without torchao."""
        try:
            quantization = import_module("torchao.quantization")
        except ImportError:
            return None
        holders = [quantization]
        if _HOLDER in sys.modules:
            holders.append(sys.modules[_HOLDER])
        return _deferred(holders)


@contextmanager
def _deferred(holders: list[Any]) -> Iterator[DeferredQuantize]:
    original = holders[0].quantize_
    deferred = DeferredQuantize(original)
    for holder in holders:
        holder.quantize_ = deferred.quantize
    try:
        yield deferred
    finally:
        for holder in holders:
            holder.quantize_ = original
