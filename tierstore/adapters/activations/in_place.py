"""Whether a tensor that autograd saved was changed in place since.

Autograd looks after that itself, but not once there are hooks.
"""

from __future__ import annotations

import threading
import weakref

import torch

from tierstore.torch_private import base_of, uncounted, version_of


class VersionWatch:
    """Notices whether a tensor is changed in place, without holding its memory."""

    __slots__ = ("_counter", "_root", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = version_of(tensor)
        # A tensor that shares the version counter, and nothing else.
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._root = weakref.ref(_root(tensor))

    def check(self, name: str) -> None:
        """Raise torch's own error if the tensor, called `name`, is not what it was."""
        if version_of(self._counter) != self.version:
            with _probing:  # perhaps somebody was only trying
                refuse_changed(name, version_of(self._counter), self.version)

    def counted(self, bare: torch.Tensor) -> torch.Tensor:
        """The tensor, with the version counter that is watched."""
        tensor = self._counter.detach()
        tensor.data = bare
        return tensor

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether changes of `tensor`, which has the same memory, are noticed here.

        Views have the version counter of their base; but there are tensors that share memory and
        not its counter, such as `x.data`, or the gates that an LSTM cuts out of one tensor and
        changes one by one. Of two counters that say the same only one moves when it is told to.
        """
        if self._root() is _root(tensor):
            return True
        with _probing:
            before = version_of(tensor)
            if version_of(self._counter) != before:
                return False
            with uncounted(self._counter):
                torch.autograd.graph.increment_version(self._counter)
                return version_of(tensor) != before


_probing = threading.RLock()


def _root(tensor: torch.Tensor) -> torch.Tensor:
    base = base_of(tensor)
    return tensor if base is None else base


def refuse_changed(name: str, now: int, then: int) -> None:
    """Raise torch's own error if a tensor of version `then` has become version `now`."""
    if now != then:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {name} is at version {now}; expected version {then} instead. Hint: enable "
            "anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def described(tensor: torch.Tensor) -> str:
    """A tensor, in the words of autograd's errors."""
    plain = tensor.layout is torch.strided
    name = f"[{tensor.type() if plain else tensor.layout} {list(tensor.size())}]"
    if tensor.grad_fn is None:
        return name
    function = tensor.grad_fn.name().removesuffix("0").removesuffix("Backward")
    return f"{name}, which is output {tensor.output_nr} of {function},"
