"""Which keys are a caller's, and which the store makes up for what autograd saves."""

from __future__ import annotations

import re

from tierstore.engine.object_references import is_made
from tierstore.system.objects import check_key

_PREFIX = "activation/"
_OF_THE_STORE = re.compile(_PREFIX + "[0-9]{6,}")


def saved_key(number: int) -> str:
    """The key of what was saved for the backward pass under this number.

    >>> saved_key(7)
    'activation/000007'
    """
    return f"{_PREFIX}{number:06}"


def check_callers_key(key: str) -> None:
    """Raise TypeError or ValueError if it cannot be a caller's key."""
    if _OF_THE_STORE.fullmatch(check_key(key)):
        raise ValueError(f"{key!r} is a name for saved activations: use another key")
    if is_made(key):
        raise ValueError(f"{key!r} is a name for weights by their content: use another key")
