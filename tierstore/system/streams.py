"""The streams of an accelerator, and which of them a thread's device work goes to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


def selecting(device: torch.device) -> Callable[[], None]:
    """What a thread of the store does first: from then on `device` is its current device.

    Otherwise it would be device 0, and whatever asks for the current device there, such as the
    registration of host memory, would set that one up and take memory of it.
    """

    def select() -> None:
        if device.type == "cpu":
            return
        with suppress(RuntimeError):  # a device that is lost is told of by what is done there
            torch.accelerator.set_device_index(device)

    return select


def is_captured(device: torch.device) -> bool:
    """Whether what this thread tells the device now goes into a graph instead of being done."""
    ask = question_of_capture(device.type)
    return ask is not None and bool(ask())


@functools.cache
def question_of_capture(kind: str) -> Callable[[], bool] | None:
    """Return the function that answers `is_captured` for a kind of device; None if it has none."""
    if kind == "cpu":
        return None
    module = torch.get_device_module(kind)  # takes some microseconds
    return getattr(module, "is_current_stream_capturing", None)


def entered(stream: torch.Stream) -> torch.Stream:
    """A context in which `stream` is the current one of the thread that enters it; to enter once.

    torch keeps the stream to return to on the object that is entered. Two threads that entered the
    same object would return to each other's stream, so each use gets an object of its own.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def on(stream: torch.Stream, action: Callable[[], T]) -> T:
    """Do something with `stream` as the current one of this thread.

    There are two ends, as for locks: an interrupt may come before the inner one has given the
    caller's own stream back. To set a stream sets its device, too.
    """
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device_index)

    def give_back() -> None:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)

    try:
        try:
            torch.accelerator.set_stream(stream)
            return action()
        finally:
            give_back()
    finally:
        give_back()


def empty_cache(device: torch.device) -> None:
    """Give the memory that torch keeps for later back to the device, for any stream to have it.

    Waits for the device. Nothing happens where torch keeps none.
    """
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()
