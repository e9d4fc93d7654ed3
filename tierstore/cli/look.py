"""The commands that only look: `ls`, `show`, `df`, `env`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from tierstore.cli import words
from tierstore.cli.directories import Item
from tierstore.cli.documents import group_row, items, path_of
from tierstore.cli.frame import (
    Code,
    Document,
    Failure,
    as_json_option,
    checked_key,
    data,
    directory_argument,
    examples,
    print_json,
    remark,
    unknown_keys,
)
from tierstore.cli.render import Column, draw
from tierstore.cli.report import Contents, Group, find_group, survey, told_by_state, total
from tierstore.cli.tensors import StoredTensor, tensors_of

# ls -----------------------------------------------------------------------------------------------


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    parts = re.split(r"([0-9]{1,18})", text)  # text and numbers in turn
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


_SORTING: dict[str, Callable[[Group], Any]] = {
    "key": lambda group: (group.key is None, _natural(group.key or group.item.name)),
    "size": lambda group: -group.item.nbytes,
    "modified": lambda group: -group.item.modified,
}

_GROUPS: Sequence[Column[Group]] = (
    Column("KEY", lambda g: g.item.name if g.key is None else g.key, flexible=True),
    Column("TENSORS", lambda g: f"{len(g.tensors):,}" if g.stored else "?", right=True),
    Column("DTYPES", lambda g: ",".join(g.dtypes) if g.stored else "?"),
    Column("SIZE", lambda g: words.size(g.item.nbytes), right=True),
    Column("MODIFIED", lambda g: words.moment(g.item.modified)),
    Column("STATE", lambda g: g.state),
)


@click.command(
    "ls", epilog=examples("ls offload", "ls offload --sort size --limit 10", "ls offload --json")
)
@directory_argument
@click.option("--sort", type=click.Choice(list(_SORTING)), default="key", show_default=True)
@click.option("--limit", type=click.IntRange(min=0), help="Show at most so many groups.")
@click.option("--prefix", help="Show only groups whose key begins so.")
@as_json_option
def list_groups(
    directory: str, sort: str, limit: int | None, prefix: str | None, as_json: bool
) -> None:
    """List the groups: key, tensors, dtypes, size, time, and whether the file is intact.

    Headers and file sizes are looked at here; `verify --data` reads the tensors too.
    """
    contents = survey(directory)
    chosen = [g for g in contents.groups if prefix is None or (g.key or "").startswith(prefix)]
    shown = sorted(chosen, key=_SORTING[sort])[:limit]
    if as_json:
        print_json(
            {
                **_totals(contents),
                "groups": [group_row(directory, group) for group in shown],
                "temporary": items(directory, contents.temporary),
                "stray": items(directory, contents.stray),
            }
        )
        return
    if shown:
        draw(_GROUPS, shown)
    data(_summary(contents, len(shown)))
    if contents.unusable:
        remark(f"See what is wrong with: tierstore-inspect verify {directory}")


def _totals(contents: Contents) -> Document:
    """Counts and bytes of a directory."""
    damaged = total(group.item for group in contents.damaged)
    temporary, stray = total(contents.temporary), total(contents.stray)
    return {
        "directory": os.path.abspath(contents.directory),
        "group_count": len(contents.groups),
        "unusable_count": len(contents.unusable),
        "nbytes": total(group.item for group in contents.groups),
        "reclaimable": {
            "nbytes": damaged + temporary + stray,
            "damaged": damaged,
            "temporary": temporary,
            "stray": stray,
        },
        "quarantine": {
            "count": len(contents.put_away),
            "nbytes": total(contents.quarantine),
        },
        "locked_by": contents.locked_by,
        "free": contents.free,
    }


def _summary(contents: Contents, shown: int) -> str:
    groups = len(contents.groups)
    parts = [
        f"{words.count(groups, 'group')}, {words.size(total(g.item for g in contents.groups))}"
    ]
    if shown < groups:
        parts.append(f"{shown:,} shown")
    if contents.unusable:
        parts.append(told_by_state(contents.unusable))
    parts += _rest(contents.temporary, "temporary file") + _rest(contents.stray, "stray file")
    if contents.quarantine:
        nbytes = words.size(total(contents.quarantine))
        parts.append(f"{len(contents.put_away):,} in quarantine ({nbytes})")
    if contents.locked_by:
        parts.append(f"in use by {contents.locked_by}")
    parts.append(f"{words.size(contents.free)} free")
    return "; ".join(parts)


def _rest(items: Sequence[Item], noun: str) -> list[str]:
    return [f"{words.count(len(items), noun)} ({words.size(total(items))})"] if items else []


# show ---------------------------------------------------------------------------------------------

_TENSORS: Sequence[Column[StoredTensor]] = (
    Column("NAME", lambda t: t.spec.name, flexible=True),
    Column("DTYPE", lambda t: t.spec.dtype),
    Column("SHAPE", lambda t: str(list(t.spec.shape))),
    Column("STRIDE", lambda t: "" if t.contiguous else str(list(t.spec.stride))),
    Column("TIED", lambda t: "" if t.tied is None else f"#{t.tied}"),
    Column("SIZE", lambda t: words.size(t.spec.nbytes), right=True),
    Column("OFFSET", lambda t: str(t.offset), right=True),
    Column("XXH3", lambda t: t.digest),
)


@click.command(
    "show", epilog=examples("show offload transformer/blocks.3", "show offload latents --json")
)
@directory_argument
@click.argument("key")
@as_json_option
def show(directory: str, key: str, as_json: bool) -> None:
    """List the tensors of one group.

    OFFSET is where a tensor begins in the file. Tensors with the same number under TIED share
    memory. STRIDE is given for tensors whose elements do not lie in order.
    """
    group = find_group(directory, checked_key(key))
    if group is None:
        raise unknown_keys([key], directory)
    if group.stored is None:
        reason = group.problem.reason if group.problem else "it cannot be read"
        raise Failure(
            f"the group {key!r} is {group.state}: {reason}",
            "Put the group again; this removes what is left of it: tierstore-inspect rm",
            Code.DAMAGED,
        )
    rows = tensors_of(group.stored)
    if as_json:
        print_json({**group_row(directory, group), "tensors": [_tensor_row(row) for row in rows]})
        return
    if rows:
        draw(_TENSORS, rows)
    data(
        f"{words.count(len(rows), 'tensor')}, {words.size(group.item.nbytes)} in "
        f"{path_of(directory, group.item)}"
    )


def _tensor_row(tensor: StoredTensor) -> Document:
    return {
        "name": tensor.spec.name,
        "dtype": tensor.spec.dtype,
        "shape": tensor.spec.shape,
        "stride": tensor.spec.stride,
        "contiguous": tensor.contiguous,
        "tied": tensor.tied,
        "nbytes": tensor.spec.nbytes,
        "offset": tensor.offset,
        "xxh3": tensor.digest,
    }


# df -----------------------------------------------------------------------------------------------

_DIRECTORIES: Sequence[Column[Document]] = (
    Column("DIRECTORY", lambda d: d["as_given"], flexible=True),
    Column("GROUPS", lambda d: f"{d['group_count']:,}", right=True),
    Column("OBJECTS", lambda d: words.size(d["nbytes"]), right=True),
    Column("RECLAIMABLE", lambda d: words.size(d["reclaimable"]["nbytes"]), right=True),
    Column("QUARANTINE", lambda d: words.size(d["quarantine"]["nbytes"]), right=True),
    Column("FREE", lambda d: words.size(d["free"]), right=True),
    Column("FILE SYSTEM", lambda d: d["file_system"] or "?"),
)


@click.command("df", epilog=examples("df offload", "df /scratch/*/offload --json"))
@click.argument("directories", metavar="DIR...", nargs=-1, required=True)
@as_json_option
def disk_use(directories: tuple[str, ...], as_json: bool) -> None:
    """Say how much of the disk each directory takes, and how much of that holds no group.

    RECLAIMABLE counts temporary files, damaged objects, and stray files: those that tierstore did
    not write, and so will not remove. QUARANTINE is what `verify --repair` put away.
    """
    from tierstore.cli.machine import file_system_of

    rows = [{**_totals(survey(d)), "file_system": file_system_of(d)} for d in directories]
    if as_json:
        print_json({"directories": rows})
    else:
        given = zip(directories, rows, strict=True)
        draw(_DIRECTORIES, [{**row, "as_given": directory} for directory, row in given])


# env ----------------------------------------------------------------------------------------------


@click.command("env", epilog=examples("env", "env --dir /scratch/offload --json"))
@click.option("--dir", "directory", metavar="DIR", default=".", help="Look at this disk.")
@as_json_option
def environment(directory: str, as_json: bool) -> None:
    """Say what this machine and its packages are: paste it into a report about a problem."""
    from tierstore.cli import machine

    if not os.path.isdir(directory):
        raise Failure(f"{directory} is no directory", "Give another --dir.", Code.USAGE)
    found = machine.environment(directory)
    if as_json:
        print_json(found)
        return
    packages = found.pop("packages")
    assert isinstance(packages, dict)
    for name, value in found.items():
        data(f"{name.replace('_', ' '):<14} {_fact(name, value)}")
    for name, version in packages.items():
        data(f"{name:<14} {version or 'not installed'}")


def _fact(name: str, value: object) -> str:
    if name == "usable_memory" and isinstance(value, int):
        return words.size(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none found"
    return "none found" if value is None else str(value)
