"""Messages in a byte stream: a header of three numbers, then a msgpack array.

The header has the length of the array in bytes, the sequence number of the message in its stream,
counted from 0, and the CRC-32 of the array, each in four bytes (little-endian). A message that is
lost, duplicated or changed in transit is detected at the next message at the latest, and never
mistaken for another one.

This module does no I/O: it turns bytes into messages and back, and raises `ProtocolError` for
invalid input. It buffers at most one incomplete message.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from tierstore.wire.messages import MAX_MESSAGE, Message

HEAD = struct.Struct("<III")

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()


class ProtocolError(ValueError):
    """The input violates the protocol. The text gives the reason."""


class Outgoing:
    """Numbers the messages of one stream. Not thread-safe: the sender holds a lock."""

    def __init__(self) -> None:
        self._sent = 0

    def encode(self, message: Message) -> bytes:
        """Return the message as bytes of the stream. Raises ValueError if it is too long."""
        body = _encoder.encode(message)
        if len(body) > MAX_MESSAGE:
            raise ValueError(
                f"a message of {len(body):,} bytes is longer than {MAX_MESSAGE:,}: use shorter "
                "names, or groups of fewer tensors"
            )
        head = HEAD.pack(len(body), self._sent & 0xFFFFFFFF, zlib.crc32(body))
        self._sent += 1
        return head + body


class Incoming(Generic[M]):
    """Decodes a stream whose messages have the types in `kinds` (a union)."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kinds)
        self._parts: deque[bytes] = deque()
        self._length = 0
        self._received = 0

    @property
    def unfinished(self) -> bool:
        """True if a part of a message has arrived."""
        return self._length > 0

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that these bytes complete, in order. Exhaust the iterator.

        Raises ProtocolError; the stream is unusable after that.
        """
        self._parts.append(data)
        self._length += len(data)
        buffer = b"".join(self._parts) if len(self._parts) > 1 else data
        at = 0
        while (body := self._body(buffer, at)) is not None:
            at += HEAD.size + len(body)
            try:
                message = self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"{error} (in {len(body):,} bytes)") from error
            yield message
        rest = buffer[at:]
        self._parts = deque([rest] if rest else [])
        self._length = len(rest)

    def _body(self, buffer: bytes, at: int) -> memoryview | None:
        """Return the bytes of the next message if it has arrived completely."""
        if len(buffer) - at < HEAD.size:
            return None
        nbytes, number, checksum = HEAD.unpack_from(buffer, at)
        if nbytes > MAX_MESSAGE:
            raise ProtocolError(f"a message would have {nbytes:,} bytes, more than {MAX_MESSAGE:,}")
        if number != self._received & 0xFFFFFFFF:
            raise ProtocolError(f"got message {number}, expected number {self._received}")
        end = at + HEAD.size + nbytes
        if len(buffer) < end:
            return None
        self._received += 1
        body = memoryview(buffer)[at + HEAD.size : end]
        if zlib.crc32(body) != checksum:
            raise ProtocolError(f"message {number} was changed in transit: wrong checksum")
        return body
