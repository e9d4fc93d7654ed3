"""LoRAs are trained over quantised bases that stream: the same gradients, to the bit.

Each of these kinds also goes backward on the CPU without a store. They keep different tensors for
that: quanto and bitsandbytes the quantised weight, which the backward reads again; torchao and GGUF
a dequantised weight of full size, on the device, as without a store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

from tests import pipelines
from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.adapters.conftest import Checkpoints, checkpoint
from tests.quantised.gguf_files import write_gguf
from tests.quantised.kinds import CPU_ONLY, KINDS, quantised, weights_of
from tests.store.helpers import open_store
from tierstore import Access, dispatch_model, enable_group_offload, from_single_file
from tierstore.adapters.codecs import leaves_of, weight_bytes

__all__ = ["checkpoint"]

STEPS = 3
SHARE = 0.4
KEPT_QUANTISED = ("quanto_int8", "bitsandbytes_nf4", "bitsandbytes_int8")
Loss = Callable[[Any, int, str], torch.Tensor]


def adapted(checkpoint: Checkpoints, kind: str) -> Any:
    """A quantised Llama with an adapter whose weights are random: all of them get gradients."""
    model = quantised("llama", checkpoint, kind)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config).train()


def of_text(model: Any, number: int, device: str) -> torch.Tensor:
    ids = torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(number)).to(device)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(model: Any, device: str, loss_of: Loss = of_text) -> list[torch.Tensor]:
    """Return losses and gradients of a few steps, and the trained weights after them."""
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    found = []
    for number in range(STEPS):
        loss = loss_of(model, number, device)
        loss.backward()
        gradients = [p.grad for p in trained(model)]
        assert all(gradient is not None and gradient.cpu().any() for gradient in gradients)
        found += [each.detach().cpu().clone() for each in (loss, *gradients)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().cpu().clone() for p in trained(model)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def frozen_bytes(model: Any) -> int:
    return weight_bytes(weights_of(model)) - weight_bytes(trained(model))


def recompute(model: Any, how: str) -> None:
    if how != "plain":
        reentrant = {"use_reentrant": how == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)
        model.enable_input_require_grads()


CASES = [
    pytest.param(device, kind, marks=needs_accelerator if device != "cpu" else ())
    for kind in KINDS
    for device in ("cpu", ACCELERATOR)
    if device == "cpu" or kind not in CPU_ONLY
]


@pytest.mark.parametrize("how", ("plain", "reentrant", "not reentrant"))
@pytest.mark.parametrize(("device", "kind"), CASES)
def test_finetuning_steps_equal_plain_torch(
    device: str, kind: str, how: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    plain, model = adapted(checkpoint, kind), adapted(checkpoint, kind)
    for each in (plain, model):
        recompute(each, how)
    expected = train(plain.to(device), device)
    frozen = frozen_bytes(model)
    budget = int(SHARE * frozen) + weight_bytes(trained(model))
    with open_store(disk_dir, budget, device) as store:
        dispatch_model(model, store)
        before = store.stats()
        assert_equal(train(model, device), expected)
        after = store.stats()
        assert after.bytes_written == before.bytes_written
        passes = STEPS * (1 if how == "plain" and kind not in KEPT_QUANTISED else 2)
        memory = 1 if device == "cpu" else 2  # tiers with space for a share
        assert after.bytes_read - before.bytes_read > passes * (1 - memory * SHARE) * frozen
        assert all(p.grad is None for p in model.parameters())
        for tier, peak in after.peak_bytes.items():
            assert tier == "DISK" or peak <= budget


@pytest.mark.parametrize("kind", ("Q8_0", "Q4_0"))
def test_lora_over_a_gguf_file_trains(
    kind: str, checkpoint: Checkpoints, tmp_path: Path, disk_dir: Path
) -> None:
    """On the CPU only: on the pretend accelerator it fails in the backward without a store, too."""
    flux = checkpoint("flux")
    path = tmp_path / "model.gguf"
    write_gguf(pipelines.load("flux", flux).transformer, path, kind)
    arguments: dict[str, Any] = {
        "quantization_config": GGUFQuantizationConfig(compute_dtype=pipelines.DTYPE),
        "config": str(flux / "transformer"),
        "torch_dtype": pipelines.DTYPE,
    }

    def with_lora(model: Any) -> Any:
        model.requires_grad_(False)
        torch.manual_seed(1)
        targets = ["to_q", "to_v"]
        model.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        return model.train()

    plain = with_lora(FluxTransformer2DModel.from_single_file(path, **arguments))
    expected = train(plain, "cpu", of_latents)
    frozen = frozen_bytes(plain)
    with open_store(disk_dir, int(SHARE * frozen) + weight_bytes(trained(plain))) as store:
        model = with_lora(from_single_file(FluxTransformer2DModel, path, store, **arguments))
        enable_group_offload(model, store)
        before = store.stats()
        assert_equal(train(model, "cpu", of_latents), expected)
        after = store.stats()
        assert after.bytes_written == before.bytes_written
        assert after.bytes_read - before.bytes_read > STEPS * (1 - SHARE) * frozen


def of_latents(model: Any, number: int, device: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(number)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, pipelines.DTYPE)

    found = model(
        hidden_states=draw(1, 16, 16),
        encoder_hidden_states=draw(1, 5, 64),
        pooled_projections=draw(1, 32),
        timestep=torch.tensor([0.5]).to(device),
        guidance=torch.tensor([3.5]).to(device),
        img_ids=torch.zeros(16, 3).to(device),
        txt_ids=torch.zeros(5, 3).to(device),
    )
    return found.sample.float().square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_graph_holds_no_store_memory(
    kind: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = adapted(checkpoint, kind)
    with open_store(disk_dir, 2 * frozen_bytes(model)) as store:
        dispatch_model(model, store)
        loss = of_text(model, 0, "cpu")
        assert loss.grad_fn is not None
        for key in store:
            store.acquire(key, Access.UPDATE, timeout=10).release()


@pytest.mark.parametrize("kind", KEPT_QUANTISED)
def test_double_backward_works(kind: str, checkpoint: Checkpoints, disk_dir: Path) -> None:
    model = adapted(checkpoint, kind)
    (weight, *_) = trained(model)
    (expected,) = torch.autograd.grad(of_text(model, 0, "cpu"), weight)
    with open_store(disk_dir, int(SHARE * frozen_bytes(model)) + 50_000) as store:
        dispatch_model(model, store)
        loss = of_text(model, 0, "cpu")
        for _ in range(2):
            before = store.stats().bytes_read
            (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
            assert torch.equal(gradient, expected)
            assert store.stats().bytes_read > before


@pytest.mark.parametrize("kind", KEPT_QUANTISED)
def test_quantised_weight_changed_in_between_raises(
    kind: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = adapted(checkpoint, kind)
    with open_store(disk_dir, int(SHARE * frozen_bytes(model)) + 50_000) as store:
        dispatch_model(model, store)
        loss = of_text(model, 0, "cpu")
        layer = model.get_base_model().model.layers[2].self_attn.q_proj.base_layer
        scales = {
            "quanto_int8": lambda: leaves_of(layer.weight)["_scale"],
            "bitsandbytes_nf4": lambda: layer.weight.quant_state.absmax,
            "bitsandbytes_int8": lambda: layer.state.SCB,
        }
        with torch.no_grad():
            scales[kind]().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert store.stats().bytes_read > 0
