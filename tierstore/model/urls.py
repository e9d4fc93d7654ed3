"""URLs of checkpoints, which must not contain secrets, because they are displayed and logged.

Credentials belong in the environment, where object-store libraries look for them.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from tierstore.errors import UrlError

_USER = re.compile(r"(://)(?:[^\s/?#@]*:[^\s@]*|(?<=http://)[^\s/?#@]*|(?<=https://)[^\s/?#@]*)@")
_QUERY = re.compile(r"(://[^\s?#]*[?#])[^\s)\"',]+")


def check_url(url: str) -> None:
    """Raise UrlError if a URL may contain a secret: a user name, a password or a query.

    A query may be a signature. The message does not contain the secret. In
    `abfss://container@account.dfs.core.windows.net`, the part before `@` is a container.
    """
    shown = redact_secrets(url)
    try:
        parts = urlsplit(url)
        user, _ = parts.username, parts.port  # an invalid port raises
    except ValueError:
        raise UrlError(f"{shown} is not a valid URL: check its host and port") from None
    of_azure = parts.scheme.startswith("abfs") and parts.password is None
    if user is not None and not of_azure:
        raise UrlError(
            f"{shown} has a user or a password: pass the URL without it, and set credentials in "
            "the environment variables that obstore reads. From a web server that requires a "
            "password, download the checkpoint first"
        )
    if parts.query or parts.fragment:
        raise UrlError(
            f"{shown.partition('?')[0].partition('#')[0]} has a query: pass the plain URL, and "
            "set credentials in the environment variables that obstore reads"
        )


def redact_secrets(text: str) -> str:
    """Replace user names, passwords and queries of all URLs in a text by `***`.

    >>> redact_secrets("no answer of https://me:secret@host/model?sig=abc")
    'no answer of https://***@host/model?***'
    >>> redact_secrets("abfss://models@account.dfs.core.windows.net/flux")
    'abfss://models@account.dfs.core.windows.net/flux'
    """
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))
