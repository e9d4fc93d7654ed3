"""The benchmark of quantising runs, and says what it is there to say."""

from __future__ import annotations

from pathlib import Path

from tests.bench.test_speed_benches import cells, number, run


def test_quantising(tmp_path: Path) -> None:
    text = run("quantising", tmp_path)
    rows = cells(text)
    assert number(rows["quantised, first start"][-1]) > 0
    assert number(rows["quantised, second start"][-1]) == 0
    assert text.count("it is what was asked for (1)") == len(rows) - 1 == 4
