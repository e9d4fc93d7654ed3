"""The command `verify`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import click

from tierstore.cli import documents, words
from tierstore.cli.failures import Code
from tierstore.cli.frame import (
    as_json_option,
    data,
    directory_argument,
    examples,
    remark,
)
from tierstore.cli.report import Contents, Group, survey


@click.command("verify", epilog=examples("verify offload", "verify offload --data --json"))
@directory_argument
@click.option("--data", "read_data", is_flag=True, help="Read every tensor, compare checksums.")
@as_json_option
def verify(directory: str, read_data: bool, as_json: bool) -> int:
    """Check every group. Exits with 3 if one is damaged.

    Headers and file sizes are checked at once. With --data, every byte is read, a few mebibytes
    at a time, and compared with the checksum that was stored with it.
    """
    contents = survey(directory)
    started = time.monotonic()
    problems, read = _check_data(contents) if read_data else (contents.unusable, 0)
    seconds = time.monotonic() - started
    if as_json:
        document = {
            "directory": os.path.abspath(directory),
            "group_count": len(contents.groups),
            "data_read": read_data,
            "nbytes_read": read,
            "seconds": round(seconds, 3),
            "problems": [documents.damage(directory, group) for group in problems],
        }
        click.echo(documents.text_of(document))
    else:
        _print_problems(directory, problems)
        data(_verdict(contents, problems))
        if read_data:
            rate = words.size(read / max(seconds, 1e-9))
            remark(f"Read {words.size(read)} in {seconds:.1f} s ({rate}/s).")
        else:
            remark("Headers and sizes only; --data reads the tensors too.")
    return Code.DAMAGED if problems else Code.OK


def _check_data(contents: Contents) -> tuple[list[Group], int]:
    from tierstore.cli.checking import Checker

    nbytes = sum(g.stored.packing.dense_nbytes for g in contents.groups if g.stored)
    with _bar(nbytes) as advance:
        checker = Checker(contents.directory, advance)
        problems = [found for group in contents.groups for found in checker.check(group)]
    return problems, checker.read


def _bar(nbytes: int) -> AbstractContextManager[Callable[[int], None]]:
    if not sys.stderr.isatty():
        return nullcontext(lambda _: None)
    from tierstore.cli import progress

    return progress.bar("Reading", nbytes)


def _print_problems(directory: str, problems: Iterable[Group]) -> None:
    for group in problems:
        problem = group.problem
        if problem is None:
            continue
        data(f"{group.state}: {'(key not readable)' if group.key is None else group.key}")
        lines = (
            ("path", documents.path_of(directory, group.item)),
            ("tensor", problem.tensor),
            ("expected", problem.expected),
            ("found", problem.found),
            ("reason", problem.reason),
        )
        for name, text in lines:
            if text is not None:
                data(f"  {name:<9} {text}")


def _verdict(contents: Contents, problems: Iterable[Group]) -> str:
    bad = len({group.item.name for group in problems})
    return f"{words.count(len(contents.groups), 'group')}: " + (
        f"{bad:,} damaged" if bad else "no damage found"
    )
