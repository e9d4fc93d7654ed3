"""Facilities that tests of real faults need, and checks for them.

A test names its facilities with `@pytest.mark.needs("fuse", "root")`. Elsewhere it is skipped, with
the reason. `expected.txt` lists the facilities of a machine that guards changes: there, a missing
facility is a failure, so that no fault test is skipped silently.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import functools
import importlib.util
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EXPECTED = Path(__file__).with_name("expected.txt")

SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN: the file system at once discards all data that is not on its disk."""
WITHOUT_FLUSHING = 2


class Unusable(Exception):
    """A facility that this machine lacks; the text names it."""


def run(*command: str | os.PathLike[str]) -> None:
    """Run a program. Raises Unusable, with the program's output, if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unusable(str(error)) from error
    if done.returncode:
        raise Unusable(f"{command[0]}: {done.stderr.strip() or done.returncode}")


def program(name: str) -> str:
    """Return the path of a program, `/sbin` included. Raises Unusable."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        raise Unusable(f"there is no {name} here")
    return found


@contextmanager
def mounted(*arguments: str | os.PathLike[str], at: Path) -> Iterator[Path]:
    """Run `mount ARGUMENTS AT`; unmount at the end of the block. Raises Unusable."""
    at.mkdir(parents=True, exist_ok=True)
    run(program("mount"), *arguments, at)
    try:
        yield at
    finally:
        unmount(at)


def unmount(at: Path) -> None:
    """Unmount now, or lazily once the last user is gone."""
    with suppress(Unusable):
        run(program("umount"), at)
        return
    run(program("umount"), "--lazy", at)


def wait_until_mounted(path: Path, server: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for a file of a file system that another process serves. Raises Unusable."""
    end = time.monotonic() + patience
    while not path.exists():
        if server.poll() is not None or time.monotonic() > end:
            raise Unusable("no file system in user space could be mounted")
        time.sleep(0.01)


def make_image(path: Path, kind: str, nbytes: int = 320 << 20) -> None:
    """Create a file with an empty file system of `kind` (ext4, xfs). Raises Unusable."""
    with open(path, "wb") as file:
        file.truncate(nbytes)
    quiet = {"ext4": ("-q", "-F"), "xfs": ("-q", "-f")}[kind]
    run(program(f"mkfs.{kind}"), *quiet, path)


@contextmanager
def loop_mounted(image: Path, at: Path) -> Iterator[Path]:
    """Mount the file system in `image`. Raises Unusable."""
    with mounted("-o", "loop", image, at=at) as directory:
        yield directory


def cut_power(at: Path) -> None:
    """Make a mounted file system discard all data that is not on its disk, as in a power cut.

    All operations on it fail until it is unmounted. Raises OSError if the file system does not
    support this.
    """
    directory = os.open(at, os.O_RDONLY)
    try:
        fcntl.ioctl(directory, SHUTDOWN, struct.pack("I", WITHOUT_FLUSHING))
    finally:
        os.close(directory)


# Facilities ---------------------------------------------------------------------------------------


def _root() -> None:
    if os.geteuid() != 0:
        raise Unusable("needs root")


def _loop(kind: str, scratch: Path) -> None:
    _root()
    make_image(scratch / "image", kind)
    with loop_mounted(scratch / "image", scratch / "mounted") as directory:
        (directory / "file").write_bytes(b"bytes")
        cut_power(directory)


def _fuse(scratch: Path) -> None:
    _root()
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Unusable("there is no /dev/fuse")
    program("fusermount3")
    if ctypes.util.find_library("fuse3") is None and ctypes.util.find_library("fuse") is None:
        raise Unusable("there is no libfuse")
    if importlib.util.find_spec("mfusepy") is None:
        raise Unusable("the package mfusepy is not installed")


def _strace(scratch: Path) -> None:
    target = scratch / "file"
    target.write_bytes(b"bytes")
    script = f"import os; os.pread(os.open({str(target)!r}, os.O_RDONLY), 5, 0)"
    inject = ("-f", "-qq", "-o", os.devnull, "-P", str(target), "-e", "inject=pread64:error=EIO")
    command = [program("strace"), *inject, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "Input/output error" not in done.stderr:
        raise Unusable("strace injects no errors here")


def _tmpfs(scratch: Path) -> None:
    _root()
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", at=scratch / "mounted"):
        pass


def _overlay(scratch: Path) -> None:
    _root()
    for name in ("lower", "upper", "work"):
        (scratch / name).mkdir()
    layers = ",".join(f"{n}dir={scratch / n}" for n in ("lower", "upper", "work"))
    with mounted("-t", "overlay", "-o", layers, "overlay", at=scratch / "mounted"):
        pass


def _read_only(scratch: Path) -> None:
    _root()
    with mounted("--bind", scratch, at=scratch / "mounted") as directory:
        run(program("mount"), "-o", "remount,ro,bind", directory)


def _immutable(scratch: Path) -> None:
    _root()
    run(program("chattr"), "+i", scratch)
    run(program("chattr"), "-i", scratch)


def _memory_group(scratch: Path) -> None:
    _root()
    group = Path("/sys/fs/cgroup/memory") / f"tierstore-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
        group.rmdir()
    except OSError as error:
        raise Unusable(f"no memory cgroup can be made: {error}") from error


def _limits(scratch: Path) -> None:
    resource.getrlimit(resource.RLIMIT_NOFILE)


def _other_user(scratch: Path) -> None:
    _root()
    run(program("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups", "true")


FACILITIES: dict[str, Callable[[Path], None]] = {
    "root": lambda scratch: _root(),
    "ext4": functools.partial(_loop, "ext4"),
    "xfs": functools.partial(_loop, "xfs"),
    "fuse": _fuse,
    "strace": _strace,
    "tmpfs": _tmpfs,
    "overlay": _overlay,
    "read-only-mounts": _read_only,
    "immutable-files": _immutable,
    "memory-groups": _memory_group,
    "limits": _limits,
    "other-users": _other_user,
}


@functools.cache
def missing(name: str) -> str | None:
    """Return the reason why a facility cannot be used here, or None."""
    with tempfile.TemporaryDirectory(prefix="tierstore-", dir="/var/tmp") as scratch:
        try:
            FACILITIES[name](Path(scratch))
        except (Unusable, OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return None


def expected() -> list[str]:
    """Return the facilities that a machine guarding changes must offer."""
    lines = EXPECTED.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
