"""Faults between a store and its server.

Values are right, or the call that needs them raises with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save

from tests.lanes import by_lane
from tests.remote.conftest import Uploaded, assert_holds, uploaded, values_of
from tests.remote.servers import REPAIRED, Handler, Proxy, error_500, hangs, shorter, upload
from tierstore import TierStore
from tierstore.errors import StaleCheckpointError, TransferError
from tierstore.tiers.object_store import retry_policy

GROUPS, ROWS = 4, 32


def run(checkpoint: Uploaded, directory: Path) -> None:
    """Use all of a checkpoint twice; the disk holds half of it."""
    with TierStore("100KB", directory, device="cpu", disk_budget="100KB") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        for _ in range(2):
            for key in checkpoint.groups:
                assert_holds(store, checkpoint, key)


@pytest.fixture
def checkpoint(s3: str, proxy: Proxy) -> Uploaded:
    return uploaded(s3, GROUPS, ROWS)


def requests_of(checkpoint: Uploaded, proxy: Proxy, directory: Path) -> int:
    """Return the number of requests of such a run."""
    run(checkpoint, directory)
    return len(proxy.requests)


@pytest.mark.full("a fault at each request")
@pytest.mark.parametrize("name", REPAIRED)
def test_transient_fault_is_retried_unseen(
    name: str, checkpoint: Uploaded, proxy: Proxy, tmp_path: Path
) -> None:
    """Tested at each request in turn."""
    count = requests_of(checkpoint, proxy, tmp_path / "first")
    assert count >= 2 + GROUPS
    for number in range(1, count + 1, by_lane(4, 1)):
        proxy.requests.clear()
        proxy.faults = {number: REPAIRED[name]}
        run(checkpoint, tmp_path / f"{number}")
        assert len(proxy.requests) >= number, "the fault was not injected"


@pytest.mark.full("the fault", keep="a third")
@pytest.mark.parametrize("name", ["error_500", "cut_inside", "shorter"])
def test_permanent_fault_raises(
    name: str, checkpoint: Uploaded, proxy: Proxy, tmp_path: Path
) -> None:
    """The control: a fault that persists raises."""
    with retry_policy(deadline=1.5), TierStore("100KB", tmp_path, device="cpu") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        proxy.every = REPAIRED[name]
        with pytest.raises(TransferError, match=r"could not be read, tried \d+ times.*the network"):
            store.acquire("0")
        proxy.every = None
        assert_holds(store, checkpoint, "0")


@pytest.mark.full("waits for a deadline")
def test_hung_server_raises_at_the_deadline(
    checkpoint: Uploaded, proxy: Proxy, tmp_path: Path
) -> None:
    with (
        retry_policy(deadline=2.0, request_seconds=0.5),
        TierStore("100KB", tmp_path, device="cpu") as store,
    ):
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        proxy.every = hangs
        began = time.monotonic()
        with pytest.raises(TransferError, match="could not be read, tried"):
            store.acquire("0")
        assert 1.0 < time.monotonic() - began < 6.0


def swapping(address: str, name: str, rows: int, at: int) -> Callable[[int], None]:
    """Replaces the object before the request of this number is passed on."""
    other = save(values_of(GROUPS, rows, seed=1))

    def before(number: int) -> None:
        if number == at:
            upload(address, name, other)

    return before


@pytest.mark.parametrize("rows", [ROWS, ROWS // 2], ids=["same size", "smaller"])
def test_swapped_object_is_stale_and_never_mixed(
    rows: int, s3: str, checkpoint: Uploaded, proxy: Proxy, tmp_path: Path
) -> None:
    """Tested before each request in turn. Expected values are those that were registered."""
    count = requests_of(checkpoint, proxy, tmp_path / "first")
    original = save(checkpoint.values)
    stale = 0
    for number in range(2, count + 1, by_lane(4, 1)):  # before the first, nothing has changed
        upload(s3, checkpoint.name, original)
        proxy.requests.clear()
        proxy.before = swapping(s3, checkpoint.name, rows, number)
        try:
            run(checkpoint, tmp_path / f"{number}")
        except StaleCheckpointError as error:
            assert "was replaced" in str(error)
            stale += 1
    assert stale >= by_lane(1, GROUPS)


def test_server_ignoring_preconditions_is_caught_by_its_answer(
    s3: str, checkpoint: Uploaded, proxy: Proxy, tmp_path: Path
) -> None:
    with TierStore("100KB", tmp_path, device="cpu") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        upload(s3, checkpoint.name, save(values_of(GROUPS, ROWS, seed=1)))
        proxy.drop_headers = {"if-match"}
        with pytest.raises(StaleCheckpointError, match="was replaced"):
            store.acquire("0")


def test_checks_disabled_let_wrong_bytes_through(
    s3: str, checkpoint: Uploaded, proxy: Proxy, tmp_path: Path
) -> None:
    """The control of the two tests above: a server that lies about both."""
    with TierStore("100KB", tmp_path, device="cpu") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        [etag] = proxy.etags
        upload(s3, checkpoint.name, save(values_of(GROUPS, ROWS, seed=1)))
        proxy.drop_headers = {"if-match"}
        proxy.every = lying(etag)
        with pytest.raises(AssertionError):
            assert_holds(store, checkpoint, "0")


def lying(etag: str) -> Callable[[Handler, object], object]:
    def fault(handler: Handler, answer: object) -> object:
        answer.headers["ETag"] = etag  # type: ignore[attr-defined]
        return answer

    return fault


def test_prefetch_fault_raises_only_on_demand(
    checkpoint: Uploaded, proxy: Proxy, tmp_path: Path
) -> None:
    with retry_policy(deadline=0.5), TierStore("200KB", tmp_path, device="cpu") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        proxy.every = shorter
        store.prefetch("2")
        time.sleep(1.0)
        proxy.every = None
        store.put("mine", checkpoint.values["blocks.0.weight"])
        assert_holds(store, checkpoint, "1")


@pytest.mark.parametrize("needed", ["fetched", "fetched anew"])
def test_close_succeeds_with_a_silent_server(
    needed: str, checkpoint: Uploaded, proxy: Proxy, tmp_path: Path
) -> None:
    """A running fetch and those queued are abandoned; the directory is free."""
    if needed == "fetched anew":
        run(checkpoint, tmp_path)
    with TierStore("100KB", tmp_path, device="cpu") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        for path in (tmp_path / "remote").rglob("*.safetensors"):
            path.unlink()
        proxy.requests.clear()
        proxy.every = error_500
        for key in checkpoint.groups:
            store.prefetch(key)
        ends = time.monotonic() + 10
        while len(proxy.requests) < 6:  # it retries
            assert time.monotonic() < ends
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    proxy.every = None
    with TierStore("100KB", tmp_path, device="cpu") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        for key in checkpoint.groups:
            assert_holds(store, checkpoint, key)
