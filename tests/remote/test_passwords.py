"""URLs with passwords and signatures are refused, and no output contains the secret."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save
from torch import nn

from tierstore import TierStore, TierStoreError, load_checkpoint_and_dispatch
from tierstore.cli.commands import inspector
from tierstore.engine.mirrors import mirror
from tierstore.errors import UrlError
from tierstore.model.urls import check_url, redact_secrets
from tierstore.tiers.object_store import RemoteDirectory, memory_store

pytest.importorskip("obstore")

SECRET = "S3CR3T"
URLS = [
    f"https://user:{SECRET}@host/model.safetensors",
    f"https://{SECRET}@host/models",
    f"http://user:{SECRET}@127.0.0.1:9/model.safetensors.index.json",
    f"https://user:a/{SECRET}@host/x",
    f"https://user:1#{SECRET}@host/x",
    f"https://[user:{SECRET}@host/x",
    f"s3://key:{SECRET}@bucket/model",
    f"abfss://container:{SECRET}@account.dfs.core.windows.net/model",
    f"memory://user:{SECRET}@name/p",
    f"https://host/model.safetensors?sig={SECRET}",
    f"s3://bucket/model?X-Amz-Signature={SECRET}",
    f"https://host/model.safetensors#{SECRET}",
]
WAYS: dict[str, Callable[[str, Path], object]] = {
    "register": lambda url, place: opened(place).register_checkpoint(url),
    "mirror": lambda url, place: mirror(url, str(place)),
    "dispatch": lambda url, place: load_checkpoint_and_dispatch(
        nn.Linear(2, 2), url, opened(place)
    ),
    "find": lambda url, place: RemoteDirectory(url).find("model.safetensors"),
}


def opened(place: Path) -> TierStore:
    return TierStore("1MB", place, device="cpu", disk_budget="1MB")


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("way", WAYS)
def test_secret_in_a_url_raises_and_is_not_shown(
    way: str, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(UrlError, match=r"environment|check its host") as error:
        WAYS[way](url, tmp_path)
    assert isinstance(error.value, TierStoreError) and isinstance(error.value, ValueError)
    chain: BaseException | None = error.value
    while chain is not None:
        assert SECRET not in str(chain) + repr(vars(chain))
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    assert SECRET not in caplog.text
    for path in tmp_path.rglob("*"):
        assert SECRET not in str(path)
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("words", [["ls"], ["plan", "--ram", "1MB"], ["verify"], ["ls", "--json"]])
def test_commands_never_print_the_secret_of_a_url(words: list[str], url: str) -> None:
    done = CliRunner().invoke(inspector, [words[0], url, *words[1:]])
    assert done.exit_code != 0
    assert SECRET not in done.output
    assert "environment" in done.output or "host" in done.output, done.output


def test_top_does_not_print_the_secret_of_a_page() -> None:
    url = f"http://user:{SECRET}@127.0.0.1:9/metrics"
    done = CliRunner().invoke(inspector, ["top", url, "--once"])
    assert done.exit_code != 0 and "127.0.0.1:9/metrics" in done.output
    assert SECRET not in done.output


def test_url_without_its_secret_works(tmp_path: Path) -> None:
    url = f"memory://{uuid4()}/a@b"
    memory_store(url).put("a@b/model.safetensors", save({"weight": torch.ones(2, 2)}))
    with opened(tmp_path) as store:
        assert store.register_checkpoint(url) == ["weight"]
        assert torch.equal(store.get("weight"), torch.ones(2, 2))
    done = CliRunner().invoke(inspector, ["ls", url])
    assert done.exit_code == 0 and "model.safetensors" in done.output


@pytest.mark.parametrize(
    "url",
    [
        *("s3://bucket/a@b/c", "https://host:8080/a/b", "file:///a/b@c", "gs://bucket", "az://c/p"),
        *("abfss://container@account.dfs.core.windows.net/p", "https://[::1]:80/x"),
    ],
)
def test_url_without_a_secret_is_shown_unchanged(url: str) -> None:
    check_url(url)
    assert redact_secrets(f"see {url}, please") == f"see {url}, please"


def test_library_error_is_shown_without_secrets() -> None:
    """Endpoints and proxies come from the environment, and may have passwords."""
    error = f"GET http://me:{SECRET}@proxy/bucket?X-Amz-Signature={SECRET} failed"
    assert redact_secrets(error) == "GET http://***@proxy/bucket?*** failed"
