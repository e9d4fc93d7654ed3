"""Reads the headers of many object files, most of which have the same layout.

Headers of groups with equal tensors differ only in the key, the checksums, and names that contain
the key (a tensor that was put alone is named by its key). So the reader splits a header at these.
If the texts in between equal those of an earlier header, it reuses that layout without parsing,
which takes a quarter of the time.

The result equals that of parsing. A layout is cached only if `header_of` writes the same texts for
it under another key. So each checksum belongs to a block, in order, and the key occurs only in
names. Keys with quotes, backslashes or control characters take the slow path, and the other key
cannot complete an escape sequence: so each occurrence stays inside its string. Distinct names
remain distinct, because equal texts contain the key at equal positions.
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
"""The start of a header as tierstore writes it, for a key without escapes."""

_CHECKSUM = re.compile(rb'":"([0-9a-f]{16})"')
_OTHER_KEY = "?~?"
_MOST_LAYOUTS = 256
_SPACES = b" " * PAGE

_Texts = tuple[tuple[bytes, ...], ...]


class _Split(NamedTuple):
    """A header in parts.

    `texts` are the texts between the checksums, each split at the occurrences of the key.
    """

    key: str
    header_sum: str
    digests: tuple[str, ...]
    texts: _Texts


def _split(raw: bytes) -> _Split | None:
    """Split a header; None if tierstore did not write it or it is longer than a page."""
    start = _START.match(raw) if len(raw) <= PAGE else None
    if start is None:
        return None
    end = raw.rfind(b"}") + 1
    body, encoded = raw[start.end() : end], start[1]
    # A tensor of that name is stored under another name.
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
    """Reads the headers of many object files. Not thread-safe."""

    def __init__(self) -> None:
        self._once: dict[_Texts, None] = {}  # seen once
        self._layouts: dict[_Texts, StoredObject] = {}

    def read(self, raw: bytes, file_size: int, path: str) -> StoredObject:
        """Return the same result as `read_header`, or raise the same error."""
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
            return read_header(raw, file_size, path)  # raises the error
        if any([len(text) > 1 for text in texts]):
            packing = packing.renamed(like.key, key)
        return StoredObject(key, packing, digests, data_start, like.single)

    def _note(self, split: _Split, stored: StoredObject) -> None:
        """Cache a layout on its second occurrence: verifying it takes as long as parsing."""
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
    """Add an entry to a cache, and evict the oldest if it is full."""
    if len(known) == _MOST_LAYOUTS:
        del known[next(iter(known))]
    known[texts] = value
