"""Many workers of one service on few cores, with more models than its memory holds.

    python tests/service/crowded.py WORKERS MODELS

Each worker runs its model repeatedly. Once each has run it twice, prints `RESULT` and a JSON object
with the number of runs of each, the service's resident bytes and its budget. Run in a process that
has imported torch but not used it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import struct
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.service.killed import connect, end_children, forked, left_over, start_service
from tests.service.serving import wait_until
from tierstore.wire.status import NoAnswerError, query_status

GROUPS, NBYTES = 8, 128 << 10
SOCKET = "run/s"


def worker(place: int, model: int, passes: mmap.mmap) -> None:
    """Run passes of a model, and count them at `place`."""
    torch.set_num_threads(1)
    store = connect()
    store.register_checkpoint(f"{model}.safetensors")
    done = 0
    while True:
        for number in range(GROUPS):
            with store.acquire(f"g{number}") as lease:
                assert bool((lease.tensors[f"g{number}"] == model * GROUPS + number).all())
        done += 1
        struct.pack_into("I", passes, 4 * place, done)


def answers() -> bool:
    """Return whether the service answers."""
    with contextlib.suppress(NoAnswerError):
        return query_status(SOCKET).pid > 0
    return False


def main() -> None:
    workers, models = int(sys.argv[1]), int(sys.argv[2])
    Path("run").mkdir(mode=0o700)
    for model in range(models):
        tensors = {
            f"g{n}": torch.full((NBYTES // 4,), float(model * GROUPS + n)) for n in range(GROUPS)
        }
        save_file(tensors, f"{model}.safetensors")
    passes = mmap.mmap(-1, 4 * workers)
    budget = models * GROUPS * NBYTES // 4
    service = start_service(budget)
    try:
        found = crowd(service, workers, models, passes)
    finally:
        end_children()
    print("RESULT", json.dumps(found | {"budget": budget}))


def crowd(service: int, workers: int, models: int, passes: mmap.mmap) -> dict[str, object]:
    """Run this many workers until each has used its model twice. Returns their results."""
    wait_until(answers, 30.0)
    before = left_over(service)
    for n in range(workers):
        forked(lambda n=n: worker(n, n % models, passes))

    def counts() -> list[int]:
        return list(struct.unpack_from(f"{workers}I", passes))

    wait_until(lambda: min(counts()) >= 2, 240.0)
    found, report, after = counts(), query_status(SOCKET), left_over(service)
    return {
        "passes": found,
        "workers": len(report.workers),
        "grew": after.resident - before.resident,
    }


if __name__ == "__main__":
    main()
