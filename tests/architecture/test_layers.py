"""Names that modules may use, where import-linter does not check; pyproject.toml has the rest.

`uses` finds every dotted name in a module's source, and resolves local names.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import output_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tierstore"


def parsed_files(part: str = "") -> Iterator[tuple[Path, ast.AST]]:
    """Parse the modules of the package, or of one folder of it."""
    for path in sorted((PACKAGE / part).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def uses(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield every name of a module, in full: `torch.nn.Linear` for `t.nn.Linear` of `torch as t`.

    A name that no import binds begins with a dot, as `.eval` and `.self.load` do.
    """
    imported: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        for name, local in _imports(node):
            yield node, name
            # `import torch.nn` binds `torch`, but `import torch.nn as layers` binds `layers`.
            first = name.partition(".")[0]
            imported[local or first] = name if local else first
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            yield node, resolved(node, imported)


def _imports(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, alias.asname) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        for alias in node.names:
            yield f"{node.module}.{alias.name}", alias.asname or alias.name


def resolved(node: ast.expr, imported: dict[str, str]) -> str:
    match node:
        case ast.Name(id=name):
            return imported.get(name, f".{name}")
        case ast.Attribute(value=value, attr=attribute):
            return f"{resolved(value, imported)}.{attribute}"
    return "."


def is_or_is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


PRIVATE_TENSOR_NAMES = {"_version", "_base", "_cdata", "_make_subclass", "_new_with_weak_ptr"}
"""Private names of tensors and storages, which can be recognised only by name."""


def is_torch_nn(name: str) -> bool:
    return is_or_is_inside(name, "torch.nn")


def is_private_of_torch(name: str) -> bool:
    first, *rest = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in rest)
    own = name.startswith((".self.", ".cls.")) and len(rest) == 2
    return (first == "torch" and private) or (
        bool(rest) and rest[-1] in PRIVATE_TENSOR_NAMES and not own
    )


def is_record_stream(name: str) -> bool:
    """No budget counts memory that `record_stream` holds until the device has passed."""
    return name.endswith(".record_stream")


MAY_USE = {
    is_torch_nn: "tierstore/adapters/",
    # so that another torch version changes one file
    is_private_of_torch: "tierstore/torch_private.py",
    is_record_stream: "nowhere",
}


def test_restricted_names_are_used_only_where_allowed() -> None:
    used, wrong = set(), []
    for path, tree in parsed_files():
        file = str(path.relative_to(ROOT))
        for node, name in uses(tree):
            for rule in [rule for rule in MAY_USE if rule(name)]:
                used.add(rule)
                if not file.startswith(MAY_USE[rule]):
                    wrong.append(f"{file}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    assert wrong == []
    assert used == {is_torch_nn, is_private_of_torch}


@pytest.mark.parametrize(
    ("source", "rule", "found"),
    [
        ("import torch.nn as layers", is_torch_nn, True),
        ("from torch.nn.functional import linear", is_torch_nn, True),
        ("import torch as t\nx = t.nn.Linear", is_torch_nn, True),
        ("def later():\n    from torch import nn", is_torch_nn, True),
        ("import torchvision.nn\nfrom .torch import nn", is_torch_nn, False),
        ("x = something.nn.Linear", is_torch_nn, False),
        ("import torch._dynamo", is_private_of_torch, True),
        ("import torch as t\nt.autograd._is_checkpoint_valid()", is_private_of_torch, True),
        ("from torch.utils._pytree import tree_map", is_private_of_torch, True),
        ("x = f(tensor).untyped_storage()._cdata", is_private_of_torch, True),
        ("import torch\nx = torch.Tensor.__init__", is_private_of_torch, False),
        ("self._version = module._parameters", is_private_of_torch, False),
        ("from tierstore.torch_private import tree_map", is_private_of_torch, False),
        ("x.record_stream(s)", is_record_stream, True),
    ],
)
def test_use_of_a_restricted_name_is_found(
    source: str, rule: Callable[[str], bool], found: bool
) -> None:
    assert any(rule(name) for _, name in uses(ast.parse(source))) == found


# The rest of the modules that an import may load: `import tierstore` works, and is quick, without
# these.
OPTIONAL_LIBRARIES = {"accelerate", "diffusers", "matplotlib", "prometheus_client", "transformers"}


@pytest.mark.parametrize(
    ("module", "missing"),
    [("tierstore", OPTIONAL_LIBRARIES), ("tierstore.cli", OPTIONAL_LIBRARIES | {"torch"})],
)
def test_import_loads_no_optional_library(module: str, missing: set[str]) -> None:
    loaded = output_of("-c", f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded
    assert not {name.partition(".")[0] for name in loaded} & missing
