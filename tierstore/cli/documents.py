"""Rows of what `--json` prints that several commands have."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tierstore.cli.directories import Item
from tierstore.cli.frame import Document
from tierstore.cli.report import Group, Problem


def path_of(directory: str, item: Item) -> str:
    """The absolute path of something in the directory."""
    return os.path.join(os.path.abspath(directory), item.name)


def items(directory: str, found: Iterable[Item]) -> list[Document]:
    """Things in the directory."""
    return [
        {"path": path_of(directory, item), "kind": item.kind, "nbytes": item.nbytes}
        for item in found
    ]


def group_row(directory: str, group: Group) -> Document:
    """One group in one object."""
    return {
        "key": group.key,
        "path": path_of(directory, group.item),
        "nbytes": group.item.nbytes,
        "modified": group.item.modified,
        "tensors": len(group.tensors),
        "dtypes": group.dtypes,
        "state": group.state,
        "problem": group.problem and problem_row(group.problem),
    }


def problem_row(problem: Problem) -> Document:
    """What is wrong with an object."""
    return {name: getattr(problem, name) for name in ("reason", "tensor", "expected", "found")}
