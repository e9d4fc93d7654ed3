"""No file can make this library run code: nothing in the package could load any.

Checkpoints of torch are pickles. `checkpoint_metadata.py` reads their metadata as records, and
imports nothing; torch's own unpickler, which makes only objects on a list, reads the tensors (see
decision 49). `tests/training/test_saving.py` and `tests/faults/test_hostile_documents.py` try them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_layers import ROOT, is_or_is_inside, parsed_files, uses

FORBIDDEN = {
    *("cloudpickle", "code", "codeop", "dill", "imp", "joblib", "jsonpickle", "marshal", "pickle"),
    *("pickletools", "pty", "runpy", "shelve", "subprocess", "yaml", "zipimport", "socketserver"),
    *("http", "urllib.request", "requests", "ftplib", "xmlrpc", "multiprocessing"),
    *("torch.hub", "torch.jit.load", "torch.load", "torch.package", "torch.serialization"),
    *("torch.ops.load_library", "torch.classes.load_library", "ctypes.cdll"),
    *("numpy.load", "numpy.fromfile", "numpy.loadtxt", "os.system", "os.popen", "os.execv"),
    *("os.execve", "os.execvp", "os.posix_spawn", "os.spawnv", "os.startfile"),
    *(f"{where}.{name}" for where in ("", "builtins") for name in ("compile", "eval", "exec")),
    *(".__import__", "builtins.__import__"),
}
"""Modules and functions that load code, start programs, or reach for the network."""

WITH_LITERALS = {"importlib.import_module", "importlib.util.spec_from_file_location"}
"""Functions that import a module by name: only a literal name in the source is allowed."""

ALLOWED = {
    # The network is reached at a URL that a user typed, for a text with numbers.
    "tierstore/cli/sampling.py": {
        *("http", "http.client", "http.client.HTTPException", "urllib.request"),
        *("urllib.request.ProxyHandler", "urllib.request.build_opener"),
    },
    "tierstore/adapters/training/checkpoint_files.py": {
        *("pickle", "pickle.PickleError", "torch.load of weights only")
    },
    "tierstore/adapters/training/checkpoint_metadata.py": {
        *("pickle", "pickle.Unpickler")  # which imports nothing
    },
    "tierstore/adapters/compat/__init__.py": {  # the files of its own folder
        "importlib.import_module of a name that is not written here"
    },
    "tierstore/torch_private.py": {
        "ctypes.CDLL of a file"  # a library of torch's own
    },
}


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines that could run code from a file, and how."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for call in calls.values():
        if any(keyword.arg == "allow_pickle" for keyword in call.keywords):
            yield call.lineno, "allow_pickle"
    for node, name in uses(tree):
        call = calls.get(id(node))
        line: int = node.lineno  # type: ignore[attr-defined]
        if name == "torch.load" and call is not None and _loads_weights_only(call):
            yield line, "torch.load of weights only"
        elif any(is_or_is_inside(name, forbidden) for forbidden in FORBIDDEN):
            yield line, name
        elif name in WITH_LITERALS and call is not None and not _is_literal(call.args[0]):
            yield line, f"{name} of a name that is not written here"
        elif name == "ctypes.CDLL" and call is not None and not _is_none(call.args):
            yield line, "ctypes.CDLL of a file"


def _loads_weights_only(call: ast.Call) -> bool:
    return any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)


def _is_literal(argument: ast.expr) -> bool:
    """Return whether a module name is a literal, or one of a table of literals (`_LAZY[name]`)."""
    table = isinstance(argument, ast.Subscript) and ast.unparse(argument.value) == "_LAZY"
    return table or (isinstance(argument, ast.Constant) and isinstance(argument.value, str))


def _is_none(arguments: list[ast.expr]) -> bool:
    return all(isinstance(each, ast.Constant) and each.value is None for each in arguments)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle as p",
        "from pickle import loads",
        "def later():\n    import marshal",
        "import torch\nx = torch.load('f')",
        "import torch\nx = torch.load('f', weights_only=False)",
        "from torch import load",
        "from torch import jit\njit.load('f')",
        "eval('1')",
        "run = exec",
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
def test_code_loading_calls_are_found(source: str) -> None:
    assert list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(code.loads)",
        "import re\nre.compile('a')",
        "import torch\ntorch.compiler.disable(f)",
        "import ctypes\nctypes.CDLL(None)",
        "from importlib import import_module\nimport_module('torch')",
        "self.load('f')",
        "from tierstore.observe.trace import load",
    ],
)
def test_other_calls_are_not_reported(source: str) -> None:
    assert not list(dangers(ast.parse(source)))


def test_package_cannot_run_code_from_a_file() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in parsed_files():
        for line, what in dangers(tree):
            file = str(path.relative_to(ROOT))
            found.setdefault(file, set()).add(what)
            assert what in ALLOWED.get(file, ()), f"no code may come from a file: {file}:{line}"
    assert found.keys() == ALLOWED.keys(), "remove allowances that are not used"
