"""The messages between a service and its workers.

Each message is a msgpack array that begins with its name; in the stream, a header precedes it (see
`tierstore.wire.framing`). File descriptors travel beside the bytes of a message, as ancillary data
of the Unix socket. A successful decode proves nothing: the receiver validates the contents.

A worker sends `Hello`, and the service answers with `Welcome` (and the descriptor of its arena) or
with `Refused`. After that, each request of the worker has a number that the answer repeats;
`Release`, `Cancel` and `Forget` have no answer. `Allowance` and `Reclaim` from the service are
unsolicited. Any process of the same user may send `Status` without a hello.

Sizes and offsets are in bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from tierstore import errors

VERSION = 2
"""Version of the protocol. A service and its workers must have the same one."""

MAX_MESSAGE = 1 << 20
"""Maximum bytes of a message. A longer one is a protocol error, and ends the connection."""

MAX_DESCRIPTORS = 128
"""Maximum file descriptors beside one message; the system allows 253."""

UPLOAD = 1 << 19
"""Size of a part of an upload, in bytes."""

HELD_SECONDS = 30.0
"""Seconds after which a lease that others wait for is reported, in the log and by `ps`."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Dimension = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Stride = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Identity = Annotated[int, msgspec.Meta(ge=0)]
"""Number of a file or device. Some file systems use all 64 bits."""
Time = tuple[int, Annotated[int, msgspec.Meta(ge=0, lt=10**9)]]
"""Seconds and nanoseconds, as file systems store them.

Nanoseconds alone, in 64 bits, cover 1677 to 2262, and a file's time may lie outside.
"""


def time_of(nanoseconds: int) -> Time:
    """Convert nanoseconds since 1970 to a `Time`."""
    return divmod(nanoseconds, 10**9)


def nanoseconds_of(time: Time) -> int:
    """Convert a `Time` to nanoseconds since 1970."""
    return time[0] * 10**9 + time[1]


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The base of the components of messages."""


class Hello(Message):
    """A worker introduces itself. `name` is for people, and is not authenticated."""

    version: Number
    name: Text


class Welcome(Message):
    """The service accepts the worker, and passes a read-only descriptor of the arena.

    `directory` is where the service keeps object files. `budget` is the maximum bytes of groups in
    the arena, `arena` the length of its file, `allowance` the bytes that this worker may lease
    at once.
    """

    version: Number
    directory: Text
    budget: Number
    arena: Number
    allowance: Number


class Refused(Message):
    """The service ends the connection, for the reason in `why`."""

    why: Text


class File(Row):
    """A file whose descriptors come with the message.

    One descriptor reads through the page cache; if `direct`, a second one reads past it. `stamp` is
    the file's state when the worker read its header: device, inode, size, and the times of the last
    change of its bytes and of its inode.
    """

    path: Text
    stamp: tuple[Identity, Identity, Number, Time, Time]
    header_digest: Annotated[str, msgspec.Meta(max_length=64)] | None
    direct: bool


class Open(Message):
    """Files that later groups lie in.

    The files of a connection are numbered from 0 in the order sent; the descriptors of all of them
    come with the message, in order.
    """

    files: Annotated[list[File], msgspec.Meta(min_length=1, max_length=MAX_DESCRIPTORS // 2)]


class CloseFile(Message):
    """The worker will not register further groups in this file."""

    file: Number


class Piece(Row, gc=False):
    """`nbytes` bytes from `offset` of a file (by its number), to be read to byte `at`."""

    file: Number
    offset: Number
    nbytes: Count
    at: Number


class Shift(Row, gc=False):
    """Bytes to move inside the group after it is read."""

    src: Number
    dst: Number
    nbytes: Count


class Checksum(Row, gc=False):
    """The expected xxh3_64 checksum of some bytes of the group, after the moves."""

    name: Text
    offset: Number
    nbytes: Number
    digest: Annotated[str, msgspec.Meta(max_length=64)]


class Group(Row):
    """A group to read from files into a slot of `nbytes` bytes."""

    nbytes: Count
    pieces: list[Piece]
    shifts: list[Shift]
    checksums: list[Checksum]


class Register(Message):
    """Groups that the worker may lease later, in files that it has sent before."""

    request: Number
    groups: Annotated[list[Group], msgspec.Meta(min_length=1, max_length=4096)]


class Registered(Message):
    """The numbers that the service has assigned to the groups, for this worker."""

    request: Number
    groups: list[Number]


class Forget(Message):
    """The worker no longer leases this group. Sent once per registration."""

    group: Number


class Lease(Message):
    """Request for a group in the arena, until it is released."""

    request: Number
    group: Number


class Leased(Message):
    """The group lies in the arena from `offset` on, until `Release(request)`."""

    request: Number
    offset: Number
    nbytes: Count


class Cancel(Message):
    """The worker gives up a lease request. If it was granted meanwhile, it is released."""

    request: Number


class Release(Message):
    """End of the lease that was requested by `request`."""

    request: Number


class Find(Message):
    """Query whether the service's directory has an object file of this key."""

    request: Number
    key: Key


class Found(Message):
    """Answer to `Find`."""

    request: Number
    there: bool


class TensorRow(Row):
    """A tensor of an upload: `stride` counts elements, `offset` is its first byte in the upload."""

    name: Text
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[Dimension], msgspec.Meta(max_length=32)]
    stride: Annotated[list[Stride], msgspec.Meta(max_length=32)]
    offset: Number


class Upload(Message):
    """Start of an upload, which the service stores as an object file for all workers.

    Its `nbytes` bytes follow in `Part`s.
    """

    request: Number
    key: Key
    tensors: Annotated[list[TensorRow], msgspec.Meta(min_length=1, max_length=16384)]
    nbytes: Count


class Part(Message):
    """The next bytes of an upload."""

    request: Number
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=UPLOAD)]


class Done(Message):
    """The request succeeded; an upload is on disk."""

    request: Number


class Failed(Message):
    """The request failed: the name of an error of the library, and its attributes."""

    request: Number
    error: Annotated[str, msgspec.Meta(max_length=64)]
    parts: Annotated[dict[str, str | int | None], msgspec.Meta(max_length=8)]


class Allowance(Message):
    """New limit on the bytes that the worker may lease at once."""

    nbytes: Number


class Reclaim(Message):
    """Another worker waits for memory: release leases that are not in use."""


class Ping(Message):
    """Sent by a worker that waits, to detect lost messages by their sequence number."""


class Pong(Message):
    """Answer to `Ping`."""


class Status(Message):
    """Query for a `Report`. Allowed without a hello."""

    request: Number


class WorkerRow(Row):
    """State of one worker.

    `since` is when it connected (seconds since 1970). `groups` counts the groups it registered,
    `leases` its leases, of `leased_bytes` bytes, and `longest_lease` is the age of the oldest one
    in seconds. `waits` counts its pending lease requests, and `waiting` is the age of the oldest in
    seconds. `granted`, `hits` and `granted_bytes` are totals.
    """

    pid: Number
    name: Text
    since: float
    groups: Number
    leases: Number
    leased_bytes: Number
    waits: Number
    waiting: float
    longest_lease: float
    granted: Number
    hits: Number
    granted_bytes: Number


class Report(Message):
    """The answer to `Status`. `tiers` has the bytes used and the budget of each tier."""

    request: Number
    pid: Number
    directory: Text
    socket: Text
    since: float
    tiers: dict[str, tuple[Number, Number | None]]
    read_bytes: Number
    written_bytes: Number
    groups: Number
    workers: list[WorkerRow]


FromWorker = (
    Hello
    | Open
    | CloseFile
    | Register
    | Forget
    | Lease
    | Cancel
    | Release
    | Find
    | Upload
    | Part
    | Ping
    | Status
)
FromService = (
    Welcome
    | Refused
    | Registered
    | Leased
    | Found
    | Done
    | Failed
    | Allowance
    | Reclaim
    | Pong
    | Report
)

_ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.BudgetError,
        errors.ClosedError,
        errors.CorruptDataError,
        errors.DiskFullError,
        errors.InvalidHeaderError,
        errors.StaleCheckpointError,
        errors.StoreTimeoutError,
        errors.TierStoreError,
        errors.TransferError,
        errors.TruncatedFileError,
    )
}
_PARTS = ("key", "path", "tier", "nbytes", "budget", "expected", "found", "seconds")


def failure(request: int, error: BaseException) -> Failed:
    """Return the message for an error."""
    kind = type(error).__name__
    parts: dict[str, Any] = {"text": str(error)[:4000]}
    for name in _PARTS:
        value = getattr(error, name, None)
        if isinstance(value, str | int):
            parts[name] = value[:1024] if isinstance(value, str) else min(max(value, 0), 1 << 62)
    return Failed(request, kind if kind in _ERRORS else "TransferError", parts)


def error_of(message: Failed, key: str) -> errors.TierStoreError:
    """Return the error of a message. `key` is the worker's name for the group."""
    parts = dict(message.parts)
    text = str(parts.pop("text", "the service failed without a reason: see its log"))
    theirs = parts.get("key")
    if isinstance(theirs, str) and theirs:
        text = text.replace(repr(theirs), repr(key))
    kind = _ERRORS.get(message.error, errors.TransferError)
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    for name in _PARTS:
        setattr(error, name, key if name == "key" else parts.get(name))
    return error
