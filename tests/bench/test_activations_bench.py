"""The benchmark of activations runs, and its figures can be true."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.bench.test_speed_benches import WHOLE_BENCHMARK, cells, number
from tests.helpers.processes import output_of
from tools.bench.training import Saved

ROOT = Path(__file__).resolve().parents[2]


@WHOLE_BENCHMARK
def test_a_short_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    place = tmp_path / "stores"
    place.mkdir()
    script = ["tools/bench/activations.py", "--small", "--rounds", "1"]
    output = output_of(*script, "--dir", place, "--markdown", page, timeout=600)
    assert output.strip() in page.read_text()
    assert str(place) not in output
    assert list(place.iterdir()) == [], "files are left behind"
    on_cpu = cells(output.partition("On the pretend accelerator")[0])
    assert on_cpu["no hooks"][-1] == "equal"
    for name in ("tierstore, 2 x", "tierstore, 0.5 x", "tierstore, 0.1 x"):
        budget, copied, written, read, peak, seconds, ratio, gradients = on_cpu[name]
        assert gradients == "equal"
        assert min(map(number, (budget, copied, peak, seconds, ratio))) > 0
        assert (number(written) > 0) == (number(copied) > number(budget))
        assert number(read) <= number(written) <= number(copied)
    assert number(on_cpu["save_on_cpu"][1]) == 0, "on a CPU it has nothing to do"
    assert number(on_cpu["save_on_cpu, pin_memory"][1]) > number(on_cpu["tierstore, 2 x"][1])


def test_what_a_step_saves_is_counted_once_and_without_weights() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    saved = Saved({weight.untyped_storage().data_ptr()})
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        x = torch.ones(4, 4) @ weight  # saves what is not the weight
        (x.sin() * x.cos()).sum()  # saves x twice, and two results
    assert sorted(saved.pieces.values()) == 4 * [4 * 16]
    assert saved.tensors == 5 * 4 * 16
