"""Connects to services of this user only.

A client passes descriptors of files that only its user may read, and trusts what it receives.
Before it sends a byte, it asks the kernel which user's process listens (SO_PEERCRED). A path proves
nothing: any user may create a socket at an unused path.
"""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


class ForeignServiceError(PermissionError):
    """Another user's process listens at a socket."""


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Return the process and user id at the other end of a Unix socket.

    They date from when it began to listen or connected.
    """
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


def connect_to_own(path: str, seconds: float | None = None) -> socket.socket:
    """Connect to a process of this user that listens at `path`.

    `seconds` is a timeout for this and for later calls on the socket. Raises ForeignServiceError if
    the process is another user's, and OSError if none listens.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(seconds)
        made.connect(path)
        process, user = peer_of(made)
        if user != os.geteuid():
            raise ForeignServiceError(
                f"process {process} of user {user} listens there, but this process is of user "
                f"{os.geteuid()}: files are shared with no other user; connect to your own "
                "service, whose socket is in a private directory"
            )
    except BaseException:
        made.close()
        raise
    return made
