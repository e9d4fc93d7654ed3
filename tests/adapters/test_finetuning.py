"""Fine-tuning with other libraries' tools gives bitwise the same results on a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import tierstore
from tests import pipelines
from tests.accelerator import PRETENDING
from tests.adapters.conftest import DEVICES, Checkpoints
from tests.dispatch import models
from tests.helpers.tensors import parameter_bytes
from tests.store.helpers import open_store
from tierstore import dispatch_model, enable_group_offload

pytestmark = pytest.mark.parametrize("device", DEVICES)

STEPS = 4
SHARE = 0.4


def llama(**options: Any) -> Any:
    """Return a Llama with an adapter of random weights, so that all of them get gradients."""
    base = models.build("llama")
    torch.manual_seed(1)
    settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    return peft.get_peft_model(base, peft.LoraConfig(r=4, **settings)).train()


def tokens(number: int, device: str) -> torch.Tensor:
    return models.tokens(number, (2, 7), 96).to(device)


def loss_of(model: Any, number: int, device: str) -> torch.Tensor:
    ids = tokens(number, device)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def trained(model: Any) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


Run = Callable[[Any, str], list[torch.Tensor]]


def train(model: Any, device: str, loss: Callable[..., torch.Tensor] = loss_of) -> list[Any]:
    """Return losses and gradients of a few steps, and the trained weights after them."""
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    found = []
    for number in range(STEPS):
        value = loss(model, number, device)
        value.backward()
        found += [value.detach().cpu(), *(p.grad.cpu().clone() for p in trained(model))]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().cpu().clone() for p in trained(model)]


def assert_same(
    run: Run, device: str, disk_dir: Path, build: Callable[[], Any] = llama, passes: int = 2 * STEPS
) -> None:
    """Check that a run on a store equals a plain one.

    It reads the weights in `passes` passes, and writes nothing.
    """
    plain, model = build(), build()
    expected = run(plain.to(device), device)
    frozen = parameter_bytes(model) - parameter_bytes(model, trained=True)
    budget = int(SHARE * frozen) + parameter_bytes(model, trained=True)
    with open_store(disk_dir, budget, device) as store:
        dispatch_model(model, store)
        before = store.stats()
        found = run(model, device)
        after = store.stats()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        memory = 1 if device == "cpu" else 2  # tiers that hold a fraction
        moved = after.bytes_read - before.bytes_read
        assert moved > passes * (1 - memory * SHARE) * frozen
        assert after.bytes_written == before.bytes_written


@pytest.mark.full("a loop of another library")
def test_accelerate_accumulation_equals_plain(device: str, disk_dir: Path) -> None:
    def run(model: Any, device: str) -> list[torch.Tensor]:
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, device_placement=False
        )
        made = torch.optim.AdamW(trained(model), lr=1e-2)
        model, optimizer = accelerator.prepare(model, made)
        found = []
        for number in range(STEPS):
            with accelerator.accumulate(model):
                loss = loss_of(model, number, device)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(trained(model), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach().cpu())
        return found + [p.detach().cpu().clone() for p in trained(model)]

    assert_same(run, device, disk_dir)


def test_autocast_equals_plain(device: str, disk_dir: Path) -> None:
    """Casts of frozen weights stay until the backward, as the guide says: those are read once."""
    if PRETENDING and device != "cpu":
        pytest.skip("the pretend accelerator has no autocast")

    def loss(model: Any, number: int, device: str) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss_of(model, number, device)

    assert_same(lambda model, device: train(model, device, loss), device, disk_dir, passes=STEPS)


@pytest.mark.full("a kind of LoRA; test_adapter_file_equals_plain has another")
def test_dora_equals_plain(device: str, disk_dir: Path) -> None:
    assert_same(train, device, disk_dir, lambda: llama(use_dora=True))


def test_checkpoint_of_each_block_equals_plain(device: str, disk_dir: Path) -> None:
    def build() -> nn.Module:
        model = models.Tower().requires_grad_(False)
        model.layers[0].requires_grad_(True)
        return model

    def loss(model: Any, number: int, device: str) -> torch.Tensor:
        x = models.rows().to(device) + number
        for layer in model.layers:
            x = tierstore.checkpoint_activations(lambda x, layer=layer: torch.tanh(layer(x)), x)
        return x.square().mean()

    assert_same(lambda model, device: train(model, device, loss), device, disk_dir, build)


class Texts(torch.utils.data.Dataset[Any]):
    """A few texts, always the same."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = tokens(number, "cpu")[0]
        return {"input_ids": ids, "labels": ids}


@pytest.mark.full("tests/training/test_trainer.py has the same trainer")
def test_transformers_trainer_equals_plain(device: str, disk_dir: Path) -> None:
    if device != "cpu":
        pytest.skip("it chooses the device itself, and knows no pretend accelerator")

    def run(model: Any, device: str) -> list[torch.Tensor]:
        settings = transformers.TrainingArguments(
            output_dir=str(disk_dir / "trainer"),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        before = [p.detach().clone() for p in trained(model)]
        transformers.Trainer(model=model, args=settings, train_dataset=Texts()).train()
        after = [p.detach().clone() for p in trained(model)]
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
        return after

    assert_same(run, device, disk_dir)


def with_loras(pipe: Any) -> Any:
    """Add a LoRA to the UNet and to a text encoder, as diffusers' training scripts do."""
    torch.manual_seed(1)
    for part in pipelines.components(pipe).values():
        part.requires_grad_(False)
    pipe.unet.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    pipe.text_encoder.add_adapter(
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    return pipe


def train_to_denoise(pipe: Any, device: str) -> list[torch.Tensor]:
    parts = [*trained(pipe.unet), *trained(pipe.text_encoder)]
    optimizer = torch.optim.AdamW(parts, lr=1e-2)
    found = []
    for number in range(2):
        random = torch.Generator().manual_seed(number)
        image = torch.randn(1, 3, 16, 16, generator=random).to(device)
        with torch.no_grad():
            latents = pipe.vae.encode(image).latent_dist.mode()
        noise = torch.randn(latents.shape, generator=random).to(device, latents.dtype)
        ids = models.tokens(number, (1, 77), 500).to(device)
        first = pipe.text_encoder(ids, output_hidden_states=True)
        second = pipe.text_encoder_2(ids, output_hidden_states=True)
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        time_ids = torch.tensor([[16, 16, 0, 0, 16, 16]]).to(device, latents.dtype)
        conditions = {"text_embeds": second[0], "time_ids": time_ids}
        predicted = pipe.unet(
            latents + noise, torch.tensor([3]).to(device), states, added_cond_kwargs=conditions
        ).sample
        loss = (predicted - noise).square().mean()
        loss.backward()
        found += [loss.detach().cpu(), *(p.grad.cpu().clone() for p in parts if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().cpu().clone() for p in parts]


@pytest.mark.full("a whole pipeline", keep=["cpu"])
def test_pipeline_with_two_loras_equals_plain(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    path = checkpoint("sdxl")
    expected = train_to_denoise(
        with_loras(pipelines.load("sdxl", path, torch_dtype=torch.float32)).to(device), device
    )
    pipe = with_loras(pipelines.load("sdxl", path, torch_dtype=torch.float32))
    parts = pipelines.components(pipe).values()
    total = sum(parameter_bytes(part) for part in parts)
    with open_store(disk_dir, int(SHARE * total), device) as store:
        enable_group_offload(pipe, store)
        before = store.stats()
        found = train_to_denoise(pipe, device)
        after = store.stats()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert after.bytes_read - before.bytes_read > total
    assert after.bytes_written == before.bytes_written


def test_adapter_file_equals_plain(device: str, disk_dir: Path) -> None:
    def run(model: Any, device: str) -> list[torch.Tensor]:
        train(model, device)
        model.save_pretrained(disk_dir / "adapters")
        (path,) = (disk_dir / "adapters").glob("*.safetensors")
        found = load_file(path)
        path.unlink()
        assert len(found) == len(trained(model))
        return [found[name] for name in sorted(found)]

    assert_same(run, device, disk_dir)
