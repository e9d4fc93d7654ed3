"""The command `verify`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import click

from tierstore.cli import words
from tierstore.cli.directories import Item
from tierstore.cli.documents import items, path_of, problem_row
from tierstore.cli.frame import (
    Code,
    Document,
    as_json_option,
    data,
    directory_argument,
    examples,
    print_json,
    remark,
)
from tierstore.cli.quarantine import Damage, Kept, QuarantineOutcome, kept, put_away
from tierstore.cli.removal import only_user
from tierstore.cli.report import Contents, Group, Problem, survey, told_by_state, total
from tierstore.progress import byte_bar


@dataclass(frozen=True)
class _Findings:
    """What a directory holds, and every problem of it. `outcomes` is what a repair did, by name."""

    contents: Contents
    problems: Sequence[Group]
    read: int
    seconds: float
    outcomes: Mapping[str, QuarantineOutcome]
    kept: Sequence[Kept]

    @property
    def damaged(self) -> set[str]:
        """The names of what is damaged."""
        return {group.item.name for group in self.problems}

    @property
    def moved(self) -> list[str]:
        """The names in quarantine of what was put away now."""
        return [o.moved_to for o in self.outcomes.values() if o.moved_to is not None]


@click.command(
    "verify",
    epilog=examples(
        "verify offload", "verify offload --data --json", "verify offload --data --repair"
    ),
)
@directory_argument
@click.option("--data", "read_data", is_flag=True, help="Read every tensor, compare checksums.")
@click.option("--repair", is_flag=True, help="Move what is damaged into DIR/quarantine.")
@as_json_option
def verify(directory: str, read_data: bool, repair: bool, as_json: bool) -> int:
    """Check every group. Exits with 3 if one is damaged.

    Headers, file sizes and names are checked at once. With --data, every byte is read, a few
    mebibytes at a time, and compared with the checksum that was stored with it.

    Nothing is changed without --repair. With it, what is damaged is moved into DIR/quarantine, with
    a note on what was wrong beside it, and the exit code is 0 if all of it was. Nothing is deleted:
    the directory is yours to remove. Nobody else may be using the store then.
    """
    findings = _examined(directory, read_data, repair)
    if as_json:
        print_json(_document(findings, read_data, repair))
    else:
        _print(findings, read_data, repair)
    done = len(findings.moved) == len(findings.damaged)
    return Code.OK if done else Code.DAMAGED


def _examined(directory: str, read_data: bool, repair: bool) -> _Findings:
    with only_user(directory) if repair else nullcontext() as root:
        contents = survey(directory)
        started = time.monotonic()
        problems, read = _check_data(contents) if read_data else (contents.unusable, 0)
        seconds = time.monotonic() - started
        problems = [*problems, *contents.in_the_way]
        outcomes = {} if root is None else put_away(directory, root, _damages(problems))
        return _Findings(contents, problems, read, seconds, outcomes, kept(directory))


def _check_data(contents: Contents) -> tuple[list[Group], int]:
    from tierstore.cli.checking import Checker

    nbytes = sum(g.stored.packing.dense_nbytes for g in contents.groups if g.stored)
    with byte_bar("Reading", nbytes) as advance:
        checker = Checker(contents.directory, advance)
        problems = [found for group in contents.groups for found in checker.check(group)]
    return problems, checker.read


def _damages(problems: Iterable[Group]) -> list[Damage]:
    found: dict[Item, tuple[str | None, list[Problem]]] = {}
    for group in problems:
        if group.problem is not None:
            found.setdefault(group.item, (group.key, []))[1].append(group.problem)
    return [Damage(item, key, tuple(several)) for item, (key, several) in found.items()]


# Telling ------------------------------------------------------------------------------------------


def _document(findings: _Findings, read_data: bool, repair: bool) -> Document:
    contents = findings.contents
    directory = contents.directory
    return {
        "directory": os.path.abspath(directory),
        "group_count": len(contents.groups),
        "data_read": read_data,
        "nbytes_read": findings.read,
        "seconds": round(findings.seconds, 3),
        "repair": repair,
        "problems": [
            {
                "key": group.key,
                "path": path_of(directory, group.item),
                "state": group.state,
                **(problem_row(group.problem) if group.problem else {}),
                **_became(findings, group),
            }
            for group in findings.problems
        ],
        "quarantine": [
            {**row, "key": entry.key, "since": entry.since, "reasons": entry.reasons}
            for entry, row in zip(
                findings.kept, items(directory, (e.item for e in findings.kept)), strict=True
            )
        ],
        "temporary": items(directory, contents.temporary),
        "stray": items(directory, contents.stray),
        "exposed": items(directory, contents.exposed),
    }


def _became(findings: _Findings, group: Group) -> Document:
    outcome = findings.outcomes.get(group.item.name)
    if outcome is None:
        return {"put_away": None, "left": None}
    root = os.path.abspath(findings.contents.directory)
    moved = outcome.moved_to and os.path.join(root, outcome.moved_to)
    return {"put_away": moved, "left": outcome.left}


def _print(findings: _Findings, read_data: bool, repair: bool) -> None:
    for group in findings.problems:
        _print_problem(findings, group)
    _print_quarantine(findings)
    data(_verdict(findings))
    if read_data:
        rate = words.size(findings.read / max(findings.seconds, 1e-9))
        remark(f"Read {words.size(findings.read)} in {findings.seconds:.1f} s ({rate}/s).")
    else:
        remark("Headers and sizes only; --data reads the tensors too.")
    if findings.problems and not repair:
        remark("Nothing was changed; --repair moves what is damaged into quarantine.")
    _remark_on_the_rest(findings.contents)


def _print_problem(findings: _Findings, group: Group) -> None:
    problem = group.problem
    if problem is None:
        return
    became = _became(findings, group)
    data(f"{group.state}: {_name_of(group.key)}")
    _print_lines(
        ("path", path_of(findings.contents.directory, group.item)),
        ("tensor", problem.tensor),
        ("expected", problem.expected),
        ("found", problem.found),
        ("reason", problem.reason),
        ("put away", became["put_away"]),
        ("left", became["left"]),
    )


def _print_quarantine(findings: _Findings) -> None:
    """What was put away before; what was put away now has been told of."""
    for entry in findings.kept:
        if entry.item.name not in findings.moved:
            data(f"in quarantine: {_name_of(entry.key)}")
            _print_lines(
                ("path", path_of(findings.contents.directory, entry.item)),
                ("since", entry.since),
                *(("reason", reason) for reason in entry.reasons),
            )


def _name_of(key: str | None) -> str:
    return "(key not readable)" if key is None else key


def _print_lines(*lines: tuple[str, str | None]) -> None:
    for name, text in lines:
        if text is not None:
            data(f"  {name:<9} {text}")


def _verdict(findings: _Findings) -> str:
    groups = words.count(len(findings.contents.groups), "group")
    if not findings.problems:
        return f"{groups}: no damage found"
    # What cannot be read in one place and is damaged in another is damaged.
    worst = sorted(findings.problems, key=lambda group: group.state == "damaged")
    bad = {group.item.name: group for group in worst}
    moved = len(findings.moved)
    return f"{groups}: {told_by_state(bad.values())}" + (
        f", {moved:,} put away" if findings.outcomes else ""
    )


def _remark_on_the_rest(contents: Contents) -> None:
    """What is no damage, and still worth knowing."""
    if contents.temporary:
        remark(
            f"{words.count(len(contents.temporary), 'temporary file')} "
            f"({words.size(total(contents.temporary))}): the next store removes what is in tmp/, "
            "prune removes all."
        )
    others = len(contents.stray) - len(contents.in_the_way)
    if others:
        remark(f"{words.count(others, 'stray file')} that tierstore did not write: see ls --json.")
    if contents.exposed:
        first = contents.exposed[0]
        remark(
            f"Others may read or change {words.count(len(contents.exposed), 'file')}, such as "
            f"{os.path.normpath(path_of(contents.directory, first))} "
            f"({first.mode:o}): chmod -R go= {contents.directory}"
        )
