"""Creates and finds sockets of services, in directories that only one user can enter."""

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
"""Maximum bytes of a Unix socket's path."""

BACKLOG = 512


def runtime_directory() -> str:
    """Return the default directory of this user's sockets."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return os.path.join(base, "tierstore")
    return os.path.join(tempfile.gettempdir(), f"tierstore-{os.geteuid()}")


def default_socket(directory: str | os.PathLike[str]) -> str:
    """Return the default path of the socket for a store's directory."""
    path = os.path.realpath(directory)
    name = os.path.basename(path)[:32] or "root"
    mark = hashlib.sha256(path.encode()).hexdigest()[:8]
    return os.path.join(runtime_directory(), f"{name}-{mark}.sock")


def running() -> list[str]:
    """List the sockets in the runtime directory, sorted.

    The list is empty if the directory is not private: another user may have created it.
    """
    directory = runtime_directory()
    with contextlib.suppress(OSError):
        if why_not_private(directory) is None:
            names = sorted(os.listdir(directory))
            return [os.path.join(directory, name) for name in names if _is_socket_name(name)]
    return []


def _is_socket_name(name: str) -> bool:
    return name.endswith(".sock")


def listen(path: str) -> socket.socket:
    """Return a socket that listens at `path`, which only this user can connect to.

    Creates its directory if it is missing, and replaces the socket of a killed service. Raises
    StoreLockedError if a service listens there, TierStoreError if others can enter the directory or
    another kind of file has the name, and OSError.
    """
    path = os.path.abspath(path)
    if len(os.fsencode(path)) > LONGEST:
        raise TierStoreError(
            f"{path} is too long for a socket (the limit is {LONGEST} bytes): pass a shorter "
            "--socket"
        )
    directory = os.path.dirname(path)
    make_directories(directory)
    reason = why_not_private(directory)
    if reason is not None:
        raise TierStoreError(
            f"{directory} is not private ({reason}): make it private (chmod 700), or pass a "
            "--socket in a directory that is"
        )
    _remove_stale_socket(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(made.fileno(), 0o600)  # before bind: the name never has another mode
        made.bind(path)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def identity(path: str) -> tuple[int, int, int]:
    """Return values that differ for a socket created later at `path`. Raises OSError."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_ctime_ns  # inode numbers are reused


def remove(path: str, made: tuple[int, int, int]) -> None:
    """Remove a socket that no longer listens, unless another one has replaced it."""
    with contextlib.suppress(OSError):
        if identity(path) == made:
            os.unlink(path)


def _remove_stale_socket(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise TierStoreError(
            f"{path} exists and is not a socket: remove it, or pass another --socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # do not wait if the service's queue is full
        try:
            probe.connect(path)
        except BlockingIOError:
            pass
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise StoreLockedError(
        f"a service already listens at {path}: stop it, or pass another --socket"
    )
