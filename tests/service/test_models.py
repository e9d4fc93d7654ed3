"""Every adapter on a served store: the same results, and bytes were moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import pipelines
from tests.accelerator import on_both, same
from tests.service.serving import serving
from tierstore import (
    OffloadModel,
    OffloadOptimizer,
    TierStore,
    dispatch_model,
    enable_group_offload,
    offload_activations,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.build_flux(tmp_path_factory.mktemp("flux"))


@pytest.mark.full("whole pipelines; a served Llama shows the same in seconds")
@on_both
def test_two_pipelines_share_one_copy(
    flux: Path, tmp_path: Path, device: str, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"device": device}
    if device != "cpu":
        options["device_budget"] = 16 * MIB
    expected = pipelines.load("flux", flux)
    nbytes = pipelines.weight_bytes(expected)
    image = pipelines.run("flux", expected, steps=2)
    with serving(tmp_path / "served", nbytes * 4 // 10) as service:
        stores = [TierStore.connect(service.socket, **options) for _ in range(2)]
        pipes = [pipelines.load("flux", flux) for _ in stores]
        for pipe, store in zip(pipes, stores, strict=True):
            enable_group_offload(pipe, store)
        for pipe in pipes:
            assert same(pipelines.run("flux", pipe, steps=2, device=device), image, device)
        stats = service.stats()
        assert stats.bytes_read >= nbytes * 6 // 10
        assert stats.peak_bytes["HOST"] <= nbytes * 4 // 10
        assert all(store.stats().bytes_read >= nbytes * 6 // 10 for store in stores)
        assert len(service.server.groups) == len(stores[0])
        for store in stores:
            store.close()


@pytest.mark.full("a model in each of two processes")
def test_dispatched_model_is_served(tmp_path: Path) -> None:
    directory = pipelines.build_llama(tmp_path / "llama")
    expected = pipelines.run("llama", pipelines.load("llama", directory))
    with serving(tmp_path / "served", 12 * MIB) as service, service.connect() as store:
        model = dispatch_model(pipelines.load("llama", directory), store)
        assert torch.equal(pipelines.run("llama", model), expected)
        assert service.stats().bytes_read > 0


def blocks() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))


def test_training_state_stays_with_the_worker(tmp_path: Path) -> None:
    plain, x = blocks(), torch.randn(8, 256)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    with (
        serving(tmp_path / "served", 4 * MIB) as service,
        service.connect(ram_budget=4 * MIB, disk_dir=tmp_path / "own") as store,
    ):
        model = OffloadModel(blocks(), store)
        ours = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1, momentum=0.9)
        for _ in range(2):
            ours.zero_grad()
            model(x).square().mean().backward()
            ours.step()
        for name, parameter in plain.named_parameters():
            assert torch.equal(dict(model.named_parameters())[name], parameter), name
        assert service.stats().bytes_read == 0


def test_activations_stay_with_the_worker(tmp_path: Path) -> None:
    model, x = blocks(), torch.randn(512, 256)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with (
        serving(tmp_path / "served", 4 * MIB) as service,
        service.connect(ram_budget=2 * MIB, disk_dir=tmp_path / "own") as store,
    ):
        with offload_activations(store, min_size=4096):
            loss = model(x).square().mean()
        loss.backward()
        assert store.stats().activations.shipped_bytes > 0
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)
