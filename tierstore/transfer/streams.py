"""The streams of an accelerator, and which of them a thread's device work goes to."""

from __future__ import annotations

import torch


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
