"""The commands that remove files: `prune` and `rm`.

What is removed is a regular file below the directory that bears one of the store's own names, and
is still the file that was looked at. It is removed by its name in an open directory, so that no
link, whenever it was planted, can lead to another file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import click

from tierstore.cli import completing, options, words
from tierstore.cli.directories import Item, look_at, only_user, opened_parent
from tierstore.cli.output import Failure, data, print_json, remark, system_failure
from tierstore.cli.report import Group, existing_groups, item_rows, survey, total
from tierstore.system.files import sync_names


@options.command("prune", "prune offload --dry-run", "prune offload", "prune offload -y")
@options.directory_argument
@click.option("--damaged", is_flag=True, help="Remove damaged objects too.")
@options.dry_run_option
@options.yes_option
def prune(directory: str, damaged: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove what holds nothing: files that a killed process left half-written.

    Damaged objects go only with --damaged, and objects that cannot be read at all stay, as does all
    that is in quarantine. Files that tierstore did not write are never touched. Nobody may be using
    the directory.
    """

    def candidates(_: int | None) -> dict[Item, str]:
        contents = survey(directory)
        if dry_run and contents.locked_by:
            remark(f"In use by {contents.locked_by}: its temporary files are counted here.")
        found = {item: item.name for item in contents.temporary}
        return {**found, **_named(contents.damaged if damaged else ())}

    _remove(directory, candidates, dry_run=dry_run, yes=yes, as_json=as_json)


@options.command("rm", "rm offload latents --dry-run", "rm offload 'run 1' 'run 2' -y")
@options.directory_argument
@click.argument(
    "keys",
    metavar="KEY...",
    nargs=-1,
    required=True,
    type=options.key,
    shell_complete=completing.keys,
)
@options.dry_run_option
@options.yes_option
def remove_groups(
    directory: str, keys: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Remove groups for good, damaged ones too. If one is missing, none is removed."""

    def candidates(root: int | None) -> dict[Item, str]:
        return _named(existing_groups(directory, keys, root))

    _remove(directory, candidates, dry_run=dry_run, yes=yes, as_json=as_json)


def _named(groups: Iterable[Group]) -> dict[Item, str]:
    """Files of groups, with their keys; those of which no key is known, with their names."""
    return {group.item: group.key or group.item.name for group in groups}


def _remove(
    directory: str,
    candidates: Callable[[int | None], dict[Item, str]],
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove the candidates, which are looked for (and asked about) while the lock is held.

    They are files, and what a user calls them.
    """
    if not dry_run and not yes and not sys.stdin.isatty():
        raise Failure(
            "nobody can be asked whether to remove files: this is no terminal",
            "Add -y to remove them, or --dry-run to see which.",
        )
    refused = False
    with nullcontext() if dry_run else only_user(directory) as root:
        names = candidates(root)
        found = list(names)
        if root is not None:
            refused = bool(found) and not yes and not _agreed(names)
            found = [] if refused else _removed(directory, root, found)
    rows, nbytes = item_rows(directory, found), total(found)
    if as_json:
        document = {"directory": os.path.abspath(directory), "dry_run": dry_run}
        print_json({**document, "nbytes": nbytes, "removed": rows})
        return
    if refused:
        remark("Nothing was removed.")
        return
    for row in rows:
        data(row["path"])
    doing = "would be removed" if dry_run else "removed"
    remark(f"{words.count(len(rows), 'file')} ({words.size(nbytes)}) {doing}.")


def _agreed(found: Mapping[Item, str]) -> bool:
    for item, name in found.items():
        remark(f"{words.size(item.nbytes):>10}  {name}")
    question = f"Remove {words.count(len(found), 'file')} ({words.size(total(found))}) for good?"
    return click.confirm(question, err=True)


def _removed(directory: str, root: int, items: Iterable[Item]) -> list[Item]:
    """Remove files for good. Returns those that were removed; the others were gone already."""
    removed: list[Item] = []
    for item in items:
        try:
            removed += [item] if _remove_one(root, item) else []
        except OSError as error:
            before = f" (after {len(removed)} of them were removed)" if removed else ""
            raise system_failure(error, f"removing from {directory}{before}") from error
    return removed


def _remove_one(root: int, item: Item) -> bool:
    with opened_parent(root, item.name) as parent:
        leaf = os.path.basename(item.name)
        if parent is None or item.kind != "file" or look_at(parent, leaf, item.name) != item:
            return False
        os.unlink(leaf, dir_fd=parent)
        sync_names(parent)
        return True
