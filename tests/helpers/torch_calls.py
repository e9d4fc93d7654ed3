"""Functions of torch that are observed, or fail, on a thread that calls them.

This uses torch's own means: nothing is replaced, and other threads are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class BeforeEach(TorchFunctionMode):
    """Context that calls `act` before each call, on this thread, of the function of this name.

    For example "copy_" of tensors, or "empty" of torch. If `act` raises, the call raises.
    """

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        super().__init__()
        self._name = name
        self._act = act

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == self._name:
            self._act()
        return func(*args, **(kwargs or {}))
