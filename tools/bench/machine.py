"""What every benchmark shares: the machine, a cold page cache, medians of interleaved runs, tables.

A script in this folder begins with

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tools.bench import machine

and then runs both as `python tools/bench/NAME.py` and as `python -m tools.bench.NAME`.
"""

from __future__ import annotations

import os
import platform
import random
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil

from tierstore.progress import bar

Result = TypeVar("Result")

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def describe(directory: str | Path | None = None, packages: Iterable[str] = ()) -> list[str]:
    """The machine in lines of text: cores, memory, the file system of `directory`, versions."""
    memory = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    lines = [
        f"{cores} cores ({_processor()}), {memory:.1f} GiB of RAM, load {load:.1f} at the start",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    ]
    if directory is not None:
        from tierstore.cli.machine import direct_reads, file_system_of, huge_pages

        lines.append(
            f"{file_system_of(str(directory))}, direct reads: {direct_reads(str(directory))}, "
            f"huge pages: {huge_pages()}"
        )
    found = [f"{package} {metadata.version(package)}" for package in packages]
    return [*lines, ", ".join(found)] if found else lines


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def drop_page_cache() -> bool:
    """Make files cold. Returns False where this process may not."""
    try:
        os.sync()
        DROP_CACHES.write_text("3\n")
    except OSError:
        return False
    return True


class Stopwatch:
    """Wall-clock and CPU seconds of a `with` block, its finished child processes included."""

    seconds = 0.0
    cpu_seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._cpu = _cpu_seconds()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self.cpu_seconds = _cpu_seconds() - self._cpu


def _cpu_seconds() -> float:
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(each.ru_utime + each.ru_stime for each in used)


def interleave(
    runs: Mapping[str, Callable[[], Result]],
    rounds: int,
    *,
    before: Callable[[], object] = lambda: None,
    doing: str = "Measuring",
) -> dict[str, list[Result]]:
    """Run everything once per round, in another order each round, so that a drift hits all alike.

    `before` comes before each run, such as `drop_page_cache`. Gives the results in round order.
    """
    order = random.Random(0)
    results: dict[str, list[Result]] = {name: [] for name in runs}
    names = [name for _ in range(rounds) for name in order.sample(list(runs), len(runs))]
    for name in bar(names, doing, "runs"):
        before()
        results[name].append(runs[name]())
    return results


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Each value to the reference of its own round."""
    return [value / other for value, other in zip(values, reference, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the range in parentheses: `0.98 (0.95 to 1.02)`."""
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table that can also be read on a terminal. Numbers are best given as text."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]

    def line(texts: Sequence[str]) -> str:
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(columns), rule, *map(line, cells)])


def command_line() -> str:
    """How this script was started, for the page with its results."""
    script = Path(sys.argv[0])
    root = Path(__file__).resolve().parents[2]
    name = str(script.resolve().relative_to(root)) if script.is_absolute() else str(script)
    return shlex.join(["python", name, *sys.argv[1:]])


_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


def publish(path: str | Path, title: str, measured: str) -> None:
    """Put what was measured into a page, between two marks; prose around them stays as it is."""
    page = Path(path)
    text = page.read_text() if page.exists() else f"# {title}\n\n{_BEGIN}\n{_END}\n"
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before}{_BEGIN}\n{measured.strip()}\n{_END}{after}")
