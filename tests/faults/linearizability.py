"""Checks whether threads' observations of one key are linearizable.

Each operation takes effect at one moment between its begin and its end. A history is sound if such
moments can be chosen so that every operation finds what it reports. The search is Wing and Gong's,
with Lowe's memory of visited states: the completed operations, and the value that they leave.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf

LIMIT = 200_000
"""Positions that a search may visit. Histories of a few hundred operations visit hundreds."""


class Some(Enum):
    """A value that no operation names."""

    ANY = "whatever is there, if anything"
    GROUP = "some group"
    SAME = "what was there before"


Value = int | None | Some
"""A value that was written; None where the key is unknown."""


class Undecided(Exception):
    """The history is too long or too complex to be judged."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: the value it found, and the value it left.

    It leaves `left` in any state, or only in the state `meets`. `maybe` marks an interrupted call:
    it took effect once, or not at all, and perhaps after its caller got the error.
    """

    begin: float
    end: float
    found: Value
    left: Value
    who: str = ""
    maybe: bool = False
    only: Value = Some.ANY

    def fits(self, value: int | None) -> bool:
        """Return whether it can take effect when the value is `value`."""
        if self.found is Some.ANY:
            return True
        return value is not None if self.found is Some.GROUP else self.found == value

    def after(self, value: int | None) -> int | None:
        """Return the value after it has taken effect."""
        passes = self.only is not Some.ANY and self.only != value
        return value if passes or isinstance(self.left, Some) else self.left

    def __str__(self) -> str:
        found, left = (v.name if isinstance(v, Some) else v for v in (self.found, self.left))
        notes = " (maybe)" * self.maybe + f" (only of {self.only})" * (self.only is not Some.ANY)
        return f"{self.begin:>9} {self.end:>9}  {found} -> {left}{notes}  {self.who}"


@dataclass
class _Search:
    """A history in the order of its begins."""

    operations: list[Operation]
    limit: int
    visited: set[tuple[int, int | None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.needed = sum(1 << i for i, op in enumerate(self.operations) if not op.maybe)
        # Operations that find a value, and those that leave it, as bit masks.
        self.finders: dict[Value, int] = defaultdict(int)
        self.makers: dict[Value, int] = defaultdict(int)
        for i, op in enumerate(self.operations):
            self.finders[op.found] |= (not op.maybe) << i
            self.makers[op.left] |= 1 << i

    def order(self, value: int | None) -> list[Operation] | None:
        """Return an order from `value` on in which every operation fits; None if there is none."""
        path: list[tuple[int, int, int | None]] = []  # operation, and the state before it
        places = [iter([*self._next(0, value)])]
        done = 0
        while self.needed & ~done:
            found = next(places[-1], None)
            if found is None:
                places.pop()
                if not path:
                    return None
                _, done, value = path.pop()
                continue
            before, there = done | 1 << found, self.operations[found].after(value)
            if (before, there) in self.visited:
                continue
            self._note(before, there)
            path.append((found, done, value))
            done, value = before, there
            places.append(iter([*self._next(done, value)]))
        return [self.operations[i] for i, _, _ in path]

    def _note(self, done: int, value: int | None) -> None:
        self.visited.add((done, value))
        if len(self.visited) > self.limit:
            raise Undecided(f"{len(self.operations)} operations, {self.limit} positions visited")

    def _next(self, done: int, value: int | None) -> list[int]:
        """Return the operations that can come next. One that changes nothing is taken at once."""
        found = []
        for i in self._open(done):
            op = self.operations[i]
            if not op.fits(value):
                continue
            if op.left is Some.SAME and not op.maybe:
                return [i]
            if not self._is_missed(done | 1 << i, value, op.after(value)):
                found.append(i)
        return found

    def _open(self, done: int) -> list[int]:
        """Return the operations that no other has to precede."""
        found, deadline = [], inf
        first = (~done & (done + 1)).bit_length() - 1
        for i in range(first, len(self.operations)):
            op = self.operations[i]
            if op.begin > deadline:
                break
            if not done >> i & 1:
                found.append(i)
                if not op.maybe:
                    deadline = min(deadline, op.end)
        return sorted(found, key=lambda i: self.operations[i].end)

    def _is_missed(self, done: int, value: int | None, then: int | None) -> bool:
        """Return whether a pending operation must find `value`, which never comes again."""
        if value is None or value == then:
            return False
        return bool(self.finders[value] & ~done) and not self.makers[value] & ~done


def order(
    start: int | None, operations: Iterable[Operation], *, limit: int = LIMIT
) -> list[Operation] | None:
    """Return an order that explains a key's history from value `start`; None if there is none.

    Raises Undecided after visiting more than `limit` positions.
    """
    return _Search(sorted(operations, key=lambda op: op.begin), limit).order(start)


def assert_linearizable(key: str, start: int | None, operations: Sequence[Operation]) -> None:
    """Assert that there is such an order. The message shows the shortest part that has none."""
    if order(start, operations) is not None:
        return
    by_end = sorted(operations, key=lambda op: op.end)
    for count in range(1, len(by_end) + 1):
        # An operation still running may have taken effect, or not.
        part = [*by_end[:count], *(_unfinished(op) for op in by_end[count:])]
        if _has_none(start, part):
            last = by_end[count - 1]
            near = [op for op in operations if op.end >= last.begin - 200 and op.begin <= last.end]
            near.sort(key=lambda op: op.begin)
            listed = "\n".join(map(str, near))
            raise AssertionError(
                f"{key}: no order explains\n{last}\nwhich began with {start}, among\n{listed}"
            )
    raise AssertionError(f"{key}: no order explains its history")


def _has_none(start: int | None, operations: list[Operation]) -> bool:
    try:
        return order(start, operations) is None
    except Undecided:
        return False


def _unfinished(operation: Operation) -> Operation:
    return replace(operation, end=inf, found=Some.ANY, maybe=True)


def lent(value: int) -> int:
    """Return the value while one caller has the group exclusively: it exists but is unreadable."""
    return -value


class History:
    """Operations of threads on several keys, each with the moments of its begin and end.

    Values are positive.
    """

    def __init__(self) -> None:
        self._clock = itertools.count()  # `next` is atomic
        self._operations: dict[str, list[Operation]] = defaultdict(list)

    def now(self) -> int:
        """Return a moment later than all before."""
        return next(self._clock)

    def add(  # value found, value left, when, and by which thread: all are needed
        self, key: str, begin: int, found: Value, left: Value, who: str
    ) -> None:
        """Add an operation that began at `begin` and ends now."""
        self._operations[key].append(Operation(begin, self.now(), found, left, who))

    def add_cut(self, key: str, begin: int, left: Value, who: str) -> None:
        """Add an interrupted operation: it takes effect before the history is settled, or never."""
        self._operations[key].append(Operation(begin, inf, Some.ANY, left, who, maybe=True))

    def add_return(self, key: str, begin: int, value: int, left: Value, who: str) -> None:
        """Record that the exclusive holder of `value` returned it as `left`, if not replaced."""
        self._operations[key].append(
            Operation(begin, self.now(), Some.ANY, left, who, only=lent(value))
        )

    def __len__(self) -> int:
        return sum(map(len, self._operations.values()))

    def settle(self, values: dict[str, int | None]) -> dict[str, list[Operation]]:
        """Record these values while all threads are idle. Returns all since the last time.

        Later operations take effect later.
        """
        histories, self._operations = self._operations, defaultdict(list)
        for key, value in values.items():
            now = self.now()
            histories[key].append(Operation(now, now, value, Some.SAME, "at the end"))
        return histories
