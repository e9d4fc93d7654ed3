"""`tierstore-inspect plan` reports the same for an object store's checkpoint as for its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save, save_file

from tests.helpers.processes import run_python
from tests.remote.conftest import assert_holds, uploaded
from tests.remote.servers import BUCKET, Proxy, remove, upload
from tierstore import TierStore
from tierstore.trace import read_trace

PARTS = ("transformer", 8), ("vae", 2)


def planned(checkpoint: str) -> dict[str, object]:
    words = ["-m", "tierstore.cli", "plan", checkpoint, "--ram", "500KB", "--json"]
    done = run_python(*words)
    assert done.returncode == 0, done.stderr
    document: dict[str, object] = json.loads(done.stdout)
    del document["checkpoint"], document["source"], document["disk_bandwidth"]
    for step in document["plans"][0]["steps"]:  # type: ignore[index]
        step.pop("seconds", None), step.pop("stalled_seconds", None)
    return document


@pytest.mark.full("plans twice; test_ls_lists_the_files_of_a_url reads a URL")
def test_plan_of_a_url_equals_that_of_the_file(s3: str, proxy: Proxy, tmp_path: Path) -> None:
    checkpoint = uploaded(s3)
    save_file(checkpoint.values, tmp_path / "model.safetensors")
    assert planned(checkpoint.url) == planned(str(tmp_path / "model.safetensors"))
    assert proxy.sent <= 300_000, "more than the headers was read"


@pytest.mark.full("as a file that is planned by its URL")
def test_plan_of_a_pipeline_url_works(s3: str, proxy: Proxy, tmp_path: Path) -> None:
    parts = {
        name: uploaded(s3, count, 128, f"a/pipeline/{name}/model.safetensors")
        for name, count in PARTS
    }
    index = {name: ["diffusers", "SomeModel"] for name in (*parts, "scheduler")}
    upload(s3, "a/pipeline/model_index.json", json.dumps(index).encode())
    for name, part in parts.items():
        (tmp_path / name).mkdir()
        save_file(part.values, tmp_path / name / "model.safetensors")
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    told = planned(f"s3://{BUCKET}/a/pipeline/")
    assert told == planned(str(tmp_path))
    assert [part["name"] for part in told["components"]] == ["transformer", "vae"]  # type: ignore[attr-defined]


def test_plan_of_a_url_without_models_raises(s3: str, proxy: Proxy) -> None:
    words = ["-m", "tierstore.cli", "plan", "s3://models/nothing/", "--ram", "500KB"]
    done = run_python(*words)
    assert done.returncode != 0
    assert "has no safetensors checkpoint" in done.stderr


def test_ls_lists_the_files_of_a_url(s3: str, proxy: Proxy) -> None:
    checkpoint = uploaded(s3)
    done = run_python("-m", "tierstore.cli", "ls", checkpoint.url, "--json")
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)["files"]
    assert (row["name"], row["tensors"]) == ("model.safetensors", len(checkpoint.values))
    assert row["dtypes"] == ["BF16", "F32"]
    assert row["etag"] in proxy.etags
    assert "1 file, 16 tensors" in run_python("-m", "tierstore.cli", "ls", checkpoint.url).stdout


@pytest.mark.full("the damage", keep="a third")
@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
def test_verify_of_a_url_reports_damage(s3: str, proxy: Proxy, json_too: list[str]) -> None:
    checkpoint = uploaded(s3)
    words = ["-m", "tierstore.cli", "verify", checkpoint.url, *json_too]
    assert run_python(*words).returncode == 0
    upload(s3, checkpoint.name, save(checkpoint.values)[:-100])
    done = run_python(*words)
    assert done.returncode == 3
    assert "model.safetensors" in done.stdout
    remove(s3, checkpoint.name)
    done = run_python(*words)
    assert done.returncode not in (0, 3)
    assert "does not exist" in done.stderr


def test_verify_checks_fetched_groups(s3: str, proxy: Proxy, tmp_path: Path) -> None:
    checkpoint = uploaded(s3)
    with TierStore("600KB", tmp_path, device="cpu") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        assert_holds(store, checkpoint, "0")
    done = run_python("-m", "tierstore.cli", "verify", tmp_path / "remote", "--data")
    assert done.returncode == 0, done.stderr
    assert "no damage found" in done.stdout


@pytest.mark.full("runs a model from a server")
def test_trace_reports_downloads(s3: str, proxy: Proxy, tmp_path: Path) -> None:
    checkpoint = uploaded(s3)
    with TierStore("1MB", tmp_path / "store", device="cpu") as store:
        for key in store.register_checkpoint(checkpoint.url):
            store.get(key)
        stats = store.stats()
        store.trace(tmp_path / "run.json")
    png = tmp_path / "run.png"
    words = ["trace", str(tmp_path / "run.json"), "--png", str(png), "--json"]
    done = run_python("-m", "tierstore.cli", *words)
    assert done.returncode == 0, done.stderr
    hops = {hop["kind"]: hop for hop in json.loads(done.stdout)["hops"]}
    assert hops["download"]["nbytes"] == stats.bytes_fetched > 0
    downloads = [one for one in read_trace(tmp_path / "run.json").slices if one.kind == "download"]
    assert sum(one.args["nbytes"] for one in downloads) == stats.bytes_fetched
    assert png.stat().st_size > 0
