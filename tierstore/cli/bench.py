"""The command `bench`."""

from __future__ import annotations

import functools
import os
import shutil
import time
from pathlib import Path

import click

from tierstore.cli import options
from tierstore.cli.output import Code, Failure, data, print_json, remark
from tierstore.inspection.directories import not_a_directory
from tierstore.model.formatting import Units, size
from tierstore.progress import byte_bar
from tierstore.system.files import transfer_errors
from tierstore.system.machine import file_system_of


def _size(text: str) -> int:
    from tierstore.tiers.disk_speed import SMALLEST

    nbytes = options.parsed_bytes(text)
    if nbytes < SMALLEST:
        raise click.BadParameter(f"{text!r} is too small: use at least {size(SMALLEST)}.")
    return nbytes


@options.command("bench", "bench offload", "bench /mnt/nvme --size 4GiB --json")
@options.directory_argument
@click.option(
    "--size",
    "nbytes",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    type=_size,
    help="Size of the file to write and read.",
)
def bench(directory: str, nbytes: int, as_json: bool) -> None:
    """Measure the disk of DIR, and save its speed for `plan`.

    Writes a file twice and reads it five times, bypassing the page cache, which takes a few seconds
    or more. The file has no name, so it is never left behind. Each measurement of a disk replaces
    the previous one, whatever its --size.
    """
    from tierstore.tiers.disk_speed import ROUNDS, known_speed, measure, remember

    _check_space(directory, nbytes)
    started = time.monotonic()
    with transfer_errors("measuring the disk of", path=directory):
        found = measure(directory, nbytes, functools.partial(byte_bar, immediately=True))
    seconds = time.monotonic() - started
    former = known_speed(directory)
    saved: Path | None = None
    try:
        saved = remember(directory, found.read)
    except OSError as error:
        remark(f"The result could not be saved: {error}")
    if as_json:
        print_json(
            {
                "directory": os.path.abspath(directory),
                "file_system": file_system_of(directory),
                "direct": found.direct,
                "read": round(found.read),
                "writes": {"new": round(found.new), "again": round(found.again)},
                "nbytes": nbytes,
                "seconds": round(seconds, 3),
                "remembered_in": None if saved is None else str(saved),
                "replaced": None if saved is None or former is None else round(former),
            }
        )
        return
    read, new, again = (size(each, Units.DECIMAL) for each in (found.read, found.new, found.again))
    data(f"reads     {read}/s")
    data(f"writes    {new}/s into a new file, {again}/s over existing data")
    if not found.direct:
        remark("This file system does not support direct I/O: all reads go through the page cache.")
    remark(f"Wrote {size(nbytes)} twice and read it {ROUNDS} times, in {seconds:.1f} s.")
    if saved is not None:
        replaced = f", replacing {size(former, Units.DECIMAL)}/s," if former else ""
        remark(f"The read speed of this disk was saved{replaced} in {saved}.")


def _check_space(directory: str, nbytes: int) -> None:
    advice = "Name a directory on the disk to measure."
    if not os.path.isdir(directory):
        raise Failure(not_a_directory(directory), advice)
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise Failure(f"{directory} cannot be accessed: {error.strerror}", advice) from error
    if free < 2 * nbytes:
        raise Failure(
            f"not enough disk space: {size(free)} free, {size(2 * nbytes)} needed, of which half "
            "stays free",
            "Measure with a smaller --size, or free some space.",
            Code.UNEXPECTED,
        )
