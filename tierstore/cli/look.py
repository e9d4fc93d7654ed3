"""The commands that only look: `ls`, `show`, `df`, `env`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from tierstore.cli import documents, words
from tierstore.cli.failures import Code, Failure
from tierstore.cli.frame import (
    as_json_option,
    checked_key,
    data,
    directory_argument,
    examples,
    remark,
    unknown_keys,
)
from tierstore.cli.report import Contents, Group, Item, find_group, survey, told_by_state, total
from tierstore.cli.tensors import tensors_of


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    parts = re.split(r"([0-9]{1,18})", text)  # text and numbers in turn
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


_SORTING: dict[str, Callable[[Group], Any]] = {
    "key": lambda group: (group.key is None, _natural(group.key or group.item.name)),
    "size": lambda group: -group.item.nbytes,
    "modified": lambda group: -group.item.modified,
}


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
    shown = _selected(contents.groups, sort, limit, prefix)
    if as_json:
        click.echo(documents.text_of(documents.listing(contents, shown)))
        return
    if shown:
        from tierstore.cli import render

        render.groups(shown)
    data(_summary(contents, len(shown)))
    if contents.unusable:
        remark(f"See what is wrong with: tierstore-inspect verify {directory}")


def _selected(
    groups: Iterable[Group], sort: str, limit: int | None, prefix: str | None
) -> list[Group]:
    chosen = [group for group in groups if prefix is None or (group.key or "").startswith(prefix)]
    return sorted(chosen, key=_SORTING[sort])[:limit]


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
        click.echo(documents.text_of(documents.tensors_of(directory, group, rows)))
        return
    from tierstore.cli import render

    if rows:
        render.tensors(rows)
    data(
        f"{words.count(len(rows), 'tensor')}, {words.size(group.item.nbytes)} in "
        f"{documents.path_of(directory, group.item)}"
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

    rows = [(survey(directory), file_system_of(directory)) for directory in directories]
    if as_json:
        entries = [{**documents.summary(c), "file_system": kind} for c, kind in rows]
        click.echo(documents.text_of({"directories": entries}))
        return
    from tierstore.cli import render

    render.directories(rows)


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
        click.echo(documents.text_of(found))
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
