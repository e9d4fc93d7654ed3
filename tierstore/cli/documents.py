"""What `--json` prints: documents of raw bytes and seconds, for scripts. `schema` is their version.

A new field does not change the version; a field that goes away or changes its meaning does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from tierstore.cli.failures import Code, Failure
from tierstore.cli.report import Contents, Group, Item, Problem, total
from tierstore.cli.tensors import StoredTensor

SCHEMA = 1

Document = dict[str, Any]


def text_of(document: Document) -> str:
    """The document as text. Whatever is not ASCII is escaped, so keys cannot steer a terminal."""
    try:
        return json.dumps({"schema": SCHEMA, **document}, indent=2, allow_nan=False)
    except ValueError as error:  # Python would write NaN, which no other reader takes
        raise Failure(
            "some of what is to be told is a number without end",
            "Give speeds and times that a machine can have.",
            Code.USAGE,
        ) from error


def listing(contents: Contents, shown: Iterable[Group]) -> Document:
    """What `ls` tells: the groups asked for, and a summary of the whole directory."""
    return {
        **summary(contents),
        "groups": [group_row(contents.directory, group) for group in shown],
        "temporary": [item(contents.directory, i) for i in contents.temporary],
        "stray": [item(contents.directory, i) for i in contents.stray],
    }


def summary(contents: Contents) -> Document:
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


def group_row(directory: str, group: Group) -> Document:
    """One group in one object."""
    return {
        "key": group.key,
        "path": path_of(directory, group.item),
        "nbytes": group.item.nbytes,
        "modified": group.item.modified,
        "tensors": len(group.tensors),
        "dtypes": group.dtypes,
        "state": group.state,
        "problem": _problem(group.problem),
    }


def tensors_of(directory: str, group: Group, tensors: Iterable[StoredTensor]) -> Document:
    """What `show` tells: the group, and each of its tensors."""
    rows = [
        {
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
        for tensor in tensors
    ]
    return {**group_row(directory, group), "tensors": rows}


def damage(directory: str, group: Group) -> Document:
    """One damage that `verify` found."""
    return {
        "key": group.key,
        "path": path_of(directory, group.item),
        "state": group.state,
        **(_problem(group.problem) or {}),
    }


def removed(directory: str, items: Iterable[Item], *, dry_run: bool) -> Document:
    """What `prune` and `rm` removed, or would remove."""
    items = list(items)
    return {
        "directory": os.path.abspath(directory),
        "dry_run": dry_run,
        "nbytes": total(items),
        "removed": [item(directory, i) for i in items],
    }


def path_of(directory: str, item: Item) -> str:
    """The absolute path of something in the directory."""
    return os.path.join(os.path.abspath(directory), item.name)


def item(directory: str, found: Item) -> Document:
    """Something in the directory."""
    return {"path": path_of(directory, found), "kind": found.kind, "nbytes": found.nbytes}


def _problem(problem: Problem | None) -> Document | None:
    if problem is None:
        return None
    return {
        "reason": problem.reason,
        "tensor": problem.tensor,
        "expected": problem.expected,
        "found": problem.found,
    }
