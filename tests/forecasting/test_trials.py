"""`plan` without budgets: those that it tries, its recommendation, and the output."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Inspect
from tierstore import TierStore
from tierstore.cli.commands import inspector
from tierstore.model.sizes import available_memory, parse_size

BLOCKS = 16
BLOCK = 1 << 20
WEIGHTS = BLOCKS * BLOCK


@pytest.fixture(autouse=True)
def no_disk_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of 16 blocks of 1 MiB, each of 4 layers."""
    layer = torch.zeros(256, 256)
    weights = {f"blocks.{n}.{m}.weight": layer.clone() for n in range(BLOCKS) for m in range(4)}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def tried(*budgets: str) -> list[str]:
    return [word for budget in budgets for word in ("--ram", budget)]


def enough(document: dict[str, Any]) -> list[str]:
    return [plan["ram_budget"] for plan in document["plans"] if plan["enough"]]


# --- the recommended budget -----------------------------------------------------------------------


def test_recommended_without_times_is_the_smallest_without_reads(
    inspect: Inspect, checkpoint: Path
) -> None:
    found = inspect.json("plan", checkpoint, *tried("40MB", "4MB", "20MB", "10MB"))
    assert [plan["ram_budget"] for plan in found["plans"]] == ["4MB", "10MB", "20MB", "40MB"]
    assert enough(found) == ["20MB"]
    reads = [plan["steps"][0]["read"] for plan in found["plans"]]
    assert reads[0] > reads[1] > reads[2] == reads[3] == 0
    assert found["advice"]["ram_budget"] == "20MB"
    assert (found["advice"]["ram"], found["advice"]["tried"]) == (20_000_000 // 4096 * 4096, True)
    text = inspect("plan", checkpoint, *tried("4MB", "20MB", "40MB")).stdout
    assert (
        "ram_budget='20MB': the smallest of these budgets with which a step reads nothing, "
        "because all its weights stay in RAM." in text
    )
    assert [line.split()[0] for line in text.splitlines() if "enough" in line] == ["20MB"]


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ("0.3", ["20MB"]),  # at 50 MB/s, 5 % more is less than 1 MB
        ("0.35", ["20MB"]),
        ("0", ["20MB"]),
        ("1", ["4MB"]),  # all weights arrive in a third of that
        ("0.25", ["10MB"]),  # 12.5 MB can arrive meanwhile, 10 must
    ],
)
def test_recommended_with_times_allows_a_twentieth_more(
    inspect: Inspect, checkpoint: Path, compute: str, expected: list[str]
) -> None:
    speed = {"0.3": "1MB/s", "0.35": "3MB/s"}.get(compute, "50MB/s")
    options = "--compute", compute, "--disk-bandwidth", speed
    found = inspect.json("plan", checkpoint, *tried("4MB", "10MB", "20MB", "40MB"), *options)
    assert enough(found) == expected
    best = found["plans"][-1]["steps"][0]["seconds"]
    assert best == pytest.approx(float(compute))
    for plan in found["plans"]:
        is_enough = plan["steps"][0]["seconds"] <= 1.05 * best
        assert is_enough == (parse_size(plan["ram_budget"]) >= parse_size(expected[0]))


def test_recommended_when_none_suffices_is_reported(inspect: Inspect, checkpoint: Path) -> None:
    found = inspect.json("plan", checkpoint, *tried("4MB", "8MB"))
    advice = found["advice"]
    assert (enough(found), advice["tried"]) == ([], False)
    assert "None of these budgets is enough" in advice["text"]
    again = inspect.json("plan", checkpoint, *tried("8MB", advice["ram_budget"]))
    assert enough(again) == [advice["ram_budget"]]
    assert WEIGHTS < advice["ram"] < 1.1 * WEIGHTS
    below = f"{int(0.9 * WEIGHTS)}B"
    assert enough(inspect.json("plan", checkpoint, "--ram", below)) == []


def test_recommended_below_auto_is_named(inspect: Inspect, checkpoint: Path) -> None:
    found = inspect.json("plan", checkpoint, *tried("4MB", "auto"))
    assert enough(found) == ["auto"]
    (less,) = re.findall(r" '(\S+)' is enough, too\.$", found["advice"]["text"])
    assert WEIGHTS < parse_size(less) < 1.1 * WEIGHTS
    assert enough(inspect.json("plan", checkpoint, *tried("4MB", less, "auto"))) == [less]


def test_recommended_for_a_slow_link_needs_no_more_memory(
    inspect: Inspect, checkpoint: Path
) -> None:
    options = "--device", "4MB", "--disk-bandwidth", "100GB/s", "--link-bandwidth", "10MB/s"
    found = inspect.json("plan", checkpoint, *tried("8MB", "40MB"), *options)
    slow, fast = (plan["steps"][0] for plan in found["plans"])
    assert slow["read"] > fast["read"] == 0
    assert slow["stalled_seconds"] == pytest.approx(fast["stalled_seconds"], rel=0.02)
    assert fast["stalled_seconds"] > 1
    assert enough(found) == ["8MB"]


def test_recommended_satisfies_each_model_of_a_loop(inspect: Inspect, tmp_path: Path) -> None:
    layers = {f"blocks.{n}.weight": torch.zeros(256, 256) for n in range(16)}
    for name, kept in (("transformer", layers), ("transformer_2", dict([*layers.items()][:8]))):
        (tmp_path / name).mkdir()
        save_file(kept, tmp_path / name / "model.safetensors")
    index = '{"transformer": ["d", "A"], "transformer_2": ["d", "A"]}'
    (tmp_path / "model_index.json").write_text(index)
    found = inspect.json("plan", tmp_path, *tried("2.5MB", "5MB"))
    small, large = ([step["read"] for step in plan["steps"]] for plan in found["plans"])
    assert small[0] > small[1] == 0
    assert large == [0, 0]
    assert enough(found) == ["5MB"]


# --- the tried budgets ----------------------------------------------------------------------------


def test_plan_needs_only_a_model_name(inspect: Inspect, checkpoint: Path) -> None:
    result = inspect("plan", checkpoint)
    assert result.exit_code == 0
    assert "Use ram_budget='24MB'" in result.stdout
    found = inspect.json("plan", checkpoint)
    *ladder, auto = found["plans"]
    assert auto["ram_budget"] == "auto"
    budgets = [plan["ram_budget"] for plan in ladder]
    assert budgets == ["1MB", "3MB", "4MB", "6MB", "8MB", "12MB", "16MB", "24MB"]
    assert all(plan["overlaps"] for plan in ladder)
    assert enough(found) == ["24MB"]
    assert [plan["steps"][0]["read"] == 0 for plan in ladder] == [False] * 7 + [True]


def test_auto_budget_equals_a_stores(inspect: Inspect, checkpoint: Path, disk_dir: Path) -> None:
    found = inspect.json("plan", checkpoint, *tried("auto", "5MB", "50%"))
    rams = {plan["ram_budget"]: plan["ram"] for plan in found["plans"]}
    with TierStore("auto", disk_dir, device="cpu") as store:
        budget = store.stats().budget_bytes["HOST"]
    assert budget == pytest.approx(rams["auto"], rel=0.1)  # other processes use memory meanwhile
    assert rams["auto"] == pytest.approx(available_memory() / 2, rel=0.1)
    with TierStore("50%", disk_dir, device="cpu") as store:
        assert rams["50%"] == store.stats().budget_bytes["HOST"]
    assert re.search(r"^auto \(\d+\.\d [GM]B\)", table(inspect, checkpoint, "auto"), re.MULTILINE)


def table(inspect: Inspect, checkpoint: Path, budget: str) -> str:
    return inspect("plan", checkpoint, "--ram", budget).stdout


# --- output ---------------------------------------------------------------------------------------


def test_document_lists_groups_on_request_only(inspect: Inspect, checkpoint: Path) -> None:
    short = inspect("plan", checkpoint, *tried("4MB", "40MB"), "--json").stdout
    assert "blocks.0" not in short
    assert len(short) < 4000
    (part,) = inspect.json("plan", checkpoint, "--ram", "4MB", "--groups")["plans"][0]["components"]
    names = [name for group in part["groups"] for name in group["tensors"]]
    assert len(names) == 4 * BLOCKS


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        (tried("4MB", "auto"), "MB"),
        (tried("4MiB"), "MiB"),
        (tried("4MiB", "40MB"), "MiB"),
        ([], "MB"),
        (tried("50%"), "MB"),
        ([*tried("50%"), "--device", "4MiB"], "MiB"),
    ],
)
def test_sizes_are_printed_in_the_units_given(
    inspect: Inspect, checkpoint: Path, options: list[str], unit: str
) -> None:
    typed = [budget for option, budget in itertools.pairwise(options) if option == "--ram"]
    result = inspect("plan", checkpoint, *options, "--disk-bandwidth", "1GB/s")
    assert result.exit_code == 0, result.output
    for budget in typed:
        assert re.search(rf"^{re.escape(budget)}( |$)", result.stdout, re.MULTILINE)
    computed = re.findall(r"\d\.\d [KMGT]i?B", result.stdout)
    assert computed
    assert {text.split()[1].endswith("iB") for text in computed} == {unit.endswith("iB")}
    assert f"16.{'8' if unit == 'MB' else '0'} {unit}" in result.stdout


def test_budget_too_small_is_listed_beside_the_others(inspect: Inspect, checkpoint: Path) -> None:
    result = inspect("plan", checkpoint, *tried("200KB", "300KB", "20MB"))
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if "KB " in line}
    assert "too small" in rows["200KB"] and "no overlap" in rows["300KB"]
    assert "--ram 200KB is too small" in result.stderr
    assert "hardly overlap" in result.stderr
    small, *_ = inspect.json("plan", checkpoint, *tried("200KB", "20MB"))["plans"]
    assert (small["steps"], small["enough"]) == ([], False)
    assert "too small" in small["problem"]


@pytest.mark.parametrize("name", ["plan", "replay"])
def test_help_examples_parse(inspect: Inspect, checkpoint: Path, name: str) -> None:
    epilog = inspector.commands[name].epilog
    assert epilog is not None
    examples = [line.split()[1:] for line in epilog.splitlines() if "tierstore-inspect" in line]
    assert len(examples) >= 3
    for _, _, *options in examples:
        result = inspect(name, checkpoint if name == "plan" else "/nowhere/run.json", *options)
        assert result.exit_code == (0 if name == "plan" else 1), result.output
        assert "Usage" not in result.stderr
