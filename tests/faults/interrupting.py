"""Raises KeyboardInterrupt at any single instruction of the library's code.

Ctrl-C may come between any two instructions of the interpreter. So an action is run repeatedly,
with an exception raised at its first instruction, then at its second, and so on until the action
ends before that instruction.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import tierstore

PACKAGE = str(Path(tierstore.__file__).parent)


class Interrupter:
    """Raises KeyboardInterrupt at instruction number `turn` (from 0) of the package on this thread.

    `count` is the number of instructions run, and `where` the place of the interrupt.
    """

    def __init__(self, turn: int, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.turn = turn
        self.count = 0
        self.where = ""
        self._kind = kind

    @property
    def fired(self) -> bool:
        return bool(self.where)

    def run(self, action: Callable[[], Any]) -> None:
        """Run `action`, and catch the interrupt that it gets."""
        threading.current_thread()
        sys.settrace(self._enter)
        try:
            action()
        except self._kind:
            if not self.fired:
                raise
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.fired or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "opcode" or self.fired:
            return self._instruction
        if self.count == self.turn:
            code = frame.f_code
            self.where = f"{code.co_qualname}:{frame.f_lineno} at {frame.f_lasti}"
            raise self._kind(self.where)
        self.count += 1
        return self._instruction


class InterruptAt:
    """Raises KeyboardInterrupt where Python would, at the `point`-th check for signals.

    Only checks in code below a directory count. `where` is the place, if that check was reached.
    """

    # The interpreter checks for signals after these instructions, and at the start of functions.
    LOOKS = ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME")

    def __init__(self, point: int, below: Path = Path(PACKAGE)) -> None:
        self.left = point
        self.where = ""
        self._below = f"{below}/"

    @property
    def raised(self) -> bool:
        return bool(self.where)

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        ours = frame.f_code.co_filename.startswith(self._below)
        if not ours or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        last = ""

        def instruction(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal last
            if event == "opcode":
                self.left -= last in self.LOOKS
                if self.left == 0:
                    self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                    sys.settrace(None)
                    raise KeyboardInterrupt
                last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            return instruction

        return instruction


def interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def at_call(function: Callable[..., Any], act: Callable[[], object] = interrupt) -> Iterator[None]:
    """Run `act` at the start of the first call of a function or method, on this thread.

    Its exception is raised there, like an interrupt. Decorated functions are not supported: all
    functions with the same decorator share one code object.
    """
    assert not hasattr(function, "__wrapped__")
    code = getattr(function, "__func__", function).__code__

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            sys.setprofile(None)
            act()

    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(None)
