"""Packages that only some uses need: where one is missing, the error says how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "diffusers": "diffusers",
    "gguf": "quantised",
    "matplotlib": "plot",
    "msgspec": "serve",
    "obstore": "remote",
    "prometheus_client": "metrics",
}
"""Which extra of this package brings a package."""


@contextmanager
def extra_for(doing: str) -> Iterator[None]:
    """A package that is missing inside is told with how to install it: a ModuleNotFoundError.

    `doing` begins a sentence that goes on with what it takes.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        raise ModuleNotFoundError(
            f"{doing} takes a package that is missing ({missing}): "
            f"pip install 'tierstore[{EXTRAS[missing]}]'",
            name=missing,
        ) from error
