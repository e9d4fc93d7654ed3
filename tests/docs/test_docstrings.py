"""What the reference shows is said: types, units, what comes back, what is raised.

For each name of docs/reference/ and each public member of it:

- it has a docstring of its own, in the style that the site reads (Google's);
- `Args:` describes every parameter, and none that there is not; `Attributes:` every field;
- it says what it returns, by a section `Returns:` or by a first sentence that names the thing;
- each type under `Raises:` is an exception, of Python or of tierstore;
- what is a number of bytes or of seconds says so.

`X for coroutines` in a first line stands for the docstring of X.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tierstore

ROOT = Path(__file__).resolve().parents[2]

SHOWN = re.compile(r"^::: (?P<name>\S+)\n(?: {4}options:\n(?: {6}.*\n)*)?", re.MULTILINE)
MEMBERS = re.compile(r"members: \[(.*)\]")
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
ENTRY = re.compile(r"^(?P<name>\*{0,2}[\w.]+): ?(?P<text>.*)$")
TWIN = re.compile(r"^`(?P<name>\w+)` for coroutines")
NAMES_WHAT_IT_IS = ("A ", "An ", "The ", "What ", "Whether ", "How ", "Copies", "Bytes ", "Every ")

UNITS = {
    "bytes": re.compile(r"(^|_)(n?bytes|budget|size)($|_)"),
    "seconds": re.compile(r"seconds|timeout"),
}

MADE_BY = {
    "Lease": "acquire",
    "OffloadHandle": "enable_group_offload",
    "ActivationOffload": "offload_activations",
}
"""Classes that users do not make themselves, and what they call instead."""


@dataclass(frozen=True)
class Shown:
    """Something that the reference shows; `members` are those that it names, if it names some."""

    name: str
    members: tuple[str, ...] | None = None

    @property
    def value(self) -> Any:
        module, _, name = self.name.rpartition(".")
        return getattr(importlib.import_module(module), name)


def shown() -> list[Shown]:
    found = []
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        for match in SHOWN.finditer(page.read_text(encoding="utf-8") + "\n"):
            named = MEMBERS.search(match[0])
            members = tuple(re.findall(r"\w+", named[1])) if named else None
            found.append(Shown(match["name"], members))
    return found


def sections(docstring: str) -> dict[str, dict[str, str]]:
    """The sections of a docstring: what each entry of it says, by name. `Returns` has one, ""."""
    found: dict[str, dict[str, str]] = {}
    section = entry = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if (heading := SECTION.match(line)) is not None:
            section, entry = heading[1], ""
            found[section] = {}
        elif section and line and not line.startswith(" "):
            section = ""
        elif section and (match := ENTRY.match(line[4:])) and section != "Returns":
            entry = match["name"].lstrip("*")
            found[section][entry] = match["text"]
        elif section and line:
            found[section][entry] = f"{found[section].get(entry, '')} {line.strip()}".strip()
    return found


def parameters_of(function: Any) -> list[str]:
    """The names of its parameters; of a method, without the object or class itself."""
    names = list(inspect.signature(function).parameters)
    return names[1:] if "." in function.__qualname__.rpartition("<locals>.")[2] else names


def fields_of(kind: type) -> set[str]:
    """What an object has beside its methods: fields, and what `__init__` of an error assigns."""
    if dataclasses.is_dataclass(kind):
        return {each.name for each in dataclasses.fields(kind)}
    if not issubclass(kind, Exception) or "__init__" not in vars(kind):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))
    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {each.attr for each in assigned if isinstance(each.ctx, ast.Store)}


def described_elsewhere(kind: type, docstring: str) -> str:
    """The docstring that one refers to: of whom it is a twin."""
    twin = TWIN.match(docstring)
    return inspect.getdoc(getattr(kind, twin["name"])) or "" if twin else docstring


def exception(name: str) -> bool:
    """Whether there is such an exception."""
    for place in (tierstore, builtins):
        if (found := getattr(place, name, None)) is not None:
            return isinstance(found, type) and issubclass(found, BaseException)
    return False


def faults_of_text(name: str, docstring: str | None) -> Iterator[str]:
    """What no docstring may have, whatever it describes."""
    if not docstring or not docstring.strip():
        yield f"{name}: no docstring"
        return
    parts = sections(docstring)
    unknown = [kind for kind in parts.get("Raises", {}) if not exception(kind)]
    yield from (f"{name}: raises {kind}, which is no exception" for kind in unknown)
    if re.search(r"^ *Raises? \w+Error", docstring, re.MULTILINE):
        yield f"{name}: errors belong into a section, Raises:"
    for entry, text in (parts.get("Args", {}) | parts.get("Attributes", {})).items():
        yield from faults_of_entry(name, entry, text)


def faults_of_entry(name: str, entry: str, text: str) -> Iterator[str]:
    if not text:
        yield f"{name}: says nothing of {entry}"
    for unit, pattern in UNITS.items():
        if pattern.search(entry) and unit not in text:
            yield f"{name}: {entry} does not say that it is in {unit}"


def faults_of_function(name: str, function: Any, docstring: str | None) -> Iterator[str]:
    yield from faults_of_text(name, docstring)
    if not docstring:
        return
    parts = sections(docstring)
    wanted = set(parameters_of(function))
    found = set(parts.get("Args", {}))
    yield from (f"{name}: does not describe {each}" for each in sorted(wanted - found))
    yield from (f"{name}: has no parameter {each}" for each in sorted(found - wanted))
    result = inspect.signature(function).return_annotation
    says = "Returns" in parts or "Yields" in parts or docstring.startswith(NAMES_WHAT_IT_IS)
    if result not in (None, "None", inspect.Signature.empty) and not says:
        yield f"{name}: does not say what it returns"


def faults_of_class(name: str, kind: type, members: tuple[str, ...] | None = None) -> Iterator[str]:
    docstring = vars(kind).get("__doc__")
    yield from faults_of_text(name, docstring)
    parts = sections(docstring or "")
    made_by = MADE_BY.get(kind.__name__)
    if fields := fields_of(kind):
        described = set(parts.get("Attributes", {}))
        yield from (f"{name}: does not describe {each}" for each in sorted(fields - described))
    elif made_by is not None and f"{made_by}`" not in (docstring or ""):
        yield f"{name}: does not say that {made_by} makes it"
    elif made_by is None and "__init__" in vars(kind):
        for fault in faults_of_function(name, kind.__init__, docstring):
            yield from [fault] if "no docstring" not in fault else []
    for member, value in vars(kind).items():
        if member.startswith("_") or (members is not None and member not in members):
            continue
        yield from faults_of_member(f"{name}.{member}", kind, value)


def faults_of_member(name: str, kind: type, value: Any) -> Iterator[str]:
    if isinstance(value, property):
        yield from faults_of_text(name, value.__doc__)
    elif inspect.isfunction(value := getattr(value, "__func__", value)):
        docstring = value.__doc__ and described_elsewhere(kind, value.__doc__)
        if docstring == value.__doc__:
            yield from faults_of_function(name, value, docstring)
            return
        wanted = set(parameters_of(value))
        missing = wanted - set(sections(docstring or "").get("Args", {}))
        yield from (f"{name}: does not describe {each}" for each in sorted(missing))


def faults(each: Shown) -> list[str]:
    value = each.value
    if isinstance(value, type):
        return sorted(set(faults_of_class(each.name, value, each.members)))
    return sorted(set(faults_of_function(each.name, inspect.unwrap(value), value.__doc__)))


@pytest.mark.parametrize("each", shown(), ids=lambda each: each.name)
def test_what_the_reference_shows_is_described(each: Shown) -> None:
    assert faults(each) == []


def test_all_of_it_is_looked_at() -> None:
    names = {each.name for each in shown()}
    assert {f"tierstore.{name}" for name in tierstore.__all__} <= names
    named = {each.name: each.members for each in shown() if each.members}
    assert "disable" in named["tierstore.OffloadModel"]


# Controls: each fault is noticed ------------------------------------------------------------------


class Made:
    """Does something.

    Args:
        timeout: how long to wait, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def get(self, key: str) -> int:
        """The number of a key.

        Args:
            key: which one.

        Raises:
            UnknownKeyError: there is none.
        """
        raise NotImplementedError

    async def aget(self, key: str) -> int:
        """`get` for coroutines."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return False


def source_without(old: str, new: str = "") -> type:
    """`Made`, with something of its source replaced."""
    source = inspect.getsource(Made)
    assert source.count(old) == 1, old
    namespace: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), namespace)
    made: type = namespace["Made"]
    return made


def test_a_class_that_says_all_has_no_faults() -> None:
    assert list(faults_of_class("Made", Made)) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("timeout: how long to wait, in seconds.", "wait: how long.", "does not describe timeout"),
        ("timeout: how long to wait, in seconds.", "wait: how long.", "has no parameter wait"),
        (", in seconds", "", "timeout does not say that it is in seconds"),
        ("timeout: how long to wait, in seconds.", "timeout:", "says nothing of timeout"),
        ("The number of a key.", "Look for a key.", "does not say what it returns"),
        ("key: which one.", "name: which one.", "does not describe key"),
        ("UnknownKeyError: there is none.", "NoSuchError: never.", "NoSuchError, which is no"),
        ('"""Whether it is closed."""', "pass", "Made.closed: no docstring"),
        ("`get` for coroutines.", "Get the number.", "Made.aget: does not describe key"),
        ("The number of a key.\n", "The number.\n\n        Raises KeyError.\n", "into a section"),
    ],
)
def test_a_fault_is_noticed(old: str, new: str, fault: str) -> None:
    found = list(faults_of_class("Made", source_without(old, new)))
    assert any(fault in each for each in found)


def test_fields_of_data_and_of_errors_are_wanted() -> None:
    @dataclass
    class Numbers:
        """Some numbers."""

        used_bytes: int

    class Failed(Exception):
        """It failed."""

        def __init__(self, key: str) -> None:
            self.key = key

    assert list(faults_of_class("Numbers", Numbers)) == ["Numbers: does not describe used_bytes"]
    assert list(faults_of_class("Failed", Failed)) == ["Failed: does not describe key"]
