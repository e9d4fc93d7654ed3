"""Every use of a missing extra's package says how to install it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh import run_fresh
from tierstore.model.extras import extra_for, requirements

WITHOUT = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Missing())
for name in [name for name in sys.modules if name.partition(".")[0] in {missing!r}]:
    del sys.modules[name]
"""


def told(tmp_path: Path, missing: str, use: str) -> str:
    """Return the error of a program that lacks some packages."""
    program = tmp_path / "program.py"
    program.write_text(WITHOUT.format(missing=missing.split()) + use)
    run = run_fresh(program, directory=tmp_path)
    assert run.returncode != 0, run.stdout
    return run.stdout + run.stderr


SERVE = (
    "from tierstore.service.cli import serve\n"
    "serve(['d', '--ram', '64MB', '--socket', './run/s'{more}])\n"
)
INSPECT = "import sys\nfrom tierstore.cli import main\nsys.argv = ['x', {words}]\nmain()\n"


@pytest.mark.parametrize(
    ("missing", "use", "extra"),
    [
        pytest.param("msgspec", SERVE.format(more=""), "serve", id="serve"),
        pytest.param(
            "prometheus_client", SERVE.format(more=", '--metrics', '0'"), "metrics", id="metrics"
        ),
        pytest.param(
            "msgspec",
            "from tierstore import TierStore\nTierStore.connect('s', device='cpu')\n",
            "serve",
            id="connect",
        ),
        pytest.param("prometheus_client", "import tierstore.prometheus\n", "metrics", id="collect"),
        pytest.param(
            "obstore",
            "from tierstore import TierStore\n"
            "with TierStore('64MB', 'd', device='cpu') as store:\n"
            "    store.register_checkpoint('s3://bucket/model/')\n",
            "remote",
            id="object store",
        ),
        pytest.param(
            "gguf",
            "from tierstore.adapters.compat.diffusers import mapped_gguf\nmapped_gguf('m.gguf')\n",
            "quantised",
            id="gguf",
        ),
        pytest.param(
            "obstore", INSPECT.format(words="'ls', 's3://bucket/model/'"), "remote", id="ls"
        ),
        pytest.param("msgspec", INSPECT.format(words="'ps'"), "serve", id="ps"),
    ],
)
def test_missing_package_error_says_how_to_install_it(
    missing: str, use: str, extra: str, tmp_path: Path
) -> None:
    said = told(tmp_path, missing, use)
    assert missing in said
    assert f"pip install 'tierstore[{extra}]'" in said


def test_missing_package_in_a_program_prints_one_line(tmp_path: Path) -> None:
    for missing, use in (
        ("msgspec", SERVE.format(more="")),
        ("msgspec", INSPECT.format(words="'ps'")),
    ):
        assert "Traceback" not in told(tmp_path, missing, use)
    assert not (tmp_path / "run" / "s").exists()


@pytest.mark.full("a process without those libraries")
def test_offloading_models_needs_no_model_library(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        WITHOUT.format(missing=["diffusers", "transformers", "accelerate"]) + "import torch\n"
        "from tierstore import TierStore, enable_group_offload\n"
        "model, x = torch.nn.Linear(64, 64), torch.ones(1, 64)\n"
        "expected = model(x)\n"
        "with TierStore('64MB', 'd', device='cpu') as store:\n"
        "    enable_group_offload(model, store)\n"
        "    assert torch.equal(model(x), expected)\n"
        "    assert store.stats().bytes_written > 0\n"
    )
    run = run_fresh(program, directory=tmp_path)
    assert run.returncode == 0, run.stderr


def test_missing_package_without_extra_is_reraised() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'nothing_of_that_name'"),
        extra_for("it"),
    ):
        import nothing_of_that_name  # type: ignore[import-not-found]  # noqa: F401


def test_requirements_name_the_extra_of_each_package() -> None:
    found = requirements()
    assert found["torch"] == ""
    assert found["prometheus-client"] == "metrics"
    assert found["gguf"] == "quantised"
    assert found["diffusers"] == found["huggingface-hub"] == "diffusers"
    assert "pytest-xdist" not in found  # only developers need it
