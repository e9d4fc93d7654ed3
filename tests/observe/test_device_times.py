"""When an accelerator did what it was told, on the host's clock."""

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
    """A copy that waits on a stream until something forces it."""
    source = torch.ones(1024).pin_memory()
    with stream:
        target = torch.empty(1024, device=device)
        target.copy_(source, non_blocking=True)
    return target


def test_times_are_told_once_they_have_passed_and_nothing_is_forced(
    device: torch.device, pretend: Any
) -> None:
    stream = torch.Stream(device)
    times = DeviceTimes(device, stream)
    told: list[list[float]] = []
    before = time.monotonic()
    began = times.mark(stream)
    target = queued_copy(stream, device)
    ended = times.mark(stream)
    times.tell(told.append, began, ended)
    waiting = pretend.queued_tasks()
    assert waiting > 0
    times.look()
    assert not told
    assert pretend.queued_tasks() == waiting, "looking forced the copy"
    ended.event.synchronize()
    times.look()
    ((start, end),) = told
    assert before <= start <= end <= time.monotonic()
    assert target.sum() == 1024
    times.look()
    assert len(told) == 1, "it was told twice"


def test_one_that_waits_does_not_hold_up_another(device: torch.device, pretend: Any) -> None:
    slow, quick = torch.Stream(device), torch.Stream(device)
    times = DeviceTimes(device, quick)
    told: list[str] = []
    target = queued_copy(slow, device)
    times.tell(lambda _: told.append("slow"), times.mark(slow))
    times.tell(lambda _: told.append("quick"), times.mark(quick))
    times.look()
    assert told == ["quick"]
    slow.synchronize()
    times.look()
    assert told == ["quick", "slow"]
    assert target.sum() == 1024


def test_times_follow_the_order_of_a_stream(device: torch.device) -> None:
    times = DeviceTimes(device, torch.Stream(device))
    told: list[float] = []
    for _ in range(200):  # looked at now and then, without being asked to
        times.tell(lambda at: told.extend(at), times.mark())
    assert len(told) > 100
    times.look()
    assert told == sorted(told)
    assert len(told) == 200


def queries(act: Callable[[], object]) -> int:
    """How often this thread asks an event whether it has passed, meanwhile."""
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


def test_a_device_that_is_behind_is_asked_once_for_each_stream(
    device: torch.device, pretend: Any
) -> None:
    streams = [torch.Stream(device) for _ in range(2)]
    times = DeviceTimes(device, streams[0])
    told: list[float] = []
    targets = [queued_copy(stream, device) for stream in streams]
    for number in range(1000):
        times.tell(told.extend, times.mark(streams[number % 2]))
    assert queries(times.look) == 2
    assert not told
    for stream in streams:
        stream.synchronize()
    assert queries(times.look) == 1000, "each that has passed is asked once more"
    assert len(told) == 1000
    assert all(target.sum() == 1024 for target in targets)


class Broken:
    """An event of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("the device is lost")


def test_what_a_failed_device_cannot_tell_is_forgotten(device: torch.device) -> None:
    times = DeviceTimes(device, torch.Stream(device))
    told: list[list[float]] = []
    times.tell(told.append, Mark(Broken(), time.monotonic()))
    times.tell(told.append, times.mark())
    times.look()
    assert len(told) == 1
    times.look()
    assert len(told) == 1
