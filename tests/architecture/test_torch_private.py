"""What torch keeps to itself is used in one file only, so that another torch is one file's work."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_layers import (
    PACKAGE,
    ROOT,
    imported_names,
    is_or_is_inside,
    names_of_torch,
    parsed_files,
)
from tests.architecture.test_no_code_from_files import dotted

HOME = PACKAGE / "torch_private.py"

OF_TENSORS = {"_version", "_base", "_cdata", "_make_subclass", "_new_with_weak_ptr"}
"""Private names of tensors and storages, which are known only by what they are called."""


def is_private(name: str) -> bool:
    """Whether a dotted name has a part that begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_uses(tree: ast.AST) -> Iterator[int]:
    """The lines that use a private name of torch."""
    torch_names = names_of_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name for name, _ in imported_names(node)]
            if any(is_or_is_inside(name, "torch") and is_private(name) for name in names):
                yield node.lineno
        elif isinstance(node, ast.Attribute):
            name = dotted(node) or ""
            of_torch = name.partition(".")[0] in torch_names and is_private(name)
            own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if of_torch or (node.attr in OF_TENSORS and not own):
                yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch as t\nt.autograd._is_checkpoint_valid()",
        "import torch.nn\ntorch._neg_view(x)",
        "from torch import _C",
        "from torch._C import Generator",
        "from torch.utils._pytree import tree_map",
        "from torch.utils import _pytree",
        "from torch.autograd.grad_mode import _unsafe_preserve_version_counter",
        "def later():\n    from torch.utils._pytree import tree_map",
        "x = weight.tensor._version",
        "x = f(tensor).untyped_storage()._cdata",
    ],
)
def test_every_private_use_is_noticed(source: str) -> None:
    assert list(private_uses(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.zeros(1)",
        "import torch\ntorch.Tensor.__init__",
        "from torch.utils.checkpoint import checkpoint",
        "self._version = 3",
        "module._parameters",
        "from tierstore.torch_private import tree_map",
        "torch_like._private()",
    ],
)
def test_other_code_does_not_count(source: str) -> None:
    assert not list(private_uses(ast.parse(source)))


def test_private_names_of_torch_are_used_in_one_file_only() -> None:
    found = {
        str(path.relative_to(ROOT)): list(private_uses(tree))
        for path, tree in parsed_files(None, set())
    }
    assert found.pop(str(HOME.relative_to(ROOT))), "it is what this test is about"
    assert not {path: lines for path, lines in found.items() if lines}
