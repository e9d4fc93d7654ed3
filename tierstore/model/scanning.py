"""JSON of a shape that is known, read in one pass over its bytes.

`json` builds whatever a file holds before anybody can look at it: 16 MB of `[],[],` become 372 MiB
and take six seconds. Here each value is looked at before it is built, and nothing is built that was
not asked for. Nothing recurses, so no nesting is too deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NoReturn

from tierstore.model.sizes import PAGE

MOST_SKIPPED = 100_000
"""Brackets and texts in a value that nobody wants to know."""

_SPACE = re.compile(rb"[ \t\n\r]*+")
TEXT = rb'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
"""A pattern for a text; its group is what `Scanner.decoded` takes."""
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
"""Bytes of an object that may be read at once: what is built of more is built piece by piece."""

_SPACES = b" " * PAGE
_decoder = json.JSONDecoder()
_SHORT = 1000
"""Bytes of a text above which it is not copied to be decoded."""
_DULL = re.compile(rb'[^"\[\]{}]*+')


class Scanner:
    """Reads JSON from its first byte to its last.

    `refuse` is told what is wrong, as the end of a sentence, and raises.
    """

    def __init__(self, raw: bytes, refuse: Callable[[str], NoReturn]) -> None:
        self._raw = raw
        self._at = 0
        self._refuse = refuse

    def match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """What the pattern finds right here, if it does, and take it."""
        found = pattern.match(self._raw, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def sees(self, mark: bytes) -> bool:
        """Whether the next value or sign begins with this byte."""
        self.match(_SPACE)
        return self._raw.startswith(mark, self._at)

    def finds(self, mark: bytes) -> bool:
        """Whether this byte is next; if so, it is taken."""
        found = self.sees(mark)
        self._at += found
        return found

    def take(self, mark: bytes) -> None:
        """Take this byte, which must be next."""
        if not self.finds(mark):
            self._refuse(f"it is no JSON: {mark.decode()} is missing at byte {self._at}")

    def end(self) -> None:
        """Nothing but spaces may follow."""
        left = len(self._raw) - self._at
        if left <= PAGE and self._raw.endswith(_SPACES[:left]):
            self._at = len(self._raw)  # as we pad headers
        self.match(_SPACE)
        if self._at != len(self._raw):
            self._refuse(f"it is no JSON: something follows its end, at byte {self._at}")

    def text(self) -> str:
        """A text, which UTF-8 can hold."""
        found = self.match(_TEXT)
        if found is None:
            self._refuse(f"it is no JSON: there is no whole text at byte {self._at}")
        return self.decoded(*found.span(1))

    def decoded(self, start: int, stop: int) -> str:
        """The text whose inside, between the quotes, are these bytes."""
        try:
            short = stop - start <= _SHORT
            inside = self._raw[start:stop] if short else memoryview(self._raw)[start:stop]
            text = str(inside, "utf-8")
            if "\\" in text:
                text = str(json.loads(f'"{text}"'))
                text.encode()  # half of a pair of surrogates is no text
        except UnicodeError:
            self._refuse("a text in it is no UTF-8")
        except ValueError:
            self._refuse(f"it is no JSON: the text at byte {start} has an unknown escape")
        return text

    def _name(self) -> str:
        found = self.match(_NAME)
        if found is None:
            self.text()  # which says what is wrong, if it is the name
            self._refuse(f"it is no JSON: : is missing at byte {self._at}")
        return self.decoded(*found.span(1))

    def members(self, most: int) -> Iterator[str]:
        """The names in an object; after each, whoever iterates reads its value."""
        self.take(b"{")
        if self.finds(b"}"):
            return
        seen: set[str] = set()
        while True:
            name = self._name()
            if name in seen:
                self._refuse("a name occurs twice")
            if len(seen) == most:
                self._refuse(f"an object in it has more than {most} members")
            seen.add(name)
            yield name
            sign = self.match(_NEXT)
            if sign is None:
                self._refuse(f"it is no JSON: ',' or '}}' is missing at byte {self._at}")
            if sign[1] == b"}":
                return

    def texts(self, most: int) -> dict[str, str] | None:
        """An object of texts, as most write it, read at once. None, and nothing is read, if the
        next value is anything else, or may be too much."""
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
        """A list of whole numbers from 0 to 2**63 - 1; None if the next value is something else."""
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
        """A whole number from 0 to 2**63 - 1."""
        found = self.match(_NUMBER)
        if found is None or int(found[1]) >= 2**63:
            self._refuse(f"there is no whole number at byte {self._at}")
        return int(found[1])

    def skip(self) -> None:
        """Pass over a value, whatever it is."""
        self.match(_SPACE)
        if self.match(_SCALAR) is not None:
            return
        depth = 0
        for _ in range(MOST_SKIPPED):
            if self.sees(b'"'):
                self.text()
            elif self.finds(b"[") or self.finds(b"{"):
                depth += 1
            elif depth and (self.finds(b"]") or self.finds(b"}")):
                depth -= 1
            else:
                break
            if not depth:
                return
            self.match(_DULL)
        self._refuse(f"it is no JSON, or too much to read, at byte {self._at}")


def _unescaped(text: bytes) -> str:
    """A text with escapes. Raises ValueError."""
    value = _decoder.raw_decode(f'"{text.decode()}"')[0]
    value.encode()  # half of a pair of surrogates is no text
    return str(value)
