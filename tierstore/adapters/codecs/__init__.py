"""How a model's tensors are taken apart into plain tensors, and shown again: one codec per kind.

A store holds plain tensors only: bytes with a dtype, a shape and strides. A codec says of which
plain tensors one of its kind consists, and makes it of others (`TensorCodec`). Kinds of other
libraries are in `tierstore.adapters.compat`. `tests.conformance.codecs` says what a codec promises.

What has no codec stays in memory: on the store's device for as long as its model is offloaded, and
counted in the budget. (See `tierstore.adapters.device_resident`.)
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
    """Return the codecs, in the order in which they are asked."""
    return (
        WrapperCodec(),
        *(codec for library in libraries() for codec in library.codecs),
        PlainCodec(),
    )


def codec_of(tensor: torch.Tensor) -> TensorCodec | None:
    """The codec of a tensor's kind; None if nobody knows how to take it apart."""
    return next((codec for codec in all_codecs() if codec.accepts(tensor)), None)


def leaves_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a tensor consists of, the very objects: what they show, it shows.

    By their names as its attributes, with dots between names in names; the tensor itself has an
    empty name. Empty if there is any whose kind no codec knows.
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
    """The leaves of a tensor that is called `name`, by their full names."""
    return {f"{name}.{attribute}" if attribute else name: t for attribute, t in leaves.items()}


def rebuilt(tensor: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor like `tensor` (see `TensorCodec.rebuild`) that consists of other leaves."""
    codec = codec_of(tensor)
    assert codec is not None, "it has leaves"
    parts = {}
    for name, part in codec.flatten(tensor).items():
        start = f"{name}."
        inner = {n.removeprefix(start): t for n, t in leaves.items() if n.startswith(start)}
        parts[name] = leaves[name] if name in leaves else rebuilt(part, inner)
    return codec.rebuild(tensor, parts)


def movable_leaves(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those of its leaves that have bytes; empty if a store cannot hold all of them."""
    leaves = leaves_of(tensor)
    if any(leaf.device.type == "meta" for leaf in leaves.values()):
        return {}
    return {name: leaf for name, leaf in leaves.items() if leaf.numel() > 0}


def weight_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors of all kinds, each address counted once."""
    listed = [(tensor, leaves_of(tensor)) for tensor in tensors]
    unknown = sum(_elements_bytes(tensor) for tensor, leaves in listed if not leaves)
    return unknown + unique_bytes(leaf for _, leaves in listed for leaf in leaves.values())


def _elements_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        found = tensor.detach().coalesce()
        return tensor_bytes(found.values()) + tensor_bytes(found.indices())
    return tensor_bytes(tensor)


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain (or has plain ones beside it), with bytes that a store can hold."""
    return "" in movable_leaves(tensor)
