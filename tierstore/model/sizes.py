"""Parses human-readable sizes into bytes, and reads the memory limits of the process.

>>> parse_size("8GB"), parse_size("8GiB"), parse_size(1024)
(8000000000, 8589934592, 1024)
>>> parse_size("50%", total=1000), parse_size(0.25, total=1000)
(500, 250)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from tierstore.model import shares

PAGE = 4096

_SIZES_PER_DOUBLING = 64
_FINE_FROM, _FINE_STEP = 16 << 20, 32 << 10
"""Bytes. From `_FINE_FROM` on, slot sizes are multiples of `_FINE_STEP`.

With steps of 1/64, a model of large groups would take 1 % more memory than it has bytes, and move
1 % more bytes in each pass.
"""

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = 1024**_power

_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z%]*)\s*")


def round_up(nbytes: int, multiple: int) -> int:
    """Round `nbytes` up to a multiple of `multiple`."""
    return -(-nbytes // multiple) * multiple


def slot_bytes(nbytes: int) -> int:
    """Return the size of a slot for `nbytes` bytes: whole pages, at most 1/64 more than needed.

    Equal blocks of a model may differ by a page, because each starts at another offset in its file.
    With few slot sizes, such groups can reuse each other's slots.

    >>> slot_bytes(5000), slot_bytes(10_000_000), slot_bytes(10_004_096)
    (8192, 10092544, 10092544)
    >>> slot_bytes(100_000_000)
    100007936
    """
    step = (1 << max(nbytes - 1, 1).bit_length() - 1) // _SIZES_PER_DOUBLING
    return round_up(nbytes, max(step if nbytes < _FINE_FROM else _FINE_STEP, PAGE))


def parse_size(
    value: int | float | str, *, total: int | None = None, auto: int | None = None
) -> int:
    """Convert a size to bytes.

    An int is bytes. `"8GB"` is 8·10⁹ bytes and `"8GiB"` is 2³³ bytes, in upper or lower case.
    `"50%"` and a float in (0, 1] are a share of `total` bytes (default: the memory that this
    process may use, see `usable_memory`). `"auto"` is `auto` bytes, if the caller supports it.

    Raises ValueError or TypeError for anything ambiguous or invalid: `"8"`, `"0.5"`, `"8G"`, `1.5`,
    a bool, a negative number. The message says how to write the size.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(
            f"a size must be an int of bytes, a string such as '8GB', or a share such as 0.5, "
            f"not {value!r}"
        )
    if isinstance(value, int):
        return _positive(value, value)
    if isinstance(value, float):
        return _share(value, value, total)
    if is_auto(value):
        if auto is None:
            raise ValueError("'auto' is not supported for this size: pass bytes, such as '8GB'")
        return auto
    return _parse_text(value, total, "'50%' or 'auto'" if auto is not None else "or '50%'")


def _parse_text(text: str, total: int | None, others: str) -> int:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it like '8GB', '8GiB', {others}")
    number, unit = match.groups()
    if unit == "%":
        return _share(float(number) / 100, text, total)
    if not unit and float(number) == 0:
        return _positive(0, text)
    if not unit:
        raise ValueError(
            f"{text!r} has no unit: write '{number}GB' for gigabytes, '50%' for a share, "
            "or pass an int for bytes"
        )
    scale = _UNITS.get(unit.lower())
    if scale is None:
        raise ValueError(
            f"{text!r} has the unknown unit {unit!r}: use B, KB, MB, GB, TB (powers of 1000) "
            "or KiB, MiB, GiB, TiB (powers of 1024)"
        )
    return _positive(int(float(number) * scale) if "." in number else int(number) * scale, text)


def _share(share: float, written: float | str, total: int | None) -> int:
    if not 0 < share <= 1:
        raise ValueError(
            f"{written!r} is not a share: a float or percentage must be above 0 and at most 1 "
            "(100%); for bytes pass an int or a string such as '1.5GB'"
        )
    return _positive(int(share * (usable_memory() if total is None else total)), written)


def _positive(nbytes: int, written: object) -> int:
    if nbytes <= 0:
        raise ValueError(f"{written!r} is not a size: it must be more than 0; pass at least 1 byte")
    return nbytes


def ram_bytes(ram: int | float | str, available: int | None = None) -> int:
    """Convert a `ram_budget` to bytes, for a store or for a plan.

    A share is a share of the memory that this process may use (`usable_memory`). `"auto"` is half
    of the memory that is free now: `available` bytes, or by default `available_memory()`.

    Raises the errors of `parse_size`.
    """
    free = available_memory() if available is None else available
    return parse_size(ram, total=usable_memory(), auto=free // shares.AUTO)


def is_auto(budget: object) -> bool:
    """Return True if a budget is `"auto"`."""
    return isinstance(budget, str) and budget.strip().lower() == "auto"


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of RAM that this process could allocate now without swapping.

    Within a cgroup, this is the limit minus the usage of all its processes, without reclaimable
    page cache, as in MemAvailable of /proc/meminfo.
    """
    left = (group.limit - group.usage + group.reclaimable for group in _cgroups(root))
    return max(min([usable_memory(root), int(_machine_memory().available), *left]), 0)


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of RAM that this process may use: the machine's, or its cgroup's if less.

    `root` is the parent directory of proc and sys, which tests replace.
    """
    limits = (group.limit for group in _cgroups(root))
    return min([int(_machine_memory().total), *limits])


def _machine_memory() -> Any:
    import psutil  # imported lazily, for a fast start of the command line

    return psutil.virtual_memory()


class _Files(NamedTuple):
    """Names of the files of one cgroup version, and of its counters of reclaimable page cache."""

    limit: str
    usage: str
    counters: tuple[str, str]


_VERSION_1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


class _Cgroup(NamedTuple):
    """A cgroup with a limit, in bytes. `reclaimable` bytes of its usage are page cache."""

    limit: int
    usage: int
    reclaimable: int


def _cgroups(root: Path) -> list[_Cgroup]:
    """Return the cgroups of this process that have a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[_Cgroup] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            groups += _limited_upwards(root / "sys/fs/cgroup", path, _VERSION_2)
        elif "memory" in controllers.split(","):
            groups += _limited_upwards(root / "sys/fs/cgroup/memory", path, _VERSION_1)
    return groups


def _limited_upwards(mount: Path, path: str, files: _Files) -> list[_Cgroup]:
    """Return each cgroup with a limit, from `path` up to the root; the lowest limit applies."""
    groups = []
    here = mount / path.lstrip("/")
    while True:
        limit = _number(here / files.limit)
        if limit is not None:
            usage = _number(here / files.usage) or 0
            groups.append(_Cgroup(limit, usage, _reclaimable(here, files)))
        if here == mount or mount not in here.parents:
            return groups
        here = here.parent


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if the file is missing or contains "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(cgroup: Path, files: _Files) -> int:
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counters = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(counters.get(name, 0)) for name in files.counters)
