"""Workers with many groups disconnect: others are served meanwhile, and accounting stays right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.service.raw import PAGE, RawWorker, pages
from tests.service.serving import ThreadService, serving
from tests.service.test_limits import pause
from tests.service.test_serving import MIB
from tierstore.wire import messages as m

GROUPS = 4000
BATCH = 500


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 4 * MIB) as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.touch()
    os.truncate(path, GROUPS * PAGE)
    return path


def register_all(raw: RawWorker, data: Path) -> list[int]:
    raw.open(data)
    numbers = []
    for first in range(0, GROUPS, BATCH):
        numbers += raw.register([pages(i) for i in range(first, first + BATCH)])
    return numbers


def watch(service: ThreadService) -> list[int]:
    """Record the number of registered groups in each turn of the event loop until it is 0."""
    noted: list[int] = []

    def note() -> None:
        noted.append(service.server.groups.bytes_registered // PAGE)
        if noted[-1]:
            service.loop.call_soon(note)

    service.loop.call_soon_threadsafe(note)
    return noted


def test_leave_with_many_groups_takes_many_turns(service: ThreadService, data: Path):
    with RawWorker(service.socket) as raw:
        register_all(raw, data)
        noted = watch(service)
        service.wait_until(lambda: len(noted) > 10)
    service.wait_until(lambda: noted[-1] == 0)
    assert noted[0] == GROUPS
    assert max(before - after for before, after in pairwise(noted)) <= 1000


def test_register_while_another_leaves_counts_each_once(service: ThreadService, data: Path):
    with RawWorker(service.socket) as one, RawWorker(service.socket) as other:
        numbers = register_all(one, data)
        other.open(data)
        other.ping()
        paused, go_on = pause(service)
        one.close()
        other.send(m.Register(1, [pages(i) for i in range(GROUPS - BATCH, GROUPS)]))
        go_on.set()
        assert paused
        assert other.take(m.Registered).groups == numbers[-BATCH:]
        registered = service.server.groups
        service.wait_until(lambda: registered.bytes_registered == BATCH * PAGE)
        (connection,) = service.server.connections.values()
        # Shared groups keep their bytes, so only their counts show that one worker has left.
        shared = connection.groups.values()
        service.wait_until(lambda: {group.workers for group in list(shared)} == {1})
        assert isinstance(other.lease(numbers[-1]), m.Leased)
        other.ping()
        assert registered.bytes_registered == BATCH * PAGE
    service.wait_until(lambda: registered.bytes_registered == 0)


def test_service_ends_while_many_groups_leave(
    tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
):
    with serving(tmp_path / "ended", MIB) as service, RawWorker(service.socket) as raw:
        register_all(raw, data)
        paused, go_on = pause(service)
        raw.close()
        service.loop.call_soon_threadsafe(service.server.stop)
        go_on.set()
        assert paused
    assert "Traceback" not in caplog.text
