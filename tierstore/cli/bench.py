"""The command `bench`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli import options, words
from tierstore.cli.frame import (
    Code,
    Document,
    Failure,
    as_json_option,
    data,
    directory_argument,
    examples,
    print_json,
    remark,
    system_failure,
)
from tierstore.progress import byte_bar

if TYPE_CHECKING:
    from tierstore.cli.disk_speed import DiskSpeed


def _size(text: str) -> int:
    from tierstore.cli.disk_speed import SMALLEST

    nbytes = options.bytes_only(text)
    if nbytes < SMALLEST:
        raise click.BadParameter(f"{text!r} is too little: use {words.size(SMALLEST)} at least.")
    return nbytes


@click.command("bench", epilog=examples("bench offload", "bench /mnt/nvme --size 4GiB --json"))
@directory_argument
@click.option(
    "--size",
    "nbytes",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    type=_size,
    help="How large the file is that is written and read.",
)
@as_json_option
def bench(directory: str, nbytes: int, as_json: bool) -> None:
    """Measure the disk that DIR lies on, and remember how fast it is, for `plan`.

    The file that is written has no name and is gone afterwards, whatever happens. It is written
    twice and read five times, past the page cache: some seconds, or longer where the disk is slow.
    """
    from tierstore.cli.disk_speed import remember

    _check_room(directory, nbytes)
    started = time.monotonic()
    found = _measured(directory, nbytes)
    seconds = time.monotonic() - started
    kept: Path | None = None
    try:
        kept = remember(directory, found.read)
    except OSError as error:
        remark(f"It could not be remembered: {error}")
    if as_json:
        where = None if kept is None else str(kept)
        document = {**_document(directory, found), "nbytes": nbytes}
        print_json({**document, "seconds": round(seconds, 3), "remembered_in": where})
        return
    data(f"reads     {words.size(found.read)}/s")
    data(f"writes    {words.size(found.new)}/s at first, {words.size(found.again)}/s again")
    if not found.direct:
        remark("This file system refuses direct reads: everything goes through the page cache.")
    remark(f"Measured with {words.size(nbytes)} in {seconds:.1f} s.")
    if kept is not None:
        remark(f"Remembered in {kept}.")


def _check_room(directory: str, nbytes: int) -> None:
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise Failure(
            f"{directory} cannot be looked at: {error.strerror}",
            "Name a directory on the disk to measure.",
            Code.USAGE,
        ) from error
    if not os.path.isdir(directory):
        raise Failure(
            f"{directory} is no directory", "Name a directory on the disk to measure.", Code.USAGE
        )
    if free < 2 * nbytes:
        raise Failure(
            f"too little room: {words.size(free)} are free there, and at least "
            f"{words.size(2 * nbytes)} must be, of which half stays free",
            "Measure with a smaller --size, or free some space.",
            Code.UNEXPECTED,
        )


def _measured(directory: str, nbytes: int) -> DiskSpeed:
    from tierstore.cli.disk_speed import measure

    with ExitStack() as bars:

        def start(doing: str, total: int) -> Callable[[int], object]:
            bars.close()
            return bars.enter_context(byte_bar(doing, total, at_once=True))

        try:
            return measure(directory, nbytes, start)
        except OSError as error:
            raise system_failure(error, f"measuring the disk of {directory}") from error


def _document(directory: str, found: DiskSpeed) -> Document:
    from tierstore.cli.machine import file_system_of

    return {
        "directory": os.path.abspath(directory),
        "file_system": file_system_of(directory),
        "direct": found.direct,
        "read": round(found.read),
        "writes": {"new": round(found.new), "again": round(found.again)},
    }
