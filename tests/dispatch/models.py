"""Models of every kind, built from configs with random weights, and their expected outputs.

Each of them has many small weights: none is larger than a twentieth of all, so that a budget of a
tenth of the weights can hold the needs of any one module. Inputs and outputs are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_model
from torch import nn

WIDTH = 64
COUNT = 24
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)

Outputs = dict[str, torch.Tensor]

transformers.utils.logging.disable_progress_bar()
diffusers.utils.logging.disable_progress_bar()


class Parts(nn.Module):
    """Tied and unused weights, a weight beside the blocks, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))
        self.register_buffer("mask", torch.arange(WIDTH) % 7 > 0, persistent=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return self.head(self.norm((x + self.shift) * self.mask))


class Tower(nn.Module):
    """Layers one after the other; each has `LAYER_BYTES` bytes of weights."""

    def __init__(self, count: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
        draw(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def draw(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw random weights of a moderate size, and unusual statistics."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
        if parameter.ndim > 1:
            parameter.data.mul_(parameter[0].numel() ** -0.5)
        else:
            parameter.data.mul_(0.1).add_(0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    return model.eval()


def rows(seed: int = 1, count: int = 3) -> torch.Tensor:
    """Return an input of a tower."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 1, shape: tuple[int, ...] = (5,), most: int = WIDTH) -> torch.Tensor:
    """Return token ids, an input of `Parts` or of a language model; 0 to 2 have a meaning."""
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(seed))


# Building -----------------------------------------------------------------------------------------


def _parts() -> nn.Module:
    return Parts()


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=96,
        d_model=WIDTH,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 16, 32),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=2,
        attention_head_dim=4,
        cross_attention_dim=32,
        norm_num_groups=8,
    )


# Running ------------------------------------------------------------------------------------------


def _run_parts(model: Any, device: str) -> Outputs:
    return {"output": model(tokens().to(device))}


def prompt(device: str = "cpu") -> torch.Tensor:
    """Return the input of a language model."""
    return tokens(shape=(2, 7), most=96).to(device)


def _run_llama(model: Any, device: str) -> Outputs:
    return {"logits": model(prompt(device)).logits}


def _run_t5(model: Any, device: str) -> Outputs:
    ids, mask = prompt(device), torch.tensor([[1] * 7, [1] * 4 + [0] * 3]).to(device)
    output = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :3])
    return {"logits": output.logits, "encoded": output.encoder_last_hidden_state}


def _run_unet(model: Any, device: str) -> Outputs:
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(1, 4, 8, 8, generator=generator).to(device)
    states = torch.randn(1, 5, 32, generator=generator).to(device)
    return {"sample": model(sample, torch.tensor(7).to(device), states).sample}


LANGUAGE_MODELS = ("llama", "t5")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 2.0},
    "beams": {"do_sample": False, "num_beams": 2},
}


@torch.no_grad()
def generated(model: Any, way: str, device: str = "cpu") -> Outputs:
    """Return the text that a language model generates."""
    torch.manual_seed(5)
    return {way: model.generate(prompt(device), max_new_tokens=3, **WAYS[way])}


# All checks ---------------------------------------------------------------------------------------


def _save_parts(model: Any, directory: Path) -> None:
    directory.mkdir()
    save_model(model, str(directory / "model.safetensors"), metadata={"format": "pt"})


def _load_parts(directory: Path) -> nn.Module:
    model = Parts()
    model.load_state_dict(load_file(directory / "model.safetensors"), assign=True, strict=False)
    model.tie_weights()
    return model


def _load_t5(directory: Path) -> nn.Module:
    return transformers.T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)


def _load_llama(directory: Path) -> nn.Module:
    return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


@dataclass(frozen=True)
class Kind:
    """Functions that make and run one kind of model."""

    make: Callable[[], Any]
    load: Callable[[Path], Any]
    outputs: Callable[[Any, str], Outputs]
    save: Callable[[Any, Path], None] = lambda model, directory: model.save_pretrained(
        directory, max_shard_size="400KB"
    )


_KINDS = {
    "parts": Kind(_parts, _load_parts, _run_parts, _save_parts),
    "llama": Kind(_llama, _load_llama, _run_llama),
    "t5": Kind(_t5, _load_t5, _run_t5),
    "unet": Kind(_unet, diffusers.UNet2DConditionModel.from_pretrained, _run_unet),
}
KINDS = tuple(_KINDS)


def build(kind: str, seed: int = 0) -> Any:
    """Return a model in memory."""
    return draw(_KINDS[kind].make(), seed)


def save(kind: str, model: nn.Module, directory: Path) -> Path:
    """Save a checkpoint of the model, in several files where the library does that."""
    _KINDS[kind].save(model, directory)
    return directory


def load(kind: str, directory: Path) -> Any:
    """Load a checkpoint's model as its users do: its weights are maps of the files."""
    return _KINDS[kind].load(directory).eval()


def empty(kind: str) -> Any:
    """Return a model whose parameters are on meta, as accelerate's users make it."""
    with init_empty_weights():
        model = _KINDS[kind].make()
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model.eval()


@torch.no_grad()
def forward(kind: str, model: Any, device: str = "cpu") -> Outputs:
    """Return the output of one forward for inputs on `device`, wherever the outputs are."""
    return _KINDS[kind].outputs(model, device)


def run(kind: str, model: Any, device: str = "cpu") -> Outputs:
    """Return the outputs of `forward`, and the text that a language model generates."""
    outputs = forward(kind, model, device)
    for way in ("greedy", "sampled") if kind in LANGUAGE_MODELS else ():
        outputs |= generated(model, way, device)
    return outputs


def in_files(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, read from its files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    assert found
    return found
