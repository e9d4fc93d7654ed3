"""What every codec must do. Subclass `CodecConformance`, give it examples, and run pytest.

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
    """What a tensor of any kind is, as an ordinary one."""
    return tensor.detach() + 0


class CodecConformance(ABC):
    """Examples are on the CPU, and of numbers that are neither all zero nor all one."""

    codec: TensorCodec

    @abstractmethod
    def examples(self) -> list[torch.Tensor]:
        """Tensors of this kind, made anew: parameters among them."""

    def flattened(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts, copied, with their strides."""
        parts = self.codec.flatten(tensor)
        copies = {
            n: torch.empty_strided(p.size(), p.stride(), dtype=p.dtype) for n, p in parts.items()
        }
        return {name: copy.copy_(parts[name]) for name, copy in copies.items()}

    def test_it_is_the_one_that_is_found(self) -> None:
        for tensor in self.examples():
            assert type(codec_of(tensor)) is type(self.codec)

    def test_parts_are_aliases_that_a_codec_knows(self) -> None:
        for tensor in self.examples():
            parts = self.codec.flatten(tensor)
            assert parts
            assert all(codec_of(part) is not None for part in parts.values())
            assert not any(part.requires_grad for part in parts.values())
            before = value_of(tensor)
            for part in parts.values():
                part.zero_()
            assert not torch.equal(value_of(tensor), before)

    def test_of_its_parts_it_is_made_again(self) -> None:
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

    def test_what_is_made_again_has_memory_of_its_own(self) -> None:
        for tensor in self.examples():
            before = value_of(tensor)
            made = self.codec.rebuild(tensor, self.flattened(tensor))
            for part in self.codec.flatten(made).values():
                part.zero_()
            assert torch.equal(value_of(tensor), before)

    def test_it_shows_another_and_stays_the_same_object(self) -> None:
        for tensor in self.examples():
            identity, kind, wants = id(tensor), type(tensor), tensor.requires_grad
            other = self.codec.rebuild(
                tensor, {n: torch.ones_like(p) for n, p in self.codec.flatten(tensor).items()}
            )
            expected, before = value_of(other), value_of(tensor)
            assert not torch.equal(expected, before)
            self.codec.show(tensor, other)
            assert (id(tensor), type(tensor), tensor.requires_grad) == (identity, kind, wants)
            assert torch.equal(value_of(tensor), expected)

    def test_a_store_holds_the_parts(self, disk_dir: Path) -> None:
        for tensor in self.examples():
            with TierStore(BUDGET, disk_dir, device="cpu") as store:
                store.put("group", self.codec.flatten(tensor))
                with store.acquire("group") as lease:
                    parts = {name: part.clone() for name, part in lease.tensors.items()}
            made = self.codec.rebuild(tensor, parts)
            assert torch.equal(value_of(made), value_of(tensor))
