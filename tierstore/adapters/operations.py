"""Looking at each operation of torch before it runs, on one thread, and when not to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.overrides import TorchFunctionMode

from tierstore.torch_private import innermost_function_mode


class _OnThread(threading.local):
    mode: OperationMode | None = None


_on = _OnThread()


class OperationMode(TorchFunctionMode):
    """A mode of which at most one does anything at a time on a thread: the one begun last."""

    def __init__(self) -> None:
        super().__init__()
        self._outer: OperationMode | None = None

    def begin(self) -> None:
        """Look at what runs on this thread from now on."""
        self._outer, _on.mode = _on.mode, self
        self.__enter__()

    def end(self) -> None:
        """Look at nothing any more."""
        _on.mode, self._outer = self._outer, None
        self.__exit__(None, None, None)


@contextmanager
def not_looked_at() -> Iterator[None]:
    """A context manager, inside of which operations on this thread run as they are."""
    mode = _on.mode
    if mode is None or innermost_function_mode() is not mode:
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()
