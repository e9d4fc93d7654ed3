"""Groups that identify themselves: bytes of another group, version or place are noticed.

Every number in a group is made of its tag and its place in the group. A tag is made of the key, its
writer, and a number that the writer uses once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.store.helpers import PAGE

WHO, SERIAL = 12, 20  # bits
PLACE = 20


class Torn(AssertionError):
    """A group that no thread wrote under its key."""


def key_of(number: int) -> str:
    return f"key/{number:03}"


def tag_for(key: str, who: int, serial: int) -> int:
    return (int(key[4:]) << WHO | who) << SERIAL | serial


def writer_of(tag: int) -> str:
    return f"thread {tag >> SERIAL & (1 << WHO) - 1}, {tag & (1 << SERIAL) - 1}"


def _numbers(tag: int, start: int, count: int) -> torch.Tensor:
    base = (tag << PLACE) + start
    return torch.arange(base, base + count)


def group(tag: int, pages: int) -> dict[str, torch.Tensor]:
    """Return a group of `pages` pages in two tensors."""
    rows = pages * PAGE // 8
    return {
        "left": _numbers(tag, 0, rows // 2),
        "right": _numbers(tag, rows // 2, rows - rows // 2),
    }


def tag_of(key: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the tag of a whole group. Raises Torn."""
    left, right = tensors["left"].cpu(), tensors["right"].cpu()
    tag = int(left[0]) >> PLACE
    if tag >> SERIAL >> WHO != int(key[4:]):
        raise Torn(f"{key}: holds numbers of {key_of(tag >> SERIAL >> WHO)} ({writer_of(tag)})")
    whole = (_numbers(tag, 0, len(left)), _numbers(tag, len(left), len(right)))
    if not (torch.equal(left, whole[0]) and torch.equal(right, whole[1])):
        tags = {int(n) for t in (left, right) for n in torch.unique(t >> PLACE).tolist()}
        raise Torn(f"{key}: a mix of {sorted(map(writer_of, tags))}")
    return tag


def fill(tensors: Mapping[str, torch.Tensor], tag: int) -> None:
    """Change a group in place, one tensor after another."""
    start = 0
    for name in ("left", "right"):
        tensors[name].copy_(_numbers(tag, start, len(tensors[name])))
        start += len(tensors[name])
