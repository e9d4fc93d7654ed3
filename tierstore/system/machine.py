"""Describes the machine: versions, memory, file systems, direct reads, GPUs."""

from __future__ import annotations

import errno
import mmap
import os
import pkgutil
import platform
import re
from pathlib import Path
from typing import Any

from tierstore.model.extras import requirements
from tierstore.model.sizes import PAGE, usable_memory
from tierstore.system.file_systems import file_system_of as file_system_of

LIBRARIES = Path(__file__).parents[1] / "adapters" / "compat"
"""Directory in which each file supports one library."""


def packages() -> list[str]:
    """Return the packages whose versions matter: requirements and supported libraries."""
    supported = [info.name for info in pkgutil.iter_modules([str(LIBRARIES)])]
    return sorted({*requirements(), "safetensors", *supported})


def version_of(package: str) -> str | None:
    """Return the installed version of a package, without importing it."""
    from importlib import metadata  # deferred, to keep the command line's start fast

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str | None:
    """Return the text of a kernel file; None if it cannot be read."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return None


def direct_reads(directory: str) -> str:
    """Test whether files in a directory can be read past the page cache.

    Leaves no file behind. Returns "yes", "no", or "not known: " and a reason.
    """
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        os.close(os.open(directory, flags, 0o600))
    except OSError as error:
        return f"not known: an unnamed file cannot be created there ({error.strerror})"
    try:
        descriptor = os.open(directory, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        return "no" if error.errno == errno.EINVAL else f"not known: {error.strerror}"
    try:
        buffer = memoryview(mmap.mmap(-1, PAGE))
        os.pwrite(descriptor, buffer, 0)
        return "yes" if os.preadv(descriptor, [buffer], 0) == PAGE else "no"
    except OSError:
        return "no"
    finally:
        os.close(descriptor)


def huge_pages(root: Path = Path("/")) -> str | None:
    """Return the setting of transparent huge pages: always, madvise or never."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    return chosen[1] if chosen else None


def gpus(root: Path = Path("/")) -> list[str]:
    """List the NVIDIA GPUs of the driver."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    texts = [text for file in files if (text := _text(file)) is not None]
    found = [re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in texts]
    return [model[1].strip() if model else "unknown" for model in found]


def gpu_driver(root: Path = Path("/")) -> str | None:
    """Return the version of the NVIDIA driver."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _text(root / "proc/driver/nvidia/version") or "")
    return found[0] if found else None


def environment(directory: str) -> dict[str, Any]:
    """Describe the machine, for a bug report."""
    return {
        "tierstore": version_of("tierstore"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {package: version_of(package) for package in packages()},
        "cores": len(os.sched_getaffinity(0)),
        "usable_memory": usable_memory(),
        "huge_pages": huge_pages(),
        "directory": os.path.abspath(directory),
        "file_system": file_system_of(directory),
        "direct_reads": direct_reads(directory),
        "gpu_driver": gpu_driver(),
        "gpus": gpus(),
    }
