"""The benchmark of dispatched models runs, and its figures can be true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.test_speed_benches import cells, number, run

WEIGHTS = 19.9  # MB, of the small model


@pytest.mark.full("runs a whole benchmark; what it is made of has tests of its own")
def test_a_short_run(tmp_path: Path) -> None:
    text = run("dispatch", tmp_path)
    below, found, above = text.partition("Above the working set")
    assert found
    for regime, budget in ((below, 8 << 20), (above, 64 << 20)):
        rows = cells(regime)
        assert "accelerate, disk_offload" in rows
        for name in rows.keys() - {""}:
            seconds, ratio, first, loading, _, written, _, text_written = rows[name]
            assert min(map(number, (seconds, ratio, first, loading))) > 0
            assert text_written.startswith("same"), name
            copies = name.startswith("accelerate")
            assert (number(written) >= WEIGHTS) == copies
            assert (number(written) <= 0.1) == (not copies)
        assert number(rows["tierstore"][6]) < budget / 2**20 + 64
    assert "MISSED: the text" not in text
    assert "held: the text is that of the plain model" in text
