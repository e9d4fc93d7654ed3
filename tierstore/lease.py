"""What a caller holds while it uses a group's tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType

import torch

from tierstore.model.errors import LeaseError


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
        version: str,
        tensors: dict[str, torch.Tensor],
        release: Callable[[], None],
        lose: Callable[[], None],
    ) -> None:
        self.key = key
        self.version = version
        self._tensors: dict[str, torch.Tensor] | None = tensors
        self._release = release
        self._lose = lose
        self._over = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name. Raises LeaseError after the release."""
        if self._tensors is None:
            raise LeaseError(
                f"the lease of {self.key!r} is released: use its tensors before that, or take "
                "copies with store.get()"
            )
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
        self._tensors = None  # first: another thread may give the memory away at once
        self._release()  # once, however often it is called
        self._over = True

    def abandon(self) -> None:
        """`release` for finalizers: they may run in the middle of a step, so it is done later."""
        if not self._over:
            self._tensors = None
            self._over = True
            self._lose()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self.abandon()
            warnings.warn(
                f"a lease of {self.key!r} was lost without release(): use it in a with statement",
                ResourceWarning,
                stacklevel=2,
            )
