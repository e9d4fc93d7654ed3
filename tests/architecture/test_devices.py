"""Selection of tests for a GPU or the pretend accelerator, and comparison of values."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import accelerator, devices
from tests.accelerator import TOLERANCES, same
from tests.architecture.test_layers import is_or_is_inside, uses
from tests.helpers.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
MAY_NAME_PRETEND = {TESTS / "devices.py", TESTS / "accelerator.py", Path(__file__).resolve()}

# Names --------------------------------------------------------------------------------------------


def names_pretend(source: str) -> bool:
    """Return whether a module names the pretend accelerator or bypasses tests/accelerator.py."""
    tree = ast.parse(source)
    if any(is_or_is_inside(name, "tests.device.pretend") for _, name in uses(tree)):
        return True
    texts = [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return any(text.partition(":")[0] == devices.PRETEND for text in texts)


@pytest.mark.parametrize(
    "source",
    [
        "torch.device('pretend:1')",
        "from tests.device import autocast, pretend",
        "from tests.device.pretend import load",
        "import tests.device.pretend",
    ],
)
def test_name_of_the_pretend_device_is_found(source: str) -> None:
    assert names_pretend(source)
    assert not names_pretend(source.replace("pretend", "other"))


def test_tests_do_not_name_the_pretend_device() -> None:
    files = {path for path in TESTS.rglob("*.py") if path.parent != TESTS / "device"}
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    named = {path for path, text in texts.items() if "pretend" in text and names_pretend(text)}
    assert named == MAY_NAME_PRETEND, (
        "use ACCELERATOR, DEVICE_0 or `pretend` of tests/accelerator.py"
    )


# Marks and the option -----------------------------------------------------------------------------

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


def test_real_device_leaves_out_pretend_only_tests(tmp_path: Path) -> None:
    tmp_path.joinpath("test_it.py").write_text(SMALL)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    words += ["-c", ROOT / "pyproject.toml", "-p", "tests.devices", "--device=xpu"]
    text = run_python(*words, "--collect-only", tmp_path / "test_it.py").stdout
    assert set(re.findall(r"::(\S+)", text)) == {
        *("test_on_both[cpu]", "test_on_both[xpu]", "test_two", "test_bytes[cpu]", "test_cpu"),
    }
    assert "1 on xpu, 1 on two of them, 3 on the CPU alone" in text
    assert "2 left to the pretend accelerator" in text
    assert f"1   late: {devices.REASONS['late']}" in text
    assert f"1   bytes: {devices.REASONS['bytes']}" in text


@pytest.mark.parametrize(
    ("mark", "why"),
    [
        (None, r"uses \['pretend'\]: mark it"),
        ((), "needs one argument"),
        (("me",), "of \\['bytes'"),
    ],
    ids=["no mark", "no reason", "unknown reason"],
)
def test_mark_missing_or_wrong_raises(mark: tuple[str] | None, why: str) -> None:
    given = None if mark is None else pytest.mark.pretend_only(*mark).mark
    item: Any = SimpleNamespace(
        nodeid="test", fixturenames=["pretend"], get_closest_marker=lambda name: given
    )
    config: Any = None
    with pytest.raises(pytest.UsageError, match=why):
        devices.pytest_collection_modifyitems(config, [item])


def test_pretend_function_without_the_mark_raises() -> None:
    with pytest.raises(pytest.UsageError, match=r"uses pretend\.pinned_bytes: mark"):
        accelerator.pretend.pinned_bytes()


# Values -------------------------------------------------------------------------------------------

REAL = "cuda"
"""It need not be present: values are compared on the CPU."""
ROWS, WIDTH = 16, 256
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a batch, and a weight of a usual size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return x.to(dtype), weight.to(dtype)


def in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum the product in another order, as another device does."""
    pairs = zip(x.split(64, dim=1), weight.split(64), strict=True)
    return torch.stack([a @ b for a, b in pairs]).sum(dim=0)


@each_dtype
def test_same_accepts_another_summation_order(dtype: torch.dtype) -> None:
    x, weight = factors(dtype)
    found, expected = in_parts(x, weight), x @ weight
    assert not torch.equal(found, expected)
    assert same(found, expected, REAL)
    for exact in ("cpu", devices.PRETEND):
        assert not same(found, expected, exact)
        assert same(expected.clone(), expected, exact)


def harmed(weight: torch.Tensor, fault: str) -> torch.Tensor:
    page = 4096 // weight.itemsize // WIDTH  # in rows
    match fault:
        case "a page is zero":
            return torch.cat([weight[:page] * 0, weight[page:]])
        case "a page is of another place":
            return torch.cat([weight[-page:], weight[page:]])
        case "a step of AdamW is missing":
            return weight - 1e-2 * weight.sign()
        case "it is added twice":
            return weight * 2
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weight.itemsize]
    changed = weight.clone().view(-1)
    mantissa = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
    changed.view(words)[int(changed.abs().argmax())] ^= 1 << (mantissa[weight.dtype] - 1)
    return changed.view_as(weight)


@each_dtype
@pytest.mark.parametrize(
    "fault",
    [
        *("a page is zero", "a page is of another place", "a step of AdamW is missing"),
        *("it is added twice", "the highest bit of one mantissa is wrong"),
    ],
)
def test_same_rejects_a_fault_in_each_dtype(fault: str, dtype: torch.dtype) -> None:
    """The fault is in moved bytes, and in a result computed from them."""
    x, weight = factors(dtype)
    wrong = harmed(weight, fault)
    assert not same(wrong, weight, REAL)
    assert not same(in_parts(x, wrong), x @ weight, REAL)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        *(([wrong], [value]) for wrong, value in ((0.0, float("nan")), (3e38, float("inf")))),
        ([float("nan")], [1.0]),
        ([float("inf")], [-float("inf")]),
        ([0.0, 0.0], [1e-6, 1e-6]),
        ([1 << 40], [(1 << 40) + 1]),
        ([1.0], [[1.0]]),
        ([1.0], [1]),
    ],
)
def test_same_distinguishes_special_values(found: list[Any], expected: list[Any]) -> None:
    one, other = torch.tensor(found), torch.tensor(expected)
    assert not same(one, other, REAL)
    assert same(one.clone(), one, REAL) and same(other.clone(), other, REAL)
