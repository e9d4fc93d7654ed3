"""Codecs that split a model's tensors into plain tensors and rebuild them: one per kind.

A store holds only plain tensors: bytes with a dtype, a shape and strides. A `TensorCodec` lists the
plain tensors inside a tensor of its kind, and rebuilds such a tensor from others. Codecs for other
libraries are in `tierstore.adapters.compat`. `tests.conformance.codecs` specifies their behaviour.

A tensor without a codec stays on the store's device while its model is offloaded, and counts
against the budget. (See `tierstore.adapters.device_resident`.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch

from tierstore.adapters.codecs.memory import tensor_bytes, unique_bytes
from tierstore.adapters.codecs.plain import PlainCodec
from tierstore.adapters.codecs.wrapper import WrapperCodec
from tierstore.adapters.compat import TensorCodec, libraries


@functools.cache
def all_codecs() -> tuple[TensorCodec, ...]:
    """Return all codecs, in order of precedence."""
    return (
        WrapperCodec(),
        *(codec for library in libraries() for codec in library.codecs),
        PlainCodec(),
    )


def codec_of(tensor: torch.Tensor) -> TensorCodec | None:
    """Return the codec of a tensor's kind; None if there is none."""
    return next((codec for codec in all_codecs() if codec.accepts(tensor)), None)


def leaves_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors inside a tensor, by attribute path; they are not copies.

    Pointing a leaf at other memory changes the tensor. Nested attribute names are joined by dots; a
    plain tensor is its own leaf, with an empty name. Empty if any inner tensor has no codec.
    """
    codec = codec_of(tensor)
    if codec is None:
        return {}
    leaves: dict[str, torch.Tensor] = {}
    for name, part in codec.flatten(tensor).items():
        if not name:
            leaves[""] = tensor
            continue
        inner = leaves_of(part)
        if not inner:
            return {}
        leaves |= with_names(name, inner)
    return leaves


def with_names(name: str, leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the leaves of a tensor with the given name, by their full names."""
    return {f"{name}.{attribute}" if attribute else name: t for attribute, t in leaves.items()}


def rebuilt(tensor: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor like `tensor` with other leaves. See `TensorCodec.rebuild`."""
    codec = codec_of(tensor)
    assert codec is not None, "it has leaves"
    parts = {}
    for name, part in codec.flatten(tensor).items():
        start = f"{name}."
        inner = {n.removeprefix(start): t for n, t in leaves.items() if n.startswith(start)}
        parts[name] = leaves[name] if name in leaves else rebuilt(part, inner)
    return codec.rebuild(tensor, parts)


def movable_leaves(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the leaves that have bytes; empty if a store cannot hold all leaves."""
    leaves = leaves_of(tensor)
    if any(leaf.device.type == "meta" for leaf in leaves.values()):
        return {}
    return {name: leaf for name, leaf in leaves.items() if leaf.numel() > 0}


def weight_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors of any kind, each address counted once."""
    listed = [(tensor, leaves_of(tensor)) for tensor in tensors]
    unknown = sum(_elements_bytes(tensor) for tensor, leaves in listed if not leaves)
    return unknown + unique_bytes(leaf for _, leaves in listed for leaf in leaves.values())


def _elements_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        found = tensor.detach().coalesce()
        return tensor_bytes(found.values()) + tensor_bytes(found.indices())
    return tensor_bytes(tensor)


def is_movable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor itself has plain bytes that a store can hold."""
    return "" in movable_leaves(tensor)
