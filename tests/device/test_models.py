"""Real models give the same numbers on the pretend accelerator as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.device import pretend

pytestmark = pytest.mark.pretend_only("itself")

Inputs = dict[str, Any]


def flux() -> tuple[nn.Module, Inputs]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(8, 3),
    }
    return model, inputs


def unet() -> tuple[nn.Module, Inputs]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    inputs = {
        "sample": torch.randn(1, 4, 16, 16),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": torch.randn(1, 5, 24),
    }
    return model, inputs


def wan() -> tuple[nn.Module, Inputs]:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
    }
    return model, inputs


def autoencoder() -> tuple[nn.Module, Inputs]:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_num_groups=4,
    )
    return model, {"sample": torch.randn(1, 3, 16, 16)}


def clip() -> tuple[nn.Module, Inputs]:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return CLIPTextModel(config), {"input_ids": torch.randint(0, 99, (2, 7))}


def t5() -> tuple[nn.Module, Inputs]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    inputs = {
        "input_ids": torch.randint(0, 99, (2, 7)),
        "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
    }
    return T5EncoderModel(config), inputs


def llama() -> tuple[nn.Module, Inputs]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(1, 99, (2, 7))}


def sent(inputs: Inputs, place: str) -> Inputs:
    return {name: value.to(place) for name, value in inputs.items()}


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))


MODELS: list[Callable[[], tuple[nn.Module, Inputs]]] = [
    flux,
    unet,
    wan,
    autoencoder,
    clip,
    t5,
    llama,
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_forward_equals_the_cpu(make: Callable[[], tuple[nn.Module, Inputs]]) -> None:
    device = pretend.load()
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    before = device.memory_allocated(1)
    with torch.no_grad():
        wanted = first(model(**inputs))
        found = first(model.to("pretend:1")(**sent(inputs, "pretend:1")))
    assert found.device == torch.device("pretend:1")
    assert torch.equal(found.cpu(), wanted)
    del found
    model.to("cpu")
    assert device.memory_allocated(1) == before


@pytest.mark.parametrize("make", [flux, unet, llama], ids=lambda make: make.__name__)
def test_gradients_equal_the_cpu(make: Callable[[], tuple[nn.Module, Inputs]]) -> None:
    pretend.load()
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    gradients = []
    for place in ("cpu", "pretend"):
        model.to(place).zero_grad()
        first(model(**sent(inputs, place))).square().mean().backward()
        gradients.append(
            {
                name: p.grad.cpu().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, wanted in gradients[0].items():
        assert torch.equal(gradients[1][name], wanted), name


@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 3}]
)
def test_llama_generates_the_same_text(sampling: dict[str, Any]) -> None:
    pretend.load()
    torch.manual_seed(0)
    model, inputs = llama()
    model.eval()
    torch.manual_seed(1)
    wanted = model.generate(**inputs, max_new_tokens=8, **sampling)
    torch.manual_seed(1)
    found = model.to("pretend").generate(**sent(inputs, "pretend"), max_new_tokens=8, **sampling)
    assert found.device == torch.device("pretend:0")
    assert torch.equal(found.cpu(), wanted)
