"""`plan` of a model in the Hugging Face hub, by id: from the cache, or from headers alone.

The hub is local; the client and its cache are the real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Inspect, environment, start
from tests.forecasting.hub import REVISION, Hub, serving

pytest.importorskip("huggingface_hub")

PIPE = "some-lab/Some.Pipeline-1"
MODEL = "some-lab/model"
LAYERS = 24


def layers(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return layers of 24 MiB in float32."""
    return {f"blocks.{n}.weight": torch.zeros(512, 512, dtype=dtype) for n in range(LAYERS)}


def save_sharded(place: Path, stem: str, weights: dict[str, torch.Tensor]) -> None:
    names = list(weights)
    half = len(names) // 2
    index: dict[str, str] = {}
    for number, members in enumerate((names[:half], names[half:]), start=1):
        shard = f"{stem}-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in members}, place / shard)
        index |= dict.fromkeys(members, shard)
    (place / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Create a pipeline with shards, two variants, pickles and more, and a model of one file."""
    root = tmp_path_factory.mktemp("repositories")
    pipe = root / "pipe"
    index: dict[str, Any] = {"_class_name": "SomePipeline", "safety_checker": [None, None]}
    for name, kind in (
        ("transformer", "SomeTransformer2DModel"),
        ("text_encoder", "SomeTextModel"),
        ("vae", "AutoencoderKL"),
        ("safety", "SomeChecker"),
        ("scheduler", "SomeScheduler"),
    ):
        (pipe / name).mkdir(parents=True)
        index[name] = ["diffusers", kind]
        own = "scheduler_config.json" if name == "scheduler" else "config.json"
        (pipe / name / own).write_text("{}")
    (pipe / "model_index.json").write_text(json.dumps(index))
    save_sharded(pipe / "transformer", "diffusion_pytorch_model", layers())
    save_file(
        layers(torch.float16), pipe / "transformer" / "diffusion_pytorch_model.fp16.safetensors"
    )
    encoder = {f"encoder.{n}.weight": torch.zeros(256, 256) for n in range(4)}
    save_file(encoder, pipe / "text_encoder" / "model.safetensors")
    (pipe / "text_encoder" / "pytorch_model.bin").write_bytes(bytes(1 << 20))
    save_file({"decoder.w": torch.zeros(64, 64)}, pipe / "vae" / "model.safetensors")
    (pipe / "safety" / "pytorch_model.bin").write_bytes(bytes(1 << 20))
    # A single file with all weights, as many repositories have beside the folders.
    save_file(layers(), pipe / "everything.safetensors")
    model = root / "model"
    model.mkdir()
    save_file(layers(), model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text("{}")
    pickles = root / "pickles"
    pickles.mkdir()
    (pickles / "pytorch_model.bin").write_bytes(bytes(1000))
    return {PIPE: pipe, MODEL: model, "some-lab/pickles": pickles}


@pytest.fixture
def hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    with serving() as found:
        found.models.update(repositories)
        yield found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "huggingface"


def planned(name: object, *options: str, **more: str) -> tuple[dict[str, Any], str]:
    """Return the forecast of a checkpoint, and its remarks."""
    done = start("plan", name, "--ram", "8MB", "--groups", "--json", *options, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def download(name: str, hub: Hub, home: Path, *patterns: str) -> Path:
    """Have huggingface_hub download a model to its cache."""
    code = (
        "import sys; from huggingface_hub import snapshot_download as get;"
        "print(get(sys.argv[1], ignore_patterns=sys.argv[2:] or None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name, *patterns],
        env=environment(**hub.environment(home)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def forecast_and_remarks(document: dict[str, Any]) -> dict[str, Any]:
    """Return the forecast without its location, and the remarks."""
    names = "components", "plans", "advice"
    return {name: document[name] for name in names}


# --- from headers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PIPE, MODEL])
def test_hub_model_plans_as_its_directory_from_headers_alone(
    name: str, hub: Hub, home: Path, repositories: dict[str, Path], inspect: Inspect
) -> None:
    told, remarks = planned(name, **hub.environment(home))
    local = inspect.json("plan", repositories[name], "--ram", "8MB", "--groups")
    assert forecast_and_remarks(told) == forecast_and_remarks(local)
    assert told["source"] == f"{name} in the hub, revision {REVISION[:12]}, headers only"
    assert f"Querying the Hugging Face hub for {name}" in remarks
    weights = {path: n for path, n in hub.sent.items() if path.endswith(".safetensors")}
    wanted = {"model.safetensors"}
    if name == PIPE:
        shards = (f"diffusion_pytorch_model-{n:05}-of-00002.safetensors" for n in (1, 2))
        wanted = {f"transformer/{shard}" for shard in shards}
        wanted |= {"text_encoder/model.safetensors", "vae/model.safetensors"}
    assert set(weights) == wanted
    assert max(weights.values()) <= 100_001, "only the beginning of each file is requested"
    assert sum(hub.sent.values()) < hub.weights(name) / 50
    assert not list(home.rglob("*.json")), "the cache must stay empty"


def test_hub_variant_is_read_where_present(hub: Hub, home: Path) -> None:
    told, _ = planned(PIPE, "--variant", "fp16", **hub.environment(home))
    dtypes = {part["name"]: part["dtypes"] for part in told["components"]}
    assert dtypes == {"transformer": ["F16"], "text_encoder": ["F32"], "vae": ["F32"]}


# --- from the cache -------------------------------------------------------------------------------


def test_hub_cache_is_read_first(hub: Hub, home: Path, inspect: Inspect) -> None:
    snapshot = download(PIPE, hub, home)
    hub.requests.clear()
    told, remarks = planned(PIPE, **hub.environment(home))
    assert told["source"] == f"{PIPE} in the cache, {snapshot}"
    assert remarks == ""
    local = inspect.json("plan", snapshot, "--ram", "8MB", "--groups")
    assert forecast_and_remarks(told) == forecast_and_remarks(local)
    assert hub.requests == [], "no request was needed"


@pytest.mark.full("several processes for each")
@pytest.mark.parametrize("lacking", ["transformer/*00002*", "transformer/*.safetensors", "vae/*"])
def test_hub_files_outside_the_cache_are_fetched(lacking: str, hub: Hub, home: Path) -> None:
    download(PIPE, hub, home, lacking)
    whole, _ = planned(PIPE, **hub.environment(home.with_name("another")))
    hub.requests.clear()
    told, remarks = planned(PIPE, **hub.environment(home))
    assert forecast_and_remarks(told) == forecast_and_remarks(whole)
    assert hub.requests
    assert f"the cache lacks {'vae' if 'vae' in lacking else ''}" in remarks


@pytest.mark.full("several processes")
def test_hub_cache_with_damaged_index_is_ignored(hub: Hub, home: Path) -> None:
    snapshot = download(PIPE, hub, home)
    index = snapshot / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.unlink()
    index.write_text("{")
    told, remarks = planned(PIPE, **hub.environment(home))
    assert f"the cache lacks {index.name}" in remarks
    assert "in the hub" in told["source"]


@pytest.mark.full("several processes")
def test_hub_offline_missing_component_raises(hub: Hub, home: Path) -> None:
    download(PIPE, hub, home, "vae/*")
    hub.requests.clear()
    told, remarks = planned(PIPE, **hub.environment(home, HF_HUB_OFFLINE="1"))
    assert [part["name"] for part in told["components"]] == ["transformer", "text_encoder"]
    assert "HF_HUB_OFFLINE forbids" in remarks
    assert "Missing from the cache: vae." in remarks
    assert hub.requests == []


# --- errors ---------------------------------------------------------------------------------------


def refused(name: str, **more: str) -> tuple[int, str]:
    done = start("plan", name, "--ram", "8MB", **more)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_hub_name_that_is_neither_file_nor_model_raises(hub: Hub, home: Path) -> None:
    code, told = refused("some-lab/nothing", **hub.environment(home))
    assert code == 2
    assert "no file or directory some-lab/nothing, and no model some-lab/nothing" in told


@pytest.mark.parametrize("name", ["some/where/else", "./here", "/nowhere", "a--b", "here.", "x/-y"])
def test_path_is_not_looked_up_in_the_hub(name: str, hub: Hub, home: Path) -> None:
    code, told = refused(name, **hub.environment(home))
    assert code == 2
    assert f"there is no file or directory {name}" in told
    assert hub.requests == []


def test_gated_model_error_names_the_terms(hub: Hub, home: Path) -> None:
    hub.gated.add(PIPE)
    code, told = refused(PIPE, **hub.environment(home))
    assert code == 2
    assert "is gated" in told and "HF_TOKEN" in told


def test_hub_offline_sends_no_request(hub: Hub, home: Path) -> None:
    code, told = refused(PIPE, **hub.environment(home, HF_HUB_OFFLINE="1"))
    assert code == 2
    assert "HF_HUB_OFFLINE forbids" in told and "no file or directory" in told
    assert hub.requests == []


def test_hub_without_network_raises(hub: Hub, home: Path) -> None:
    code, told = refused(PIPE, **hub.environment(home, HF_ENDPOINT="http://127.0.0.1:9"))
    assert code == 1
    assert "could not be queried" in told and "check the network" in told


def test_hub_malformed_header_raises(hub: Hub, home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(hub.models[MODEL], broken)
    (broken / "model.safetensors").write_bytes(b"\xff" * 1000)
    hub.models["some-lab/broken"] = broken
    code, told = refused("some-lab/broken", **hub.environment(home))
    assert code == 2
    assert "header" in told


def test_hub_without_its_library_says_how_to_install(hub: Hub, home: Path) -> None:
    hidden = "sys.modules['huggingface_hub'] = None"
    done = start("plan", PIPE, before=hidden, **hub.environment(home))
    assert done.returncode == 2
    assert f"no file or directory {PIPE}" in done.stderr
    assert "pip install 'tierstore[diffusers]'" in done.stderr


def test_directory_of_the_same_name_comes_first(hub: Hub, home: Path, tmp_path: Path) -> None:
    place = tmp_path / "some-lab" / "model"
    place.mkdir(parents=True)
    save_file({"a.weight": torch.zeros(4096)}, place / "model.safetensors")
    before = f"import os; os.chdir({os.fspath(tmp_path)!r})"
    done = start("plan", MODEL, "--json", before=before, **hub.environment(home))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["components"][0]["tensors"] == 1
    assert hub.requests == []
