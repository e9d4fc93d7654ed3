"""The public names are documented: every name of docs/reference/, and each public member of it.

Each has a docstring of its own, in the style that the site reads (Google's), with an entry for each
parameter or field. `Async X` in a first line stands for the docstring of X. The build of
the site refuses entries for parameters that there are not.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SHOWN = re.compile(r"^::: (\S+)\n(?: {4}options:\n((?: {6}.*\n)*))?", re.MULTILINE)
MEMBERS = re.compile(r"members: \[(.*)\]")
SECTION = re.compile(r"^(?:Args|Attributes|Returns|Yields|Raises|Examples?):$", re.MULTILINE)
ENTRY = re.compile(r"^ +\*{0,2}(\w+):(?= ?\S|\n {8})", re.MULTILINE)
ASYNC_VARIANT = re.compile(r"Async `(\w+)`")
NOT_CONSTRUCTED_BY_USERS = {"Lease", "OffloadHandle", "ActivationOffload"}


def members_of(value: Any, chosen: str | None = None) -> dict[str, Any]:
    """Return the public methods and properties of a class, or those that a page has chosen."""
    members = vars(value) if isinstance(value, type) else {}
    return {
        name: member
        for name, member in members.items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property))
        and (chosen is None or name in re.findall(r"\w+", chosen))
    }


def shown() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Read the reference: each name, its value, and the members that are shown of it."""
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        for path, options in SHOWN.findall(page.read_text(encoding="utf-8") + "\n"):
            module, _, name = path.rpartition(".")
            value = getattr(importlib.import_module(module), name)
            chosen = MEMBERS.search(options)
            yield path, value, members_of(value, chosen and chosen[1])


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Return every docstring of the reference, with whose it is."""
    for name, value, members in shown():
        yield name, value.__doc__ or ""
        yield from ((f"{name}.{member}", part.__doc__ or "") for member, part in members.items())


def faults(value: Any, members: dict[str, Any]) -> Iterator[str]:
    for name, part in {"": value, **members}.items():
        text = vars(part).get("__doc__") if isinstance(part, type) else part.__doc__
        if not text:
            yield f"{name}: no docstring"
            continue
        if (twin := ASYNC_VARIANT.match(text)) is not None:
            text = members[twin[1]].__doc__
        entries = ENTRY.findall(inspect.cleandoc(text))
        yield from (f"{name}: {each}" for each in parameters_of(part) if each not in entries)


def parameters_of(part: Any) -> list[str]:
    """Return the names of its parameters, the fields of data, or the attributes of an error."""
    if not isinstance(part, type):
        function = getattr(part, "__func__", part)
        names = list(inspect.signature(function).parameters) if callable(function) else []
        return [name for name in names if name not in ("self", "cls")]
    if "__init__" not in vars(part) or part.__name__ in NOT_CONSTRUCTED_BY_USERS:
        return []
    if issubclass(part, Exception):
        steps = dis.get_instructions(part.__init__)
        return [
            step.argval for step in steps if step.opname == "STORE_ATTR" and step.argval[0] != "_"
        ]
    return list(inspect.signature(part).parameters)


@pytest.mark.parametrize(
    ("value", "members"), [each[1:] for each in shown()], ids=[each[0] for each in shown()]
)
def test_public_name_is_described(value: Any, members: dict[str, Any]) -> None:
    assert list(faults(value, members)) == []


class Made:
    """Wait.

    Args:
        timeout: how long to wait, in seconds.
        key:
    """

    def __init__(self, timeout: float, key: str, group: str) -> None: ...

    def get(self, key: str) -> None:
        """Wait for a key."""

    async def aget(self, key: str, timeout: float) -> None:
        """Async `get`."""

    def silent(self) -> None: ...

    @property
    def closed(self) -> bool:
        """True once it is closed."""


def test_docstring_faults_are_found() -> None:
    """The control."""
    found = ["key", "group", "get: key", "aget: key", "aget: timeout", "silent: no docstring"]
    assert [each.removeprefix(": ") for each in faults(Made, members_of(Made))] == found
