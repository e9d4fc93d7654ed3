"""The benchmarks of quantised models run, and show the effect that they measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.test_benches import cells, number, run

pytestmark = pytest.mark.long(
    "two processes that import all libraries; test_parity.py does the same in one",
    sentinel="tests/quantised/test_parity.py::test_quantised_output_bytes_and_budgets_are_equal",
)


def test_quantising_bench_runs(tmp_path: Path) -> None:
    text = run("quantising", tmp_path)
    rows = cells(text)
    assert number(rows["quantised, first start"][-1]) > 0
    assert number(rows["quantised, second start"][-1]) == 0
    assert text.count("it is what was asked for (1)") == len(rows) - 1 == 4


def test_quantised_bench_runs(tmp_path: Path) -> None:
    text = run("quantised", tmp_path, "--kinds", "torchao_int8", "Q4_K", "--models", "flux")
    for kind in ("torchao_int8", "Q4_K"):
        _, nbytes, *runs, outside = cells(text)[f"{kind}, flux"]
        assert [each.split(", ")[0] for each in runs] == ["equal"] * 3
        assert all(number(each.split(", ")[1]) >= number(nbytes) > 0 for each in runs)
        assert number(outside) <= 2
