"""torchao: quantise weights once, a few layers at a time, while a model is loaded.

diffusers and transformers call torchao's `quantize_` on each layer as soon as it is loaded, in
memory. Here the call is deferred until all layers are mapped from their files; then a few layers at
a time are quantised, and the results are written to the store's directory. On the next start, the
results are looked up by the source files and the configuration. `quantize_` then runs on the meta
device, without computing anything, to obtain the structure of each weight.
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
from tierstore.engine.groups import Groups
from tierstore.engine.in_place_groups import derivation_of
from tierstore.model.outline import in_portions
from tierstore.progress import bar
from tierstore.system.allocator import FreedMemory

_HOLDER = "diffusers.quantizers.torchao.torchao_quantizer"
"""A module, besides torchao's own, from which a library calls `quantize_`."""
_IN_BETWEEN = 8
"""Peak memory of quantising a weight, in multiples of its size: several float32 tensors."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer to quantise, with its configuration as text in `how`."""

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
        """Return the layer's quantised tensors by name. The layer itself is not changed.

        Tensors (by id) are first cast to `dtypes`, and moved to `device` if one is given.
        """
        before = self.tensors()
        for name, tensor in before.items():
            dtype = dtypes.get(id(tensor), tensor.dtype)
            value = tensor.detach().to(device=device or tensor.device, dtype=dtype)
            self._register(name, nn.Parameter(value, requires_grad=False))
        try:
            self.quantize()
            return {name: tensor for name, tensor in self.tensors().items() if is_wrapper(tensor)}
        finally:
            for name, tensor in before.items():
                self._register(name, tensor)

    def set_weight(self, name: str, weight: torch.Tensor) -> None:
        """Replace a weight by its quantised form."""
        self._register(name, weight)

    def _register(self, name: str, weight: Any) -> None:
        self.module.register_parameter(name, weight)


class DeferredQuantize:
    """The calls of `quantize_` deferred while a model is loaded: a `Deferred`."""

    def __init__(self, quantize: Callable[..., None]) -> None:
        self._quantize = quantize
        self._layers: list[_Layer] = []
        self._version = importlib.metadata.version("torchao")

    def quantize(self, module: nn.Module, *arguments: Any, **named: Any) -> None:
        """Record the call for later. Replaces `quantize_` for single layers."""
        if next(module.children(), None) is not None:
            self._quantize(module, *arguments, **named)
            return
        # Skip functions: they only filter layers, and their repr contains an address.
        said = [each for each in (*arguments, *named.values()) if not callable(each)]
        how = f"{self._version} {said!r}"

        def quantize() -> None:
            self._quantize(module, *arguments, **named)

        self._layers.append(_Layer(module, quantize, how))

    def finish(self, groups: Groups, dtypes: Mapping[int, torch.dtype], target: int) -> None:
        """Quantise all deferred layers, up to `target` bytes at a time.

        Tensors with another dtype in `dtypes` (by id) are cast first.
        """
        layers, self._layers = self._layers, []
        freed = FreedMemory()
        parts = list(in_portions(layers, lambda layer: layer.nbytes, target))
        for part in bar(parts, "Quantising", "parts"):
            freed.add(_IN_BETWEEN * sum(layer.nbytes for layer in part))
            _finish(groups, dict(enumerate(part)), dtypes)
        freed.release()


def _finish(groups: Groups, part: Mapping[int, _Layer], dtypes: Mapping[int, torch.dtype]) -> None:
    tensors = {f"{i}.{n}": t for i, layer in part.items() for n, t in layer.tensors().items()}
    casts = {n: dtypes[id(t)] for n, t in tensors.items() if id(t) in dtypes}
    how = [layer.how for layer in part.values()]
    derivation = derivation_of(tensors, casts, repr(how))
    found = groups.get_derived(derivation)
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
        found = groups.put_derived(derivation, leaves)
    for i, weights in made.items():
        for name, weight in weights.items():
            host_views = {each: found[f"{i}.{name}.{each}"] for each in leaves_of(weight)}
            part[i].set_weight(name, rebuilt(weight, host_views))


class Torchao(Library):
    """Support for torchao, whose `quantize_` is deferred during loading."""

    name = "torchao"

    def loading(self) -> AbstractContextManager[DeferredQuantize] | None:
        """Return a context in which `quantize_` is deferred; None if torchao is not installed."""
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
