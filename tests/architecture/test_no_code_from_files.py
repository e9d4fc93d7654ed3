"""No file can make this library run code: nothing in it could load any.

Checkpoints of torch are pickles. One module reads them, as descriptions of which nothing is made;
what passed there and has tensors is read by torch's own unpickler, which makes only what is on a
list (see decision 35).
`tests/training/test_saving.py` and `tests/faults/test_hostile_documents.py` try them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_layers import ROOT, imported_names, is_or_is_inside, parsed_files

MODULES = {
    *("cloudpickle", "code", "codeop", "dill", "imp", "joblib", "jsonpickle", "marshal", "pickle"),
    *("pickletools", "pty", "runpy", "shelve", "subprocess", "yaml", "zipimport", "socketserver"),
    *("http", "urllib.request", "requests", "ftplib", "xmlrpc", "torch.hub", "torch.serialization"),
    *("torch.jit", "torch.package", "multiprocessing"),
}
"""Modules that load code, start programs, or reach for the network."""

CALLS = {
    *("__import__", "compile", "eval", "exec", "execfile", "torch.load", "torch.jit.load"),
    *("numpy.load", "np.load", "numpy.fromfile", "numpy.loadtxt", "os.system", "os.popen"),
    *("os.execv", "os.execve", "os.execvp", "os.posix_spawn", "os.spawnv", "os.startfile"),
    *("torch.package.PackageImporter", "torch.ops.load_library", "torch.classes.load_library"),
    *("ctypes.cdll.LoadLibrary", "builtins.exec", "builtins.eval", "builtins.compile"),
}

TYPED = {"tierstore/cli/page.py": ["http.client", "urllib.request"]}
"""Where the network is reached: at a URL that a user typed, for a text in which numbers are."""

CAREFUL = {
    "tierstore/adapters/training/checkpoint_archives.py": ["torch.load"],
    "tierstore/adapters/training/checkpoint_files.py": ["pickle"],
    "tierstore/adapters/training/checkpoint_pickles.py": ["pickle"],
    "tierstore/torch_private.py": ["ctypes.CDLL of a file"],  # a library of torch's own
}
"""Where pickles are read that name nothing but what is on a list."""
OF_PICKLE = {"PicklingError", "UnpicklingError"}
"""What of `pickle` is used there: nothing that loads one as it is."""

DYNAMIC = {"importlib.import_module", "import_module", "importlib.util.spec_from_file_location"}
"""Calls that import a module by its name: only a name that is written in the source will do."""


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` as text; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines that could run what a file holds, and how."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, _ in imported_names(node):
                if any(is_or_is_inside(name, module) for module in MODULES) or name in CALLS:
                    yield node.lineno, name
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _called(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = dotted(node.func)
    if name in CALLS:
        yield node.lineno, str(name)
    if name in DYNAMIC and not _is_known(node.args[:1]):
        yield node.lineno, f"{name} of a name that is not written here"
    if name == "ctypes.CDLL" and not _is_none(node.args):
        yield node.lineno, "ctypes.CDLL of a file"
    if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
        yield node.lineno, "allow_pickle"


def _is_known(arguments: list[ast.expr]) -> bool:
    """Whether a module's name is a literal, or one of a table of literals (`_LAZY[name]`)."""
    [argument] = arguments
    table = isinstance(argument, ast.Subscript) and dotted(argument.value) == "_LAZY"
    return table or (isinstance(argument, ast.Constant) and isinstance(argument.value, str))


def _is_none(arguments: list[ast.expr]) -> bool:
    return all(isinstance(each, ast.Constant) and each.value is None for each in arguments)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def later():\n    import marshal",
        "import torch\nx = torch.load('f')",
        "from torch import load",
        "import torch.jit\nx = 1",
        "eval('1')",
        "exec('1')",
        "compile('1', '', 'exec')",
        "__import__('os')",
        "import importlib\nimportlib.import_module(name)",
        "import numpy as np\nnp.load('f')",
        "f('x', allow_pickle=True)",
        "import ctypes\nctypes.CDLL('libc.so')",
        "import subprocess",
        "from urllib.request import urlopen",
    ],
)
def test_every_way_is_noticed(source: str) -> None:
    assert list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads('1')",
        "import re\nre.compile('a')",
        "import torch\ntorch.compiler.disable(f)",
        "import ctypes\nctypes.CDLL(None)",
        "from importlib import import_module\nimport_module('torch')",
        "self.load('f')",
        "from tierstore.observe.trace import load",
    ],
)
def test_other_code_does_not_count(source: str) -> None:
    assert not list(dangers(ast.parse(source)))


def test_nothing_in_the_package_could_run_what_a_file_holds() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path, tree in parsed_files(None, set())
        for line, what in dangers(tree)
        if what not in (TYPED | CAREFUL).get(str(path.relative_to(ROOT)), ())
    ]
    assert not found, "no code may ever come from a file"


def test_pickles_are_read_with_care_where_they_are() -> None:
    seen = set()
    for path, tree in parsed_files(None, set()):
        if str(path.relative_to(ROOT)) not in CAREFUL:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and dotted(node.value) == "pickle":
                assert node.attr in OF_PICKLE, f"{path}:{node.lineno}"
                seen.add(node.attr)
            if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
                [only] = [k.value for k in node.keywords if k.arg == "weights_only"]
                assert isinstance(only, ast.Constant) and only.value is True
                seen.add("torch.load")
    assert seen == OF_PICKLE | {"torch.load"}
