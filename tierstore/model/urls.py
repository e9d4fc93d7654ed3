"""URLs of checkpoints, which must carry no secrets: a URL is shown, logged and kept.

Credentials belong in the environment, where the libraries of object stores look for them.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from tierstore.errors import UrlError

_USER = re.compile(r"(://)(?:[^\s/?#@]*:[^\s@]*|(?<=http://)[^\s/?#@]*|(?<=https://)[^\s/?#@]*)@")
_QUERY = re.compile(r"(://[^\s?#]*[?#])[^\s)\"',]+")


def check_url(url: str) -> None:
    """Raise UrlError, without the secret, for a URL that has one: a user and a password, or a
    query, which may be a signature.

    In `abfss://container@account.dfs.core.windows.net`, what looks like a user is a container.
    """
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        user, _ = parts.username, parts.port  # of which the second may be none at all
    except ValueError:
        raise UrlError(f"{shown} is no URL: check its host and port") from None
    of_azure = parts.scheme.startswith("abfs") and parts.password is None
    if user is not None and not of_azure:
        raise UrlError(
            f"{shown} has a user or a password: pass the URL without, and credentials by the "
            "environment, as obstore reads them; a web server that asks for a password cannot be "
            "read: download the checkpoint first"
        )
    if parts.query or parts.fragment:
        raise UrlError(
            f"{shown.partition('?')[0].partition('#')[0]} has a query: pass the plain URL, and "
            "credentials by the environment, as obstore reads them"
        )


def without_secrets(text: str) -> str:
    """A text in which no URL shows a password or a query.

    >>> without_secrets("no answer of https://me:secret@host/model?sig=abc")
    'no answer of https://***@host/model?***'
    >>> without_secrets("abfss://models@account.dfs.core.windows.net/flux")
    'abfss://models@account.dfs.core.windows.net/flux'
    """
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))
