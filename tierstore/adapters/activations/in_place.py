"""Detect in-place changes of tensors that autograd has saved.

Autograd checks this itself, but not if there are saved-tensor hooks.
"""

from __future__ import annotations

import threading
import weakref

import torch

from tierstore.torch_private import base_of, preserve_version, version_of


class VersionWatch:
    """Detects in-place changes of a tensor without holding its memory."""

    __slots__ = ("_counter", "_root", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = version_of(tensor)
        # A tensor that shares only the version counter.
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._root = weakref.ref(_root(tensor))

    def check(self, name: str) -> None:
        """Raise torch's own error if the tensor, described by `name`, was changed in place."""
        if version_of(self._counter) != self.version:
            with _probing:  # `covers` may be incrementing a counter on another thread
                check_unchanged(name, version_of(self._counter), self.version)

    def counted(self, bare: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the memory of `bare` with the watched version counter."""
        tensor = self._counter.detach()
        tensor.data = bare
        return tensor

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether this watch detects changes of `tensor`, which has the same memory.

        Views share the version counter of their base, but some tensors share memory without sharing
        a counter, such as `x.data`, or the gates that an LSTM slices from one tensor and changes
        separately. To compare two counters with equal values, this increments one of them.
        """
        if self._root() is _root(tensor):
            return True
        with _probing:
            before = version_of(tensor)
            if version_of(self._counter) != before:
                return False
            with preserve_version(self._counter):
                torch.autograd.graph.increment_version(self._counter)
                return version_of(tensor) != before


_probing = threading.RLock()


def _root(tensor: torch.Tensor) -> torch.Tensor:
    base = base_of(tensor)
    return tensor if base is None else base


def check_unchanged(name: str, now: int, then: int) -> None:
    """Raise torch's own error if a tensor of version `then` has become version `now`."""
    if now != then:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {name} is at version {now}; expected version {then} instead. Hint: enable "
            "anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def described(tensor: torch.Tensor) -> str:
    """Describe a tensor in the format of autograd's errors."""
    plain = tensor.layout is torch.strided
    name = f"[{tensor.type() if plain else tensor.layout} {list(tensor.size())}]"
    if tensor.grad_fn is None:
        return name
    function = tensor.grad_fn.name().removesuffix("0").removesuffix("Backward")
    return f"{name}, which is output {tensor.output_nr} of {function},"
