"""A one-pass scanner for JSON of a known structure, safe for hostile input.

`json` builds every value before the caller can check it: 16 MB of `[],[],` become 372 MiB and take
six seconds. This scanner checks each value first, and builds only the values that the caller
requests. It does not recurse, so deep nesting is harmless.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NoReturn

from tierstore.model.sizes import PAGE

MOST_SKIPPED = 100_000
"""Largest number of brackets and strings in a skipped value."""

_SPACE = re.compile(rb"[ \t\n\r]*+")
TEXT = rb'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
"""A pattern for a string; its group is the argument of `Scanner.decoded`."""
_TEXT = re.compile(rb"[ \t\n\r]*+" + TEXT)
_NAME = re.compile(rb"[ \t\n\r]*+" + TEXT + rb"[ \t\n\r]*+:")
_NEXT = re.compile(rb"[ \t\n\r]*+([,}])")
_NUMBERS = re.compile(rb"\[([0-9, \t\n\r]*+)\]")
_NUMBER = re.compile(rb"[ \t\n\r]*+(0|[1-9][0-9]{0,18}+)[ \t\n\r]*+")
_SCALAR = re.compile(rb'[^"\[\]{},: \t\n\r]++')
_PAIR = rb'"([^"\\\x00-\x1f]*+)":' + TEXT
_PAIRS = re.compile(rb"\{(?:%b(?:,%b){0,63}+)?+\}" % (_PAIR, _PAIR))
_PAIR_OF = re.compile(_PAIR)
READ_AT_ONCE = 64 << 10
"""Largest object, in bytes, that is read with one regular expression."""

_SPACES = b" " * PAGE
_decoder = json.JSONDecoder()
_SHORT = 1000
"""Bytes. Longer strings are decoded without a copy."""
_DULL = re.compile(rb'[^"\[\]{}]*+')


class Scanner:
    """Reads JSON from its first byte to its last.

    On an error, the scanner calls `fail` with the reason (a clause, for the end of a message).
    `fail` must raise.
    """

    def __init__(self, raw: bytes, fail: Callable[[str], NoReturn]) -> None:
        self._raw = raw
        self._at = 0
        self._fail = fail

    def match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Match a pattern at the current position, and consume the match. None if there is none."""
        found = pattern.match(self._raw, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def peek(self, mark: bytes) -> bool:
        """Return True if the next byte after spaces is `mark`."""
        self.match(_SPACE)
        return self._raw.startswith(mark, self._at)

    def accept(self, mark: bytes) -> bool:
        """Consume the next byte if it is `mark`. Return True if it is."""
        found = self.peek(mark)
        self._at += found
        return found

    def expect(self, mark: bytes) -> None:
        """Consume `mark`, which must be next."""
        if not self.accept(mark):
            self._fail(f"it is not valid JSON: {mark.decode()} is missing at byte {self._at}")

    def end(self) -> None:
        """Fail if anything but spaces follows."""
        left = len(self._raw) - self._at
        if left <= PAGE and self._raw.endswith(_SPACES[:left]):
            self._at = len(self._raw)  # the usual padding of headers
        self.match(_SPACE)
        if self._at != len(self._raw):
            self._fail(f"it is not valid JSON: extra data at byte {self._at}")

    def text(self) -> str:
        """Read a string, which must be valid UTF-8."""
        found = self.match(_TEXT)
        if found is None:
            self._fail(f"it is not valid JSON: no complete string at byte {self._at}")
        return self.decoded(*found.span(1))

    def decoded(self, start: int, stop: int) -> str:
        """Decode the string between two quotes, from byte `start` to byte `stop`."""
        try:
            short = stop - start <= _SHORT
            inside = self._raw[start:stop] if short else memoryview(self._raw)[start:stop]
            text = str(inside, "utf-8")
            if "\\" in text:
                text = str(json.loads(f'"{text}"'))
                text.encode()  # raises for a lone surrogate
        except UnicodeError:
            self._fail("a string in it is not valid UTF-8")
        except ValueError:
            self._fail(f"it is not valid JSON: the string at byte {start} has an unknown escape")
        return text

    def _name(self) -> str:
        found = self.match(_NAME)
        if found is None:
            self.text()  # fails if the string itself is invalid
            self._fail(f"it is not valid JSON: : is missing at byte {self._at}")
        return self.decoded(*found.span(1))

    def members(self, most: int) -> Iterator[str]:
        """Yield the names in an object. The caller must read the value after each name."""
        self.expect(b"{")
        if self.accept(b"}"):
            return
        seen: set[str] = set()
        while True:
            name = self._name()
            if name in seen:
                self._fail("a name occurs twice")
            if len(seen) == most:
                self._fail(f"an object in it has more than {most} members")
            seen.add(name)
            yield name
            sign = self.match(_NEXT)
            if sign is None:
                self._fail(f"it is not valid JSON: ',' or '}}' is missing at byte {self._at}")
            if sign[1] == b"}":
                return

    def texts(self, most: int) -> dict[str, str] | None:
        """Read an object of strings in its usual form, with one regular expression.

        Returns None and consumes nothing if the next value is anything else or too large.
        """
        found = _PAIRS.match(self._raw, self._at)
        if found is None or found.end() - self._at > READ_AT_ONCE:
            return None
        pairs = _PAIR_OF.findall(self._raw, self._at, found.end())
        try:
            texts = {
                name.decode(): _unescaped(text) if b"\\" in text else text.decode()
                for name, text in pairs
            }
        except ValueError:
            return None
        if not len(texts) == len(pairs) <= most:
            return None
        self._at = found.end()
        return texts

    def numbers(self, most: int) -> tuple[int, ...] | None:
        """Read a list of integers from 0 to 2**63 - 1; None if the next value is anything else."""
        self.match(_SPACE)
        found = self.match(_NUMBERS)
        if found is None:
            return None
        start, stop = found.span(1)
        if self._raw.count(b",", start, stop) >= most:
            return None
        inner = found[1]
        if not inner.strip():
            return ()
        numbers = [_NUMBER.fullmatch(part) for part in inner.split(b",")]
        values = tuple(int(number[1]) for number in numbers if number is not None)
        return values if len(values) == len(numbers) and max(values) < 2**63 else None

    def number(self) -> int:
        """Read an integer from 0 to 2**63 - 1."""
        found = self.match(_NUMBER)
        if found is None or int(found[1]) >= 2**63:
            self._fail(f"there is no integer at byte {self._at}")
        return int(found[1])

    def skip(self) -> None:
        """Skip a value of any kind."""
        self.match(_SPACE)
        if self.match(_SCALAR) is not None:
            return
        depth = 0
        for _ in range(MOST_SKIPPED):
            if self.peek(b'"'):
                self.text()
            elif self.accept(b"[") or self.accept(b"{"):
                depth += 1
            elif depth and (self.accept(b"]") or self.accept(b"}")):
                depth -= 1
            else:
                break
            if not depth:
                return
            self.match(_DULL)
        self._fail(f"it is not valid JSON, or is too large, at byte {self._at}")


def _unescaped(text: bytes) -> str:
    """Decode a string with escapes. Raises ValueError."""
    value = _decoder.raw_decode(f'"{text.decode()}"')[0]
    value.encode()  # raises for a lone surrogate
    return str(value)
