"""The errors that the library raises on purpose. Each message ends with a remedy."""

from __future__ import annotations

import itertools
from collections import abc

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


_MOST_COMPARED = 2_000
"""Maximum number of keys to compare with an unknown one, which takes milliseconds."""

_ON_TIER = {
    "DEVICE": "on the device (tier DEVICE)",
    "HOST": "in RAM (tier HOST)",
    "DISK": "on disk (tier DISK)",
}


class TierStoreError(Exception):
    """Base class of all errors of this library. Instances can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (type(self), self.args, vars(self))


def _unpickled(
    kind: type[TierStoreError], args: tuple[object, ...], state: dict[str, object]
) -> TierStoreError:
    """Recreate a pickled error without calling its `__init__`, whose parameters differ by class."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


class UnknownKeyError(TierStoreError, KeyError):
    """No group has this key, or no tensor of a checkpoint has this name. Also a KeyError.

    The message suggests a similar key, if there is one.

    Attributes:
        key: the unknown key.
    """

    def __init__(
        self, key: str, known: abc.Iterable[str] = (), *, in_checkpoint: bool = False
    ) -> None:
        super().__init__(key)
        self.key = key
        self._known = tuple(itertools.islice(known, _MOST_COMPARED))
        self._in_checkpoint = in_checkpoint

    def __str__(self) -> str:
        import difflib  # lazily: the command line must start fast

        # Compared here, not when it is raised: callers that catch the error must not wait.
        near = difflib.get_close_matches(self.key, self._known, n=1, cutoff=0.75)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        if self._in_checkpoint:
            return f"the checkpoint has no tensor {self.key!r}{hint}; pass names of its tensors"
        return (
            f"the store has no group {self.key!r}{hint}; list its groups with store.keys(), or put "
            "or register the group first"
        )


class DuplicateKeyError(TierStoreError):
    """The store already has a group with this key, and registering does not replace groups.

    Attributes:
        key: the key of the group.
    """

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the store already has a group {key!r}; discard it first, or register the new one "
            "under another prefix"
        )
        self.key = key


class BudgetError(TierStoreError):
    """A budget is too small for a request.

    Attributes:
        key: the key of the group.
        tier: the name of the tier.
        nbytes: bytes requested.
        budget: the budget of the tier, in bytes.
    """

    def __init__(self, key: str, tier: str, nbytes: int, budget: int, advice: str) -> None:
        super().__init__(
            f"group {key!r} needs {nbytes:,} bytes {_ON_TIER.get(tier, f'on tier {tier}')}, whose "
            f"budget{'' if tier == 'DISK' else ', in whole pages,'} is {budget:,} bytes: {advice}"
        )
        self.key = key
        self.tier = tier
        self.nbytes = nbytes
        self.budget = budget


class TransferError(TierStoreError):
    """A transfer failed. `__cause__` is the error of the operating system or the device.

    Attributes:
        key: the key of the group; None if the error concerns no single group.
        path: the path of the file; None if the error concerns no file.
    """

    def __init__(self, message: str, *, key: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.path = path


class TruncatedFileError(TransferError):
    """A file is shorter than expected."""


class CorruptDataError(TransferError):
    """Data read from disk or a network differs from the data that was written.

    Attributes:
        expected: the expected value, such as a checksum; None if unknown.
        found: the value found instead.
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
    """A checkpoint file was modified after registration, or was removed and is not held open."""


class DiskFullError(TransferError):
    """The disk or the user's quota is full."""


class LeaseError(TierStoreError):
    """A lease was misused, or callers deadlocked on each other's leases."""


class ReentrantCallError(TierStoreError, RuntimeError):
    """A call interrupted a transaction of the store on the same thread. Also a RuntimeError.

    The call came from a signal handler, or from a finalizer (`__del__`) that the garbage collector
    ran.
    """

    def __init__(self) -> None:
        super().__init__(
            "a finalizer or signal handler called the store while this thread is inside another "
            "call of a store, or is one of its worker threads: set a flag or fill a queue there, "
            "and call the store from the code that polls it"
        )


class CaptureError(TierStoreError, RuntimeError):
    """A store was used while the current stream is captured into a graph. Also a RuntimeError."""

    def __init__(self) -> None:
        super().__init__(
            "the current stream is being captured into a graph, and a replayed graph neither waits "
            "for a store's copies nor knows the memory that they will be in: use the store before "
            "and after the capture, and capture only models that are not offloaded"
        )


class DeviceError(TierStoreError, ValueError, RuntimeError):
    """This machine has no such device. The message lists the devices that it has.

    Also a ValueError, as for any invalid argument, and a RuntimeError, as torch raises.
    """


class StoreLockedError(TierStoreError):
    """Another live store uses the same directory."""


class StoreTimeoutError(TierStoreError, TimeoutError):
    """The operation timed out. The transfer continues in the background. Also a TimeoutError.

    Attributes:
        key: the key of the group.
        seconds: the timeout, in seconds.
    """

    def __init__(self, key: str, what: str, seconds: float) -> None:
        super().__init__(
            f"timed out after {seconds:g} s waiting for {what} of group {key!r}: the disk may not "
            "respond, or other leases may hold the memory; try again, or pass a longer timeout"
        )
        self.key = key
        self.seconds = seconds


class ServiceLostError(TierStoreError, ConnectionError):
    """The service that a store is connected to cannot be reached. Also a ConnectionError.

    Tensors of open leases stay readable. The store reconnects by itself once the service is back.

    Attributes:
        socket: the path of the service's socket.
    """

    def __init__(self, socket: str, why: str) -> None:
        super().__init__(
            f"the service at {socket} cannot be reached ({why}): start tierstore-serve again with "
            "this socket, and retry the call; tensors of open leases stay readable"
        )
        self.socket = socket


class ClosedError(TierStoreError):
    """The store is closed, or was opened by the process that this one was forked from."""


class InvalidTraceError(TierStoreError, ValueError):
    """A file is not a complete trace of a store. Also a ValueError.

    Attributes:
        path: the path of the file.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} cannot be read as a trace: {why}; write it again with store.trace(path)"
        )
        self.path = path


class UrlError(TierStoreError, ValueError):
    """A URL is malformed, or contains a password or a signature. Also a ValueError.

    The message shows the URL without the secret.
    """
