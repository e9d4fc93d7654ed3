"""A training step whose activations are more than the budget for them

    python tools/bench/activations.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

The same step of a Flux transformer in float32, forward and backward, as it is, with torch's
`save_on_cpu`, and with `tierstore.offload_activations` at three RAM budgets. Each contender is a
process of its own that lives until the end, so that peaks are its own, and does one step when it is
its turn. Weights and gradients are there before anything is measured.

On a CPU `save_on_cpu(pin_memory=False)` keeps what it is given, and copies nothing;
`pin_memory=True` copies every saved tensor, weights too, into memory that is not pinned. On the
pretend accelerator of the tests, bytes and peaks are what they would be on a real one; it has no
speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tierstore.model.sizes import PAGE, round_up
from tools.bench import machine, training
from tools.bench.report import Claim, Page
from tools.bench.training import COPIED, FULL, KEPT, MARK, OURS, PLAIN, SMALL, Turn

ALL_FITS = next(iter(OURS))

TORCHTUNE = (
    "torchtune's `OffloadActivations` is not here: when it is made it asks for CUDA streams, with "
    "`use_streams=False` too, and raises where there is no CUDA (torchtune 0.6.1). It copies every "
    "saved tensor that is no `nn.Parameter`, and has neither a budget nor a disk."
)


class Worker:
    """The process of a contender."""

    def __init__(self, name: str, small: bool, device: str, budgets: list[int], place: Path):
        told = {"name": name, "small": small, "device": device, "budgets": budgets}
        words = [sys.executable, training.__file__, json.dumps({**told, "place": str(place)})]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> dict[str, Any]:
        """What it says next."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        raise RuntimeError("a contender has ended")

    def turn(self) -> Turn:
        """One step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Turn(**self.answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Found:
    """The steps of all contenders on one device, and what a step saves (bytes)."""

    tensors: int
    pieces: list[int]
    budgets: dict[str, int]
    turns: dict[str, list[Turn]]

    @property
    def saved(self) -> int:
        return sum(self.pieces)

    def equal(self, name: str) -> bool:
        """Whether the gradients of all steps are those of a step without hooks, to the last bit."""
        plain = self.turns[PLAIN][0].gradients
        return all(turn.gradients == plain for turn in self.turns[name])

    def most(self, name: str, what: str) -> int:
        return max(getattr(turn, what) for turn in self.turns[name])

    def ratio(self, name: str) -> list[float]:
        """Seconds of a step to those of the copying `save_on_cpu`, round by round."""
        ours, theirs = ([t.seconds for t in self.turns[n]] for n in (name, COPIED))
        return machine.ratios(ours, theirs)


def measure(device: str, small: bool, rounds: int, place: Path) -> Found:
    """Have all contenders take turns."""
    with ExitStack() as stack:

        def start(name: str, budgets: list[int]) -> Worker:
            directory = place / f"{device}-{len(workers)}"
            worker = Worker(name, small, device, budgets, directory)
            stack.callback(worker.close)
            return worker

        workers: dict[str, Worker] = {}
        workers[PLAIN] = start(PLAIN, [])
        told = workers[PLAIN].answer()
        saved, largest = sum(told["pieces"]), round_up(max(told["pieces"]), PAGE)
        budgets = {name: max(int(saved * share), largest) for name, share in OURS.items()}
        for name in (KEPT, COPIED):
            workers[name] = start(name, [])
        for name, budget in budgets.items():
            workers[name] = start(name, [budget, 4 * largest])
        for worker in workers.values():
            assert worker.answer()["ready"]
        runs = {name: worker.turn for name, worker in workers.items()}
        turns = machine.interleave(runs, rounds, doing=f"Training on {device}")
    return Found(told["tensors"], told["pieces"], budgets, turns)


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}" if nbytes >= 1e7 else f"{nbytes / 1e6:,.1f}"


def rows(found: Found) -> Iterator[list[str]]:
    for name, turns in found.turns.items():
        moved = (
            machine.median([getattr(t, n) for t in turns]) for n in ("copied", "written", "read")
        )
        yield [
            name,
            megabytes(found.budgets[name]) if name in found.budgets else "none",
            *map(megabytes, moved),
            megabytes(found.most(name, "host")),
            machine.spread([turn.seconds for turn in turns]),
            machine.spread(found.ratio(name)),
            "equal" if found.equal(name) else "DIFFER",
        ]


def rows_of_device(found: Found) -> Iterator[list[str]]:
    for name in found.turns:
        yield [
            name,
            *(megabytes(found.most(name, n)) for n in ("copied", "written", "device")),
            "equal" if found.equal(name) else "DIFFER",
        ]


def told_of(found: Found) -> str:
    return (
        f"A step saves {megabytes(found.tensors)} MB of tensors, weights included. With each piece "
        f"of memory counted once, and without weights, that is {megabytes(found.saved)} MB in "
        f"{len(found.pieces)} pieces. Budgets are shares of the latter. All bytes below are in MB."
    )


def claims_of(found: Found) -> Iterator[Claim]:
    within = max(found.most(n, "store") / budget for n, budget in found.budgets.items())
    copied = max(found.most(n, "copied") for n in OURS) / found.saved
    equal = float(all(map(found.equal, OURS)))
    yield Claim("tierstore's gradients are the same bit for bit", equal, at_least=1)
    yield Claim("the store stays within its budget (share of it)", within, at_most=1)
    yield Claim("bytes copied are at most the bytes saved (share of them)", copied, at_most=1)


def speed_claim(found: Found) -> Claim:
    slower = machine.median(found.ratio(ALL_FITS))
    text = f"where all fits, no slower than `{COPIED}` (time to time)"
    return Claim(text, slower, at_most=1)


def on_pretend(page: Page, place: Path) -> None:
    """The part on the accelerator of the tests."""
    from tests.device import pretend

    if reason := pretend.available():
        page.text(f"Not run on the pretend accelerator: {reason}.")
        return
    found = measure("pretend", True, 1, place)
    page.text(f"On the pretend accelerator, with a small model. {told_of(found)}")
    columns = ("contender", "copied from it", "written", "device peak", "gradients")
    page.table(columns, rows_of_device(found))
    page.claims(claims_of(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each contender takes its turn")
    parser.add_argument("--dir", type=Path, help="where the stores have their files")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    rounds = options.rounds or (SMALL if options.small else FULL).rounds
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        page = Page(__doc__, place, ("torch", "diffusers"))
        found = measure("cpu", options.small, rounds, place)
        page.text(told_of(found))
        page.table(
            (
                "contender",
                "budget",
                "copied",
                "written",
                "read back",
                "peak RAM",
                "seconds per step",
                f"to `{COPIED}`",
                "gradients",
            ),
            rows(found),
        )
        page.text("Peak RAM is anonymous memory over weights and gradients.")
        page.claims([*claims_of(found), speed_claim(found)])
        on_pretend(page, place)
        page.text(TORCHTUNE)
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
