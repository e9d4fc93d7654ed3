"""What a caller holds while it uses a group's tensors."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch

from tierstore.errors import LeaseError
from tierstore.model.formatting import count, size
from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access
from tierstore.observe.report import Shown, shown_by


class Lender(Protocol):
    """Whom a lease goes back to. Each method is told of the lender's own record of it."""

    def release(self, record: Any) -> None:
        """It comes back. A second time, nothing happens."""

    def lose(self, record: Any) -> bool:
        """It comes back at the next step. False if it is back."""

    def make_revocable(self, record: Any) -> bool:
        """Whoever needs the room may revoke it from now on. False if that is not possible."""

    def resume(self, record: Any) -> bool:
        """It is in use again. False if it was revoked."""


class Lease:
    """A group on the device, kept there until the lease is released.

    `TierStore.acquire` makes it. Use it as a context manager, on the thread (or task) that acquired
    it:

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
        lender: Lender,
        record: object,
    ) -> None:
        self.key = key
        self.group = group
        self._tensors: dict[str, torch.Tensor] | None = tensors
        self._lender = lender
        self._record = record
        self._used = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, on the store's device.

        They are views of the store's memory, valid until `release` and not a moment longer. Change
        them only with `Access.UPDATE`.

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
        """Whether the lease was given back."""
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
        """Give the group back. A second call does nothing.

        With `Access.UPDATE`, the changed bytes are the group from now on. With `Access.TAKE`, the
        group is forgotten.

        Raises:
            CaptureError: the current stream is captured into a graph.
            TransferError: after `Access.TAKE`, the group's file cannot be removed.
        """
        try:
            self._tensors = None  # first: another thread may give the memory away at once
            self._lender.release(self._record)  # once, however often it is called
            self.__class__ = Lease  # it can be lost without harm
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> bool:
        """Release it later, for finalizers: they may run in the middle of a step.

        Returns:
            Whether it had not been given back.
        """
        self._tensors = None
        self.__class__ = Lease
        return self._lender.lose(self._record)

    def revoked(self) -> Any:
        """Forget the tensors. Returns the lender's record, for who takes it back himself."""
        self._tensors = None
        self.__class__ = Lease
        return self._record

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A copy would share the record, and give the lease back when it goes.
        raise TypeError(
            f"the lease of {self.key!r} cannot be copied or pickled: acquire the group again, or "
            "take copies of its tensors with store.get()"
        )

    __repr__, __rich__, _repr_html_ = shown_by(lambda lease: _look(lease))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _look(lease: Lease) -> Shown:
    """What it looks like. Nobody has used its tensors by that."""
    state = vars(lease)  # it may be asked for while a lease is made
    title, tensors = f"Lease of {state.get('key', '?')!r}", state.get("_tensors")
    if tensors is None:
        return Shown(f"{title}, released")
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
    return Shown(f"{title}: {what}", rows=tuple(rows))


class OpenLease(Lease):
    """A lease that was not released yet: it says so if it is lost."""

    def __del__(self) -> None:
        # What nobody has looked at was lost in an interrupt, on its way to the caller.
        if hasattr(self, "_used") and self.abandon() and self._used:
            warnings.warn(
                f"a lease of {self.key!r} was lost without release(): use it in a with statement",
                ResourceWarning,
                stacklevel=2,
            )


def make_revocable(lease: Lease) -> bool:
    """Say that the tensors of a lease to read are not used until `resume`. For adapters.

    Nobody has to wait for a revocable lease: it is revoked by the first who would, and so it costs
    nothing to keep one for a use that may come. False: it was not kept, so release it.
    """
    return lease._lender.make_revocable(lease._record)


def resume(lease: Lease) -> bool:
    """Use the tensors of a revocable lease again. False: it was revoked, and is released.

    It takes a fraction of the time that another `acquire` would.
    """
    if lease._lender.resume(lease._record):
        return True
    lease.release()  # nothing is left of it, unless who revoked it was interrupted
    return False
