"""Connects to services of this user, and to no other's.

A client passes descriptors of files that only its user may read, and believes what it is given. So
before a byte is sent, the kernel is asked whose process listens (SO_PEERCRED): a path proves
nothing, as anybody may make a socket where nobody has made one yet.
"""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


class ForeignServiceError(PermissionError):
    """Another user's process listens at a socket."""


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, as they were when it began to
    listen, or connected."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


def connect_to_own(path: str, seconds: float | None = None) -> socket.socket:
    """A socket that is connected to a process of this user, which listens at `path`.

    With `seconds`, it waits for no longer, now or later. Raises ForeignServiceError if the process
    is another user's, and OSError if none listens.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(seconds)
        made.connect(path)
        process, user = peer_of(made)
        if user != os.geteuid():
            raise ForeignServiceError(
                f"process {process} of user {user} listens there, and this one is of user "
                f"{os.geteuid()}: files are shared with no other user; connect to a service of "
                "your own, whose socket is in a directory that is yours alone"
            )
    except BaseException:
        made.close()
        raise
    return made
