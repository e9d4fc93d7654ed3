"""Completion times of device work, on the host's clock."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR
from tierstore.observe.device_times import DeviceTimes, Mark

pytestmark = [pytest.mark.floor, pytest.mark.pretend_only("late")]


@pytest.fixture
def device(late_pretend: Any) -> torch.device:
    return torch.device(ACCELERATOR, 0)


def queued_copy(stream: torch.Stream, device: torch.device) -> torch.Tensor:
    """Start a copy that waits on a stream until a call forces it."""
    source = torch.ones(1024).pin_memory()
    with stream:
        target = torch.empty(1024, device=device)
        target.copy_(source, non_blocking=True)
    return target


def test_device_times_are_polled_without_synchronizing(device: torch.device, pretend: Any) -> None:
    stream = torch.Stream(device)
    times = DeviceTimes(device, stream)
    told: list[list[float]] = []
    before = time.monotonic()
    began = times.mark(stream)
    target = queued_copy(stream, device)
    ended = times.mark(stream)
    times.notify(told.append, began, ended)
    waiting = pretend.queued_tasks()
    assert waiting > 0
    times.poll()
    assert not told
    assert pretend.queued_tasks() == waiting, "polling forced the copy"
    ended.event.synchronize()
    times.poll()
    ((start, end),) = told
    assert before <= start <= end <= time.monotonic()
    assert target.sum() == 1024
    times.poll()
    assert len(told) == 1, "the times were reported twice"


def test_unfinished_event_does_not_delay_another_stream(device: torch.device, pretend: Any) -> None:
    slow, quick = torch.Stream(device), torch.Stream(device)
    times = DeviceTimes(device, quick)
    told: list[str] = []
    target = queued_copy(slow, device)
    times.notify(lambda _: told.append("slow"), times.mark(slow))
    times.notify(lambda _: told.append("quick"), times.mark(quick))
    times.poll()
    assert told == ["quick"]
    slow.synchronize()
    times.poll()
    assert told == ["quick", "slow"]
    assert target.sum() == 1024


def test_device_times_follow_the_order_of_a_stream(device: torch.device) -> None:
    times = DeviceTimes(device, torch.Stream(device))
    told: list[float] = []
    for _ in range(200):  # polled now and then, without a call of `poll`
        times.notify(lambda at: told.extend(at), times.mark())
    assert len(told) > 100
    times.poll()
    assert told == sorted(told)
    assert len(told) == 200


def queries(act: Callable[[], object]) -> int:
    """Return the number of event queries of this thread during `act`."""
    count = 0

    def note(_: Any, what: str, called: Any) -> None:
        nonlocal count
        count += what == "c_call" and called.__name__ == "query"

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def test_busy_device_is_polled_once_per_stream(device: torch.device, pretend: Any) -> None:
    streams = [torch.Stream(device) for _ in range(2)]
    times = DeviceTimes(device, streams[0])
    told: list[float] = []
    targets = [queued_copy(stream, device) for stream in streams]
    for number in range(1000):
        times.notify(told.extend, times.mark(streams[number % 2]))
    assert queries(times.poll) == 2
    assert not told
    for stream in streams:
        stream.synchronize()
    assert queries(times.poll) == 1000, "each completed event is queried once more"
    assert len(told) == 1000
    assert all(target.sum() == 1024 for target in targets)


class Broken:
    """An event of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("the device is lost")


def test_failed_device_events_are_discarded(device: torch.device) -> None:
    times = DeviceTimes(device, torch.Stream(device))
    told: list[list[float]] = []
    times.notify(told.append, Mark(Broken(), time.monotonic()))
    times.notify(told.append, times.mark())
    times.poll()
    assert len(told) == 1
    times.poll()
    assert len(told) == 1
