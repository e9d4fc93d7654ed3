"""Intercept torch operations on one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.overrides import TorchFunctionMode

from tierstore.torch_private import current_function_mode


class _OnThread(threading.local):
    mode: OperationMode | None = None


_on = _OnThread()


class OperationMode(TorchFunctionMode):
    """A torch function mode of which only the innermost is active on a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._outer: OperationMode | None = None

    def begin(self) -> None:
        """Start to intercept operations on this thread."""
        self._outer, _on.mode = _on.mode, self
        self.__enter__()

    def end(self) -> None:
        """Stop intercepting."""
        _on.mode, self._outer = self._outer, None
        self.__exit__(None, None, None)


@contextmanager
def without_interception() -> Iterator[None]:
    """Run operations on this thread without interception within the block."""
    mode = _on.mode
    if mode is None or current_function_mode() is not mode:
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()
