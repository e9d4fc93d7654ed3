"""Functions of torch that are looked at, or fail, where a thread calls them.

By torch's own means: nothing is replaced, and other threads are not concerned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class BeforeEach(TorchFunctionMode):
    """Inside, on this thread: `act` is called before each call of the function of this name.

    Such as "copy_" of tensors, or "empty" of torch. What `act` raises, the call raises.
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
