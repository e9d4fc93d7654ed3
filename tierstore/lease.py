"""Leases: a caller holds one while it uses a group's tensors."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch

from tierstore.errors import LeaseError
from tierstore.model.formatting import count, size
from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access
from tierstore.observe.report import Description, display_methods


class LeaseIssuer(Protocol):
    """The issuer of a lease. Each method takes the issuer's record of that lease."""

    def release(self, record: Any) -> None:
        """End a lease. A second call does nothing."""

    def release_later(self, record: Any) -> bool:
        """End a lease at the next transaction. Return False if it has ended already."""

    def make_revocable(self, record: Any) -> bool:
        """Let the store revoke a lease when it needs the memory. Return False if it cannot."""

    def resume(self, record: Any) -> bool:
        """Mark a revocable lease as used again. Return False if it was revoked."""


class Lease:
    """A group that is pinned on the device until the lease is released.

    Returned by `TierStore.acquire`. Use it as a context manager, on the thread (or task) that
    acquired it:

        with store.acquire("blocks.0") as lease:
            y = torch.nn.functional.linear(x, lease.tensors["weight"])

    Attributes:
        key: the key of the group.
        group: the group's number in the store, for adapters.
    """

    def __init__(
        self,
        key: str,
        group: GroupId,
        tensors: dict[str, torch.Tensor],
        issuer: LeaseIssuer,
        record: object,
    ) -> None:
        self.key = key
        self.group = group
        self._tensors: dict[str, torch.Tensor] | None = tensors
        self._issuer = issuer
        self._record = record
        self._used = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the group by name, on the store's device.

        They are views of the store's memory, and become invalid at `release`. Write to them only
        with `Access.UPDATE`.

        Raises:
            LeaseError: the lease was released.
        """
        if self._tensors is None:
            raise LeaseError(
                f"the lease of {self.key!r} is released: use its tensors before that, or take "
                "copies with store.get()"
            )
        self._used = True
        return self._tensors

    @property
    def released(self) -> bool:
        """True if the lease has ended."""
        return self._tensors is None

    @property
    def tensor(self) -> torch.Tensor:
        """The only tensor of the group.

        Raises:
            LeaseError: the group has several, or the lease was released.
        """
        if len(self.tensors) != 1:
            raise LeaseError(f"group {self.key!r} has {len(self.tensors)} tensors: use .tensors")
        return next(iter(self.tensors.values()))

    def release(self) -> None:
        """End the lease. A second call does nothing.

        With `Access.UPDATE`, the changed tensors become the value of the group. With `Access.TAKE`,
        the group is deleted from the store.

        Raises:
            CaptureError: the current stream is being captured into a graph.
            TransferError: with `Access.TAKE`, the group's file cannot be removed.
        """
        try:
            self._tensors = None  # first: another thread may reuse the memory at once
            self._issuer.release(self._record)  # ends the lease once, however often it is called
            self.__class__ = Lease  # no warning if the object is dropped now
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> bool:
        """End the lease at the next transaction. For finalizers, which may run inside one.

        Returns:
            True if the lease had not ended.
        """
        self._tensors = None
        self.__class__ = Lease
        return self._issuer.release_later(self._record)

    def invalidate(self) -> Any:
        """Drop the tensors, and return the issuer's record. The caller then ends the lease."""
        self._tensors = None
        self.__class__ = Lease
        return self._record

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A copy would share the record, and end the lease when it is collected.
        raise TypeError(
            f"the lease of {self.key!r} cannot be copied or pickled: acquire the group again, or "
            "take copies of its tensors with store.get()"
        )

    __repr__, __rich__, _repr_html_ = display_methods(lambda lease: _summary(lease))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _summary(lease: Lease) -> Description:
    """Describe a lease for `repr`, without marking its tensors as used."""
    state = vars(lease)  # some attributes are unset while `__init__` runs
    title, tensors = f"Lease of {state.get('key', '?')!r}", state.get("_tensors")
    if tensors is None:
        return Description(f"{title}, released")
    access = getattr(state.get("_record"), "access", Access.READ)
    if access is not Access.READ:
        title += f" to {access.value}"
    devices = ", ".join(sorted({str(tensor.device) for tensor in tensors.values()}))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    rows = [
        (name, f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
        for name, tensor in tensors.items()
    ]
    what = f"{count(len(tensors), 'tensor')}, {size(nbytes)} on {devices or 'no device'}"
    return Description(f"{title}: {what}", rows=tuple(rows))


class OpenLease(Lease):
    """A lease that has not been released. Warns if it was used and is dropped without `release`."""

    def __del__(self) -> None:
        # An unused lease was lost to an interrupt, before it reached the caller: no warning.
        if hasattr(self, "_used") and self.abandon() and self._used:
            warnings.warn(
                f"a lease of {self.key!r} was dropped without release(): use a with statement",
                ResourceWarning,
                stacklevel=2,
            )


def make_revocable(lease: Lease) -> bool:
    """Mark the tensors of a READ lease as unused until `resume`. For adapters.

    The store revokes a revocable lease as soon as a caller would have to wait for it, so holding
    one for a possible next use costs nothing. Return False if the store cannot do so: the caller
    must then release the lease.
    """
    return lease._issuer.make_revocable(lease._record)


def resume(lease: Lease) -> bool:
    """Use a revocable lease again. Return False if it was revoked; it is released then.

    Takes a fraction of the time of another `acquire`.
    """
    if lease._issuer.resume(lease._record):
        return True
    lease.release()  # does nothing, unless the thread that revoked it was interrupted
    return False
