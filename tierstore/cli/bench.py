"""The command `bench`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli import words
from tierstore.cli.documents import Document, text_of
from tierstore.cli.failures import Code, Failure, system_failure
from tierstore.cli.frame import as_json_option, directory_argument, examples, remark

if TYPE_CHECKING:
    from tierstore.transfer.figures import DiskFigures
    from tierstore.transfer.measure import Measurement


def _size(ctx: click.Context, parameter: click.Parameter, text: str) -> int:
    from tierstore.model.sizes import parse_size
    from tierstore.transfer.measure import SMALLEST

    if "%" in text:
        raise click.BadParameter(f"{text!r}: a share of what? Write bytes, such as 1GiB.")
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error
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
    callback=_size,
    help="How large the file is that is written and read.",
)
@as_json_option
def bench(directory: str, nbytes: int, as_json: bool) -> None:
    """Measure the disk that DIR lies on, and remember what suits it.

    A store uses the block and the threads that were best (from its next start on), and `plan`
    the speed. Takes about a quarter of a minute, or longer where the disk is slow. The file that is
    written has no name and is gone afterwards, whatever happens.
    """
    from tierstore.transfer.figures import remember

    _check_room(directory, nbytes)
    started = time.monotonic()
    found = _measured(directory, nbytes)
    seconds = time.monotonic() - started
    figures = found.figures()
    kept: Path | None = None
    try:
        kept = remember(directory, figures)
    except OSError as error:
        remark(f"It could not be remembered: {error}")
    if as_json:
        document = _document(directory, nbytes, found, figures)
        where = None if kept is None else str(kept)
        click.echo(text_of({**document, "seconds": round(seconds, 3), "remembered_in": where}))
    else:
        _print(found, figures)
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


def _measured(directory: str, nbytes: int) -> Measurement:
    from tierstore.transfer.measure import in_silence, measure

    with ExitStack() as bars:

        def start(doing: str, total: int) -> Callable[[int], object]:
            from tierstore.cli import progress

            bars.close()
            return bars.enter_context(progress.bar(doing, total))

        try:
            return measure(directory, nbytes, start if sys.stderr.isatty() else in_silence)
        except OSError as error:
            raise system_failure(error, f"measuring the disk of {directory}") from error


def _document(directory: str, nbytes: int, found: Measurement, figures: DiskFigures) -> Document:
    from tierstore.cli.machine import file_system_of

    return {
        "directory": os.path.abspath(directory),
        "file_system": file_system_of(directory),
        "direct": found.direct,
        "nbytes": nbytes,
        "reads": [
            {
                "block": block,
                "threads": threads,
                "bytes_per_second": round(found.read((block, threads))),
            }
            for block, threads in found.rounds
        ],
        "writes": {"new": round(found.new), "again": round(found.again)},
        "chosen": {
            "block": figures.block,
            "threads": figures.threads,
            "read": round(figures.read),
            "write": round(figures.write),
        },
    }


def _print(found: Measurement, figures: DiskFigures) -> None:
    from tierstore.cli import render
    from tierstore.transfer.measure import BLOCKS, THREADS

    titles = [words.count(threads, "THREAD").upper() for threads in THREADS]
    columns = [render.Column("READS OF"), *(render.Column(title, right=True) for title in titles)]
    rows = [
        [words.size(block), *(f"{words.size(found.read((block, n)))}/s" for n in THREADS)]
        for block in BLOCKS
    ]
    render.draw(columns, rows)
    click.echo(f"writes    {words.size(found.new)}/s at first, {words.size(found.again)}/s again")
    click.echo(
        f"chosen    {words.size(figures.block)} on {words.count(figures.threads, 'thread')}: "
        f"{words.size(figures.read)}/s"
    )
    if not found.direct:
        remark("This file system refuses direct reads: everything goes through the page cache.")
