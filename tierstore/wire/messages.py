"""The messages between a service and its workers.

Each is a msgpack array that begins with its name; in the stream (see `tierstore.wire.framing`) a
head goes before it. File descriptors travel beside the bytes of a message, as ancillary data of the
Unix socket. Nothing here is trusted because it could be decoded: who receives a message checks
what it means.

A worker begins with `Hello`, and the service answers with `Welcome` (and the descriptor of its
arena) or with `Refused`. After that, each request of the worker has a number that the answer
repeats; a `Release`, a `Cancel` and a `Forget` have no answer. Some messages of the service
answer nothing: `Allowance` and `Reclaim`. Who is no worker may ask for the
`Status` without a hello.

Sizes and offsets are in bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from tierstore import errors

VERSION = 2
"""Of these messages. A service and its workers must have the same."""

MAX_MESSAGE = 1 << 20
"""Bytes of the longest message. More is nonsense, and ends the connection."""

MAX_DESCRIPTORS = 128
"""File descriptors beside one message; the system itself allows 253."""

UPLOAD = 1 << 19
"""Bytes of a part of an upload."""

HELD_SECONDS = 30.0
"""Seconds after which a lease that others wait for is told of, in the log and by `ps`."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Dimension = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Stride = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Identity = Annotated[int, msgspec.Meta(ge=0)]
"""Of a file or a device. Some file systems use all 64 bits."""
Time = tuple[int, Annotated[int, msgspec.Meta(ge=0, lt=10**9)]]
"""Seconds and nanoseconds, as file systems have them: in 64 bits, nanoseconds alone last from 1677
to 2262, and a file may have been changed before or after that, by its time."""


def time_of(nanoseconds: int) -> Time:
    """A time, given in nanoseconds since 1970."""
    return divmod(nanoseconds, 10**9)


def nanoseconds_of(time: Time) -> int:
    """A time in nanoseconds since 1970."""
    return time[0] * 10**9 + time[1]


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The base of what messages consist of."""


class Hello(Message):
    """A worker introduces itself. `name` is shown to people, and proves nothing."""

    version: Number
    name: Text


class Welcome(Message):
    """The service takes it in. The descriptor of the arena comes with it, which can only be read.

    `directory` is where the service keeps object files. `budget` is what the arena may hold,
    `arena` how long its file is, `allowance` what this worker may lease at once.
    """

    version: Number
    directory: Text
    budget: Number
    arena: Number
    allowance: Number


class Refused(Message):
    """The service does not go on with this worker, and closes the connection."""

    why: Text


class File(Row):
    """A file whose descriptors come with the message: one to read through the page cache, and, if
    `direct`, one to read past it. `stamp` is what it looked like when the worker read its header:
    device, inode, size, and the times of the last change of its bytes and of its inode.
    """

    path: Text
    stamp: tuple[Identity, Identity, Number, Time, Time]
    header_digest: Annotated[str, msgspec.Meta(max_length=64)] | None
    direct: bool


class Open(Message):
    """Files that groups are going to lie in. The first one of a connection has the number 0, and
    so on; the descriptors of all come with the message, in order."""

    files: Annotated[list[File], msgspec.Meta(min_length=1, max_length=MAX_DESCRIPTORS // 2)]


class CloseFile(Message):
    """The worker registers no more groups in this file."""

    file: Number


class Piece(Row, gc=False):
    """`nbytes` bytes from `offset` of a file (by its number), which are read to byte `at`."""

    file: Number
    offset: Number
    nbytes: Count
    at: Number


class Shift(Row, gc=False):
    """Bytes to move inside the group once it is read."""

    src: Number
    dst: Number
    nbytes: Count


class Checksum(Row, gc=False):
    """What the xxh3_64 checksum of some bytes of the group must be, once they are moved."""

    name: Text
    offset: Number
    nbytes: Number
    digest: Annotated[str, msgspec.Meta(max_length=64)]


class Group(Row):
    """A group as it is read from files: its slot has `nbytes` bytes."""

    nbytes: Count
    pieces: list[Piece]
    shifts: list[Shift]
    checksums: list[Checksum]


class Register(Message):
    """A worker is going to lease these groups, which lie in files that it has sent before."""

    request: Number
    groups: Annotated[list[Group], msgspec.Meta(min_length=1, max_length=4096)]


class Registered(Message):
    """The numbers by which the service knows them, for this worker."""

    request: Number
    groups: list[Number]


class Forget(Message):
    """A worker leases this group no more: once for each time that it has registered it."""

    group: Number


class Lease(Message):
    """A worker wants a group in the arena, until it is released."""

    request: Number
    group: Number


class Leased(Message):
    """The group lies in the arena, from `offset` on, until `Release(request)`."""

    request: Number
    offset: Number
    nbytes: Count


class Cancel(Message):
    """A worker does not wait for a lease any more. If it was granted meanwhile, it is released."""

    request: Number


class Release(Message):
    """The lease that `request` asked for comes back."""

    request: Number


class Find(Message):
    """Is there an object file of this key in the service's directory?"""

    request: Number
    key: Key


class Found(Message):
    """Whether there is."""

    request: Number
    there: bool


class TensorRow(Row):
    """A tensor of an upload: `stride` counts elements, `offset` is where it begins in the bytes."""

    name: Text
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[Dimension], msgspec.Meta(max_length=32)]
    stride: Annotated[list[Stride], msgspec.Meta(max_length=32)]
    offset: Number


class Upload(Message):
    """A worker hands over what it made, to be kept for all as an object file of this key. Its
    `nbytes` bytes follow in `Part`s."""

    request: Number
    key: Key
    tensors: Annotated[list[TensorRow], msgspec.Meta(min_length=1, max_length=16384)]
    nbytes: Count


class Part(Message):
    """The next bytes of an upload."""

    request: Number
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=UPLOAD)]


class Done(Message):
    """What was asked for is done; of an upload, it is on disk."""

    request: Number


class Failed(Message):
    """What was asked for cannot be done: the name of an error of the library, and its parts."""

    request: Number
    error: Annotated[str, msgspec.Meta(max_length=64)]
    parts: Annotated[dict[str, str | int | None], msgspec.Meta(max_length=8)]


class Allowance(Message):
    """A worker may lease so many bytes at once from now on."""

    nbytes: Number


class Reclaim(Message):
    """Somebody waits for room: a worker should release what it leases and does not use."""


class Ping(Message):
    """A worker has waited for some time: whatever was lost on the way shows with this message."""


class Pong(Message):
    """The answer."""


class Status(Message):
    """What does the service do at this moment? May be asked without a hello."""

    request: Number


class WorkerRow(Row):
    """A worker: since when (seconds since 1970), how many groups it registered and leases (and
    bytes of these), for how many it waits and since how many seconds, and what it has leased."""

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
    """The message for an error."""
    kind = type(error).__name__
    parts: dict[str, Any] = {"text": str(error)[:4000]}
    for name in _PARTS:
        value = getattr(error, name, None)
        if isinstance(value, str | int):
            parts[name] = value[:1024] if isinstance(value, str) else min(max(value, 0), 1 << 62)
    return Failed(request, kind if kind in _ERRORS else "TransferError", parts)


def error_of(message: Failed, key: str) -> errors.TierStoreError:
    """The error of a message, about the group that a worker knows by this key."""
    parts = dict(message.parts)
    text = str(parts.pop("text", "the service failed and did not say why: see its log"))
    theirs = parts.get("key")
    if isinstance(theirs, str) and theirs:
        text = text.replace(repr(theirs), repr(key))
    kind = _ERRORS.get(message.error, errors.TransferError)
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    for name in _PARTS:
        setattr(error, name, key if name == "key" else parts.get(name))
    return error
