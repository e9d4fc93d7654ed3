"""What the machine offers: versions, memory, file systems, direct reads, GPUs."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from tierstore.model.sizes import PAGE, usable_memory

PACKAGES = (
    "torch",
    "safetensors",
    "numpy",
    "xxhash",
    "psutil",
    "diffusers",
    "accelerate",
    "transformers",
    "peft",
)


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def file_system_of(directory: str, mounts: str = "/proc/self/mountinfo") -> str | None:
    """The type of the file system that a directory lies on, such as `ext4`."""
    here = os.path.realpath(directory)
    try:
        lines = Path(mounts).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    longest, found = -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = _unescaped(before.split()[4])
        # Of two mounts on one point, the later one is on top.
        if len(point) >= longest and _is_below(here, point):
            longest, found = len(point), after.split()[0]
    return found


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def direct_reads(directory: str) -> str:
    """Whether files there can be read past the page cache: tried, leaving nothing behind."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        os.close(os.open(directory, flags, 0o600))
    except OSError as error:
        return f"not known: a file without a name cannot be made there ({error.strerror})"
    try:
        descriptor = os.open(directory, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        return "no" if error.errno == errno.EINVAL else f"not known: {error.strerror}"
    try:
        room = memoryview(mmap.mmap(-1, PAGE))
        os.pwrite(descriptor, room, 0)
        return "yes" if os.preadv(descriptor, [room], 0) == PAGE else "no"
    except OSError:
        return "no"
    finally:
        os.close(descriptor)


def huge_pages(root: Path = Path("/")) -> str | None:
    """The chosen setting of transparent huge pages: always, madvise or never."""
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else None


def gpus(root: Path = Path("/")) -> list[str]:
    """The NVIDIA GPUs that the driver lists."""
    models = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        models.append(found[1].strip() if found else "unknown")
    return models


def gpu_driver(root: Path = Path("/")) -> str | None:
    """The version of the NVIDIA driver."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def environment(directory: str) -> dict[str, object]:
    """Everything that a report about a problem should say about the machine."""
    return {
        "tierstore": version_of("tierstore"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {package: version_of(package) for package in PACKAGES},
        "cores": len(os.sched_getaffinity(0)),
        "usable_memory": usable_memory(),
        "huge_pages": huge_pages(),
        "directory": os.path.abspath(directory),
        "file_system": file_system_of(directory),
        "direct_reads": direct_reads(directory),
        "gpu_driver": gpu_driver(),
        "gpus": gpus(),
    }
