"""Trainings killed at chosen points, each in a separate process, and resumed in another.

    python -m tests.training.crashing '{"place": ..., "points": {"save_training": 50}}'

All are forked from this process, which computes nothing itself: torch is imported once, and no
process with threads is forked. A point is the n-th time that the interpreter enters or leaves a
function, of Python or C, on any thread. Two of three points are the n-th time that a save begins or
ends a system call: a write, a sync, a rename.

Prints a line of JSON for each point: the way to save, and a `Crash`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_structure

from tests.helpers.processes import Tell, forked
from tests.helpers.system_calls import Call, system_call, until_the_end
from tests.helpers.tensors import assert_same
from tierstore import OffloadModel, OffloadOptimizer, TierStore, load_training, save_training

STEPS = 4
LAYERS = 4
WIDTH = 96
BUDGET = 48 * 4096  # of 590 kB of parameters, gradients and states
ADAMW = {"lr": 1e-2, "fused": True}


# Ways to save -------------------------------------------------------------------------------------


def save_ours(path: Path, model: Any, optimizer: Any, extra: dict[str, Any]) -> None:
    save_training(path, model, optimizer, extra=extra)


def save_plainly(path: Path, model: Any, optimizer: Any, extra: dict[str, Any]) -> None:
    """The control: save over the last one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}
    torch.save(state, path)


def load_plainly(path: Path, model: Any, optimizer: Any) -> dict[str, Any]:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["extra"]


WAYS: dict[str, tuple[Callable[..., None], Callable[..., Any]]] = {
    "save_training": (save_ours, load_training),
    "torch.save": (save_plainly, load_plainly),
}


# A training ---------------------------------------------------------------------------------------


def build() -> nn.Module:
    """Build the same model every time, with dropout, which depends on the steps before."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(LAYERS)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def step_once(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def uninterrupted(target: Path) -> None:
    """Run all steps of a plain model and AdamW, without a store. Saves the final values."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = [step_once(step, model, optimizer) for step in range(STEPS)]
    torch.save({"losses": losses, "state": state_of(model, optimizer)}, target)


@contextlib.contextmanager
def training(disk_dir: Path) -> Iterator[tuple[OffloadModel, OffloadOptimizer]]:
    with TierStore(BUDGET, disk_dir, device="cpu") as store:
        model = OffloadModel(build(), store)
        yield model, OffloadOptimizer(model, store, torch.optim.AdamW, **ADAMW)


def train(place: Path, way: str, killer: Killer, tell: Tell) -> None:
    """Run all steps, with a save after each. Reports each step that begins, and each save."""
    save, _ = WAYS[way]
    with killer, training(place / "store") as (model, optimizer):
        for step in range(STEPS):
            step_once(step, model, optimizer)
            extra = {"done": step + 1, "random": torch.get_rng_state().tolist()}
            with killer.saving():
                save(place / "run", model, optimizer, extra)
            tell(step + 1)
        killer.stop()
        tell([killer.in_all, killer.in_saves])


def go_on(place: Path, way: str, expected: Path, tell: Tell) -> None:
    """Open the killed store's directory, load, and run the remaining steps.

    Raises if any value differs. Reports how many steps were found.
    """
    save, load = WAYS[way]
    reference = torch.load(expected)
    with training(place / "store") as (model, optimizer):
        done = 0
        run = place / "run"
        if run.is_file() or (run / ".metadata").exists():
            extra = load(run, model, optimizer)
            done = extra["done"]
            torch.set_rng_state(torch.tensor(extra["random"], dtype=torch.uint8))
        tell(done)
        losses = [step_once(step, model, optimizer) for step in range(done, STEPS)]
        assert_same(losses, reference["losses"][done:], same_device=True)
        state = state_of(model, optimizer)
        assert tree_structure(state) == tree_structure(reference["state"])
        assert_same(state, reference["state"], same_device=True)
        save(run, model, optimizer, {"done": STEPS})
    tell(names_in(run))


def names_in(run: Path) -> list[str]:
    """Return the names of a save's files, without the number of the save."""
    names = [p.name for p in run.iterdir()] if run.is_dir() else []
    return sorted(re.sub(r"_\d+\.distcp", ".distcp", name) for name in names)


# Being killed -------------------------------------------------------------------------------------


class Killer:
    """Counts events on all threads, and kills the process at event number `point`.

    Counts system calls in saves, if `only_saves`; kills never if the point is None. Only threads
    started after it was entered count. `torch.save` makes its calls in C++, so there all calls of C
    are counted for them.
    """

    def __init__(self, way: str, point: int | None = None, only_saves: bool = False) -> None:
        self._modules = {"posix"} if way != "torch.save" else None
        self._point = point
        self.only_saves = only_saves
        self.in_all = self.in_saves = 0
        self._saving = False

    def __enter__(self) -> None:
        if not self.only_saves:
            threading.setprofile(self._event)
            sys.setprofile(self._event)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._point = None
        sys.setprofile(None)
        threading.setprofile(None)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        self._saving = True
        sys.setprofile(self._event)
        yield
        if self.only_saves:
            sys.setprofile(None)
        self._saving = False

    def _event(self, _: Any, what: str, function: Any) -> None:
        self.in_all += 1
        if self._saving and what[:2] == "c_" and self._counts(function):
            self.in_saves += 1
        elif self.only_saves:
            return
        if self._point == (self.in_saves if self.only_saves else self.in_all):
            os.kill(os.getpid(), signal.SIGKILL)

    def _counts(self, function: Any) -> bool:
        return self._modules is None or function.__module__ in self._modules


@dataclass
class Crash:
    """One point and its outcome.

    `saved` steps were reported when the process was killed, then `found` were; the next process
    resumed without an `error` and left `names`.
    """

    in_save: bool
    killed: bool = False
    saved: int = 0
    left: list[str] | None = None
    found: int | None = None
    names: list[str] | None = None
    error: str = ""


class BeforeTheRename(Killer):
    """Kills the process when the new files are in place, and `.metadata` is still the old one."""

    def __init__(self) -> None:
        super().__init__("save_training", only_saves=True)

    def __enter__(self) -> None:
        def die(call: Call) -> Any:
            if (
                Path(call.args[1]).name == ".metadata"
                and len(names_in(Path(call.args[1]).parent)) > 3
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            return call.go_on()

        until_the_end(system_call("rename", answer=die))


def done_in_a_child(do: Callable[[Tell], None]) -> tuple[int, list[Any]]:
    """Return the exit code and the messages; the last one is the traceback, if it raised."""
    child, source = forked(do)
    with os.fdopen(source) as lines:
        told = [json.loads(line)[-1] for line in lines]
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), told


def crash(place: Path, way: str, expected: Path, killer: Killer) -> Crash:
    """Train, get killed, resume."""
    place.mkdir()
    found = Crash(killer.only_saves)
    code, told = done_in_a_child(lambda tell: train(place, way, killer, tell))
    found.killed = code == -signal.SIGKILL
    found.saved = max((each for each in told if isinstance(each, int)), default=0)
    found.left = names_in(place / "run")
    code, told = done_in_a_child(lambda tell: go_on(place, way, expected, tell))
    if code:
        found.error = str(told[-1:])
    else:
        found.found, found.names = told
    shutil.rmtree(place)
    return found


def main(told: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    root = Path(told["place"])
    expected = root / "expected"
    code, said = done_in_a_child(lambda _: uninterrupted(expected))
    assert code == 0, said
    for way, points in told["points"].items():
        chosen = random.Random(way)
        counted = {}
        for only_saves in (False, True):  # in saves, other threads are not counted
            counter = Killer(way, None, only_saves)
            (root / f"{way} {only_saves}").mkdir()
            code, said = done_in_a_child(
                lambda tell, way=way, counter=counter: train(
                    root / f"{way} {counter.only_saves}", way, counter, tell
                )
            )
            assert code == 0, said
            counted[only_saves] = said[-1][only_saves]
        for number in range(points):
            only_saves = number % 3 != 0
            point = chosen.randint(1, counted[only_saves])
            killer = Killer(way, point, only_saves)
            if way == "save_training" and number == 0:
                killer = BeforeTheRename()
            found = crash(root / str(number), way, expected, killer)
            print("RESULT " + json.dumps([way, asdict(found)]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
