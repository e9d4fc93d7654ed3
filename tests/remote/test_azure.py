"""Azure Blob Storage, as its simulator (Azurite, from npm) answers."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.lanes import LONG, lane
from tests.remote.servers import STARTING_SECONDS, free_port, wait_for
from tierstore import TierStore
from tierstore.engine.mirrors import mirror
from tierstore.errors import StaleCheckpointError

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's published account."""

CONTAINER = "models"
VERSION = "2021-08-06"


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a simulator with an empty container; yield its address."""
    if lane() != LONG:
        pytest.skip("Azurite is installed by npm, from the network: in the long lane")
    if shutil.which("npm") is None:
        pytest.skip("there is no npm, which brings Azurite")
    place = tmp_path_factory.mktemp("azurite")
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "azurite"],
        cwd=place,
        check=True,
        timeout=300,
    )
    port = free_port()
    command = ["node_modules/.bin/azurite-blob", "--silent", "--skipApiVersionCheck"]
    command += ["--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=place, start_new_session=True, **quiet) as server:
        try:
            wait_for(port, server)
            address = f"http://127.0.0.1:{port}/{ACCOUNT}"
            put(address, CONTAINER, "restype:container")
            yield address
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def put(address: str, path: str, parameter: str = "", data: bytes = b"") -> None:
    """Send a signed request, the only other use of Azure's API."""
    now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": now, "x-ms-version": VERSION}
    if data:
        headers["x-ms-blob-type"] = "BlockBlob"
    signed = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    kind = "application/octet-stream" if data else ""
    what = f"PUT\n\n\n{len(data) or ''}\n\n{kind}\n\n\n\n\n\n\n{signed}/{ACCOUNT}/{ACCOUNT}/{path}"
    what += f"\n{parameter}" if parameter else ""
    digest = hmac.new(base64.b64decode(KEY), what.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    if data:
        headers["Content-Type"] = kind
    url = f"{address}/{path}?{parameter.replace(':', '=')}"
    request = urllib.request.Request(url, data=data or None, headers=headers, method="PUT")
    urllib.request.urlopen(request, timeout=STARTING_SECONDS).close()


def test_azure_checkpoint_is_fetched_and_replaced_is_stale(
    azurite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"STORAGE_ACCOUNT_NAME": ACCOUNT, "STORAGE_ACCOUNT_KEY": KEY}
    for name, value in {**settings, "ENDPOINT": azurite, "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    weights = {f"blocks.{i}": torch.randn(100, 100) for i in range(5)}
    put(azurite, f"{CONTAINER}/flux/model.safetensors", data=save(weights))
    put(azurite, f"{CONTAINER}/flux/config.json", data=b"{}")
    url = f"az://{CONTAINER}/flux"
    with TierStore("100KB", tmp_path, device="cpu", disk_budget="100KB") as store:
        keys = store.register_checkpoint(url)
        for key in keys * 2:
            with store.acquire(key) as lease:
                assert torch.equal(lease.tensors[key], weights[key])
        assert store.stats().bytes_fetched >= 200_000
        place = Path(mirror(url, str(tmp_path)))
        assert (place / "model.safetensors").read_bytes() == save(weights)
        assert (place / "config.json").read_bytes() == b"{}"
        put(
            azurite,
            f"{CONTAINER}/flux/model.safetensors",
            data=save({"blocks.0": weights["blocks.1"]}),
        )
        with pytest.raises(StaleCheckpointError):
            for key in keys * 2:
                store.acquire(key).release()
