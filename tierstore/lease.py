"""What a caller holds while it uses a group's tensors."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Protocol

import torch

from tierstore.model.errors import LeaseError
from tierstore.model.groups import GroupId


class Lender(Protocol):
    """Whom a lease goes back to. Each method is told of a loan, which is the lender's own note."""

    def _release(self, loan: Any) -> None:
        """It comes back. A second time, nothing happens."""

    def _lose(self, loan: Any) -> bool:
        """It comes back at the next step. False if it is back."""

    def _rest(self, loan: Any) -> bool:
        """It may be called in from now on, by who needs the room. False if that is not possible."""

    def _resume(self, loan: Any) -> bool:
        """It is in use again. False if it was called in."""


class Lease:
    """A group on the fastest tier, held there until the lease is released.

    `tensors` maps names to tensors on the store's device: views of the store's memory, valid until
    `release` and not a moment longer. Change them only with `Access.UPDATE`. Use it as a context
    manager, on the thread (or task) that acquired it:

        with store.acquire("blocks.0") as lease:
            y = torch.nn.functional.linear(x, lease.tensors["weight"])
    """

    def __init__(
        self,
        key: str,
        version: GroupId,
        tensors: dict[str, torch.Tensor],
        lender: Lender,
        loan: object,
    ) -> None:
        self.key = key
        self.version = version
        self._tensors: dict[str, torch.Tensor] | None = tensors
        self._lender = lender
        self._loan = loan
        self._used = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name. Raises LeaseError after the release."""
        if self._tensors is None:
            raise LeaseError(
                f"the lease of {self.key!r} is released: use its tensors before that, or take "
                "copies with store.get()"
            )
        self._used = True
        return self._tensors

    @property
    def released(self) -> bool:
        """Whether it was given back."""
        return self._tensors is None

    @property
    def tensor(self) -> torch.Tensor:
        """The only tensor of the group. Raises LeaseError if it has several."""
        if len(self.tensors) != 1:
            raise LeaseError(f"group {self.key!r} has {len(self.tensors)} tensors: use .tensors")
        return next(iter(self.tensors.values()))

    def release(self) -> None:
        """Give the group back. A second call does nothing."""
        try:
            self._tensors = None  # first: another thread may give the memory away at once
            self._lender._release(self._loan)  # once, however often it is called
            self.__class__ = Lease  # it can be lost without harm
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> bool:
        """`release` for finalizers: they may run in the middle of a step, so it is done later.

        Returns whether it had not been given back.
        """
        self._tensors = None
        self.__class__ = Lease
        return self._lender._lose(self._loan)

    def rest(self) -> bool:
        """Say that the tensors are not used until `resume`. For leases that were acquired to read.

        Nobody has to wait for a lease that rests: it is called in by the first who would, and so it
        costs nothing to keep one for a use that may come. False: it was not kept, so release it.
        """
        return self._lender._rest(self._loan)

    def resume(self) -> bool:
        """Use the tensors of a lease that rested again. False: it was called in, and is released.

        It takes a fraction of the time that another `acquire` would.
        """
        if self._lender._resume(self._loan):
            return True
        self.release()  # nothing is left of it, unless who called it in was interrupted
        return False

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


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
