"""Conformance tests for codecs. Subclass `CodecConformance`, give it examples, and run pytest.

class TestMyCodec(CodecConformance):
    codec = MyCodec()

    def examples(self):
        return [my_tensor(), nn.Parameter(my_tensor())]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from tierstore import TierStore
from tierstore.adapters.codecs import TensorCodec, codec_of

BUDGET = 1 << 20


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the value of a tensor of any kind as an ordinary tensor."""
    return tensor.detach() + 0


class CodecConformance(ABC):
    """Tests for one codec.

    Examples are on the CPU, and their numbers neither all zero nor all one.
    """

    codec: TensorCodec

    @abstractmethod
    def examples(self) -> list[torch.Tensor]:
        """Return new tensors of this kind, parameters among them."""

    def flattened(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies of the parts, with their strides."""
        parts = self.codec.flatten(tensor)
        copies = {
            n: torch.empty_strided(p.size(), p.stride(), dtype=p.dtype) for n, p in parts.items()
        }
        return {name: copy.copy_(parts[name]) for name, copy in copies.items()}

    def test_codec_is_found_for_its_tensors(self) -> None:
        for tensor in self.examples():
            assert type(codec_of(tensor)) is type(self.codec)

    def test_flatten_returns_aliases_with_known_codecs(self) -> None:
        for tensor in self.examples():
            parts = self.codec.flatten(tensor)
            assert parts
            assert all(codec_of(part) is not None for part in parts.values())
            assert not any(part.requires_grad for part in parts.values())
            before = value_of(tensor)
            for part in parts.values():
                part.zero_()
            assert not torch.equal(value_of(tensor), before)

    def test_rebuild_from_the_parts_is_equal(self) -> None:
        for tensor in self.examples():
            made = self.codec.rebuild(tensor, self.flattened(tensor))
            assert type(made) is type(tensor)
            assert isinstance(made, torch.nn.Parameter) is isinstance(tensor, torch.nn.Parameter)
            assert made.requires_grad is tensor.requires_grad
            assert (made.shape, made.stride(), made.dtype) == (
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            assert torch.equal(value_of(made), value_of(tensor))

    def test_rebuild_from_copies_shares_no_memory(self) -> None:
        for tensor in self.examples():
            before = value_of(tensor)
            made = self.codec.rebuild(tensor, self.flattened(tensor))
            for part in self.codec.flatten(made).values():
                part.zero_()
            assert torch.equal(value_of(tensor), before)

    def test_binding_other_parts_keeps_the_object(self) -> None:
        for tensor in self.examples():
            identity, kind, wants = id(tensor), type(tensor), tensor.requires_grad
            other = self.codec.rebuild(
                tensor, {n: torch.ones_like(p) for n, p in self.codec.flatten(tensor).items()}
            )
            expected, before = value_of(other), value_of(tensor)
            assert not torch.equal(expected, before)
            self.codec.assign(tensor, other)
            assert (id(tensor), type(tensor), tensor.requires_grad) == (identity, kind, wants)
            assert torch.equal(value_of(tensor), expected)

    def test_store_holds_the_parts(self, disk_dir: Path) -> None:
        for tensor in self.examples():
            with TierStore(BUDGET, disk_dir, device="cpu") as store:
                store.put("group", self.codec.flatten(tensor))
                with store.acquire("group") as lease:
                    parts = {name: part.clone() for name, part in lease.tensors.items()}
            made = self.codec.rebuild(tensor, parts)
            assert torch.equal(value_of(made), value_of(tensor))
