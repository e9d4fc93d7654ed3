"""The commands `ls`, `show`, `df` and `env`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import click

from tierstore.cli import options
from tierstore.cli.output import Code, Column, Document, Failure, data, draw, print_json, remark
from tierstore.cli.remote import is_url, list_files
from tierstore.cli.rows import count_by_state, count_foreign, existing_groups, group_row, item_rows
from tierstore.inspection.directories import not_a_directory
from tierstore.inspection.survey import Contents, Group, survey, total
from tierstore.model.formatting import ago, count, size
from tierstore.model.groups import TensorSpec, contiguous_stride
from tierstore.model.objects import StoredObject
from tierstore.system import machine
from tierstore.system.collector import paused

# ls -----------------------------------------------------------------------------------------------


_NUMBERS = re.compile(r"([0-9]{1,18})")


def _natural(text: str) -> list[tuple[int, str]]:
    """Sort layer 2 before layer 10."""
    parts = _NUMBERS.split(text)  # text and numbers alternate
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


_SORTING: dict[str, Callable[[Group], Any]] = {
    "key": lambda group: (group.key is None, _natural(group.key or group.item.name)),
    "size": lambda group: -group.item.nbytes,
    "modified": lambda group: -group.item.modified,
}

_GROUPS = (
    Column("KEY", lambda row: row["name"] if row["key"] is None else row["key"], flexible=True),
    Column("TENSORS", lambda row: "?" if row["problem"] else f"{row['tensors']:,}", right=True),
    Column("DTYPES", lambda row: "?" if row["problem"] else ",".join(row["dtypes"])),
    Column("SIZE", lambda row: size(row["nbytes"]), right=True),
    Column("MODIFIED", lambda row: ago(row["modified"])),
    Column("STATE", lambda row: row["state"]),
)


@options.command("ls", "ls offload", "ls offload --sort size --limit 10", "ls offload --json")
@options.default_directory_argument
@click.option(
    "--sort",
    type=click.Choice(list(_SORTING)),
    default="key",
    show_default=True,
    help="Order of the groups.",
)
@click.option(
    "--limit", type=click.IntRange(min=0), help="Show at most this many groups (default: all)."
)
@click.option(
    "--prefix",
    help="Show only groups whose keys start with this.",
    shell_complete=options.complete_prefixes,
)
@paused()
def list_groups(
    directory: str, sort: str, limit: int | None, prefix: str | None, as_json: bool
) -> None:
    """List the groups: key, tensors, dtypes, size, age and state.

    Reads only headers and file sizes; `verify --data` also reads the tensors. If DIR is the URL of
    a checkpoint in an object store (s3://bucket/model/), lists its files. 1 MiB is 1,048,576 bytes.
    """
    if is_url(directory):
        list_files(directory, as_json=as_json)
        return
    contents = survey(directory)
    chosen = [g for g in contents.groups if prefix is None or (g.key or "").startswith(prefix)]
    shown = sorted(chosen, key=_SORTING[sort])[:limit]
    root = os.path.abspath(directory)
    rows = [group_row(root, group) for group in shown]
    if as_json:
        print_json(
            {
                **_totals(contents),
                "groups": rows,
                "temporary": item_rows(directory, contents.temporary),
                "stray": item_rows(directory, contents.foreign),
            }
        )
        return
    if shown:
        names = (group.item.name for group in shown)
        draw(_GROUPS, [{**row, "name": name} for row, name in zip(rows, names, strict=True)])
    data(_summary(contents, len(shown)))
    if contents.unusable:
        remark(f"For details, run: tierstore-inspect verify {directory}")


def _totals(contents: Contents) -> Document:
    """Return the totals of a directory. `reclaimable` is what `prune` removes."""
    damaged = [group.item for group in contents.damaged]
    return {
        "directory": os.path.abspath(contents.directory),
        "group_count": len(contents.groups),
        "unusable_count": len(contents.unusable),
        "nbytes": total(group.item for group in contents.groups),
        "reclaimable": {"count": len(contents.temporary), "nbytes": total(contents.temporary)},
        "damaged": {"count": len(damaged), "nbytes": total(damaged)},
        "quarantine": {"count": len(contents.quarantined), "nbytes": total(contents.quarantine)},
        "locked_by": contents.locked_by,
        "free": contents.free,
    }


def _summary(contents: Contents, shown: int) -> str:
    groups, nbytes = len(contents.groups), total(group.item for group in contents.groups)
    parts = [f"{count(groups, 'group')}, {size(nbytes)}"]
    if not (groups or contents.temporary or contents.quarantine):
        parts.append("nothing stored here: checkpoints are used in place")
    if shown < groups:
        parts.append(f"{shown:,} shown")
    if contents.unusable:
        parts.append(count_by_state(group.state for group in contents.unusable))
    if contents.temporary:
        temporary = count(len(contents.temporary), "temporary file")
        parts.append(f"{temporary} ({size(total(contents.temporary))})")
    if contents.foreign:
        parts.append(count_foreign(len(contents.foreign)))
    if contents.quarantine:
        nbytes = total(contents.quarantine)
        parts.append(f"{len(contents.quarantined):,} in quarantine ({size(nbytes)})")
    if contents.locked_by:
        parts.append(f"in use by {contents.locked_by}")
    parts.append(f"{size(contents.free)} free")
    return "; ".join(parts)


# show ---------------------------------------------------------------------------------------------

_TENSORS = (
    Column("NAME", lambda row: row["name"], flexible=True),
    Column("DTYPE", lambda row: row["dtype"]),
    Column("SHAPE", lambda row: str(list(row["shape"]))),
    Column("STRIDE", lambda row: "" if row["contiguous"] else str(list(row["stride"]))),
    Column("TIED", lambda row: "" if row["tied"] is None else f"#{row['tied']}"),
    Column("SIZE", lambda row: size(row["nbytes"]), right=True),
    Column("OFFSET", lambda row: str(row["offset"]), right=True),
    Column("XXH3", lambda row: row["xxh3"]),
)


_SELDOM = ("STRIDE", "TIED")
"""Columns that are omitted if they are empty."""


@options.command("show", "show offload transformer/blocks.3", "show offload latents --json")
@click.argument(
    "names",
    metavar="[DIR] KEY",
    nargs=-1,
    required=True,
    shell_complete=options.complete_keys,
)
@click.pass_context
def show(context: click.Context, names: tuple[str, ...], as_json: bool) -> None:
    """List the tensors of one group.

    OFFSET is the position of a tensor in the file, in bytes. Tensors with the same number under
    TIED share memory. STRIDE is shown for tensors that are not contiguous.
    """
    if len(names) > 2:
        raise click.UsageError("Give one KEY. Quote a key that contains spaces.")
    *named, key = names
    directory = options.named_or_default(context, named[0] if named else None)
    (group,) = existing_groups(directory, [options.key(key)])
    if group.stored is None:
        reason = group.problem.reason if group.problem else "it cannot be read"
        raise Failure(
            f"the group {key!r} is {group.state}: {reason}",
            "Put the group again, or remove it with: tierstore-inspect rm",
            Code.DAMAGED,
        )
    rows, about = _tensor_rows(group.stored), group_row(os.path.abspath(directory), group)
    if as_json:
        print_json({**about, "tensors": rows})
        return
    if rows:
        shown = [c for c in _TENSORS if c.title not in _SELDOM or any(map(c.cell, rows))]
        draw(shown, rows)
    tensors = count(len(rows), "tensor")
    data(f"{tensors}, {size(about['nbytes'])} in {about['path']}")


def _tensor_rows(stored: StoredObject) -> list[Document]:
    """Describe the tensors of a stored group, in their order in the file.

    `offset` is in bytes from the start of the file; `xxh3` is the checksum of the tensor's storage.
    Tensors with the same number in `tied` share bytes.
    """
    packing = stored.packing
    rows: list[Document] = []
    ties = 0
    for block, start, digest in zip(packing.blocks, packing.dense, stored.digests, strict=True):
        for shared in _overlapping(block.views):
            ties += len(shared) > 1
            rows += (
                {
                    "name": view.name,
                    "dtype": view.dtype,
                    "shape": view.shape,
                    "stride": view.stride,
                    "contiguous": view.stride == contiguous_stride(view.shape),
                    "tied": ties if len(shared) > 1 else None,
                    "nbytes": view.nbytes,
                    "offset": stored.data_start + start + view.offset,
                    "xxh3": digest,
                }
                for view in shared
            )
    return rows


def _overlapping(views: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """Group the tensors of one storage that share bytes, directly or through others."""
    clusters: list[list[TensorSpec]] = []
    end = 0
    for view in sorted(views, key=lambda view: view.offset):
        if clusters and view.offset < end:
            clusters[-1].append(view)
        else:
            clusters.append([view])
        end = max(end, view.offset + view.nbytes)
    return clusters


# df -----------------------------------------------------------------------------------------------

_DIRECTORIES = (
    Column("DIRECTORY", lambda d: d["as_given"], flexible=True),
    Column("GROUPS", lambda d: f"{d['group_count']:,}", right=True),
    Column("OBJECTS", lambda d: size(d["nbytes"]), right=True),
    Column("RECLAIMABLE", lambda d: size(d["reclaimable"]["nbytes"]), right=True),
    Column("QUARANTINE", lambda d: size(d["quarantine"]["nbytes"]), right=True),
    Column("FREE", lambda d: size(d["free"]), right=True),
    Column("FILE SYSTEM", lambda d: d["file_system"] or "?"),
)


@options.command("df", "df offload", "df /scratch/*/offload --json")
@click.argument("named", metavar="[DIR]...", nargs=-1, shell_complete=options.complete_directories)
@click.pass_context
def disk_use(context: click.Context, named: tuple[str, ...], as_json: bool) -> None:
    """Show the disk space of each directory, and how much of it can be freed.

    RECLAIMABLE is the size of the temporary files of crashed processes, which `prune` deletes.
    Damaged objects, which `prune --damaged` deletes, count as OBJECTS. QUARANTINE is the size of
    the objects moved there by `verify --repair`. Foreign files are not counted.
    1 MiB is 1,048,576 bytes.
    """
    directories = named or (options.named_or_default(context, None),)
    rows = [{**_totals(survey(d)), "file_system": machine.file_system_of(d)} for d in directories]
    if as_json:
        print_json({"directories": rows})
    else:
        given = zip(directories, rows, strict=True)
        draw(_DIRECTORIES, [{**row, "as_given": directory} for directory, row in given])
        if len(rows) > 1:
            nbytes = size(sum(row["nbytes"] for row in rows))
            reclaimable = size(sum(row["reclaimable"]["nbytes"] for row in rows))
            groups = count(sum(row["group_count"] for row in rows), "group")
            data(f"{len(rows):,} directories: {groups}, {nbytes}; {reclaimable} reclaimable")


# env ----------------------------------------------------------------------------------------------


@options.command("env", "env", "env --dir /scratch/offload --json")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    default=".",
    help="Directory on the disk to describe.",
    shell_complete=options.complete_directories,
)
def environment(directory: str, as_json: bool) -> None:
    """Describe this machine and its packages, for bug reports."""
    if not os.path.isdir(directory):
        raise Failure(not_a_directory(directory), "Give another --dir.")
    found = machine.environment(directory)
    if as_json:
        print_json(found)
        return
    packages = found.pop("packages")
    for name, value in found.items():
        data(f"{name.replace('_', ' '):<14} {_fact(name, value)}")
    for name, version in packages.items():
        data(f"{name:<14} {version or 'not installed'}")


def _fact(name: str, value: object) -> str:
    if name == "usable_memory" and isinstance(value, int):
        return size(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none found"
    return "none found" if value is None else str(value)
