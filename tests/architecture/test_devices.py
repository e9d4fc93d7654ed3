"""Which tests run on a GPU and which on the pretend accelerator, and how values are compared."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests import accelerator, devices
from tests.accelerator import TOLERANCES, same

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
MAY_NAME_IT = {TESTS / "devices.py", TESTS / "accelerator.py", Path(__file__).resolve()}


# Names --------------------------------------------------------------------------------------------


def named(source: str) -> list[str]:
    """Where a module names the pretend accelerator, or imports it past tests/accelerator.py."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if text.partition(":")[0] == devices.PRETEND:
                found.append(f"line {node.lineno}: {text!r}")
            case ast.ImportFrom(module="tests.device", names=names):
                found += [f"line {node.lineno}: import" for n in names if n.name == "pretend"]
            case ast.ImportFrom(module="tests.device.pretend"):
                found.append(f"line {node.lineno}: import")
            case ast.Import(names=names):
                found += [f"line {node.lineno}: import" for n in names if "device.pret" in n.name]
    return found


@pytest.mark.parametrize(
    "source",
    [
        'x.to("pretend")',
        'torch.device("pretend:1")',
        'f"{x}" if y else "pretend"',
        "from tests.device import autocast, pretend",
        "from tests.device.pretend import load",
        "import tests.device.pretend",
    ],
)
def test_a_name_of_the_pretend_device_is_noticed(source: str) -> None:
    assert len(named(source)) == 1
    assert not named(source.replace("pretend", "other"))


def test_no_test_names_the_pretend_device() -> None:
    files = [path for path in TESTS.rglob("*.py") if path.parent != TESTS / "device"]
    assert len(files) > 200
    found = {
        str(path.relative_to(ROOT)): lines
        for path in set(files) - MAY_NAME_IT
        if (lines := named(path.read_text(encoding="utf-8")))
    }
    assert not found, "use ACCELERATOR, DEVICE_0 or `pretend` of tests/accelerator.py"


# Marks and the option -----------------------------------------------------------------------------

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
import pytest
from tests import devices

def pytest_addoption(parser, pluginmanager):
    pluginmanager.register(devices, "devices")

@pytest.fixture
def pretend(): pass
"""
MARKS = ["accelerator", "pretend_only", "two_devices"]
SMALL = """
import os
import pytest
from tests.accelerator import ACCELERATOR, on_both

assert os.environ["TIERSTORE_TEST_DEVICE"] == ACCELERATOR

@on_both
def test_on_both(device): pass

@pytest.mark.accelerator
@pytest.mark.two_devices
def test_two(): pass

@pytest.mark.pretend_only("late")
def test_late(pretend): pass

@pytest.mark.pretend_only("bytes")
@on_both
def test_bytes(device): pass

def test_cpu(): pass
"""


def run_pytest(place: Path, tests: str, *words: str) -> str:
    """What pytest prints in a directory with these tests."""
    place.joinpath("conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    place.joinpath("test_it.py").write_text(tests)
    marks = "\n    ".join(MARKS)
    place.joinpath("pytest.ini").write_text(f"[pytest]\nmarkers =\n    {marks}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_a_real_device_leaves_out_what_needs_the_pretend_one(tmp_path: Path) -> None:
    text = run_pytest(tmp_path, SMALL, "--device=xpu", "--collect-only")
    collected = {line.partition("::")[2] for line in text.splitlines() if "::" in line}
    assert collected == {
        *("test_on_both[cpu]", "test_on_both[xpu]", "test_two", "test_bytes[cpu]", "test_cpu"),
    }
    assert "1 on xpu, 1 on two of them, 3 on the CPU alone" in text
    assert "2 left to the pretend accelerator" in text
    assert f"1   late: {devices.REASONS['late']}" in text
    assert f"1   bytes: {devices.REASONS['bytes']}" in text


@pytest.mark.full("collects every test once more")
def test_all_tests_are_collected_for_a_device_that_is_not_here() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    words = ["--device=xpu", "--full", str(TESTS)]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    ids = [line for line in done.stdout.splitlines() if line.startswith("tests/")]
    assert len(ids) > 9000
    assert sum("xpu" in each for each in ids) > 1000
    parts = {part for each in ids for part in each.partition("[")[2].rstrip("]").split("-")}
    assert "xpu" in parts and devices.PRETEND not in parts


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("xpu", "--device xpu: torch has no xpu device here"),
        ("cuda:1", "takes a type of accelerator, such as cuda, not 'cuda:1'"),
        ("cpu", "takes a type of accelerator, such as cuda, not 'cpu'"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(device: str, why: str, tmp_path: Path) -> None:
    assert why in run_pytest(tmp_path, "def test(): pass", "--device", device)


def test_a_constant_that_was_read_too_soon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"device": accelerator.ACCELERATOR, "collectonly": True}
    config: Any = SimpleNamespace(getoption=options.get)
    devices.pytest_configure(config)
    options["device"] = "xpu"
    monkeypatch.setenv(devices.VARIABLE, "xpu")
    with pytest.raises(pytest.UsageError, match="imported before --device was read"):
        devices.pytest_configure(config)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("def test(pretend): pass", "uses ['pretend']: mark it pretend_only"),
        ("import pytest\n@pytest.mark.pretend_only\ndef test(): pass", "needs one argument of"),
        ("import pytest\n@pytest.mark.pretend_only('me')\ndef test(): pass", "needs one argument"),
    ],
    ids=["no mark", "no reason", "unknown reason"],
)
def test_a_mark_that_is_missing_or_wrong_is_told(tests: str, why: str, tmp_path: Path) -> None:
    assert why in run_pytest(tmp_path, tests)


def test_functions_of_the_pretend_device_are_refused_without_the_mark() -> None:
    with pytest.raises(pytest.UsageError, match=r"uses pretend\.pinned_bytes: mark"):
        accelerator.pretend.pinned_bytes()


@pytest.mark.pretend_only("itself")
def test_functions_of_the_pretend_device_are_there_with_the_mark(pretend: ModuleType) -> None:
    assert accelerator.pretend.pinned_bytes() == accelerator.counted("pinned_bytes") >= 0
    assert accelerator.count() == pretend.device_count() == 2


def test_what_a_worker_counted_reaches_the_summary() -> None:
    counts = {"accelerator": 3, "cpu": 5, "late": 2}
    node = SimpleNamespace(workeroutput={"devices": counts}, config=SimpleNamespace(stash={}))
    devices.pytest_testnodedown(node)
    assert node.config.stash[devices.COUNTS] == counts
    assert "2 left to the pretend accelerator:" in devices.summary(counts)[1]


# Values -------------------------------------------------------------------------------------------

REAL = "cuda"
"""It need not be here: values are compared on the CPU."""
ROWS, WIDTH = 16, 256
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, and a weight of a usual size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return x.to(dtype), weight.to(dtype)


def in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product, added up in another order, as another device does."""
    pairs = zip(x.split(64, dim=1), weight.split(64), strict=True)
    return torch.stack([a @ b for a, b in pairs]).sum(dim=0)


@each_dtype
def test_another_order_of_a_sum_is_the_same_on_a_real_device(dtype: torch.dtype) -> None:
    x, weight = factors(dtype)
    found, expected = in_parts(x, weight), x @ weight
    assert not torch.equal(found, expected)
    assert same(found, expected, REAL)
    for exact in ("cpu", devices.PRETEND):
        assert not same(found, expected, exact)
        assert same(expected.clone(), expected, exact)


def a_page_is_zero(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(-1).index_fill(0, torch.arange(4096 // weight.itemsize), 0).view_as(weight)


def a_page_is_of_another_place(weight: torch.Tensor) -> torch.Tensor:
    rows = 4096 // weight.itemsize // WIDTH
    return torch.cat([weight[-rows:], weight[rows:]])


def a_step_is_missing(weight: torch.Tensor) -> torch.Tensor:
    """Of AdamW, which changes each by about its rate."""
    return weight - 1e-2 * weight.sign()


def it_is_added_twice(weight: torch.Tensor) -> torch.Tensor:
    return weight * 2


def one_is_wrong(weight: torch.Tensor) -> torch.Tensor:
    """One number of all, by a flip of its highest bit of the mantissa."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weight.itemsize]
    changed = weight.clone().view(-1)
    largest = int(changed.abs().argmax())
    bit = {torch.float64: 51, torch.float32: 22, torch.float16: 9, torch.bfloat16: 6}[weight.dtype]
    changed.view(words)[largest] ^= 1 << bit
    return changed.view_as(weight)


FAULTS = (
    a_page_is_zero,
    a_page_is_of_another_place,
    a_step_is_missing,
    it_is_added_twice,
    one_is_wrong,
)


@each_dtype
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_a_fault_does_is_noticed_in_each_dtype(fault: object, dtype: torch.dtype) -> None:
    """In what was moved, and in what was computed from it."""
    x, weight = factors(dtype)
    wrong = fault(weight)  # type: ignore[operator]
    assert not same(wrong, weight, REAL)
    assert not same(in_parts(x, wrong), x @ weight, REAL)


def test_special_values_and_forms_are_compared() -> None:
    special = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert same(special.clone(), special, REAL)
    for number, wrong in enumerate((float("nan"), 1.0, -float("inf"), 3e38)):
        found = special.clone()
        found[number] = wrong
        assert not same(found, special, REAL)
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.float64), REAL)
    assert not same(torch.ones(2), torch.ones(1, 2), REAL)
    assert not same(torch.zeros(3), torch.full((3,), 1e-6), REAL)
    assert not same(torch.tensor([1 << 40]), torch.tensor([(1 << 40) + 1]), REAL)
    assert same(torch.tensor([]), torch.tensor([]), REAL)
