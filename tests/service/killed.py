"""Kill workers of a service, or the service, at random moments, and check the remains.

    python tests/service/killed.py workers|services COUNT SEED

Prints `RESULT` and a JSON object. Run in a process that has imported torch and not used it: all
others are forks of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.service.serving import LeftOver, wait_until
from tierstore import TierStore, TierStoreError
from tierstore.errors import ServiceLostError
from tierstore.service.cli import serve
from tierstore.wire.status import NoAnswerError, query_status

GROUPS, NBYTES = 12, 256 << 10
RAM = 5 * NBYTES + (64 << 10)
SOCKET, CHECKPOINT = "run/s", "model.safetensors"


def value(number: int) -> float:
    """Return the value that fills group `number`: the oracle."""
    return float(number * 37 % 101)


CHILDREN: list[int] = []


def forked(action: Callable[[], None]) -> int:
    """Fork a child that runs `action` and kills itself: with SIGABRT if `action` raises."""
    child = os.fork()
    if child:
        CHILDREN.append(child)
        return child
    try:
        action()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    os.kill(os.getpid(), signal.SIGKILL)  # without its parent's exit handlers
    raise AssertionError


def end_children() -> None:
    """Kill the remaining children."""
    for child in CHILDREN:
        with contextlib.suppress(ChildProcessError):  # already reaped
            if os.waitpid(child, os.WNOHANG) == (0, 0):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def start_service(ram: int = RAM) -> int:
    """Start a service with `ram` bytes; return its process id."""

    def run() -> None:
        log = os.open("service.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        serve(["served", "--ram", f"{ram}B", "--socket", SOCKET], standalone_mode=False)

    return forked(run)


def connect() -> TierStore:
    """Connect to the service, which may be about to start."""
    while True:
        with contextlib.suppress(ServiceLostError):
            return TierStore.connect(SOCKET, device="cpu")
        time.sleep(0.002)


def walk(store: TierStore, draw: random.Random, rounds: int) -> None:
    """Lease groups at random, up to two at once, and compare every byte."""
    for _ in range(rounds):
        first, second = draw.sample(range(GROUPS), 2)
        try:
            with store.acquire(f"g{first}") as one, store.acquire(f"g{second}") as other:
                for lease, number in ((one, first), (other, second)):
                    assert bool((lease.tensors[f"g{number}"] == value(number)).all()), "wrong bytes"
        except ServiceLostError:
            time.sleep(0.002)


def worker(seed: int) -> None:
    """Work until killed."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    store = connect()
    store.register_checkpoint(CHECKPOINT)
    walk(store, draw, 1 << 40)


def honest(seed: int) -> None:
    """Check all groups, and disconnect properly."""
    torch.set_num_threads(1)
    with connect() as store:
        store.register_checkpoint(CHECKPOINT)
        for number in range(GROUPS):
            with store.acquire(f"g{number}", timeout=20) as lease:
                assert bool((lease.tensors[f"g{number}"] == value(number)).all())


def check_honest(seed: int) -> None:
    _, status = os.waitpid(forked(lambda: honest(seed)), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "an honest worker failed"


def lasting(count: Callable[[], int]) -> int:
    """Return the count once it is stable: the service may be about to close our connection."""
    found = count()
    for _ in range(10):
        time.sleep(0.02)
        found = min(found, count())
    return found


def left_over(service: int) -> LeftOver:
    """Return the service's state once all workers are disconnected."""
    report = query_status(SOCKET)
    memory = Path(f"/proc/{service}/smaps_rollup").read_text()
    resident = next(int(line.split()[1]) for line in memory.splitlines() if line[:4] == "Rss:")
    return LeftOver(
        workers=len(report.workers),
        leases=sum(row.leases for row in report.workers),
        descriptors=lasting(lambda: len(os.listdir(f"/proc/{service}/fd"))),
        threads=len(os.listdir(f"/proc/{service}/task")),
        resident=resident << 10,
    )


def kill_workers(count: int, seed: int) -> dict[str, object]:
    """Kill each worker a random time after its start, while one or two others continue."""
    draw = random.Random(seed)
    service = start_service()
    check_honest(seed)
    wait_until(lambda: not query_status(SOCKET).workers)
    before = left_over(service)
    for number in range(count):
        children = [
            forked(lambda n=number: worker(seed + n)) for _ in range(draw.choice((1, 1, 2)))
        ]
        time.sleep(draw.uniform(0, 0.08))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        wait_until(lambda: not query_status(SOCKET).workers)
        if number % 50 == 49:
            check_honest(seed + number)
    check_honest(seed)
    wait_until(lambda: not query_status(SOCKET).workers)
    after = left_over(service)
    os.kill(service, signal.SIGKILL)
    os.waitpid(service, 0)
    return {"before": before.__dict__, "after": after.__dict__, "killed": count}


def kill_services(count: int, seed: int) -> dict[str, object]:
    """Kill and restart the service while two workers continue."""
    draw = random.Random(seed)
    service = start_service()
    workers = [forked(lambda n=n: worker(seed + n)) for n in range(2)]
    for _ in range(count):
        wait_until(lambda: both_lease(4), 30.0)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(service, signal.SIGKILL)
        os.waitpid(service, 0)
        if draw.random() < 0.3:
            time.sleep(draw.uniform(0, 0.05))
        service = start_service()
    wait_until(lambda: both_lease(4), 30.0)
    alive = [os.waitpid(child, os.WNOHANG) == (0, 0) for child in workers]
    for child in workers:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    check_honest(seed)
    os.kill(service, signal.SIGKILL)
    os.waitpid(service, 0)
    return {"alive": alive, "killed": count}


def both_lease(granted: int) -> bool:
    """Return whether the service runs, and each of two workers was granted as many leases."""
    with contextlib.suppress(NoAnswerError):
        rows = query_status(SOCKET).workers
        return len(rows) == 2 and all(row.granted >= granted for row in rows)
    return False


def main() -> None:
    what, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    Path("run").mkdir(mode=0o700)
    tensors = {f"g{n}": torch.full((NBYTES // 4,), value(n)) for n in range(GROUPS)}
    save_file(tensors, CHECKPOINT)
    try:
        found = {"workers": kill_workers, "services": kill_services}[what](count, seed)
    except (TierStoreError, AssertionError) as error:
        log = Path("service.log")
        print(log.read_text()[-2000:] if log.exists() else "", file=sys.stderr)
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    finally:
        end_children()
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
