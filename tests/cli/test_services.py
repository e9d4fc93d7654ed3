"""`ps` and `top`: their output, and inspecting a directory that is served."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from tests.cli.conftest import Inspect, command, environment, start
from tests.service.serving import ThreadService, serving, wait_until
from tests.service.test_serving import MIB, checkpoint
from tierstore import TierStore
from tierstore.cli.output import Failure
from tierstore.cli.sampling import Sample, rates, samples_in
from tierstore.cli.services import service_row
from tierstore.prometheus import StoreCollector
from tierstore.service import sockets
from tierstore.wire.messages import Report, WorkerRow

EVIL = "a \x1b[31mb\u202e"
EVIL_AS_SHOWN = r"a \x1b[31mb\u202e"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 4 * MIB + 65536) as running:
        yield running


@pytest.fixture
def worker(service: ThreadService, tmp_path: Path) -> Iterator[TierStore]:
    """Return a worker that has leased its only group."""
    checkpoint(tmp_path / "m.safetensors", groups=1)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0"):
            pass
        yield store


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Point the search for this user's services at an empty directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="ts-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        made = Path(directory) / "tierstore"
        made.mkdir(mode=0o700)
        yield made


def report(*workers: WorkerRow) -> Report:
    tiers = {"HOST": (10, 20), "DISK": (0, None)}
    return Report(0, 7, "/served", "/socket", 1e9, tiers, 3, 4, 5, list(workers))


def row(waits: int = 0, waiting: float = 0.0, longest_lease: float = 0.0) -> WorkerRow:
    return WorkerRow(8, "name", 1e9, 1, 1, 10, waits, waiting, longest_lease, 2, 1, 20)


# ps ----------------------------------------------------------------------------------------------


def test_ps_describes_a_service_and_its_workers(
    service: ThreadService, worker: TierStore, inspect: Inspect
) -> None:
    (printed,) = inspect.json("ps", service.socket)["services"]
    assert printed["directory"] == str(service.directory)
    assert printed["socket"] == service.socket
    assert printed["pid"] == os.getpid()
    assert printed["tiers"]["HOST"]["budget"] == 4 * MIB + 65536
    assert printed["tiers"]["HOST"]["used"] >= MIB
    assert printed["bytes_read"] >= MIB
    assert printed["groups"] == 1
    (one,) = printed["workers"]
    assert one["pid"] == os.getpid()
    assert one["groups"] == 1
    assert one["granted"] >= 1
    assert one["waits"] == 0
    assert one["waiting_seconds"] == 0
    assert one["holds_up"] is False


def test_ps_draws_a_table_and_a_summary(
    service: ThreadService, worker: TierStore, inspect: Inspect
) -> None:
    result = inspect("ps", service.socket)
    assert result.exit_code == 0
    about, titles, line, summary = result.stdout.splitlines()
    assert str(service.directory) in about and service.socket in about
    assert titles.split()[:3] == ["PID", "NAME", "SINCE"]
    assert line.split()[0] == str(os.getpid())
    assert line.split()[-1] == "ok"
    assert summary.startswith("1 worker, 1 group; HOST ")
    assert " of 4.3 MB, DISK 0 B; " in summary
    assert not result.stderr


def test_ps_finds_all_services_and_names_stale_sockets(
    runtime: Path, service: ThreadService, inspect: Inspect
) -> None:
    os.link(service.socket, runtime / "live.sock")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(runtime / "killed.sock"))
    result = inspect("ps")
    assert result.exit_code == 0
    assert f" at {runtime / 'live.sock'}, since " in result.stdout
    assert str(runtime / "killed.sock") in result.stderr
    assert "killed.sock" not in result.stdout
    (printed,) = inspect.json("ps")["services"]
    assert printed["socket"] == str(runtime / "live.sock")


def test_ps_without_a_service_explains_how_to_start_one(runtime: Path, inspect: Inspect) -> None:
    result = inspect("ps")
    assert result.exit_code == 0
    assert "tierstore-serve DIR --ram SIZE" in result.stderr
    assert inspect.json("ps")["services"] == []
    assert inspect("top").stderr == result.stderr
    assert inspect.json("top")["pictures"] == []


def test_ps_takes_the_directory_that_is_served(
    runtime: Path, service: ThreadService, inspect: Inspect
) -> None:
    result = inspect("ps", service.directory)
    assert result.exit_code == 1
    assert "--socket" in result.stderr, "it listens elsewhere"
    os.link(service.socket, sockets.default_socket(service.directory))
    assert len(inspect.json("ps", service.directory)["services"]) == 1


@pytest.mark.parametrize("name", ["ps", "top"])
def test_ps_path_not_a_service_fails(name: str, tmp_path: Path, inspect: Inspect) -> None:
    result = inspect(name, tmp_path / "missing")
    assert result.exit_code == 2
    assert f"there is no socket or directory {tmp_path / 'missing'}" in result.stderr
    (tmp_path / "file").touch()
    result = inspect(name, tmp_path / "file")
    assert result.exit_code == 1
    assert "no service answers" in result.stderr


@pytest.mark.parametrize(
    ("holder", "waiter", "marked"),
    [
        (row(longest_lease=31), row(waits=1, waiting=2.0), True),
        (row(longest_lease=29), row(waits=1, waiting=2.0), False),
        (row(longest_lease=31), row(waits=1, waiting=0.1), False),  # probably waits for the disk
        (row(longest_lease=31), row(), False),
        (row(waits=1, waiting=40.0, longest_lease=31), row(), False),  # it waits itself
    ],
)
def test_ps_marks_workers_that_hold_others_up(
    holder: WorkerRow, waiter: WorkerRow, marked: bool
) -> None:
    printed = service_row(report(holder, waiter))["workers"]
    assert [worker["holds_up"] for worker in printed] == [marked, False]


def test_service_names_with_control_characters_are_escaped(
    service: ThreadService, inspect: Inspect
) -> None:
    with named_worker(service):
        for words in (("ps", service.socket), ("top", service.socket, "--once")):
            shown = inspect(*words, *(("--interval", 0.05) if words[0] == "top" else ())).stdout
            assert EVIL_AS_SHOWN in shown
            assert "\x1b" not in shown and "\u202e" not in shown


@contextlib.contextmanager
def named_worker(service: ThreadService) -> Iterator[None]:
    from tierstore.wire.framing import Outgoing
    from tierstore.wire.messages import VERSION, Hello

    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(service.socket)
        raw.sendall(Outgoing().encode(Hello(VERSION, EVIL)))
        wait_until(lambda: any(c.name for c in service.server.connections.values()))
        yield


# top ---------------------------------------------------------------------------------------------


def test_top_shows_the_change_between_two_samples(
    service: ThreadService, worker: TierStore, inspect: Inspect
) -> None:
    (printed,) = inspect.json("top", service.socket, "--interval", 0.05)["pictures"]
    assert printed["seconds"] >= 0.05
    assert printed["tiers"]["HOST"]["budget"] == 4 * MIB + 65536
    assert printed["bytes_per_second"] == {"DISK>HOST": 0, "HOST>DISK": 0}
    (one,) = printed["workers"]
    assert one["pid"] == str(os.getpid())
    assert one["hits_per_second"] == one["acquires_per_second"] == printed["hits_per_second"] == 0
    result = inspect("top", service.socket, "--once", "--interval", 0.05)
    assert result.exit_code == 0
    for text in ("HOST", "4.3 MB", "no limit", "DISK>HOST 0 B/s", "hits 0.0 of 0.0 leases/s"):
        assert text in result.stdout
    assert not result.stderr


def test_top_rates_are_differences(tmp_path: Path) -> None:
    before = Sample("a", 1.0, moved={"DISK>HOST": 100}, acquires={"hit": 1, "late": 0, "miss": 5})
    after = Sample("a", 3.0, moved={"DISK>HOST": 300}, acquires={"hit": 5, "late": 2, "miss": 5})
    printed = rates(before, after)
    assert printed["seconds"] == 2
    assert printed["bytes_per_second"] == {"DISK>HOST": 100}
    assert printed["hits_per_second"] == 2
    assert printed["acquires_per_second"] == 3
    again = rates(after, Sample("a", 4.0, moved={"DISK>HOST": 10}))
    assert again["bytes_per_second"] == {"DISK>HOST": 0}, "a restart resets the counters"
    first = rates(None, after)
    assert first["bytes_per_second"] == {"DISK>HOST": None}
    assert first["hits_per_second"] is None


def test_top_reads_the_metrics_of_a_process(tmp_path: Path, inspect: Inspect) -> None:
    checkpoint(tmp_path / "m.safetensors", groups=2)
    with TierStore(4 * MIB, tmp_path / "own", device="cpu") as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        # Lease both, so that neither is fetched early between the samples.
        with store.acquire("w0"), store.acquire("w1"), serving_metrics(store) as url:
            (printed,) = inspect.json("top", url, "--interval", 0.05)["pictures"]
            shown = inspect("top", url, "--once", "--interval", 0.05).stdout
    assert printed["name"] == f"mine at {url}"
    assert printed["tiers"]["HOST"] == {"used": store.stats().used_bytes["HOST"], "budget": 4 * MIB}
    assert printed["bytes_per_second"]["DISK>HOST"] == 0
    assert printed["hits_per_second"] == 0
    assert printed["workers"] == []
    assert f"mine at {url}" in shown and "DISK>HOST 0 B/s" in shown


@contextlib.contextmanager
def serving_metrics(store: TierStore) -> Iterator[str]:
    registry = CollectorRegistry()
    registry.register(StoreCollector({"mine": store}))
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


PAGE = """\
# TYPE tierstore_used_bytes gauge
tierstore_used_bytes{store="service",tier="HOST"} 10.0
# TYPE tierstore_budget_bytes gauge
tierstore_budget_bytes{store="service",tier="HOST"} 20.0
# TYPE tierstore_worker_leased_bytes gauge
tierstore_worker_leased_bytes{worker="8",name="x"} 5.0
# TYPE tierstore_worker_waits gauge
tierstore_worker_waits{worker="8",name="x"} 2.0
# TYPE tierstore_worker_leases_total counter
tierstore_worker_leases_total{worker="8",name="x",met="hit"} 3.0
tierstore_worker_leases_total{worker="8",name="x",met="miss"} 4.0
"""


def test_top_reads_workers_from_service_metrics() -> None:
    (look,) = samples_in(PAGE, "http://x")
    assert look.tiers == {"HOST": (10, 20)}
    (worker,) = look.workers.values()
    assert (worker.pid, worker.leased_bytes, worker.waits) == ("8", 5, 2)
    assert (worker.granted, worker.hits) == (7, 3)


@pytest.mark.parametrize(
    "text", ["", "up 1.0\n", "{", "tierstore_used_bytes 1.0\n", "<html></html>", "a{b\n"]
)
def test_top_page_not_of_a_store_raises(text: str) -> None:
    with pytest.raises(Failure, match="cannot be read"):
        samples_in(text, "http://x")


def test_top_runs_until_it_is_interrupted(service: ThreadService) -> None:
    run = [*command(["top", service.socket, "--interval", 0.05])]
    with subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(2):
            lines = iter(process.stdout.readline, "")
            assert any(line.startswith(str(service.directory)) for line in lines)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_top_redraws_on_a_terminal_and_outlives_the_service(
    service: ThreadService,
) -> None:
    ours, its = os.openpty()
    run = command(["top", service.socket, "--interval", 0.05])
    process = subprocess.Popen(run, stdin=its, stdout=its, stderr=its, env=environment())
    os.close(its)
    try:
        shown = read_until(ours, str(service.directory))
        os.rename(service.socket, service.socket + "-")
        shown += read_until(ours, "retrying")
        os.rename(service.socket + "-", service.socket)
        shown += read_until(ours, "DISK>HOST")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "\x1b[J" in shown
    assert "Traceback" not in shown


def read_until(descriptor: int, text: str) -> str:
    shown = ""
    while text not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", ""):
        shown += os.read(descriptor, 4096).decode(errors="replace")
    return shown


# Starting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("ps",), ("top", "--once", "--interval", "0.05")])
def test_ps_and_top_load_no_torch(words: tuple[str, ...], service: ThreadService) -> None:
    names = ("torch", "numpy", "tierstore.plan", "tierstore.store")
    tell = f"print([name for name in {names!r} if name in sys.modules], file=sys.stderr)"
    run = start(words[0], service.socket, *words[1:], after=tell)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "[]\n"


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["ps"], "msgspec", "serve"),
        (["top"], "msgspec", "serve"),
        (["top", "http://127.0.0.1:1/metrics"], "prometheus_client", "metrics"),
    ],
)
def test_missing_package_is_named(words: list[str], module: str, extra: str) -> None:
    run = start(*words, before=f"import sys; sys.modules[{module!r}] = None")
    assert run.returncode == 2
    assert f"pip install 'tierstore[{extra}]'" in run.stderr


# A served directory ------------------------------------------------------------------------------
