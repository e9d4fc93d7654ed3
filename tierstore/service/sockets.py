"""Where services listen, and who may connect: a socket in a directory that only its user enters."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import tempfile

from tierstore.errors import StoreLockedError, TierStoreError
from tierstore.system.private import make_directories, why_not_private

LONGEST = 107
"""Bytes that the path of a Unix socket may have."""

BACKLOG = 512


def runtime_directory() -> str:
    """Where the sockets of this user's services are by default."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return os.path.join(base, "tierstore")
    return os.path.join(tempfile.gettempdir(), f"tierstore-{os.geteuid()}")


def default_socket(directory: str | os.PathLike[str]) -> str:
    """The socket of the service of a store's directory, unless another one is named."""
    path = os.path.realpath(directory)
    name = os.path.basename(path)[:32] or "root"
    mark = hashlib.sha256(path.encode()).hexdigest()[:8]
    return os.path.join(runtime_directory(), f"{name}-{mark}.sock")


def running() -> list[str]:
    """The sockets in the runtime directory, sorted; none where that is not this user's alone, as
    another user may have made it first."""
    directory = runtime_directory()
    with contextlib.suppress(OSError):
        if why_not_private(directory) is None:
            names = sorted(os.listdir(directory))
            return [os.path.join(directory, name) for name in names if _is_socket_name(name)]
    return []


def _is_socket_name(name: str) -> bool:
    return name.endswith(".sock")


def listen(path: str) -> socket.socket:
    """A socket that listens at `path`, which only this user can connect to.

    Its directory is made if it is missing. A socket that a killed service has left is replaced.
    Raises StoreLockedError if somebody serves there, TierStoreError if others could enter the
    directory or something else is in the way, OSError.
    """
    path = os.path.abspath(path)
    if len(os.fsencode(path)) > LONGEST:
        raise TierStoreError(
            f"{path} is too long for a socket, which takes {LONGEST} bytes: pass a shorter --socket"
        )
    directory = os.path.dirname(path)
    make_directories(directory)
    why = why_not_private(directory)
    if why is not None:
        raise TierStoreError(
            f"{directory} is not this user's alone ({why}): make it so (chmod 700), or pass a "
            "--socket in a directory that is"
        )
    _remove_what_was_left(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(made.fileno(), 0o600)  # which the name has from its first moment
        made.bind(path)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def identity(path: str) -> tuple[int, int, int]:
    """What tells the socket at `path` from another one that is put there later. Raises OSError."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_ctime_ns  # numbers are used again


def remove(path: str, made: tuple[int, int, int]) -> None:
    """Remove a socket that does not listen any more, unless another one is at its place by now."""
    with contextlib.suppress(OSError):
        if identity(path) == made:
            os.unlink(path)


def _remove_what_was_left(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise TierStoreError(
            f"{path} is there and is no socket: remove it, or pass another --socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # where the queue of a service is full, nobody waits
        try:
            probe.connect(path)
        except BlockingIOError:
            pass
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise StoreLockedError(
        f"somebody serves at {path} already: stop them, or pass another --socket"
    )
