"""The scaffolding of benchmarks: turns, ratios, pages, processes, and their counters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.apart_trial import doubled, hungry, summing
from tests.bench.test_benches import NEEDS
from tools.bench import machine
from tools.bench.activations import Saved
from tools.bench.apart import Apart, Ended, Killed, apart
from tools.bench.disk_mixed import Mix, Mixed
from tools.bench.memory_group import MemoryGroup
from tools.bench.page import Claim, publish
from tools.bench.runner import interleave, ratios, spread

needs_groups = pytest.mark.skipif(not NEEDS["loading"], reason="may not make control groups")


def test_interleave_takes_turns_and_ratios_are_by_round() -> None:
    calls: list[str] = []
    cleared: list[int] = []

    def runs(name: str, *values: float) -> float:
        calls.append(name)
        return values[calls.count(name) - 1]

    results = interleave(
        {"a": lambda: runs("a", 1, 2, 30), "b": lambda: runs("b", 2, 4, 30)},
        3,
        before=lambda: cleared.append(len(calls)),
    )
    assert results == {"a": [1, 2, 30], "b": [2, 4, 30]}
    assert [sorted(calls[i : i + 2]) for i in (0, 2, 4)] == 3 * [["a", "b"]]
    assert cleared == list(range(6))
    assert spread(ratios(results["a"], results["b"])) == "0.50 (0.50 to 1.00)"


def test_claim_holds_within_its_bounds() -> None:
    assert Claim("fast", 3.0, at_least=3.0).verdict() == "held: fast (3); at least 3"
    assert Claim("fast", 2.999, at_least=3.0).verdict().startswith("MISSED")
    assert Claim("short", 1.13, at_most=1.12).verdict() == "MISSED: short (1.13); at most 1.12"


def test_publish_keeps_prose_and_replaces_figures(tmp_path: Path) -> None:
    page = tmp_path / "folder" / "page.md"
    publish(page, "A title", "| a table |")
    page.write_text(page.read_text() + "prose")
    publish(page, "A title", "| another |")
    text = page.read_text()
    assert text.startswith("# A title\n") and text.endswith("prose")
    assert "| another |" in text and "| a table |" not in text


def test_stopwatch_counts_cpu_seconds_of_children() -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with machine.Stopwatch() as watch:
        subprocess.run([sys.executable, "-c", burn], check=True)
    assert min(watch.cpu_seconds, watch.seconds) >= 0.3


def test_apart_returns_the_result_or_raises_the_error() -> None:
    assert apart(doubled, 21) == 42
    with pytest.raises(Ended, match="it is below zero"):
        apart(doubled, -1)


def test_apart_worker_keeps_its_state_between_messages() -> None:
    with Apart(summing) as worker:
        assert [worker.answer(), worker.ask(3), worker.ask(4)] == [0, 3, 7]
    assert worker.process.returncode is not None


@needs_groups
def test_apart_beyond_the_group_limit_is_killed() -> None:
    with MemoryGroup(64 << 20) as group:
        assert apart(hungry, 16 << 20, group=group) == 16 << 20
        with pytest.raises(Killed):
            apart(hungry, 128 << 20, group=group)
        assert 16 << 20 < group.peak <= 64 << 20
    assert not group.path.exists()


def test_saved_counts_each_piece_once_and_no_weights() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    saved = Saved({weight.untyped_storage().data_ptr()})
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        x = torch.ones(4, 4) @ weight  # saves nothing but the weight
        (x.sin() * x.cos()).sum()  # saves x twice, and two results
    assert sorted(saved.pieces.values()) == 4 * [4 * 16]
    assert saved.tensors == 5 * 4 * 16


def test_mix_moves_its_share_in_the_order_of_a_step() -> None:
    mix = Mix([4096, 8192, 4096, 8192], written=0.5)
    order = list(mix.order())
    assert [which for which, _ in order if which >= 0] == [0, 1, 2, 3]
    read = written = 0
    seen: set[int] = set()
    for which, size in order:
        group = which if which >= 0 else ~which
        assert size == mix.groups[group]
        if which >= 0:
            seen.add(group)
            read += size
        else:
            assert group in seen, "it was written before it was read"
            written += size
        assert abs(written - read / 2) <= max(mix.groups), "one of the ways is far ahead"
    assert (read, mix.nbytes) == (sum(mix.groups), read + written)
    assert written > 0


def test_mixed_writes_the_groups_of_its_mix(tmp_path: Path) -> None:
    mixed = Mixed(tmp_path / "store", Mix([1 << 16] * 8, written=1.0))
    extents = [entry.spill_extent for entry in mixed.entries if entry.spill_extent]
    try:
        wanted = bytes(range(256)) * 256
        assert all(bytes(mixed.spill.map_extent(extent)) != wanted for extent in extents)
        mixed.written.bytes()[: len(wanted)] = wanted
        assert mixed.run(depth=4).speed > 0
        assert [bytes(mixed.spill.map_extent(extent)) for extent in extents] == 8 * [wanted]
    finally:
        mixed.close()
