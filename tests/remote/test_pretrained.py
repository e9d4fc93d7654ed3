"""A pipeline in an object store is loaded and offloaded as from a directory."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import diffusers
import pytest
import torch

from tests import pipelines
from tests.remote.servers import BUCKET, Proxy, error_500, remove, upload
from tierstore import TierStore, from_pretrained
from tierstore.engine.mirrors import MIRRORS, mirror
from tierstore.errors import StaleCheckpointError, TransferError
from tierstore.tiers.object_store import memory_store, retry_policy

pytestmark = pytest.mark.filterwarnings("ignore:.*torch_dtype:FutureWarning")

URL = f"s3://{BUCKET}/pipeline"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.build_flux(tmp_path_factory.mktemp("flux"), "tiny")


@pytest.fixture
def files(local: Path, s3: str, proxy: Proxy) -> dict[str, bytes]:
    """Return all uploaded files, by name."""
    found = {
        str(path.relative_to(local)): path.read_bytes()
        for path in sorted(local.rglob("*"))
        if path.is_file()
    }
    for name, data in found.items():
        upload(s3, f"pipeline/{name}", data)
    return found


def fetched(proxy: Proxy) -> set[str]:
    """Return the names of the objects that were read."""
    paths = (unquote(path.partition("?")[0]) for verb, path, _ in proxy.requests if verb == "GET")
    begin = f"/{BUCKET}/pipeline/"
    return {path.removeprefix(begin) for path in paths if path.startswith(begin)}


def mirrored(place: Path) -> dict[str, bytes]:
    """Return the files of the only mirror in a store's directory."""
    (root,) = (place / MIRRORS).iterdir()
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".objects.json")
    }


def image(source: str | Path, store: TierStore) -> torch.Tensor:
    pipe = from_pretrained(diffusers.FluxPipeline, source, store, torch_dtype=pipelines.DTYPE)
    return pipelines.run("flux", pipelines.quiet(pipe))


@pytest.mark.full("loads a pipeline twice; test_dispatch.py loads a model")
def test_remote_pipeline_loads_once_with_the_same_image(
    local: Path, files: dict[str, bytes], proxy: Proxy, tmp_path: Path
) -> None:
    expected = pipelines.run("flux", pipelines.load("flux", local))
    with TierStore("2MB", tmp_path, device="cpu") as store:
        assert torch.equal(image(URL, store), expected)
        assert store.stats().bytes_read > 0
        assert store.stats().bytes_written == 0, "its files are read in place"
    assert mirrored(tmp_path) == files
    assert fetched(proxy) == set(files)
    proxy.requests.clear()
    with TierStore("2MB", tmp_path, device="cpu") as store:
        assert torch.equal(image(f"{URL}/", store), expected)
    assert not fetched(proxy)
    assert len(proxy.requests) == 1, "only the listing"


def test_remote_files_replaced_or_removed_are_updated(
    files: dict[str, bytes], s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    place = Path(mirror(URL, str(tmp_path)))
    (changed,) = (name for name in files if name.startswith("vae/") and "config" in name)
    gone = next(name for name in files if name.startswith("tokenizer/"))
    other = files[changed][:-1] + b" }"
    upload(s3, f"pipeline/{changed}", other)
    remove(s3, f"pipeline/{gone}")
    damaged = next(name for name in files if name.endswith(".safetensors"))
    (place / damaged).write_bytes(files[damaged][:-1])  # one byte shorter
    proxy.requests.clear()
    assert Path(mirror(URL, str(tmp_path))) == place
    assert fetched(proxy) == {changed, damaged}
    now = {**files, changed: other}
    del now[gone]
    assert mirrored(tmp_path) == now


@pytest.mark.full("loads a pipeline twice; test_cache.py has a step that was cut short")
def test_failed_download_resumes(files: dict[str, bytes], proxy: Proxy, tmp_path: Path) -> None:
    half = len(files) // 2
    proxy.before = lambda number: setattr(proxy, "every", error_500 if number > half else None)
    with retry_policy(deadline=0.5), pytest.raises(TransferError, match="could not be read"):
        mirror(URL, str(tmp_path))
    there = mirrored(tmp_path)
    assert 0 < len(there) < len(files)
    assert all(files[name] == data for name, data in there.items()), "a file is incomplete"
    proxy.before, proxy.every = lambda number: None, None
    proxy.requests.clear()
    mirror(URL, str(tmp_path))
    assert mirrored(tmp_path) == files
    assert fetched(proxy) == set(files) - set(there)


def test_replaced_object_during_load_is_stale(
    files: dict[str, bytes], s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    last = max(files)

    def before(number: int) -> None:
        verb, path, _ = proxy.requests[number - 1]
        if verb == "GET" and unquote(path).endswith(last):
            upload(s3, f"pipeline/{last}", files[last] + b" ")

    proxy.before = before
    with pytest.raises(StaleCheckpointError):
        mirror(URL, str(tmp_path))
    assert last not in mirrored(tmp_path)


def test_unused_files_are_not_downloaded(tmp_path: Path) -> None:
    store = memory_store("memory://kinds")
    plain = ["model_index.json", "a/config.json", "b/config.json", "b/model.safetensors"]
    both = ["a/model.safetensors", "a/model.fp16-00001-of-00001.safetensors"]
    both += ["a/model.safetensors.index.fp16.json"]
    for name in (*plain, *both, "a/model.bin", "b/model.onnx"):
        store.put(f"kinds/{name}", name.encode())

    def names(place: str) -> set[str]:
        kept = (path for path in Path(place).rglob("*") if path.is_file())
        return {str(path.relative_to(place)) for path in kept} - {".objects.json"}

    url = "memory://kinds/kinds"
    assert names(mirror(url, str(tmp_path))) == {*plain, both[0]}
    assert names(mirror(url, str(tmp_path), variant="fp16")) == {*plain, *both[1:]}
    assert names(mirror(url, str(tmp_path), subfolder="b")) == set(plain[2:])


@pytest.mark.parametrize("url", ["memory://empty/nothing", "https://127.0.0.1:1/pipeline"])
def test_unlistable_location_raises(url: str, tmp_path: Path) -> None:
    with (
        TierStore("1MB", tmp_path, device="cpu") as store,
        pytest.raises(TransferError, match=r"check the URL|download it"),
    ):
        from_pretrained(diffusers.FluxPipeline, url, store)
