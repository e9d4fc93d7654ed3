"""What the commands for a GPU say of figures, and that whatever happens they say it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.gpu import correctness, inference, pages, training
from tools.gpu.bench import Bench, installed
from tools.gpu.lines import (
    ENDED,
    HOLDS,
    MEASURED,
    MISSED,
    NOT_REACHED,
    TIME,
    Goal,
    Group,
    Line,
    Run,
    Unavailable,
    chosen,
    verdict,
)

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {"correctness": correctness, "inference": inference, "training": training}


def groups_of(name: str) -> Sequence[Group]:
    """The lines of a command. Nothing is measured yet."""
    return COMMANDS[name].groups(Bench(torch.device("cpu"), True, Path("/nowhere")))  # type: ignore[attr-defined]


def lines_of(name: str) -> list[Line]:
    return [line for group in groups_of(name) for line in group.lines]


PROMISES = [
    pytest.param(line, id=f"{name}-{line.name}")
    for name in COMMANDS
    for line in lines_of(name)
    if line.goals
]


# Verdicts -----------------------------------------------------------------------------------------


def bounds(line: Line) -> dict[str, float]:
    """Figures that are just good enough."""
    return {
        goal.figure: goal.at_most if goal.at_most < math.inf else goal.at_least
        for goal in line.goals
    }


@pytest.mark.parametrize("line", PROMISES)
def test_a_line_holds_on_its_bounds_and_is_missed_beyond_any(line: Line) -> None:
    enough = bounds(line)
    assert verdict(line.goals, enough) == HOLDS
    for goal in line.goals:
        for bound, beyond in (
            (goal.at_most, goal.at_most + 0.001),
            (goal.at_least, goal.at_least - 0.001),
        ):
            if math.isfinite(bound):
                assert verdict(line.goals, {**enough, goal.figure: beyond}) == MISSED
        assert verdict(line.goals, {**enough, goal.figure: math.nan}) == MISSED
        others = {name: value for name, value in enough.items() if name != goal.figure}
        assert verdict(line.goals, others).startswith("not run: needs")


def test_each_goal_has_a_bound_and_each_line_a_name_of_its_own() -> None:
    for name in COMMANDS:
        lines = lines_of(name)
        names = [line.name for line in lines]
        assert len(names) == len(set(names))
        assert not set(names) & {group.name for group in groups_of(name)}
        for goal in (goal for line in lines for goal in line.goals):
            assert math.isfinite(goal.at_least) or math.isfinite(goal.at_most)


def test_what_the_first_run_is_to_show() -> None:
    """The goals that were set before anything ran on a GPU."""
    told = {line.name: [str(goal) for goal in line.goals] for n in COMMANDS for line in lines_of(n)}
    assert told["link"] == [
        "onload_to_pin_memory at least 0.95",
        "offload_to_pin_memory at least 0.95",
    ]
    assert "wrong at least 1" in told["without the event of a release"]
    assert "to_allowed at most 1.1" in told["running ahead"]
    assert "to_bound at most 1.15" in told["all in RAM"]
    assert "to_bound at most 1.2" in told["half in RAM"]
    assert "to_bound at most 1.3" in told["offload_activations"]
    assert "differing at most 0" in told["OffloadModel, RAM for 0.5 x, fused"]


def test_without_goals_a_line_is_measured() -> None:
    assert verdict([], {"seconds": 1.0}) == MEASURED


# Runs ---------------------------------------------------------------------------------------------


def figures(**found: float) -> Callable[[], dict[str, float]]:
    return lambda: found


def failing(error: Exception) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        raise error

    return measure


GOOD = Goal("wrong", at_most=0)


def run(groups: Sequence[Group], out: Path, seconds: float = 60, **options: Any) -> list[Any]:
    """The lines of the file, and the exit status behind them."""
    status = Run(groups, out, {"command": "trial"}, seconds, **options).run()
    return [*json.loads(out.read_text())["lines"], status]


def test_a_file_tells_figures_and_verdicts(tmp_path: Path) -> None:
    lines = [
        Line("good", "is right", figures(wrong=0, seconds=2.5), [GOOD]),
        Line("plain", "has no goal", figures(seconds=1.0)),
        Line("not here", "cannot be", failing(Unavailable("x is not installed")), [GOOD]),
        Line("other", "of others", failing(OSError("no such thing")), peer=True),
    ]
    good, plain, away, other, status = run([Group("g", lines)], tmp_path / "out.json")
    assert status == 0
    assert (good["verdict"], good["figures"]) == (HOLDS, {"wrong": 0, "seconds": 2.5})
    assert (good["group"], good["goals"]) == ("g", ["wrong at most 0"])
    assert plain["verdict"] == MEASURED
    assert away["verdict"] == "not run: x is not installed"
    assert other["verdict"] == "not run: OSError: no such thing"
    assert "no such thing" in other["error"]
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("measure", (figures(wrong=1), failing(KeyError("wrong"))))
@pytest.mark.parametrize("decisive", (True, False))
def test_after_a_group_that_decides_nothing_else_is_measured(
    decisive: bool, measure: Any, tmp_path: Path
) -> None:
    asked = []
    groups = [
        Group(
            "first",
            [
                Line("bad", "", measure, [GOOD]),
                Line("beside", "", lambda: asked.append("beside") or {}),
            ],
            decisive,
        ),
        Group("then", [Line("later", "", lambda: asked.append("later") or {})]),
    ]
    bad, beside, later, status = run(groups, tmp_path / "out.json")
    assert status == 1
    assert (bad["verdict"], beside["verdict"]) == (MISSED, MEASURED)
    assert later["verdict"] == ("not run: first was missed" if decisive else MEASURED)
    assert asked == ["beside", "later"][: 2 - decisive]


def test_a_run_stops_in_time_with_what_it_has(tmp_path: Path) -> None:
    left: list[Any] = []
    stopped = threading.Event()
    waiting = threading.Event()

    def leave(status: int) -> None:
        left.append(("leave", status))
        stopped.set()

    def slow() -> dict[str, float]:
        waiting.set()
        assert stopped.wait(30)
        return {}

    lines = [
        Line("done", "", figures(wrong=0), [GOOD]),
        Line("slow", "", slow),
        Line("next", "", figures(seconds=1)),
    ]
    out = tmp_path / "out.json"
    tidy = lambda: left.append("tidy")  # noqa: E731
    done, slow_one, after, _ = run([Group("g", lines)], out, 0.5, tidy=tidy, leave=leave)
    assert waiting.is_set()
    assert left == ["tidy", ("leave", 0)]
    assert done["verdict"] == HOLDS
    assert [slow_one["verdict"], after["verdict"]] == [TIME, TIME], "it was written after the end"


def test_a_process_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    program = (
        "import os; from pathlib import Path\n"
        "from tools.gpu.lines import *\n"
        "lines = [Line('a', '', lambda: {'x': 1.0}), Line('b', '', lambda: os._exit(9)),\n"
        "         Line('c', '', lambda: {})]\n"
        "Run([Group('g', lines)], Path('out.json'), {}, 60).run()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    assert done.returncode == 9
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    assert [line["verdict"] for line in lines] == [MEASURED, ENDED, NOT_REACHED]


def test_groups_and_lines_can_be_chosen() -> None:
    a, b, c = (Line(name, "", figures()) for name in "abc")
    groups = [Group("one", [a, b], True), Group("two", [c])]
    assert chosen(groups, []) == groups
    assert chosen(groups, ["b"]) == [Group("one", [b], True)]
    assert chosen(groups, ["one", "c"]) == groups
    with pytest.raises(ValueError, match=r"no group or line \['x'\]; there are \['a'"):
        chosen(groups, ["a", "x"])


def test_a_package_that_is_missing_is_told() -> None:
    installed("json")
    with pytest.raises(Unavailable, match="no_such_package is not installed"):
        installed("no_such_package")


# The command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--device", "cuda"], "there is no cuda device here"),
        (["--device", "nonsense"], "nonsense"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
def test_without_the_device_a_command_says_so(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.gpu.bench import command

    with pytest.raises(SystemExit) as ended:
        command("trial", "about", lambda bench: [], ["--out", str(tmp_path / "x.json"), *words])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Pages --------------------------------------------------------------------------------------------

DOCUMENT = {
    "command": "inference",
    "small": False,
    "began": "2031-02-03 04:05:06",
    "seconds": 512.3,
    "hardware": {
        "name": "NVIDIA H100 80GB HBM3",
        "device_gib": 79.1,
        "cuda": "13.0",
        "link": "580.1, 5, 16",
        "cores": 16,
        "memory_gib": 128.0,
        "system": "Linux 6.8",
        "python": "3.12.3",
        "versions": {"torch": "2.11.0"},
        "commit": "0123456789abcdef",
    },
    "lines": [
        {
            "group": "ours",
            "name": "all in RAM",
            "about": "a store",
            "goals": ["to_bound at most 1.15"],
            "verdict": HOLDS,
            "figures": {"seconds": 0.51234, "to_bound": 1.1},
            "seconds": 12.0,
            "error": "",
        },
        {
            "group": "ours",
            "name": "half in RAM",
            "about": "a store",
            "goals": ["to_bound at most 1.2"],
            "verdict": MISSED,
            "figures": {"to_bound": 1.3},
            "seconds": 12.0,
            "error": "Traceback: it went wrong\n",
        },
        {
            "group": "peers",
            "name": "diffusers",
            "about": "theirs",
            "goals": [],
            "verdict": "not run: diffusers is not installed",
            "figures": {},
            "seconds": 0.0,
            "error": "",
        },
    ],
}


def write(document: Any, place: Path) -> str:
    file = place / "result.json"
    file.write_text(json.dumps(document))
    return str(file)


def test_a_page_names_the_hardware_and_what_was_missed(tmp_path: Path) -> None:
    file = write(DOCUMENT, tmp_path)
    assert pages.main([file, "--to", str(tmp_path)]) == 0
    page = tmp_path / "gpu-inference_nvidia-h100-80gb-hbm3_2031-02-03.md"
    text = page.read_text()
    assert "NVIDIA H100 80GB HBM3, 79.1 GiB, CUDA 13.0; driver" in text
    assert "torch 2.11.0; commit 0123456789ab" in text
    assert "python -m tools.gpu.inference --out inference.json" in text
    assert re.search(r"all in RAM +\| a store \| holds .*seconds 0.5123; to_bound 1.1", text)
    assert re.search(r"half in RAM +\| a store \| MISSED", text)
    assert "not run: diffusers is not installed" in text
    assert "it went wrong" in text
    assert "- holds: all in RAM: to_bound at most 1.15" in text
    assert "- MISSED: half in RAM: to_bound at most 1.2" in text
    page.write_text(text.replace("<!-- measured: begin -->", "Words.\n\n<!-- measured: begin -->"))
    pages.main([file, "--to", str(tmp_path)])
    assert "Words." in page.read_text()


@pytest.mark.parametrize("why", ("small", "no GPU"))
def test_a_trial_makes_no_page(
    why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {**DOCUMENT, "small": why == "small"}
    if why == "no GPU":
        hardware = {k: v for k, v in DOCUMENT["hardware"].items() if k != "device_gib"}  # type: ignore[attr-defined]
        document["hardware"] = {**hardware, "name": "pretend (no GPU)"}
    file = write(document, tmp_path)
    pages.main([file, "--to", str(tmp_path)])
    assert "no page" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.md"))
    pages.main([file, "--to", str(tmp_path), "--trial"])
    assert list(tmp_path.glob("*.md"))
