"""The benchmarks of training run, and their figures can be true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.test_speed_benches import cells, number, run
from tools.bench.disk_mixed import Mix, Mixed

OURS = ("tierstore, all in RAM", "tierstore, 0.5 x", "tierstore, 0.2 x")
PEERS = ("FairScale OffloadModel", "FSDP2, CPUOffloadPolicy", "torchao CPUOffloadOptimizer")
AGAIN = ", checkpoint_activation"


@pytest.mark.full("runs a whole benchmark; what it is made of has tests of its own")
def test_a_short_run_of_the_optimizer(tmp_path: Path) -> None:
    text = run("optimizer", tmp_path)
    in_ram, found, on_disk = text.partition("## On disk")
    assert found
    for flags in ("foreach=False", "foreach=True", "fused=True"):
        torchs, ours, ratio, values = cells(in_ram)[flags]
        assert min(map(number, (torchs, ours, ratio))) > 0
        assert values == "equal"
        step, disk, in_memory, _, read, written, counted, _, share, values = cells(on_disk)[flags]
        assert values == "equal"
        assert number(step) > 0
        assert number(disk) > 0
        assert number(in_memory) >= 0
        # four fifths of parameters, gradients and states; all of them but gradients change
        assert 2.8 <= number(read) <= 4.2
        assert 1.8 <= number(written) <= 3.2
        assert number(counted) == pytest.approx(number(read) + number(written), abs=0.3)
        assert number(share) > 0
    assert "held: where all fits, no step reads or writes the disk" in text
    assert "held: parameters and states are torch's, bit for bit" in text


@pytest.mark.full("runs a whole benchmark; what it is made of has tests of its own")
@pytest.mark.timeout(900)
def test_a_short_run_of_training(tmp_path: Path) -> None:
    text = run("train_offload", tmp_path)
    rows = cells(text)
    state = 4 * number(text.partition(" MB of parameters")[0].rpartition(" ")[2])
    for name in ("plain", *OURS, "plain, checkpointed", OURS[0] + AGAIN, OURS[2] + AGAIN):
        seconds, ratio, _, budget, _, peak, tiers, moved, losses = rows[name]
        assert min(map(number, (seconds, ratio, peak))) > 0
        assert losses.endswith(": equal")
        read, written = (number(part) for part in moved.split(", "))
        streams = budget and number(budget) < state
        assert (read > 0) == (written > 0) == bool(streams)
        if budget:
            assert number(tiers) <= number(budget)
    for name in PEERS:
        (row,) = [cells for title, cells in rows.items() if title.startswith(name + " (")] or [
            rows[name]
        ]
        assert row[0].startswith("not run: ") or row[-1].endswith(": equal"), row
    assert "held: tierstore's losses are those of plain training, bit for bit" in text


def test_a_mix_moves_as_much_as_it_says_in_the_order_of_a_step() -> None:
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
    assert read == sum(mix.groups)
    assert written > 0
    assert mix.nbytes == read + written


def test_the_groups_that_a_mix_writes_are_written(tmp_path: Path) -> None:
    mixed = Mixed(tmp_path / "store", Mix([1 << 16] * 8, written=1.0))
    try:
        wanted = bytes(range(256)) * 256
        before = {
            bytes(mixed.spill.show(c.spill_extent))
            for c in mixed.entries
            if c.spill_extent is not None
        }
        assert wanted not in before
        mixed.written.bytes()[: len(wanted)] = wanted
        assert mixed.run(depth=4).speed > 0
        after = [
            bytes(mixed.spill.show(c.spill_extent))
            for c in mixed.entries
            if c.spill_extent is not None
        ]
        assert after == 8 * [wanted]
    finally:
        mixed.close()
