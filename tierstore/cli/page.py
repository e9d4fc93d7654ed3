"""The text at a URL that a user typed: the only place where the network is reached."""

from __future__ import annotations

SECONDS = 5.0
"""For the next bytes to come."""

LONGEST = 16 << 20
"""Bytes of a page. More is none."""


def page_at(url: str) -> str:
    """The text at an http or https URL. Raises OSError or ValueError, which say why not."""
    import http.client  # when they are needed: the command line must start at once
    import urllib.request

    # No proxy: what is asked for is on this machine, or near it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=SECONDS) as answer:
            found: bytes = answer.read(LONGEST + 1)
    except http.client.HTTPException as error:
        raise ValueError(f"no answer of a web server ({type(error).__name__})") from error
    if len(found) > LONGEST:
        raise ValueError(f"it has more than {LONGEST:,} bytes")
    return found.decode()
