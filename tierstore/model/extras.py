"""Packages that only some uses need: where one is missing, the error says how to install it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

_REQUIREMENT = re.compile(r"([\w.-]+)(?:.*extra == ['\"]([\w-]+))?")
_FOR_DEVELOPERS = {"all", "docs", "test"}


def requirements() -> dict[str, str]:
    """Return the packages that this one needs, by name, each with the extra that brings it ("" if
    it always comes along), as the metadata of the installed package has it."""
    try:
        lines = metadata.requires("tierstore") or []
    except metadata.PackageNotFoundError:  # the source lies on the path, and nothing is installed
        return {}
    parsed = [found.groups() for line in lines if (found := _REQUIREMENT.match(line))]
    return {
        _normalized(name): extra or "" for name, extra in parsed if extra not in _FOR_DEVELOPERS
    }


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def extra_for(doing: str) -> Iterator[None]:
    """A package that is missing inside is told with how to install it: a ModuleNotFoundError.

    `doing` begins a sentence that goes on with what it takes.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = requirements().get(_normalized(missing))
        if not extra:
            raise
        raise ModuleNotFoundError(
            f"{doing} takes a package that is missing ({missing}): "
            f"pip install 'tierstore[{extra}]'",
            name=missing,
        ) from error
