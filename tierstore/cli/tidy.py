"""The commands that remove files: `prune` and `rm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import click

from tierstore.cli import words
from tierstore.cli.directories import Item
from tierstore.cli.documents import items, path_of
from tierstore.cli.frame import (
    Code,
    Failure,
    as_json_option,
    checked_key,
    data,
    directory_argument,
    dry_run_option,
    examples,
    print_json,
    remark,
    unknown_keys,
    yes_option,
)
from tierstore.cli.report import find_group, find_group_below, survey, total


@click.command(
    "prune", epilog=examples("prune offload --dry-run", "prune offload", "prune offload -y")
)
@directory_argument
@click.option("--damaged", is_flag=True, help="Remove damaged objects too.")
@dry_run_option
@yes_option
@as_json_option
def prune(directory: str, damaged: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove what holds nothing: files that a killed process left half-written.

    Damaged objects go only with --damaged, and objects that cannot be read at all stay, as does all
    that is in quarantine. Files that tierstore did not write are never touched. Nobody may be using
    the directory.
    """

    def candidates(_: int | None) -> list[Item]:
        contents = survey(directory)
        if dry_run and contents.locked_by:
            remark(f"In use by {contents.locked_by}: its temporary files are counted here.")
        return [*contents.temporary, *(g.item for g in contents.damaged if damaged)]

    _remove(directory, candidates, dry_run=dry_run, yes=yes, as_json=as_json)


@click.command(
    "rm", epilog=examples("rm offload latents --dry-run", "rm offload 'run 1' 'run 2' -y")
)
@directory_argument
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@dry_run_option
@yes_option
@as_json_option
def remove_groups(
    directory: str, keys: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Remove groups for good, damaged ones too. If one is missing, none is removed."""
    wanted = [checked_key(key) for key in dict.fromkeys(keys)]

    def candidates(root: int | None) -> list[Item]:
        if root is None:
            found = [find_group(directory, key) for key in wanted]
        else:
            found = [find_group_below(directory, root, key) for key in wanted]
        missing = [key for key, group in zip(wanted, found, strict=True) if group is None]
        if missing:
            raise unknown_keys(missing, directory)
        return [group.item for group in found if group is not None]

    _remove(directory, candidates, dry_run=dry_run, yes=yes, as_json=as_json)


def _remove(
    directory: str,
    candidates: Callable[[int | None], list[Item]],
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove the candidates, which are looked for (and asked about) while the lock is held."""
    if dry_run:
        _report_removal(directory, candidates(None), dry_run=True, as_json=as_json)
        return
    if not yes and not sys.stdin.isatty():
        raise Failure(
            "nobody can be asked whether to remove files: this is no terminal",
            "Add -y to remove them, or --dry-run to see which.",
            Code.USAGE,
        )
    from tierstore.cli.removal import only_user, remove

    with only_user(directory) as root:
        found = candidates(root)
        if found and not yes and not _agreed(found):
            remark("Nothing was removed.")
            found = []
        removed = remove(directory, root, found)
    _report_removal(directory, removed, dry_run=False, as_json=as_json)


def _agreed(found: Sequence[Item]) -> bool:
    for item in found:
        remark(f"{words.size(item.nbytes):>10}  {item.name}")
    question = f"Remove {words.count(len(found), 'file')} ({words.size(total(found))}) for good?"
    return click.confirm(question, err=True)


def _report_removal(directory: str, gone: Sequence[Item], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "directory": os.path.abspath(directory),
                "dry_run": dry_run,
                "nbytes": total(gone),
                "removed": items(directory, gone),
            }
        )
        return
    for item in gone:
        data(path_of(directory, item))
    doing = "would be removed" if dry_run else "removed"
    remark(f"{words.count(len(gone), 'file')} ({words.size(total(gone))}) {doing}.")
