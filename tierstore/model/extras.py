"""Optional dependencies: the error for a missing package says how to install it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

_REQUIREMENT = re.compile(r"([\w.-]+)(?:.*extra == ['\"]([\w-]+))?")
_FOR_DEVELOPERS = {"all", "docs", "test"}


def requirements() -> dict[str, str]:
    """Return the dependencies of the installed package: the name of each, and its extra.

    The extra is "" for a required dependency.
    """
    try:
        lines = metadata.requires("tierstore") or []
    except metadata.PackageNotFoundError:  # run from the source tree, without installation
        return {}
    parsed = [found.groups() for line in lines if (found := _REQUIREMENT.match(line))]
    return {
        _normalized(name): extra or "" for name, extra in parsed if extra not in _FOR_DEVELOPERS
    }


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def extra_for(doing: str) -> Iterator[None]:
    """Add the `pip install` command to a ModuleNotFoundError raised in the block.

    `doing` completes the message "the package needed …", as in "to read a GGUF file".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = requirements().get(_normalized(missing))
        if not extra:
            raise
        raise ModuleNotFoundError(
            f"the package needed {doing} is not installed ({missing}): "
            f"pip install 'tierstore[{extra}]'",
            name=missing,
        ) from error
