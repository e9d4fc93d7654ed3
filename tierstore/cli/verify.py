"""The command `verify`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import click

from tierstore.cli import options
from tierstore.cli.output import Code, Document, data, print_json, remark
from tierstore.cli.remote import is_url, verify_files
from tierstore.cli.rows import count_by_state, count_foreign, item_row, item_rows, path_of
from tierstore.inspection.checksums import check_data
from tierstore.inspection.directories import locked_store
from tierstore.inspection.quarantine import QuarantineOutcome, move_to_quarantine, quarantined
from tierstore.inspection.survey import Contents, Group, survey, total
from tierstore.model.formatting import count, size
from tierstore.progress import byte_bar


@options.command(
    "verify", "verify offload", "verify offload --data --json", "verify offload --data --repair"
)
@click.argument(
    "directory", metavar="[DIR]", required=False, shell_complete=options.complete_directories
)
@click.option("--data", "read_data", is_flag=True, help="Read every tensor and compare checksums.")
@click.option("--repair", is_flag=True, help="Move damaged objects into DIR/quarantine.")
@click.pass_context
def verify(
    context: click.Context, directory: str | None, read_data: bool, repair: bool, as_json: bool
) -> int:
    """Check every group. Exits with 3 if one is damaged.

    Checks headers, file sizes and names. With --data, reads every byte, a few mebibytes at a time,
    and compares checksums.

    With --repair, moves damaged objects into DIR/quarantine, each with a note on the damage, and
    exits with 0 if all of them were moved. Nothing is deleted, and nothing changes without
    --repair. Repair fails while a process uses the directory.

    If DIR is the URL of a checkpoint in an object store, checks the headers of its files.
    1 MiB is 1,048,576 bytes.
    """
    if directory is None and repair:
        raise click.UsageError("--repair requires a DIR.")
    directory = options.named_or_default(context, directory)
    if is_url(directory):
        if read_data or repair:
            raise click.UsageError("--data and --repair require the directory of a store.")
        return verify_files(directory, as_json=as_json)
    with locked_store(directory) if repair else nullcontext() as root:
        contents = survey(directory)
        started = time.monotonic()
        problems, read = _check_data(contents) if read_data else (contents.unusable, 0)
        seconds = time.monotonic() - started
        problems = [*problems, *contents.obstructions]
        outcomes = {} if root is None else move_to_quarantine(directory, root, problems)
        quarantine = [
            {**item_row(directory, item), **note} for item, note in quarantined(directory)
        ]
    rows = [_row(directory, group, outcomes) for group in problems]
    moved = {row["put_away"] for row in rows} - {None}
    if as_json:
        print_json(
            {
                "directory": os.path.abspath(directory),
                "group_count": len(contents.groups),
                "data_read": read_data,
                "nbytes_read": read,
                "seconds": round(seconds, 3),
                "repair": repair,
                "problems": rows,
                "quarantine": quarantine,
                "temporary": item_rows(directory, contents.temporary),
                "stray": item_rows(directory, contents.foreign),
                "exposed": item_rows(directory, contents.exposed),
            }
        )
    else:
        _print_rows(rows, [row for row in quarantine if row["path"] not in moved])
        quarantined_count = f", {len(moved):,} quarantined" if outcomes else ""
        data(f"{count(len(contents.groups), 'group')}: {_verdict(rows)}{quarantined_count}")
        if read_data:
            rate = size(read / max(seconds, 1e-9))
            remark(f"Read {size(read)} in {seconds:.1f} s ({rate}/s).")
        else:
            remark("Checked headers and sizes only; --data also reads the tensors.")
        if problems and not repair:
            remark("Nothing was changed; --repair moves damaged objects into quarantine.")
        _remark_on_the_rest(contents)
    return Code.OK if len(moved) == len({row["path"] for row in rows}) else Code.DAMAGED


def _check_data(contents: Contents) -> tuple[list[Group], int]:
    nbytes = sum(g.stored.packing.dense_nbytes for g in contents.groups if g.stored)
    with byte_bar("Reading", nbytes) as advance:
        return check_data(contents, advance)


def _row(directory: str, group: Group, outcomes: Mapping[str, QuarantineOutcome]) -> Document:
    outcome = outcomes.get(group.item.name, QuarantineOutcome())
    return {
        "key": group.key,
        "path": path_of(directory, group.item),
        "state": group.state,
        **(group.problem.described() if group.problem else {}),
        "put_away": outcome.moved_to,
        "left": outcome.left,
    }


def _print_rows(problems: Iterable[Document], quarantine: Iterable[Document]) -> None:
    for row in problems:
        names = ("path", "tensor", "expected", "found", "reason")
        lines = [(name, row[name]) for name in names]
        lines += [("moved to", row["put_away"]), ("left", row["left"])]
        _print_entry(row["state"], row["key"], lines)
    for row in quarantine:
        lines = [("path", row["path"]), ("since", row["since"])]
        lines += (("reason", reason) for reason in row["reasons"])
        _print_entry("in quarantine", row["key"], lines)


def _print_entry(state: str, key: str | None, lines: Sequence[tuple[str, str | None]]) -> None:
    data(f"{state}: {'(unknown key)' if key is None else key}")
    for name, text in lines:
        if text is not None:
            data(f"  {name:<9} {text}")


def _verdict(rows: Iterable[Document]) -> str:
    # An object that is unreadable in one part and damaged in another is damaged.
    worst = sorted(rows, key=lambda row: row["state"] == "damaged")
    states = {row["path"]: row["state"] for row in worst}
    return count_by_state(states.values()) or "no damage found"


def _remark_on_the_rest(contents: Contents) -> None:
    """Report findings that are not damage."""
    if contents.temporary:
        files, nbytes = count(len(contents.temporary), "temporary file"), total(contents.temporary)
        where = "the next store removes the ones in tmp/, prune removes all"
        remark(f"{files} ({size(nbytes)}): {where}.")
    others = len(contents.foreign) - len(contents.obstructions)
    if others:
        remark(f"{count_foreign(others)}: listed by ls --json.")
    if contents.exposed:
        first = contents.exposed[0]
        path = os.path.normpath(path_of(contents.directory, first))
        files = count(len(contents.exposed), "file")
        remark(
            f"Other users may read or change {files}, such as {path} ({first.mode:o}): "
            f"chmod -R go= {contents.directory}"
        )
