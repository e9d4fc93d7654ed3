"""How a model's tensors are taken apart into plain tensors, and shown again: one codec per kind.

A store holds plain tensors only: bytes with a dtype, a shape and strides. A codec says of which
plain tensors one of its kind consists, and makes it of others. To add a kind, write a file with a
`TensorCodec`, name it in `CODECS`, and subclass `tests.conformance.codecs.CodecConformance`.

What has no codec, or one that is not `storable`, stays in memory: on the store's device for as long
as its model is offloaded. (See `tierstore.adapters.device_resident`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from tierstore.adapters.codecs.plain import PlainCodec
from tierstore.adapters.codecs.wrapper import WrapperCodec


class TensorCodec(Protocol):
    """One kind of tensors."""

    @property
    def storable(self) -> bool:
        """Whether groups of a store hold tensors of this kind, by their parts."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of this kind."""

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that it consists of, by name: aliases, no copies. They are plain, or have a
        codec of their own."""

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A tensor like `tensor` (of its class, with its attributes) that consists of `parts`."""

    def show(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Let `tensor` show the memory of `value`, on whatever device. It stays the same object."""


CODECS: tuple[TensorCodec, ...] = (WrapperCodec(), PlainCodec())


def codec_of(tensor: torch.Tensor) -> TensorCodec | None:
    """The codec of a tensor's kind; None if nobody knows how to take it apart."""
    return next((codec for codec in CODECS if codec.accepts(tensor)), None)


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether a store can hold such a tensor."""
    codec = codec_of(tensor)
    return codec is not None and codec.storable


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes that a store can hold."""
    return is_storable(tensor) and tensor.numel() > 0 and tensor.device.type != "meta"
