"""Keys that callers may use, and keys that the store generates for saved activations."""

from __future__ import annotations

import re

from tierstore.engine.object_references import is_generated_key
from tierstore.system.objects import check_key

_PREFIX = "activation/"
_RESERVED = re.compile(_PREFIX + "[0-9]{6,}")


def saved_key(number: int) -> str:
    """Return the key of the saved activation with this number.

    >>> saved_key(7)
    'activation/000007'
    """
    return f"{_PREFIX}{number:06}"


def check_callers_key(key: str) -> None:
    """Raise TypeError or ValueError if callers may not use this key."""
    if _RESERVED.fullmatch(check_key(key)):
        raise ValueError(f"{key!r} is reserved for saved activations: use another key")
    if is_generated_key(key):
        raise ValueError(f"{key!r} is reserved for weights stored by content: use another key")
