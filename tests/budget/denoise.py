"""Run a Flux of about 500 MB for 20 steps in a separate process, and print its memory use.

    python -m tests.budget.denoise CHECKPOINT DISK_DIR RAM_BUDGET POLICY

Only anonymous (private) memory counts: maps of the checkpoint belong to the page cache.
The baseline is taken after one un-offloaded step of a *tiny* pipeline, so that threads, allocator
pools and lazily imported code are part of it, and after the pipeline is loaded.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from tests import pipelines
from tierstore import TierStore, enable_group_offload

STEPS = 20
SAMPLE_SECONDS = 0.005


def anonymous_bytes() -> int:
    """Return the private memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak:
    """The largest anonymous memory seen by a sampling thread."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(SAMPLE_SECONDS)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def main(checkpoint: str, disk_dir: str, budget: str, policy: str) -> None:
    tiny = Path(disk_dir).parent / "tiny"
    pipelines.run("flux", pipelines.load("flux", pipelines.build_flux(tiny, size="tiny")), steps=1)
    pipe = pipelines.load("flux", Path(checkpoint))
    weights = pipelines.weight_bytes(pipe)
    steps: list[dict[str, int]] = []
    baseline = anonymous_bytes()
    with TierStore(budget, disk_dir, device="cpu", policy=policy) as store, Peak() as peak:
        handle = enable_group_offload(pipe, store)
        largest = max(g.nbytes for g in store.snapshot().groups if g.key in handle.groups)

        def note(_pipe: object, _step: int, _time: object, tensors: dict) -> dict:
            read = store.stats().bytes_read
            steps.append({"anonymous": anonymous_bytes(), "read": read})
            return tensors

        pipelines.run("flux", pipe, steps=STEPS, callback_on_step_end=note)
        stats = store.stats()
        offloaded = pipelines.weight_bytes(pipe.transformer)
    result = {
        "weights": weights,
        "transformer": offloaded,
        "largest_group": largest,
        "budget": stats.budget_bytes["HOST"],
        "peak_of_store": stats.peak_bytes["HOST"],
        "bytes_written": stats.bytes_written,
        "baseline": baseline,
        "peak": peak.bytes,
        "steps": steps,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
