"""The commands that delete files: `prune` and `rm`.

They delete only regular files below the directory that have one of the store's own names and are
unchanged since they were found. Each is deleted by name in an open directory, so a planted link
cannot redirect the deletion.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import click

from tierstore.cli import options
from tierstore.cli.output import Failure, data, print_json, remark
from tierstore.cli.rows import existing_groups, item_rows
from tierstore.inspection.directories import Item, locked_store, open_parent, stat_item
from tierstore.inspection.survey import Group, survey, total
from tierstore.model.formatting import count, size
from tierstore.system.files import sync_names, transfer_errors


@options.command("prune", "prune offload --dry-run", "prune offload", "prune offload -y")
@options.directory_argument
@click.option("--damaged", is_flag=True, help="Also delete damaged objects.")
@options.dry_run_option
@options.yes_option
def prune(directory: str, damaged: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete temporary files left by crashed processes.

    Damaged objects are deleted only with --damaged. Objects that cannot be read, the quarantine,
    and foreign files are never deleted. Fails while a process uses the directory.
    """

    def candidates(_: int | None) -> dict[Item, str]:
        contents = survey(directory)
        if dry_run and contents.locked_by:
            remark(f"In use by {contents.locked_by}, whose temporary files are included.")
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
    shell_complete=options.complete_keys,
)
@options.dry_run_option
@options.yes_option
def remove_groups(
    directory: str, keys: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Delete groups for good, even damaged ones. If a key is missing, nothing is deleted."""

    def candidates(root: int | None) -> dict[Item, str]:
        return _named(existing_groups(directory, keys, root))

    _remove(directory, candidates, dry_run=dry_run, yes=yes, as_json=as_json)


def _named(groups: Iterable[Group]) -> dict[Item, str]:
    """Map the files of groups to their keys, or to their paths if unknown."""
    return {group.item: group.key or group.item.name for group in groups}


def _remove(
    directory: str,
    candidates: Callable[[int | None], dict[Item, str]],
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the candidates. Finds and confirms them with the lock held."""
    if not dry_run and not yes and not sys.stdin.isatty():
        candidates(None)  # raises first if the directory or a key does not exist
        raise Failure(
            "cannot ask for confirmation: stdin is not a terminal",
            "Add -y to remove the files, or --dry-run to list them.",
        )
    declined = False
    with nullcontext() if dry_run else locked_store(directory) as root:
        names = candidates(root)
        found = list(names)
        if root is not None:
            declined = bool(found) and not yes and not _confirmed(names)
            found = [] if declined else _removed(directory, root, found)
    rows, nbytes = item_rows(directory, found), total(found)
    if as_json:
        document = {"directory": os.path.abspath(directory), "dry_run": dry_run}
        print_json({**document, "nbytes": nbytes, "removed": rows})
        return
    if declined:
        remark("Nothing was removed.")
        return
    for row in rows:
        data(row["path"])
    doing = "would be removed" if dry_run else "removed"
    remark(f"{count(len(rows), 'file')} ({size(nbytes)}) {doing}.")


def _confirmed(found: Mapping[Item, str]) -> bool:
    for item, name in found.items():
        remark(f"{size(item.nbytes):>10}  {name}")
    files, nbytes = count(len(found), "file"), size(total(found))
    return click.confirm(f"Remove {files} ({nbytes}) for good?", err=True)


def _removed(directory: str, root: int, items: Iterable[Item]) -> list[Item]:
    """Delete files. Returns the deleted ones; the others no longer existed."""
    removed: list[Item] = []
    for item in items:
        before = f" (after {len(removed)} of them were removed)" if removed else ""
        with transfer_errors(f"removing{before} from", path=directory):
            removed += [item] if _remove_one(root, item) else []
    return removed


def _remove_one(root: int, item: Item) -> bool:
    with open_parent(root, item.name) as parent:
        leaf = os.path.basename(item.name)
        if parent is None or item.kind != "file" or stat_item(parent, leaf, item.name) != item:
            return False
        os.unlink(leaf, dir_fd=parent)
        sync_names(parent)
        return True
