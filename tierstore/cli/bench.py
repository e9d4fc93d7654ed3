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
from tierstore.model.formatting import Units, size
from tierstore.progress import byte_bar
from tierstore.system.files import transfer_errors
from tierstore.system.machine import file_system_of


def _size(text: str) -> int:
    from tierstore.tiers.disk_speed import SMALLEST

    nbytes = options.parsed_bytes(text)
    if nbytes < SMALLEST:
        raise click.BadParameter(f"{text!r} is too little: use {size(SMALLEST)} at least.")
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
    """Measure the disk that DIR lies on, and remember its speed for `plan`.

    Writes a file twice and reads it five times, past the page cache, which takes some seconds or
    longer. The file has no name, so that it never stays behind. The last measurement of a disk is
    remembered, whatever its --size.
    """
    from tierstore.tiers.disk_speed import ROUNDS, known_speed, measure, remember

    _check_room(directory, nbytes)
    started = time.monotonic()
    with transfer_errors("measuring the disk of", path=directory):
        found = measure(directory, nbytes, functools.partial(byte_bar, at_once=True))
    seconds = time.monotonic() - started
    former = known_speed(directory)
    kept: Path | None = None
    try:
        kept = remember(directory, found.read)
    except OSError as error:
        remark(f"It could not be remembered: {error}")
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
                "remembered_in": None if kept is None else str(kept),
                "replaced": None if kept is None or former is None else round(former),
            }
        )
        return
    read, new, again = (size(each, Units.DECIMAL) for each in (found.read, found.new, found.again))
    data(f"reads     {read}/s")
    data(f"writes    {new}/s into a new file, {again}/s over what is there")
    if not found.direct:
        remark("This file system refuses direct reads: everything goes through the page cache.")
    remark(f"Wrote {size(nbytes)} twice and read it {ROUNDS} times, in {seconds:.1f} s.")
    if kept is not None:
        instead = f" instead of {size(former, Units.DECIMAL)}/s" if former else ""
        remark(f"What it reads is remembered for this disk{instead}, in {kept}.")


def _check_room(directory: str, nbytes: int) -> None:
    advice = "Name a directory on the disk to measure."
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise Failure(f"{directory} cannot be looked at: {error.strerror}", advice) from error
    if not os.path.isdir(directory):
        raise Failure(f"{directory} is no directory", advice)
    if free < 2 * nbytes:
        raise Failure(
            f"too little room: {size(free)} are free there, and at least "
            f"{size(2 * nbytes)} must be, of which half stays free",
            "Measure with a smaller --size, or free some space.",
            Code.UNEXPECTED,
        )
