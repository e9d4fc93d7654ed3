"""What may be on disk after a kill, known outside of the process that was killed.

The process tells of each thing that it begins to do and of each that was done, through a pipe, so
that what it was told last is known whatever becomes of it. A key has a history of what was begun:
values, and None where it was to go for good. Its acknowledgements say from where on in the history
anything may be found; nothing older, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Value = tuple[int, int]
"""What fills a group, never the same twice, and how many elements it has."""

KEEP, WRITE, LOSE, FLUSH, LOOK = "keep", "write", "lose", "flush", "look"
"""A value that is on disk after the next flush; one that is there when it is done; a key that is
gone when it is done; a flush (or a close); what changes nothing."""


@dataclass
class _History:
    values: list[Value | None] = field(default_factory=lambda: [None])
    first: int = 0  # of the whole history, the first that may still be found
    done: int = 0  # the newest that is known to be done

    def begin(self, value: Value | None) -> int:
        self.values.append(value)
        return self.first + len(self.values) - 1

    def settle(self, number: int) -> None:
        """What is older than this one can be found no more."""
        if number > self.first:
            del self.values[: number - self.first]
            self.first = number


class Oracle:
    """Hears what a process tells, and judges what is found when it is dead."""

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}
        self._begun: dict[int, tuple[str, str, int]] = {}
        self._flushes: dict[int, dict[str, int]] = {}

    def begin(self, number: int, what: str, key: str, value: Value | None) -> None:
        """The process is about to do something."""
        if what == FLUSH:
            self._flushes[number] = {key: h.done for key, h in self._histories.items()}
        elif what != LOOK:
            history = self._histories.setdefault(key, _History())
            self._begun[number] = (what, key, history.begin(value))

    def end(self, number: int) -> None:
        """It was done."""
        for key, done in self._flushes.pop(number, {}).items():
            self._histories[key].settle(done)
        what, key, place = self._begun.pop(number, (LOOK, "", 0))
        if what == LOOK:
            return
        history = self._histories[key]
        history.done = max(history.done, place)
        if what != KEEP:
            history.settle(place)

    def judge(self, found: dict[str, Value]) -> list[str]:
        """What is wrong with what is found on disk. From now on, that is what there is."""
        wrong = []
        for key, history in self._histories.items():
            value = found.get(key)
            if value not in history.values:
                wrong.append(f"{key!r}: {value} is found, and not one of {history.values}")
        wrong += [f"{key!r}: nobody put it" for key in found.keys() - self._histories.keys()]
        self._histories = {key: _History([value]) for key, value in found.items()}
        self._begun.clear()
        self._flushes.clear()
        return wrong

    def hear(self, told: list[Any]) -> None:
        """Take a message of the process: ["begin", number, what, key, value], ["end", number]."""
        if told[0] == "begin":
            _, number, what, key, value = told
            self.begin(number, what, key, None if value is None else (value[0], value[1]))
        elif told[0] == "end":
            self.end(told[1])
