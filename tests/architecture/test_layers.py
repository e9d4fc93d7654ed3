"""The rules about which module may import which, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import output_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tierstore"

MAY_USE_TORCH_NN = {"adapters"}
MAY_NOT_IMPORT_TORCH = {"model", "plan", "cli"}

SOURCE_SUFFIXES = {".c", ".cpp", ".cu", ".h", ".py", ".pyi"}

# What only some users install: `import tierstore` must work, and stay quick, without these.
OPTIONAL_LIBRARIES = {"accelerate", "diffusers", "matplotlib", "prometheus_client", "transformers"}


def source_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in SOURCE_SUFFIXES)


def part_of(path: Path) -> str:
    """The part of the package a file belongs to: `model` for both model.py and model/sizes.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Each full dotted name that an import statement reaches, and the local name it gets."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            # `import torch.nn` binds `torch`, but `import torch.nn as layers` binds `layers`.
            yield alias.name, alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        for alias in node.names:
            yield f"{node.module}.{alias.name}", alias.asname or alias.name


def is_or_is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def torch_imports(tree: ast.AST) -> list[int]:
    """The lines that import torch or something of it."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(is_or_is_inside(name, "torch") for name, _ in imported_names(node))
    ]


def names_of_torch(tree: ast.AST) -> set[str]:
    """The local names that stand for torch itself."""
    return {
        local
        for node in ast.walk(tree)
        for name, local in imported_names(node)
        if name == "torch" or (is_or_is_inside(name, "torch") and local == "torch")
    }


def torch_nn_uses(tree: ast.AST) -> list[int]:
    """The lines that import torch.nn or reach it as an attribute of torch."""
    imports = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(is_or_is_inside(name, "torch.nn") for name, _ in imported_names(node))
    ]
    torch_names = names_of_torch(tree)
    attributes = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "nn"
        and isinstance(node.value, ast.Name)
        and node.value.id in torch_names
    ]
    return sorted({*imports, *attributes})


def parsed_files(
    parts_examined: set[str] | None, parts_excused: set[str]
) -> Iterator[tuple[Path, ast.AST]]:
    for path in source_files():
        part = part_of(path)
        examined = parts_examined is None or part in parts_examined
        if path.suffix in {".py", ".pyi"} and examined and part not in parts_excused:
            yield path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn",
        "import torch.nn as layers",
        "import torch.nn.functional",
        "from torch import nn",
        "from torch import nn as layers",
        "from torch.nn import Module",
        "from torch.nn.functional import linear",
        "import torch\nx = torch.nn.Linear",
        "import torch as t\nx = t.nn.Linear",
        "import torch.cuda\nx = torch.nn.Linear",
        "def later():\n    from torch import nn",
    ],
)
def test_every_way_to_reach_torch_nn_is_noticed(source: str) -> None:
    assert torch_nn_uses(ast.parse(source))
    assert torch_imports(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.zeros(1)",
        "from torch import Tensor",
        "import torchvision.nn",
        "from .torch import nn",
        "x = something.nn.Linear",
    ],
)
def test_other_code_does_not_count_as_torch_nn(source: str) -> None:
    assert not torch_nn_uses(ast.parse(source))


def test_torch_nn_is_used_by_adapters_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in parsed_files(None, MAY_USE_TORCH_NN)
        for line in torch_nn_uses(tree)
    ]
    assert not found, "torch.nn may be used in tierstore/adapters only"


def test_model_plan_and_command_line_do_not_import_torch() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in parsed_files(MAY_NOT_IMPORT_TORCH, set())
        for line in torch_imports(tree)
    ]
    assert not found, f"torch may not be imported in {sorted(MAY_NOT_IMPORT_TORCH)}"


def test_import_contracts_are_kept() -> None:
    run = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def modules_after(statement: str) -> set[str]:
    """The top-level modules loaded in a fresh interpreter once it has run the statement."""
    output = output_of("-c", f"import sys; {statement}; print(*sys.modules)")
    return {name.partition(".")[0] for name in output.split()}


def test_the_package_imports_no_optional_library() -> None:
    assert not modules_after("import tierstore") & OPTIONAL_LIBRARIES


def test_the_command_line_starts_without_torch() -> None:
    loaded = modules_after("import tierstore.cli")
    assert "tierstore" in loaded
    assert "torch" not in loaded
