"""The headers of very many object files, most of which are alike.

Headers of groups with equal tensors differ in the key and the checksums alone; and in names, as a
tensor that is put by itself is named by its key. So a header is split at those. If the texts
between them are those of a header that was read before, all else is as in that one, and nothing is
parsed: that takes a fourth of the time.

Parsing would find the same. A layout is remembered only if its texts are also those of the header
that `header_of` writes of it under another key. So each checksum is that of a block, in order, and
the key occurs only in names. A key with quotes, backslashes or control characters is not looked
for, and the other key cannot be the end of an escape: so each stays inside the string that it is
in. Names stay different, too: where the key occurs in one, it occurs in every equal one.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeVar

from tierstore.model.header import (
    FORMAT,
    FORMAT_KEY,
    HEADER_SUM,
    KEY,
    LENGTH_BYTES,
    has_header_sum,
)
from tierstore.model.objects import MAX_KEY_BYTES, StoredObject, header_of, read_header
from tierstore.model.sizes import PAGE

T = TypeVar("T")

_TEXT = rb'"([^"\\\x00-\x1f]{1,%d}+)"' % MAX_KEY_BYTES
_START = re.compile(
    rb'\{"__metadata__":\{"%b":"%b","%b":%b,"%b":"([0-9a-f]{16})"'
    % (re.escape(FORMAT_KEY.encode()), re.escape(FORMAT.encode()), re.escape(KEY.encode()), _TEXT,
       re.escape(HEADER_SUM.encode()))
)  # fmt: skip
"""How a header begins as it is written, if the key needs no escapes."""

_CHECKSUM = re.compile(rb'":"([0-9a-f]{16})"')
_OTHER_KEY = "?~?"
_MOST_LAYOUTS = 256
_SPACES = b" " * PAGE

_Texts = tuple[tuple[bytes, ...], ...]


class _Split(NamedTuple):
    """A header in parts. Of `texts`, which lie between the checksums, each is what lies between the
    occurrences of the key in it."""

    key: str
    header_sum: str
    digests: tuple[str, ...]
    texts: _Texts


def _split(raw: bytes) -> _Split | None:
    """The parts of a header; None if it is not as headers are written, or is longer than a page."""
    start = _START.match(raw) if len(raw) <= PAGE else None
    if start is None:
        return None
    end = raw.rfind(b"}") + 1
    body, encoded = raw[start.end() : end], start[1]
    # A tensor with a name like this has another in the file.
    if b'"__metadata__' in body or not raw.endswith(_SPACES[: len(raw) - end]):
        return None
    try:
        key = encoded.decode()
    except UnicodeDecodeError:
        return None
    parts = _CHECKSUM.split(body)
    digests = tuple([part.decode() for part in parts[1::2]])
    texts = tuple([tuple(part.split(encoded)) for part in parts[::2]])
    return _Split(key, start[2].decode(), digests, texts)


class HeaderReader:
    """Reads the headers of many object files. Not for several threads at once."""

    def __init__(self) -> None:
        self._once: dict[_Texts, None] = {}  # seen once
        self._layouts: dict[_Texts, StoredObject] = {}

    def read(self, raw: bytes, file_size: int, path: str) -> StoredObject:
        """Return what `read_header` does, and raise the same errors."""
        split = _split(raw)
        if split is None:
            return read_header(raw, file_size, path)
        like = self._layouts.get(split.texts)
        if like is None:
            stored = read_header(raw, file_size, path)
            self._note(split, stored)
            return stored
        key, header_sum, digests, texts = split
        packing, data_start = like.packing, LENGTH_BYTES + len(raw)
        if file_size != data_start + packing.dense_nbytes or not has_header_sum(raw, header_sum):
            return read_header(raw, file_size, path)  # which says what is wrong
        if any([len(text) > 1 for text in texts]):
            packing = packing.renamed(like.key, key)
        return StoredObject(key, packing, digests, data_start, like.single)

    def _note(self, split: _Split, stored: StoredObject) -> None:
        """Remember a layout when it is seen for the second time: finding out whether that is right
        takes as long as parsing."""
        texts = split.texts
        if texts not in self._once:
            _put(self._once, texts, None)
            return
        del self._once[texts]
        if split.digests != stored.digests:
            return
        packing = stored.packing.renamed(split.key, _OTHER_KEY)
        written = header_of(_OTHER_KEY, packing, split.digests, single=stored.single)
        other = _split(written[LENGTH_BYTES:])
        if other is not None and other.texts == texts:
            _put(self._layouts, texts, stored)


def _put(known: dict[_Texts, T], texts: _Texts, value: T) -> None:
    """Add to what is known, and forget the oldest of too many."""
    if len(known) == _MOST_LAYOUTS:
        del known[next(iter(known))]
    known[texts] = value
