"""Real diffusers pipelines and a transformers model, built from configs with random weights.

Every ``build_*`` function saves a sharded checkpoint as the hub would hold it; ``load`` reads it
with ``from_pretrained``; ``run`` computes one deterministic output from it. Nothing is downloaded.

Checkpoints are saved at the dtype in which they run (bf16, except the modules that Wan keeps in
fp32), so that a reloaded pipeline's weights are views of the mapped safetensors files. Weights are
scaled by their fan-in: outputs are finite and unsaturated, and every weight in use changes them.
Not in use: the encoder and ``quant_conv`` of each VAE, the last layer and the final norm of SDXL's
first text encoder, and the added queries of SD3's last block.

``build_*`` take the seed of a component by its name: ``build_wan(directory, transformer_2=5)``.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

PROMPT = "a red boat on a calm lake"
NEGATIVE_PROMPT = "blurry, dark"
DTYPE = torch.bfloat16
LATENT_SIZE = 8  # latents are 8x8 (x2 frames for Wan)
MAX_SEQUENCE_LENGTH = 32  # tokens of a T5 prompt
RECIPE = "recipe.json"  # in a checkpoint: perturbed_copy needs it to build the checkpoint again

_CLIP_VOCABULARY = 514  # 256 bytes, 256 bytes that end a word, two special tokens
_T5_VOCABULARY = 384  # characters, 100 sentinels, and spare rows as real checkpoints have

transformers.utils.logging.disable_progress_bar()
diffusers.utils.logging.disable_progress_bar()


# --- checkpoints ----------------------------------------------------------------------------------


def build_flux(directory: Path | str, size: str = "small", **seeds: int) -> Path:
    """Build a FluxPipeline like FLUX.1-dev: guidance, CLIP (pooled), T5.

    ``size``: tiny, small, medium, and wide and deep: of 50 and 100 million weights in the
    transformer.
    """
    heads, head_dim, rope, double, single, shard, vae = {
        "tiny": (4, 16, (4, 4, 8), 3, 6, "512KB", (8, 16)),
        "small": (2, 128, (16, 56, 56), 5, 10, "10MB", (32, 32, 64, 64)),
        "medium": (6, 128, (16, 56, 56), 5, 16, "100MB", (32, 64, 128, 128)),
        "wide": (4, 128, (16, 56, 56), 3, 5, "50MB", (8, 16)),
        "deep": (4, 128, (16, 56, 56), 6, 10, "50MB", (8, 16)),
    }[size]
    tiny = size == "tiny"
    clip, t5 = (32, 64) if tiny else (128, 256)
    parts = {
        "transformer": diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=t5,
            pooled_projection_dim=clip,
            guidance_embeds=True,
            axes_dims_rope=rope,
        ),
        "vae": _vae(vae, latent_channels=4),
        "text_encoder": _clip(clip, layers=2 if tiny else 3),
        "tokenizer": _clip_tokenizer(),
        "text_encoder_2": _t5(t5, layers=2 if tiny else 4),
        "tokenizer_2": _t5_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return _save_pipeline(diffusers.FluxPipeline, parts, directory, "flux", size, shard, seeds)


def build_sd3(directory: Path | str, size: str = "small", **seeds: int) -> Path:
    """Build a StableDiffusion3Pipeline like SD 3.5 medium: two CLIPs of one class and shape, T5."""
    tiny = size == "tiny"
    heads, layers, shard, vae = {
        "tiny": (4, 6, "512KB", (8, 16)),
        "small": (4, 10, "10MB", (32, 32, 64, 64)),
        "wide": (8, 6, "50MB", (8, 16)),
        "deep": (8, 12, "50MB", (8, 16)),
    }[size]
    clip, t5 = (32, 64) if tiny else (128, 256)
    parts = {
        "transformer": diffusers.SD3Transformer2DModel(
            sample_size=LATENT_SIZE,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=layers,
            attention_head_dim=16 if tiny else 64,
            num_attention_heads=heads,
            joint_attention_dim=t5,
            caption_projection_dim=heads * (16 if tiny else 64),
            pooled_projection_dim=2 * clip,
            pos_embed_max_size=16,
            dual_attention_layers=(0, 1),
            qk_norm="rms_norm",
        ),
        "vae": _vae(vae, latent_channels=16),
        "text_encoder": _clip(clip, layers=3, projection=True),
        "tokenizer": _clip_tokenizer(),
        "text_encoder_2": _clip(clip, layers=3, projection=True),
        "tokenizer_2": _clip_tokenizer(),
        "text_encoder_3": _t5(t5, layers=2 if tiny else 4),
        "tokenizer_3": _t5_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return _save_pipeline(
        diffusers.StableDiffusion3Pipeline, parts, directory, "sd3", size, shard, seeds
    )


def build_sdxl(directory: Path | str, size: str = "small", **seeds: int) -> Path:
    """Build a StableDiffusionXLPipeline: a UNet, and CLIP without and with projection.

    The UNet has cross attention.
    """
    tiny = size == "tiny"
    channels, transformers_per_level, shard, vae = {
        "tiny": ((16, 32, 32), (1, 1, 2), "512KB", (8, 16)),
        "small": ((32, 64, 128), (1, 1, 4), "5MB", (32, 32, 64, 64)),
    }[size]
    clip = 32 if tiny else 128
    time_ids = 8 if tiny else 32
    parts = {
        "unet": diffusers.UNet2DConditionModel(
            sample_size=LATENT_SIZE,
            in_channels=4,
            out_channels=4,
            block_out_channels=channels,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1 if tiny else 2,
            transformer_layers_per_block=transformers_per_level,
            attention_head_dim=(2, 2, 4),
            cross_attention_dim=2 * clip,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=time_ids,
            projection_class_embeddings_input_dim=6 * time_ids + clip,
            norm_num_groups=8,
        ),
        "vae": _vae(vae, latent_channels=4),
        "text_encoder": _clip(clip, layers=3),
        "tokenizer": _clip_tokenizer(),
        "text_encoder_2": _clip(clip, layers=3, projection=True),
        "tokenizer_2": _clip_tokenizer(),
        "scheduler": diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
    }
    return _save_pipeline(
        diffusers.StableDiffusionXLPipeline,
        parts,
        directory,
        "sdxl",
        size,
        shard,
        seeds,
        add_watermarker=False,
    )


def build_wan(directory: Path | str, size: str = "small", **seeds: int) -> Path:
    """Build a WanPipeline like Wan 2.2: two experts. Of three steps the first expert takes one."""
    tiny = size == "tiny"
    heads, head_dim, ffn, layers, shard = {
        "tiny": (4, 24, 256, 3, "512KB"),
        "small": (2, 128, 1024, 8, "5MB"),
        "wide": (4, 128, 2048, 6, "50MB"),
        "deep": (4, 128, 2048, 12, "50MB"),
    }[size]
    t5 = 64 if tiny else 256

    def expert() -> Any:
        return diffusers.WanTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            ffn_dim=ffn,
            num_layers=layers,
            text_dim=t5,
            freq_dim=32 if tiny else 256,
            rope_max_seq_len=32,
        )

    parts = {
        "transformer": expert(),
        "transformer_2": expert(),
        "vae": diffusers.AutoencoderKLWan(base_dim=4 if tiny else 16, num_res_blocks=1),
        "text_encoder": _t5(t5, layers=2 if tiny else 4, multilingual=True),
        "tokenizer": _t5_tokenizer(),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    }
    return _save_pipeline(
        diffusers.WanPipeline, parts, directory, "wan", size, shard, seeds, boundary_ratio=0.875
    )


def build_llama(directory: Path | str, size: str = "small", **seeds: int) -> Path:
    """Build a LlamaForCausalLM with grouped-query attention and an untied head."""
    hidden, intermediate, layers, vocabulary, shard = {
        "tiny": (128, 256, 4, 512, "512KB"),
        "small": (256, 1024, 12, 4096, "8MB"),
        "wide": (512, 2048, 13, 512, "50MB"),
        "deep": (512, 2048, 26, 512, "50MB"),
    }[size]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    used = randomise({"model": model}, seeds)
    model.save_pretrained(directory, max_shard_size=shard)
    return _write_recipe(directory, "llama", size, used)


BUILDERS: dict[str, Callable[..., Path]] = {
    "flux": build_flux,
    "sd3": build_sd3,
    "sdxl": build_sdxl,
    "wan": build_wan,
    "llama": build_llama,
}
KINDS = tuple(BUILDERS)


def perturbed_copy(
    kind: str,
    src_directory: Path | str,
    dst_directory: Path | str,
    *,
    only: Collection[str] | None = None,
) -> Path:
    """Save the checkpoint with other random weights in all components, or those of ``only``."""
    recipe = json.loads((Path(src_directory) / RECIPE).read_text())
    if recipe["kind"] != kind:
        raise ValueError(f"{src_directory} holds a {recipe['kind']} checkpoint, not {kind}")
    seeds = dict(recipe["seeds"])
    for name in seeds if only is None else only:
        seeds[name] += 1  # an unknown name is a KeyError
    return BUILDERS[kind](dst_directory, recipe["size"], **seeds)


def _save_pipeline(
    pipeline_class: Any,
    parts: dict[str, Any],
    directory: Path | str,
    kind: str,
    size: str,
    shard: str,
    seeds: dict[str, int],
    **config: Any,
) -> Path:
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    used = randomise(modules, seeds)
    pipeline_class(**parts, **config).save_pretrained(directory, max_shard_size=shard)
    return _write_recipe(directory, kind, size, used)


def _write_recipe(directory: Path | str, kind: str, size: str, seeds: dict[str, int]) -> Path:
    recipe = Path(directory, RECIPE)
    recipe.write_text(json.dumps({"kind": kind, "size": size, "seeds": seeds}))
    return recipe.parent


def randomise(modules: dict[str, nn.Module], seeds: dict[str, int]) -> dict[str, int]:
    """Cast and draw the weights of all modules; return the seeds used, 0 where none is given."""
    if unknown := seeds.keys() - modules.keys():
        raise ValueError(f"no such component: {', '.join(sorted(unknown))}")
    used = {name: seeds.get(name, 0) for name in modules}
    for name, module in modules.items():
        _cast(module)
        _draw(module, torch.Generator().manual_seed(zlib.crc32(f"{name}:{used[name]}".encode())))
    return used


def _cast(module: nn.Module) -> None:
    """Cast to the checkpoint's dtype, except modules that ``from_pretrained`` keeps in fp32."""
    diffusers_keeps = isinstance(module, diffusers.ModelMixin) and module._keep_in_fp32_modules
    keep = set(diffusers_keeps or ())
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and keep.isdisjoint(path.split(".")):
            tensor.data = tensor.data.to(DTYPE)


@torch.no_grad()
def _draw(module: Any, generator: torch.Generator) -> None:
    """Draw matrices scaled by their fan-in, norms around 1, small biases."""
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for path, weight in module.named_parameters():  # a tied weight comes once
        weight.normal_(generator=generator)
        if id(weight) in embeddings:
            weight.mul_(0.5)
        elif weight.ndim < 2 or path.endswith("gamma"):
            weight.mul_(0.1)
            if not path.endswith("bias"):  # the scale of a norm
                weight.add_(1)
        else:
            weight.mul_(weight[0].numel() ** -0.5)
        if path.endswith("SelfAttention.q.weight"):  # T5 does not scale its attention scores
            weight.mul_(module.config.d_kv**-0.5)
        # keep images inside the clipped range, [-1, 1]
        if path.endswith("decoder.conv_out.weight"):
            weight.mul_(0.4)


def _vae(channels: tuple[int, ...], latent_channels: int) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        latent_channels=latent_channels,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=LATENT_SIZE * 2 ** (len(channels) - 1),
        use_quant_conv=latent_channels == 4,
        use_post_quant_conv=latent_channels == 4,
        shift_factor=0.05,
        scaling_factor=0.5,
        force_upcast=False,
    )


def _clip(hidden: int, layers: int, *, projection: bool = False) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=_CLIP_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        projection_dim=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        bos_token_id=_CLIP_VOCABULARY - 2,
        eos_token_id=_CLIP_VOCABULARY - 1,
        pad_token_id=_CLIP_VOCABULARY - 1,
    )
    if projection:
        return transformers.CLIPTextModelWithProjection(config)
    return transformers.CLIPTextModel(config)


def _t5(d_model: int, layers: int, *, multilingual: bool = False) -> Any:
    """Build an encoder whose ``shared`` and ``encoder.embed_tokens`` are one tied weight."""
    config_class, model_class = (
        (transformers.UMT5Config, transformers.UMT5EncoderModel)
        if multilingual
        else (transformers.T5Config, transformers.T5EncoderModel)
    )
    config = config_class(
        vocab_size=_T5_VOCABULARY,
        d_model=d_model,
        d_kv=d_model // 4,
        d_ff=2 * d_model,
        num_layers=layers,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return model_class(config)


def _clip_tokenizer() -> transformers.CLIPTokenizer:
    """Build a byte-level CLIP tokenizer without merges: each byte is a token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(code) for code in (*printable, *range(256, 512 - len(printable)))]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _t5_tokenizer() -> transformers.T5TokenizerFast:
    """Build a T5 tokenizer whose pieces are single characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(ord("!"), ord("~") + 1)]
    pieces += [(f"<extra_id_{n}>", 0.0) for n in reversed(range(100))]
    return transformers.T5TokenizerFast(vocab=pieces, model_max_length=512)


# --- use ------------------------------------------------------------------------------------------


def load(
    kind: str, directory: Path | str, *, torch_dtype: torch.dtype = DTYPE, **kwargs: Any
) -> Any:
    """Load the pipeline, or Llama, by ``from_pretrained``; silent and in eval mode."""
    if kind == "llama":
        return transformers.LlamaForCausalLM.from_pretrained(
            directory, dtype=torch_dtype, **kwargs
        ).eval()
    with warnings.catch_warnings():  # diffusers 0.42 prefers dtype=, which older ones ignore
        warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            directory, torch_dtype=torch_dtype, **kwargs
        )
    return quiet(pipeline)


def quiet(pipe: Any) -> Any:
    """Make a pipeline or model silent, set eval mode, and return it."""
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    for module in components(pipe).values():
        module.eval()
    return pipe


@torch.no_grad()
def run(
    kind: str,
    pipe: Any,
    *,
    steps: int = 3,
    seed: int = 0,
    device: torch.device | str = "cpu",
    output_type: str = "pt",
    **kwargs: Any,
) -> torch.Tensor:
    """Return one output on the CPU; the inputs are the same whatever ``device`` is.

    ``output_type="pt"`` decodes through the VAE, ``"latent"`` does not. More keywords go to the
    pipeline's call (``callback_on_step_end``, for instance). Llama: the tokens of a greedy
    ``generate()``, 5 more than ``steps``, and the logits of one forward over them, as one vector.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if kind == "llama":
        return _run_llama(pipe, generator, steps + 5, device)
    arguments = {"flux": _call_flux, "sd3": _call_sd3, "sdxl": _call_sdxl, "wan": _call_wan}[kind]
    call: dict[str, Any] = {
        "prompt": PROMPT,
        "num_inference_steps": steps,
        "output_type": output_type,
        "return_dict": False,
        **arguments(pipe, generator),
        **kwargs,
    }
    call["latents"] = call["latents"].to(device)
    output: torch.Tensor = pipe(**call)[0]
    return output.cpu()


def _call_flux(pipe: Any, generator: torch.Generator) -> dict[str, Any]:
    channels = pipe.transformer.config.in_channels // 4
    latents = torch.randn(1, channels, LATENT_SIZE, LATENT_SIZE, generator=generator).to(DTYPE)
    return {
        "latents": pipe._pack_latents(latents, 1, channels, LATENT_SIZE, LATENT_SIZE),
        "guidance_scale": 3.5,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        **_image_size(pipe),
    }


def _call_sd3(pipe: Any, generator: torch.Generator) -> dict[str, Any]:
    latents = torch.randn(
        1, pipe.transformer.config.in_channels, LATENT_SIZE, LATENT_SIZE, generator=generator
    )
    return {
        "latents": latents.to(DTYPE),
        "negative_prompt": NEGATIVE_PROMPT,
        "guidance_scale": 4.0,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        **_image_size(pipe),
    }


def _call_sdxl(pipe: Any, generator: torch.Generator) -> dict[str, Any]:
    latents = torch.randn(
        1, pipe.unet.config.in_channels, LATENT_SIZE, LATENT_SIZE, generator=generator
    )
    return {
        "latents": latents.to(DTYPE),
        "negative_prompt": NEGATIVE_PROMPT,
        "guidance_scale": 5.0,
        **_image_size(pipe),
    }


def _call_wan(pipe: Any, generator: torch.Generator) -> dict[str, Any]:
    frames = 2
    shape = (1, pipe.transformer.config.in_channels, frames, LATENT_SIZE, LATENT_SIZE)
    return {
        "latents": torch.randn(shape, generator=generator),  # Wan keeps its latents in fp32
        "negative_prompt": NEGATIVE_PROMPT,
        "guidance_scale": 4.0,
        "guidance_scale_2": 3.0,
        "num_frames": 1 + (frames - 1) * pipe.vae_scale_factor_temporal,
        "height": LATENT_SIZE * pipe.vae_scale_factor_spatial,
        "width": LATENT_SIZE * pipe.vae_scale_factor_spatial,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
    }


def _image_size(pipe: Any) -> dict[str, int]:
    return dict.fromkeys(("height", "width"), LATENT_SIZE * pipe.vae_scale_factor)


def _run_llama(
    model: Any, generator: torch.Generator, new_tokens: int, device: torch.device | str
) -> torch.Tensor:
    prompt = torch.randint(3, model.config.vocab_size, (2, 12), generator=generator).to(device)
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    logits = model(tokens).logits
    return torch.cat([tokens.flatten().float().cpu(), logits.flatten().float().cpu()])


def components(pipe: Any) -> dict[str, nn.Module]:
    """Return the modules of a pipeline by name; ``{"model": model}`` for a plain module."""
    if isinstance(pipe, nn.Module):
        return {"model": pipe}
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def weights(pipe: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers as (component.path, tensor), tied weights once."""
    seen: set[int] = set()
    for component, root in components(pipe).items():
        for path, module in root.named_modules():
            for name, tensor in {**module._parameters, **module._buffers}.items():
                if name in module._non_persistent_buffers_set or tensor is None:
                    continue
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield ".".join(filter(None, (component, path, name))), tensor


def weight_bytes(pipe: Any) -> int:
    """Return the bytes of all weights, counting each storage once."""
    unique: dict[tuple[int, int], int] = {}
    for _, tensor in weights(pipe):
        pointer = tensor.data_ptr() if tensor.device.type != "meta" else 0
        unique[(pointer or id(tensor), tensor.nbytes)] = tensor.nbytes
    return sum(unique.values())


def not_file_backed(pipe: Any) -> dict[str, int]:
    """Return name -> bytes of weights that are not views of a mapped safetensors file (Linux)."""
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith(".safetensors"):
            start, end = (int(bound, 16) for bound in fields[0].split("-"))
            mapped.append((start, end))
    return {
        name: tensor.nbytes
        for name, tensor in weights(pipe)
        if not any(start <= tensor.data_ptr() < end for start, end in mapped)
    }
