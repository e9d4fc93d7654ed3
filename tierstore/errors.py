"""Every error the library raises on purpose. A message ends with what to do about it."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CaptureError",
    "ClosedError",
    "CorruptDataError",
    "DeviceError",
    "DiskFullError",
    "DuplicateKeyError",
    "InvalidHeaderError",
    "InvalidTraceError",
    "LeaseError",
    "ReentrantCallError",
    "ServiceLostError",
    "StaleCheckpointError",
    "StoreLockedError",
    "StoreTimeoutError",
    "TierStoreError",
    "TransferError",
    "TruncatedFileError",
    "UnknownKeyError",
    "UrlError",
]


class TierStoreError(Exception):
    """The base of all errors of this library. They can be sent to other processes."""

    def __reduce__(self) -> tuple[object, ...]:
        return _made_again, (type(self), self.args, vars(self))


def _made_again(
    kind: type[TierStoreError], args: tuple[object, ...], state: dict[str, object]
) -> TierStoreError:
    """An error of another process, whatever its class takes to make one."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


class UnknownKeyError(TierStoreError, KeyError):
    """No group has this key. Also a KeyError.

    Attributes:
        key: the key that was asked for.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return (
            f"the store has no group {self.key!r}; list what it has with store.keys(), "
            "or put or register the group first"
        )


class DuplicateKeyError(TierStoreError):
    """A group of this key exists and may not be replaced by registering another.

    Attributes:
        key: the key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the store already has a group {key!r}; discard it first, or register the new one "
            "under another prefix"
        )
        self.key = key


class BudgetError(TierStoreError):
    """A budget is too small for what was asked for.

    Attributes:
        key: the key of the group.
        tier: the name of the tier.
        nbytes: bytes that were asked for.
        budget: bytes that the tier may take.
    """

    def __init__(self, key: str, tier: str, nbytes: int, budget: int, advice: str) -> None:
        super().__init__(
            f"group {key!r} needs {nbytes:,} bytes on tier {tier}, whose budget is "
            f"{budget:,} bytes: {advice}"
        )
        self.key = key
        self.tier = tier
        self.nbytes = nbytes
        self.budget = budget


class TransferError(TierStoreError):
    """Bytes could not be moved. `__cause__` is the error of the system or the device.

    Attributes:
        key: the key of the group; None if it is about no single one.
        path: the path of the file; None if it is about none.
    """

    def __init__(self, message: str, *, key: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.path = path


class TruncatedFileError(TransferError):
    """A file ends before the last byte that it should have."""


class CorruptDataError(TransferError):
    """Bytes are not the ones that were written.

    Attributes:
        expected: what should have been found, such as a checksum; None if that cannot be said.
        found: what was found instead.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        path: str | None = None,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(message, key=key, path=path)
        self.expected = expected
        self.found = found


class InvalidHeaderError(CorruptDataError):
    """A file's safetensors header is malformed."""


class StaleCheckpointError(TransferError):
    """A checkpoint file was changed after it was registered, or is gone and was not kept open."""


class DiskFullError(TransferError):
    """The disk, or its quota, has no room left."""


class LeaseError(TierStoreError):
    """A lease was used in a way that it does not allow, or callers wait for each other's leases."""


class ReentrantCallError(TierStoreError, RuntimeError):
    """A call came in the middle of a step of the store on the same thread. Also a RuntimeError.

    A finalizer (`__del__`) that the garbage collector runs, or a signal handler, made it there.
    """

    def __init__(self) -> None:
        super().__init__(
            "a finalizer or signal handler called the store while this thread is in the middle of "
            "a step of a store, or does work for one: have it set a flag or fill a queue, and call "
            "the store from the code that looks at that"
        )


class CaptureError(TierStoreError, RuntimeError):
    """A store was used while the caller's stream is captured into a graph. Also a RuntimeError."""

    def __init__(self) -> None:
        super().__init__(
            "the current stream is being captured into a graph, and a graph has neither waiting "
            "for a store's copies nor the memory that they will be in when it is replayed: use "
            "the store before and after the capture, and capture models without one"
        )


class DeviceError(TierStoreError, ValueError, RuntimeError):
    """There is no such device here. Says which there are.

    It is a ValueError, as for any argument that cannot be, and a RuntimeError, as torch has it.
    """


class StoreLockedError(TierStoreError):
    """Another live store works on the same directory."""


class StoreTimeoutError(TierStoreError, TimeoutError):
    """What was waited for has not come in time. It goes on coming. Also a TimeoutError.

    Attributes:
        key: the key of the group.
        seconds: for how many seconds it was waited for.
    """

    def __init__(self, key: str, what: str, seconds: float) -> None:
        super().__init__(
            f"{what} of group {key!r} did not come within {seconds:g} s: the disk may not answer, "
            "or others may have the room; try again, or wait for longer"
        )
        self.key = key
        self.seconds = seconds


class ServiceLostError(TierStoreError, ConnectionError):
    """The service that a store is connected to is not there (any more). Also a ConnectionError.

    What was leased of it stays readable. As soon as it is back, the store goes on by itself.

    Attributes:
        socket: the path of the socket where it was looked for.
    """

    def __init__(self, socket: str, why: str) -> None:
        super().__init__(
            f"the service at {socket} is not there ({why}): start tierstore-serve again with this "
            "socket, and call again; what is leased stays readable"
        )
        self.socket = socket


class ClosedError(TierStoreError):
    """The store is closed, or belongs to the process that this one was forked from."""


class InvalidTraceError(TierStoreError, ValueError):
    """A file is not a whole trace of a store. Also a ValueError.

    Attributes:
        path: the path of the file.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} cannot be read as a trace: {why}; write it again with store.trace(path)"
        )
        self.path = path


class UrlError(TierStoreError, ValueError):
    """A URL is none, or has a password or a signature in it. Also a ValueError. It says which URL
    without the secret."""
