"""Functions for processes of `tools.bench.apart`, without torch."""

from __future__ import annotations

from collections.abc import Iterator


def doubled(value: int) -> int:
    if value < 0:
        raise ValueError("it is below zero")
    return 2 * value


def summing() -> Iterator[int]:
    total = 0
    while True:
        total += yield total  # type: ignore[misc]


def hungry(nbytes: int) -> int:
    return len(bytearray(nbytes))
