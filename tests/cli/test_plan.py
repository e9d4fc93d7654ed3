"""`plan`: its statements about a checkpoint that is not loaded, and their accuracy."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Inspect, start, step_of
from tierstore.model.sizes import parse_size
from tierstore.tiers.disk_speed import remember

MB = 1_000_000
BLOCKS = 12


@pytest.fixture(autouse=True)
def no_disk_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def block(number: int) -> dict[str, torch.Tensor]:
    """Two layers of 128 KiB and a little more."""
    return {
        f"blocks.{number}.up.weight": torch.zeros(128, 256),
        f"blocks.{number}.up.bias": torch.zeros(128),
        f"blocks.{number}.down.weight": torch.zeros(256, 128),
    }


def weights() -> dict[str, torch.Tensor]:
    found = {"head.weight": torch.zeros(64, 256), "embed.weight": torch.zeros(64, 256)}
    for number in range(BLOCKS):
        found.update(block(number))
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Make one file of 3.3 MB."""
    save_file(weights(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def keys_of(document: dict[str, Any], component: int = 0) -> list[str]:
    (plan,) = document["plans"]
    return [group["key"] for group in plan["components"][component]["groups"]]


def budgets_of(document: dict[str, Any]) -> list[str]:
    return [plan["ram_budget"] for plan in document["plans"]]


# --- from names -----------------------------------------------------------------------------------


def test_plan_blocks_are_groups_in_numerical_order(inspect: Inspect, checkpoint: Path) -> None:
    found = inspect.json("plan", checkpoint, "--ram", "2.5MB", "--groups")
    assert keys_of(found) == ["embed", *(f"blocks.{n}" for n in range(BLOCKS)), "head"]
    (part,) = found["plans"][0]["components"]
    sizes = [group["nbytes"] for group in part["groups"]]
    assert sum(sizes) == part["nbytes"]
    assert max(sizes) == found["plans"][0]["largest_group"]
    assert len(sizes) == found["plans"][0]["group_count"]
    assert all(nbytes % 4096 == 0 for nbytes in sizes)
    least = sum(t.nbytes for t in weights().values())
    assert found["components"][0]["nbytes"] == least
    assert least <= sum(sizes) <= least + 2 * 4096 * len(sizes)


def test_plan_reads_only_headers(inspect: Inspect, tmp_path: Path) -> None:
    """A checkpoint of 60 GB that takes no space on disk: its data is one hole."""
    shape = (15_000, 10_000)
    nbytes = 2 * shape[0] * shape[1]
    header = {
        f"blocks.{n}.weight": {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [n * nbytes, (n + 1) * nbytes],
        }
        for n in range(200)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path = tmp_path / "large.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + 200 * nbytes)
    found = inspect.json("plan", path, "--ram", "16GB", "--disk-bandwidth", "3GB/s")
    step = step_of(found)
    assert found["components"][0]["nbytes"] == 60_000 * MB
    assert 60_000 * MB - 16_000 * MB <= step["read"] <= 60_000 * MB - 16_000 * MB + 4 * nbytes
    assert step["resident"] == 60_000 * MB - step["read"]


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Make two experts, an autoencoder, and a component without weights."""
    place = tmp_path / "pipeline"
    index = {
        "_class_name": "SomePipeline",
        "scheduler": ["diffusers", "SomeScheduler"],
        "transformer": ["diffusers", "SomeTransformer"],
        "transformer_2": ["diffusers", "SomeTransformer"],
        "vae": ["diffusers", "AutoencoderKL"],
        "safety_checker": [None, None],
        "../elsewhere": ["diffusers", "SomeTransformer"],
    }
    for name in ("scheduler", "transformer", "transformer_2", "vae"):
        (place / name).mkdir(parents=True)
    for name in ("transformer", "transformer_2"):
        save_file(weights(), place / name / "model.safetensors")
    autoencoder = {
        f"{part}.{layer}.weight": torch.zeros(64, 64)
        for part in ("encoder", "decoder")
        for layer in ("conv_in", "conv_out")
    }
    save_file(autoencoder, place / "vae" / "model.safetensors")
    (place / "model_index.json").write_text(json.dumps(index))
    return place


def test_plan_prints_each_component_that_runs_in_every_step(
    inspect: Inspect, pipeline: Path
) -> None:
    found = inspect.json("plan", pipeline, "--ram", "2MB", "--groups")
    assert [part["name"] for part in found["components"]] == ["transformer", "transformer_2", "vae"]
    assert keys_of(found)[0] == "transformer/embed"
    assert keys_of(found, 2) == ["vae/encoder"], "both halves are blocks, and small"
    one, other = found["plans"][0]["steps"]
    assert [step["component"] for step in (one, other)] == ["transformer", "transformer_2"]
    assert one["read"] == pytest.approx(other["read"], rel=0.01)
    assert one["read"] > 0
    table = inspect("plan", pipeline, "--ram", "2MB").stdout
    assert "Each step of transformer_2:" in table


def test_plan_component_option_chooses_one(inspect: Inspect, pipeline: Path) -> None:
    found = inspect.json("plan", pipeline, "--ram", "2MB", "--component", "vae")
    assert [part["name"] for part in found["components"]] == ["vae"]
    assert [step["component"] for step in found["plans"][0]["steps"]] == ["vae"]


def test_plan_unknown_component_names_the_others(inspect: Inspect, pipeline: Path) -> None:
    for wrong in ("transformr", "scheduler", ""):
        result = inspect("plan", pipeline, "--component", wrong)
        assert result.exit_code == 2
        assert f"no component {wrong!r}" in result.stderr
        assert "it has transformer, transformer_2, vae" in result.stderr


def test_plan_json_not_an_index_names_its_directory(
    inspect: Inspect, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pipeline / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL", "scale": 1}')
    monkeypatch.chdir(pipeline)
    for wrong, place in (
        (pipeline / "model_index.json", pipeline),
        (pipeline / "vae" / "config.json", pipeline / "vae"),
        (Path("vae/config.json"), Path("vae")),
        (Path("model_index.json"), Path()),
    ):
        result = inspect("plan", wrong, "--ram", "8MB")
        assert result.exit_code == 2
        lines = [f"Error: {wrong} is not a checkpoint", f"Give its directory: {place}"]
        assert result.stderr.splitlines() == lines
        assert inspect("plan", place, "--ram", "8MB").exit_code == 0
    (pipeline / "model.safetensors.index.json").write_text('{"scale": 1}')
    damaged = inspect("plan", "model.safetensors.index.json")
    assert "the index is malformed" in damaged.stderr


# --- output ---------------------------------------------------------------------------------------


def test_plan_without_compute_is_limited_by_the_disk(inspect: Inspect, checkpoint: Path) -> None:
    found = inspect.json("plan", checkpoint, "--ram", "2MB", "--disk-bandwidth", "1GB/s")
    step = step_of(found)
    assert step["read"] >= found["components"][0]["nbytes"] - 2 * MB
    assert step["seconds"] == pytest.approx(step["read"] / 1e9, rel=0.05)
    assert step["stalled_seconds"] == pytest.approx(step["seconds"])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--compute", "nan"),
        ("--compute", "inf"),
        ("--compute", "-1"),
        ("--compute", "soon"),
        ("--compute", "1e308"),
        ("--compute", "0it/s"),
        ("--compute", "1e-20it/s"),
        ("--compute", "1e308it/s"),
        ("--disk-bandwidth", f"{'9' * 320}GB/s"),
        ("--disk-bandwidth", f"{'9' * 320}.5GB/s"),
        ("--ram", f"{'9' * 320}.5GB"),
        ("--ram", f"{'9' * 320}GB"),
        ("--ram", f"{'9' * 5000}GB"),
    ],
)
def test_plan_impossible_hardware_value_is_usage_error(
    option: str, value: str, inspect: Inspect, checkpoint: Path
) -> None:
    result = inspect("plan", checkpoint, "--ram", "2MB", option, value)
    assert result.exit_code == 2
    assert option in result.stderr
    assert value[:10] in result.stderr


def test_plan_seconds_need_a_known_disk_speed(inspect: Inspect, checkpoint: Path) -> None:
    plain = inspect("plan", checkpoint, "--ram", "2MB")
    assert "SECONDS" not in plain.stdout
    assert "--disk-bandwidth" in plain.stderr
    assert step_of(inspect.json("plan", checkpoint, "--ram", "2MB"))["seconds"] is None
    remember(checkpoint, 2e9)
    measured = inspect("plan", checkpoint, "--ram", "2MB")
    assert "SECONDS" in measured.stdout
    assert "2.0 GB/s" in measured.stderr
    found = inspect.json("plan", checkpoint, "--ram", "2MB")
    assert found["disk_bandwidth"] == 2e9
    assert step_of(found)["seconds"] > 0
    assert "counts as instant" in measured.stderr, "no compute time was given"


def test_plan_device_has_a_separate_budget(inspect: Inspect, checkpoint: Path) -> None:
    options = "--ram", "10MB", "--device", "2MB", "--disk-bandwidth", "1GB/s"
    found = inspect.json("plan", checkpoint, *options, "--link-bandwidth", "500MB/s")
    step = step_of(found)
    nbytes = found["components"][0]["nbytes"]
    assert (found["device"], found["plans"][0]["ram"]) == (1_998_848, 9_998_336)
    assert step["read"] == 0
    assert step["onloaded"] >= nbytes - 2 * MB
    assert step["seconds"] == pytest.approx(step["onloaded"] / 5e8, rel=0.02)
    assert found["plans"][0]["enough"], "more RAM would not make the link any faster"
    assert "ONLOADED" in inspect("plan", checkpoint, *options).stdout


# --- errors ---------------------------------------------------------------------------------------


def test_plan_budget_below_the_largest_group_names_the_minimum(
    inspect: Inspect, checkpoint: Path
) -> None:
    result = inspect("plan", checkpoint, "--ram", "100KB")
    assert result.exit_code == 2
    assert "--ram 100KB is too small: the group 'blocks." in result.stderr
    (nbytes,) = re.findall(r"alone has ([\d,]+) bytes", result.stderr)
    (advised,) = re.findall(r"Give at least --ram (\S+),", result.stderr)
    assert inspect("plan", checkpoint, "--ram", advised).exit_code == 0
    needed = int(nbytes.replace(",", ""))
    assert needed <= parse_size(advised) <= 1.01 * needed
    assert inspect("plan", checkpoint, "--ram", f"{needed - 1}B").exit_code == 2


def test_plan_sufficient_budget_is_not_called_narrow(inspect: Inspect, checkpoint: Path) -> None:
    narrow = "--ram", "300KB", "--disk-bandwidth", "1GB/s"
    waits = inspect("plan", checkpoint, *narrow, "--compute", "0.001")
    assert "no overlap" in waits.stdout
    assert "--ram 300KB holds fewer" in waits.stderr
    computes = inspect("plan", checkpoint, *narrow, "--compute", "60", "--ram", "280KB")
    rows = [line.split() for line in computes.stdout.splitlines() if "KB " in line]
    assert next((row[0], row[-1]) for row in rows) == ("280KB", "enough")
    assert "overlap" not in computes.output


@pytest.mark.parametrize(
    ("typed", "seconds"),
    [
        ("1.5", 1.5),
        ("1.5s", 1.5),
        (" 1.5 s", 1.5),
        ("1.5s/it", 1.5),
        ("4it/s", 0.25),
        ("4.00it/s", 0.25),
    ],
)
def test_plan_compute_takes_times_of_a_progress_bar(
    inspect: Inspect, checkpoint: Path, typed: str, seconds: float
) -> None:
    found = inspect.json("plan", checkpoint, "--ram", "2MB", "--compute", typed)
    assert found["compute_seconds"] == seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ram", "8"], "no unit"),
        (["--ram", "1KB"], "less than one page"),
        (["--ram", "8GB", "--device", "50%"], "is a percentage"),
        (["--ram", "8GB", "--disk-bandwidth", "3GB"], "3GB/s"),
        (["--ram", "8GB", "--disk-bandwidth", "3/s"], "no unit"),
        (["--ram", "8GB", "--link-bandwidth", "3GB/s"], "requires --device"),
        (["--ram", "8GB", "--component", "vae"], "no component 'vae'"),
        (["--ram", "8GB", "--component", "vae"], "it has no components, so omit --component"),
        (["--ram", "8GB", "--compute", "soon"], "such as 1.5s/it or 3.2it/s"),
        (["--ram", "8GB", "--disk", "3GB/s"], "Did you mean '--disk-bandwidth'?"),
        (["--ram", "8GB", "--device", "auto"], "half of the free memory"),
        (["--ram", "8GB", "--steps", "3"], "--steps"),
        (["--ram", "8GB", "--groups"], "--json"),
        (["--ram", "8GB", "--variant", "fp16"], "no variant 'fp16'"),
    ],
)
def test_plan_wrong_options_are_usage_errors(
    inspect: Inspect, checkpoint: Path, options: list[str], message: str
) -> None:
    result = inspect("plan", checkpoint, *options)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("content", [None, "{}", "[]", "{", '{"unet": ["diffusers", "X"]}'])
def test_plan_path_not_a_checkpoint_is_usage_error(
    inspect: Inspect, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)
    result = inspect("plan", tmp_path, "--ram", "8GB")
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert re.search("give|pass", result.stderr.lower())
    if content is None:
        assert len(result.stderr.splitlines()) == 1, "the message itself says what to do"


def test_plan_missing_shard_is_named(inspect: Inspect, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "model-1.safetensors"}}')
    for checkpoint in (tmp_path, index):
        result = inspect("plan", checkpoint, "--ram", "8GB")
        assert result.exit_code == 2
        missing = tmp_path / "model-1.safetensors"
        problem = f"Error: {checkpoint} is incomplete: there is no file {missing}."
        assert result.stderr.startswith(problem)


def test_plan_counts_the_variant_that_libraries_read(inspect: Inspect, tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    halves = {name: tensor.half() for name, tensor in weights().items()}
    save_file(halves, tmp_path / "model.fp16.safetensors")
    nbytes = sum(tensor.nbytes for tensor in weights().values())
    for options, expected, dtypes in (((), nbytes, ["F32"]), (("fp16",), nbytes // 2, ["F16"])):
        variant = ["--variant", *options] if options else []
        (part,) = inspect.json("plan", tmp_path, "--ram", "8GB", *variant)["components"]
        assert (part["nbytes"], part["dtypes"]) == (expected, dtypes)
    os.remove(tmp_path / "model.safetensors")
    (part,) = inspect.json("plan", tmp_path, "--ram", "8GB")["components"]
    assert part["dtypes"] == ["F16"], "there is no other dtype"


def test_plan_files_with_the_same_tensors_are_not_added_up(
    inspect: Inspect, tmp_path: Path
) -> None:
    for name in ("mine.safetensors", "yours.safetensors"):
        save_file(weights(), tmp_path / name)
    result = inspect("plan", tmp_path, "--ram", "8GB")
    assert result.exit_code == 2
    assert "one file" in result.stderr


def test_plan_damaged_header_is_usage_error(inspect: Inspect, checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    result = inspect("plan", checkpoint, "--ram", "8GB")
    assert result.exit_code == 2
    assert "header" in result.stderr


def test_plan_loads_no_torch(checkpoint: Path) -> None:
    tell = "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    run = start("plan", checkpoint, "--ram", "2MB", "--json", after=tell)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines()[-1] == "False True"
