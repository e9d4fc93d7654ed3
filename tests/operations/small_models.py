"""Small models of transformers, saved as their makers do and loaded as their users do.

Each has many small weights, so that a budget of 15 % covers the weights of any of its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.dispatch.models import Tower, draw
from tests.operations.actions import Actions

WIDTH, LAYERS, WORDS = 64, 6, 96
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    **SPECIAL,
}
ENCODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
IMAGES = {"image_size": 16, "patch_size": 4}
BART_LIKE = {
    "d_model": WIDTH,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "vocab_size": WORDS,
    "decoder_start_token_id": 1,
    **SPECIAL,
}


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=16,
        d_ff=2 * WIDTH,
        num_layers=4,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _whisper() -> Any:
    config = transformers.WhisperConfig(
        **BART_LIKE, num_mel_bins=16, max_source_positions=20, max_target_positions=24
    )
    return transformers.WhisperForConditionalGeneration(config)


def _clip() -> Any:
    text = {**ENCODER, "vocab_size": WORDS, "max_position_embeddings": 16, **SPECIAL}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**ENCODER, **IMAGES}, projection_dim=32
    )
    return transformers.CLIPModel(config)


def _bert() -> Any:
    config = transformers.BertConfig(**ENCODER, vocab_size=WORDS, max_position_embeddings=32)
    return transformers.BertModel(config)


def _vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**ENCODER, **IMAGES))


def _llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**ENCODER, **IMAGES),
        text_config=transformers.LlamaConfig(**DECODER),
        image_token_index=WORDS - 1,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    # Four patches are merged into one, by a matrix that is four times as wide on both sides.
    vision = {
        "depth": 3,
        "embed_dim": WIDTH // 2,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "mlp_ratio": 2,
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        text_config={**DECODER, "rope_parameters": rope},
        vision_config={**vision, "patch_size": 4, "spatial_merge_size": 2},
        image_token_id=WORDS - 1,
        video_token_id=WORDS - 2,
        vision_start_token_id=WORDS - 3,
        vision_end_token_id=WORDS - 4,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _mamba() -> Any:
    config = transformers.MambaConfig(
        hidden_size=WIDTH, num_hidden_layers=8, vocab_size=WORDS, state_size=4, **SPECIAL
    )
    return transformers.MambaForCausalLM(config)


def _mamba2() -> Any:
    config = transformers.Mamba2Config(
        hidden_size=WIDTH,
        num_hidden_layers=8,
        vocab_size=WORDS,
        state_size=8,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=8,
        **SPECIAL,
    )
    return transformers.Mamba2ForCausalLM(config)


def _mixtral() -> Any:
    config = transformers.MixtralConfig(
        **{**DECODER, "intermediate_size": WIDTH}, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def _gemma2() -> Any:
    config = transformers.Gemma2Config(**DECODER, head_dim=16, sliding_window=4)
    return transformers.Gemma2ForCausalLM(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=4, **SPECIAL
    )
    return transformers.GPT2LMHeadModel(config)


def _bart() -> Any:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**BART_LIKE, max_position_embeddings=32)
    )


def _wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        **ENCODER,
        conv_dim=(16, 16),
        conv_kernel=(4, 4),
        conv_stride=(4, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        vocab_size=WORDS,
    )
    return transformers.Wav2Vec2ForCTC(config)


BUILDERS: dict[str, Callable[[], Any]] = {
    "t5": _t5,
    "bart": _bart,
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
    "clip": _clip,
    "bert": _bert,
    "vit": _vit,
    "llava": _llava,
    "qwen2_vl": _qwen2_vl,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "mixtral": _mixtral,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
}


def load(actions: Actions, kind: str) -> Any:
    """Load a model from a checkpoint of float32, in several files."""
    folder = actions.folder / kind
    if not folder.exists():
        made = draw(BUILDERS[kind]())
        made.save_pretrained(folder, max_shard_size="200KB")
    cls = type(BUILDERS[kind]())
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


def words(actions: Actions, *shape: int, seed: int = 1) -> torch.Tensor:
    """Return random tokens on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, WORDS - 8, shape, generator=generator).to(actions.device)


def numbers(actions: Actions, *shape: int, seed: int = 1) -> torch.Tensor:
    """Return random numbers on the device, as an image, a sound or other input."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(actions.device)


def tower(actions: Actions, name: str = "tower", seed: int = 0) -> Any:
    """Return layers in sequence, in plain torch, whose weights are maps of a file."""
    path = actions.folder / f"{name}.safetensors"
    if not path.exists():
        save_file(Tower(24, seed).state_dict(), path)
    model = Tower(24)
    model.load_state_dict(load_file(path), assign=True)
    return model.eval()
