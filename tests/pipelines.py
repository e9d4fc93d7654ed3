"""Real diffusers pipelines and a transformers model, built from configs with random weights.

Every ``build_*`` function saves a sharded checkpoint as the hub would hold it; ``load`` reads it back with
``from_pretrained``; ``run`` computes one deterministic output from it. Nothing is downloaded.

Checkpoints are saved at the dtype in which they run (bf16, except the modules that Wan keeps in fp32), so that a
reloaded pipeline's weights are views of the mapped safetensors files. Weights are drawn with one generator per
component, scaled by the fan-in: outputs are finite and far from saturation, and every component of a pipeline
changes them. The one exception is the last layer of SDXL's first text encoder: the pipeline reads the layer before it.
"""

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
RECIPE = "recipe.json"  # beside model_index.json: what perturbed_copy needs to build the checkpoint again

_CLIP_VOCABULARY = 514  # 256 bytes, 256 bytes that end a word, two special tokens
_T5_VOCABULARY = 384  # the characters, 100 sentinels and some spare rows, as real checkpoints have

transformers.utils.logging.disable_progress_bar()
diffusers.utils.logging.disable_progress_bar()

Components = dict[str, Any]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def build_flux(directory: Path | str, size: str = "small", *, seed: int = 0, seeds: dict[str, int] | None = None) -> Path:
    """FluxPipeline with guidance, as FLUX.1-dev: CLIP (pooled) and T5. ``size``: tiny, small, medium."""
    heads, head_dim, rope, double, single, shard, vae = {
        "tiny": (4, 16, (4, 4, 8), 3, 6, "512KB", (8, 16)),
        "small": (2, 128, (16, 56, 56), 5, 10, "10MB", (32, 32, 64, 64)),
        "medium": (6, 128, (16, 56, 56), 5, 16, "100MB", (32, 64, 128, 128)),
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
    return _save_pipeline(diffusers.FluxPipeline, parts, directory, "flux", size, shard, seed, seeds)


def build_sd3(directory: Path | str, size: str = "small", *, seed: int = 0, seeds: dict[str, int] | None = None) -> Path:
    """StableDiffusion3Pipeline as SD 3.5 medium: two CLIP encoders of one class and one shape, T5, dual attention."""
    tiny = size == "tiny"
    heads, layers, shard, vae = {
        "tiny": (4, 6, "512KB", (8, 16)),
        "small": (4, 10, "10MB", (32, 32, 64, 64)),
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
    return _save_pipeline(diffusers.StableDiffusion3Pipeline, parts, directory, "sd3", size, shard, seed, seeds)


def build_sdxl(directory: Path | str, size: str = "small", *, seed: int = 0, seeds: dict[str, int] | None = None) -> Path:
    """StableDiffusionXLPipeline: a UNet with cross attention in two of three levels, CLIP without and with projection."""
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
        diffusers.StableDiffusionXLPipeline, parts, directory, "sdxl", size, shard, seed, seeds, add_watermarker=False
    )


def build_wan(directory: Path | str, size: str = "small", *, seed: int = 0, seeds: dict[str, int] | None = None) -> Path:
    """WanPipeline as Wan 2.2: two experts with different weights. The default 3 steps use the first one once."""
    tiny = size == "tiny"
    heads, head_dim, ffn, layers, shard = {
        "tiny": (4, 24, 256, 3, "512KB"),
        "small": (2, 128, 1024, 8, "5MB"),
    }[size]
    t5 = 64 if tiny else 256

    def expert() -> nn.Module:
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
        diffusers.WanPipeline, parts, directory, "wan", size, shard, seed, seeds, boundary_ratio=0.875
    )


def build_llama(directory: Path | str, size: str = "small", *, seed: int = 0, seeds: dict[str, int] | None = None) -> Path:
    """LlamaForCausalLM with grouped-query attention and an untied head."""
    hidden, intermediate, layers, vocabulary, shard = {
        "tiny": (128, 256, 4, 512, "512KB"),
        "small": (256, 1024, 12, 4096, "8MB"),
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
    seeds = seeds or {}
    _randomise(model, "model", seeds.get("model", seed))
    directory = Path(directory)
    model.save_pretrained(directory, max_shard_size=shard)
    _write_recipe(directory, "llama", size, {"model": seeds.get("model", seed)})
    return directory


BUILDERS: dict[str, Callable[..., Path]] = {
    "flux": build_flux,
    "sd3": build_sd3,
    "sdxl": build_sdxl,
    "wan": build_wan,
    "llama": build_llama,
}
KINDS = tuple(BUILDERS)


def perturbed_copy(
    kind: str, src_directory: Path | str, dst_directory: Path | str, *, only: Collection[str] | None = None
) -> Path:
    """The checkpoint in ``src_directory`` again, with other random weights (in the components ``only``, or in all)."""
    recipe = json.loads((Path(src_directory) / RECIPE).read_text())
    if recipe["kind"] != kind:
        raise ValueError(f"{src_directory} holds a {recipe['kind']} checkpoint, not {kind}")
    seeds = dict(recipe["seeds"])
    for name in seeds if only is None else only:
        seeds[name] += 1000  # an unknown name is a KeyError
    return BUILDERS[kind](dst_directory, recipe["size"], seeds=seeds)


def _save_pipeline(
    pipeline_class: type,
    parts: Components,
    directory: Path | str,
    kind: str,
    size: str,
    shard: str,
    seed: int,
    seeds: dict[str, int] | None,
    **config: Any,
) -> Path:
    directory = Path(directory)
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    used = {name: (seeds or {}).get(name, seed) for name in modules}
    for name, module in modules.items():
        _randomise(module, name, used[name])
    pipeline_class(**parts, **config).save_pretrained(directory, max_shard_size=shard)
    _write_recipe(directory, kind, size, used)
    return directory


def _write_recipe(directory: Path, kind: str, size: str, seeds: dict[str, int]) -> None:
    (directory / RECIPE).write_text(json.dumps({"kind": kind, "size": size, "seeds": seeds}))


@torch.no_grad()
def _randomise(module: nn.Module, name: str, seed: int) -> None:
    """Cast to the checkpoint's dtype as ``from_pretrained`` does, then draw all weights, scaled by their fan-in."""
    keep = tuple(getattr(module, "_keep_in_fp32_modules", None) or ()) if isinstance(module, diffusers.ModelMixin) else ()
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and not any(part in keep for part in path.split(".")):
            tensor.data = tensor.data.to(DTYPE)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}:{seed}".encode()))
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
        if path.endswith("decoder.conv_out.weight"):  # stay inside [-1, 1], where the pipeline clips images
            weight.mul_(0.4)


def _vae(channels: tuple[int, ...], latent_channels: int) -> nn.Module:
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


def _clip(hidden: int, layers: int, *, projection: bool = False) -> nn.Module:
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
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config)


def _t5(d_model: int, layers: int, *, multilingual: bool = False) -> nn.Module:
    """An encoder whose ``shared`` and ``encoder.embed_tokens`` are one tied weight."""
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
    """A byte-level CLIP tokenizer without merges: each byte is a token."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [chr(code) for code in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _t5_tokenizer() -> transformers.T5TokenizerFast:
    """A T5 tokenizer whose pieces are single characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(ord("!"), ord("~") + 1)]
    pieces += [(f"<extra_id_{n}>", 0.0) for n in reversed(range(100))]
    return transformers.T5TokenizerFast(vocab=pieces, model_max_length=512)


# --- use --------------------------------------------------------------------------------------------------------------


def load(kind: str, directory: Path | str, *, torch_dtype: torch.dtype = DTYPE, **kwargs: Any) -> Any:
    """The pipeline, or Llama, by ``from_pretrained``; silent and in eval mode."""
    if kind == "llama":
        return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch_dtype, **kwargs).eval()
    with warnings.catch_warnings():  # diffusers 0.42 prefers dtype=, which older ones ignore
        warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
        pipeline = diffusers.DiffusionPipeline.from_pretrained(directory, torch_dtype=torch_dtype, **kwargs)
    pipeline.set_progress_bar_config(disable=True)
    for module in components(pipeline).values():
        module.eval()
    return pipeline


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
    """One output on the CPU; the same inputs whatever ``device`` is.

    ``output_type="pt"`` decodes through the VAE, ``"latent"`` does not. More keywords go to the pipeline's call
    (``callback_on_step_end``, for instance). Llama: ``steps`` new tokens (8 at the default) and the logits of one
    more forward over all of them, as one vector.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if kind == "llama":
        return _run_llama(pipe, generator, 8 if steps == 3 else steps, device)
    call = {"prompt": PROMPT, "num_inference_steps": steps, "output_type": output_type, "return_dict": False}
    call |= {"flux": _call_flux, "sd3": _call_sd3, "sdxl": _call_sdxl, "wan": _call_wan}[kind](pipe, generator)
    call |= kwargs
    call["latents"] = call["latents"].to(device)
    return pipe(**call)[0].cpu()


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
    latents = torch.randn(1, pipe.transformer.config.in_channels, LATENT_SIZE, LATENT_SIZE, generator=generator)
    return {
        "latents": latents.to(DTYPE),
        "negative_prompt": NEGATIVE_PROMPT,
        "guidance_scale": 4.0,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        **_image_size(pipe),
    }


def _call_sdxl(pipe: Any, generator: torch.Generator) -> dict[str, Any]:
    latents = torch.randn(1, pipe.unet.config.in_channels, LATENT_SIZE, LATENT_SIZE, generator=generator)
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
    """Name -> module of a pipeline; ``{"model": model}`` for a plain module."""
    if isinstance(pipe, nn.Module):
        return {"model": pipe}
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def weights(pipe: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers as (component.path, tensor); a tied weight comes once."""
    seen: set[int] = set()
    for component, root in components(pipe).items():
        for path, module in root.named_modules():
            persistent = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
            for name, tensor in {**module._parameters, **persistent}.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield ".".join(filter(None, (component, path, name))), tensor


def weight_bytes(pipe: Any) -> int:
    """Bytes of all weights, each piece of memory counted once."""
    unique: dict[tuple[int, int], int] = {}
    for _, tensor in weights(pipe):
        pointer = tensor.data_ptr() if tensor.device.type != "meta" else 0
        unique[(pointer or id(tensor), tensor.nbytes)] = tensor.nbytes
    return sum(unique.values())


def not_file_backed(pipe: Any) -> dict[str, int]:
    """Name -> bytes of the weights that are not views of a mapped safetensors file (Linux only)."""
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
