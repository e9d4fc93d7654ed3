"""Our codecs keep the rules, the rules catch violations, and only codecs read storages."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.architecture.test_layers import PACKAGE, parsed_files
from tests.conformance.codecs import CodecConformance, value_of
from tests.helpers.wrappers import Scaled, scaled
from tierstore.adapters.codecs import codec_of, is_movable, leaves_of, movable_leaves, rebuilt
from tierstore.adapters.codecs.plain import PlainCodec
from tierstore.adapters.codecs.wrapper import WrapperCodec


class CustomParameter(nn.Parameter):
    """A parameter of a custom class, as in vLLM and peft."""


class TestPlain(CodecConformance):
    codec = PlainCodec()

    def examples(self) -> list[torch.Tensor]:
        rows = torch.arange(2.0, 14.0).view(3, 4)
        return [
            rows.clone(),
            rows.clone().t(),
            torch.arange(2.0, 38.0)[3:27:2],
            nn.Parameter(rows.to(torch.bfloat16)),
            nn.Parameter(torch.arange(2, 8), requires_grad=False),
            CustomParameter(rows.clone()),
            nn.Buffer(rows.clone()),
        ]


class TestWrapper(CodecConformance):
    codec = WrapperCodec()

    def examples(self) -> list[torch.Tensor]:
        return [scaled(), nn.Parameter(scaled()), nn.Parameter(scaled(), requires_grad=False)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.zeros(2, dtype=torch.complex32),
    ],
    ids=["sparse", "quantized", "nested", "complex32"],
)
def test_tensor_that_cannot_be_stored_has_no_codec(tensor: torch.Tensor) -> None:
    assert codec_of(tensor) is None
    assert not leaves_of(tensor)


def test_leaves_include_empty_tensors_that_do_not_move() -> None:
    for nothing in (torch.empty(0), torch.ones(1, device="meta")):
        assert leaves_of(nothing) and not is_movable(nothing)
    assert is_movable(torch.ones(1))
    assert movable_leaves(scaled()) and not is_movable(scaled())


def test_leaves_are_the_wrapped_tensors() -> None:
    plain, inner = torch.ones(3, 1), scaled()
    outer = Scaled(inner, plain)
    leaves = leaves_of(outer)
    assert leaves.keys() == {"numbers.numbers", "numbers.scales", "scales"}
    assert leaves["numbers.scales"] is inner.scales
    assert leaves["scales"] is plain
    assert leaves_of(plain)[""] is plain


def test_nested_wrapper_is_rebuilt_from_other_leaves() -> None:
    outer = Scaled(scaled(), torch.rand(3, 1))
    leaves = {name: leaf.clone() for name, leaf in leaves_of(outer).items()}
    made = rebuilt(outer, leaves)
    assert torch.equal(value_of(made), value_of(outer))
    leaves["numbers.numbers"].zero_()
    assert not value_of(made).any() and value_of(outer).all()


def test_wrapper_of_an_unknown_tensor_has_no_leaves() -> None:
    assert not leaves_of(Scaled(torch.eye(3).to_sparse(), torch.ones(3, 1)))


# Controls ----------------------------------------------------------------------------------------


class Copies(PlainCodec):
    """Returns copies, so that a change of a part is lost."""

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"": tensor.detach().clone()}


class LosesItsClass(PlainCodec):
    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parts[""]


class ShowsNothing(PlainCodec):
    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        (Copies(), CodecConformance.test_flatten_returns_aliases_with_known_codecs),
        (LosesItsClass(), CodecConformance.test_rebuild_from_the_parts_is_equal),
        (ShowsNothing(), CodecConformance.test_binding_other_parts_keeps_the_object),
    ],
)
def test_codec_that_breaks_a_rule_fails(codec: PlainCodec, rule: Any) -> None:
    conformance = TestPlain()
    rule(conformance)
    conformance.codec = codec
    with pytest.raises(AssertionError):
        rule(conformance)


# Other code that reads storages ------------------------------------------------------------------

MEMORY_ACCESS = {
    *("__tensor_flatten__", "__tensor_unflatten__", "data_ptr", "set_", "swap_tensors"),
    *("untyped_storage", "storage_offset"),
}
STORAGE_READERS = ("adapters/codecs/", "adapters/activations/", "adapters/binding.py")
"""Directories that may read storages.

Saved tensors are kept by storage, so the code for them reads storages. Bindings do for all tensors
of a unit in one loop the work of a codec for one.
"""


def uses_of_memory(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that access a tensor's memory directly."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            given = node.attr == "data" and isinstance(node.ctx, ast.Store)
            if given or node.attr in MEMORY_ACCESS:
                yield node.lineno
        elif isinstance(node, ast.Constant) and node.value in MEMORY_ACCESS:
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    ["t.data = x", "t.data_ptr()", "hasattr(t, '__tensor_flatten__')", "torch.utils.swap_tensors"],
)
def test_direct_memory_access_is_found(source: str) -> None:
    assert list(uses_of_memory(ast.parse(source)))


def test_direct_memory_access_is_left_to_the_codecs() -> None:
    found = {
        str(path.relative_to(PACKAGE)): list(uses_of_memory(tree))
        for path, tree in parsed_files("adapters")
    }
    assert any(lines for path, lines in found.items() if path.startswith(STORAGE_READERS[0]))
    assert not {
        p: lines for p, lines in found.items() if lines and not p.startswith(STORAGE_READERS)
    }
