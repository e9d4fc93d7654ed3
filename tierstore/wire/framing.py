"""Messages in a stream of bytes: a head of three numbers, then a msgpack array.

The head has the length of the array in bytes, the number of the message in its stream, counted from
0, and the CRC-32 of the array, each in four bytes (little-endian). So a message that is lost,
doubled or changed on its way is noticed at the next one at the latest, and is never taken for
another.

Pure: bytes go in, messages come out, and whatever is no message raises `NonsenseError`. What waits
for its end is never longer than one message.
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


class NonsenseError(ValueError):
    """What came is no message. The text says why."""


class Outgoing:
    """Numbers the messages of one stream. Not thread-safe: who sends has a lock."""

    def __init__(self) -> None:
        self._sent = 0

    def encoded(self, message: Message) -> bytes:
        """The message as it lies in the stream. Raises ValueError if it is too long."""
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
    """The bytes of a stream whose messages are of the types in `kinds` (a union)."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kinds)
        self._parts: deque[bytes] = deque()
        self._length = 0
        self._came = 0

    @property
    def unfinished(self) -> bool:
        """Whether a message has come in part."""
        return self._length > 0

    def feed(self, data: bytes) -> Iterator[M]:
        """The messages that end with these bytes, in order. To be looked through to the end.

        Raises NonsenseError; then the stream is of no use any more.
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
                raise NonsenseError(f"{error} (in {len(body):,} bytes)") from error
            yield message
        rest = buffer[at:]
        self._parts = deque([rest] if rest else [])
        self._length = len(rest)

    def _body(self, buffer: bytes, at: int) -> memoryview | None:
        """The next message's bytes, if they are all there."""
        if len(buffer) - at < HEAD.size:
            return None
        nbytes, number, checksum = HEAD.unpack_from(buffer, at)
        if nbytes > MAX_MESSAGE:
            raise NonsenseError(f"a message would have {nbytes:,} bytes, more than {MAX_MESSAGE:,}")
        if number != self._came & 0xFFFFFFFF:
            raise NonsenseError(f"message {number} came where number {self._came} was due")
        end = at + HEAD.size + nbytes
        if len(buffer) < end:
            return None
        self._came += 1
        body = memoryview(buffer)[at + HEAD.size : end]
        if zlib.crc32(body) != checksum:
            raise NonsenseError(f"message {number} is not what was sent: its checksum is another")
        return body
