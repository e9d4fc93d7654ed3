"""A model in memory that hardly fits there causes a warning with advice and numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dispatch import memory_warning
from tests.helpers.processes import ROOT, results_in, with_the_usual_allocator
from tools.bench import memory_group
from tools.bench.memory_group import MemoryGroup

MIB = 1 << 20

pytestmark = [
    pytest.mark.full("a process with a model in a control group, which imports torch"),
    pytest.mark.skipif(
        not os.access(memory_group.ROOT / "memory", os.W_OK), reason="may not make control groups"
    ),
]


def run(how: str, limit: int, place: Path) -> dict[str, Any]:
    words = [
        sys.executable,
        "-m",
        "tests.dispatch.memory_warning",
        how,
        str(place / "model.safetensors"),
    ]
    with MemoryGroup(limit) as group:
        done = subprocess.run(
            group.command([*words, str(place / "store")]),
            cwd=ROOT,
            env=with_the_usual_allocator(threads=1),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any]
    (result,) = results_in(done.stdout)
    return result


@pytest.mark.parametrize("how", ("dispatch", "group offload"))
def test_weights_that_hardly_fit_in_memory_warn(how: str, tmp_path: Path) -> None:
    result = run(how, 900 * MIB, tmp_path)
    (message,) = result["messages"]
    in_memory, available = (int(n.replace(",", "")) for n in re.findall(r"\d[\d,]+", message))
    assert in_memory == memory_warning.NBYTES
    assert 0 < available < 900 * MIB - memory_warning.NBYTES
    assert "tierstore.from_pretrained" in message
    assert result["where"] == [memory_warning.__file__], "the warning does not point to the caller"


@pytest.mark.parametrize(("how", "limit"), [("mapped", 900 * MIB), ("dispatch", 4096 * MIB)])
def test_mapped_or_fitting_weights_do_not_warn(how: str, limit: int, tmp_path: Path) -> None:
    assert run(how, limit, tmp_path)["messages"] == []
