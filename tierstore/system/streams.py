"""The streams of an accelerator, and the current stream of a thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


def device_selector(device: torch.device) -> Callable[[], None]:
    """Return a function that makes `device` the current device of the calling thread.

    Threads of the store call it first. Otherwise their current device would be 0, and code that
    uses the current device, such as host memory registration, would initialise that one and take
    memory on it.
    """

    def select() -> None:
        if device.type == "cpu":
            return
        with suppress(RuntimeError):  # a lost device raises again when it is used
            torch.accelerator.set_device_index(device)

    return select


def is_captured(device: torch.device) -> bool:
    """Return whether this thread's device work is now captured into a graph instead of executed."""
    ask = capture_query(device.type)
    return ask is not None and bool(ask())


@functools.cache
def capture_query(kind: str) -> Callable[[], bool] | None:
    """Return the function that `is_captured` calls for a kind of device; None if it has none."""
    if kind == "cpu":
        return None
    module = torch.get_device_module(kind)  # takes some microseconds
    return getattr(module, "is_current_stream_capturing", None)


def stream_context(stream: torch.Stream) -> torch.Stream:
    """Return a context manager, to enter once, that makes `stream` the thread's current stream.

    torch stores the previous stream in the entered object. Two threads that enter the same object
    would restore each other's stream, so each use needs a separate object.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def run_on(stream: torch.Stream, action: Callable[[], T]) -> T:
    """Call `action` with `stream` as the current stream of this thread.

    The stream is restored in two nested `finally` clauses, as for locks: an interrupt may come
    before the inner one has restored the caller's stream. Setting a stream also sets its device.
    """
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device_index)

    def restore() -> None:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)

    try:
        try:
            torch.accelerator.set_stream(stream)
            return action()
        finally:
            restore()
    finally:
        restore()


def empty_cache(device: torch.device) -> None:
    """Release the memory that torch caches to the device, for use by any stream.

    Waits for the device. Does nothing where torch caches none.
    """
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()
