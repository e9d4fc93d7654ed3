"""Rows of JSON documents and tables about a store's directory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from tierstore.cli import options
from tierstore.cli.output import Code, Document, Failure
from tierstore.inspection.directories import Item
from tierstore.inspection.survey import Group, find_group


def path_of(directory: str, item: Item) -> str:
    """Return the absolute path of an entry of the directory."""
    return os.path.join(os.path.abspath(directory), item.name)


def item_row(directory: str, item: Item) -> Document:
    """Describe an entry of the directory."""
    return {"path": path_of(directory, item), "kind": item.kind, "nbytes": item.nbytes}


def item_rows(directory: str, items: Iterable[Item]) -> list[Document]:
    """Describe entries of the directory."""
    return [item_row(directory, item) for item in items]


def group_row(root: str, group: Group) -> Document:
    """Describe a group in the directory at the absolute path `root`."""
    tensors = group.tensors
    return {
        "key": group.key,
        "path": f"{root}/{group.item.name}",
        "nbytes": group.item.nbytes,
        "modified": group.item.modified,
        "tensors": len(tensors),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "state": group.state,
        "problem": group.problem and group.problem.described(),
    }


def count_by_state(states: Iterable[str]) -> str:
    """Count groups by state, such as "2 damaged, 1 unreadable"."""
    return ", ".join(f"{count:,} {state}" for state, count in sorted(Counter(states).items()))


def count_foreign(number: int) -> str:
    """Count entries that tierstore did not write."""
    return f"{number:,} foreign {'entry' if number == 1 else 'entries'}"


def existing_groups(directory: str, keys: Iterable[str], root: int | None = None) -> list[Group]:
    """Find the groups of some keys, damaged or not. Raises Failure if one is missing."""
    found = {key: find_group(directory, key, root) for key in keys}
    missing = [key for key, group in found.items() if group is None]
    if missing:
        meant = options.did_you_mean(missing[0], options.keys_of(directory))
        raise Failure(
            f"{directory} has no group {', '.join(map(repr, missing))}"
            + (f".{meant}" if meant and len(missing) == 1 else ""),
            f"List the keys with: tierstore-inspect ls {directory}",
            Code.UNKNOWN_KEY,
        )
    return [group for group in found.values() if group is not None]
