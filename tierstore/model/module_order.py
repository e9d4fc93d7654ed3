"""The order in which well-known model families register their modules.

Each line lists sibling modules in the order of their class: Flux, SD3, Wan, SDXL, Qwen-Image, LTX,
Hunyuan, PixArt, CogVideoX and their autoencoders; CLIP, T5, and the Llama family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SIDE_BY_SIDE = [
    line.split()
    for line in """
    time_text_embed context_embedder x_embedder transformer_blocks single_transformer_blocks norm_out proj_out
    pos_embed time_text_embed context_embedder transformer_blocks norm_out proj_out
    time_text_embed txt_norm img_in txt_in transformer_blocks norm_out proj_out
    proj_in time_embed caption_projection transformer_blocks proj_out
    patch_embed time_embed caption_projection caption_norm transformer_blocks proj_out
    patch_embed time_embedding transformer_blocks norm_final norm_out proj_out
    patch_embedding condition_embedder blocks proj_out
    conv_in time_embedding add_embedding down_blocks up_blocks mid_block conv_norm_out conv_out
    conv_in down_blocks mid_block conv_norm_out conv_out
    conv_in mid_block up_blocks norm_out conv_out
    conv_in down_blocks mid_block norm_out conv_out
    encoder decoder quant_conv post_quant_conv
    time_embedder time_proj text_embedder
    timestep_embedder text_embedder
    timestep_embedder guidance_embedder text_embedder
    timestep_embedder resolution_embedder aspect_ratio_embedder
    norm1 norm1_context attn attn2 norm2 norm2_context ff ff_context
    norm1 attn1 norm2 attn2 norm3 ff
    attn1 attn2 norm2 ffn
    attn1 attn2 ff
    img_mod attn img_mlp txt_mod txt_mlp
    norm proj_mlp proj_out attn
    norm proj_in transformer_blocks proj_out
    norm_q norm_k to_q to_k to_v to_out norm_added_q norm_added_k add_q_proj add_k_proj add_v_proj to_add_out
    to_q to_k to_v add_k_proj add_v_proj add_q_proj to_out to_add_out
    norm_q norm_k to_q to_k to_v
    to_q to_k to_v to_out norm_q norm_k
    group_norm to_q to_k to_v to_out
    norm to_qkv proj
    attentions resnets downsamplers
    attentions resnets upsamplers
    norm1 conv1 time_emb_proj norm2 conv2 conv_shortcut
    resample time_conv
    linear_1 linear_2
    embeddings encoder final_layer_norm
    token_embedding position_embedding
    text_model text_projection
    self_attn layer_norm1 mlp layer_norm2
    k_proj v_proj q_proj out_proj
    shared encoder
    embed_tokens block final_layer_norm
    SelfAttention layer_norm
    DenseReluDense layer_norm
    q k v o relative_attention_bias
    wi wi_0 wi_1 wo
    model lm_head
    embed_tokens layers norm
    self_attn mlp input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm
    q_proj k_proj v_proj o_proj q_norm k_norm
    gate_proj up_proj down_proj
    """.splitlines()  # noqa: E501 - one line per set of siblings
    if line.strip()
]

_FIRST = re.compile(r"embed|patch|conv_in|_in$|^in_|^wte$|^wpe$")
_LAST = re.compile(r"out$|^out_|_out_|final|head$|^norm$|^ln_f$")


def in_customary_order(names: Iterable[str]) -> list[str]:
    """Sort the names of sibling modules by their likely order of registration.

    Numbers sort numerically. Names that no known family has sort alphabetically, with those of
    inputs first and those of outputs last.

    >>> in_customary_order(["to_out", "to_v", "to_k", "to_q"])
    ['to_q', 'to_k', 'to_v', 'to_out']
    >>> in_customary_order(["10", "2"]), in_customary_order(["head", "body", "patches"])
    (['2', '10'], ['patches', 'body', 'head'])
    """
    names = list(names)
    known = [line for line in _SIDE_BY_SIDE if set(names) <= set(line)]
    if known:
        line = min(known, key=len)
        return sorted(names, key=line.index)
    return sorted(names, key=lambda name: (_place(name), natural(name)))


def _place(name: str) -> int:
    return -1 if _FIRST.search(name) else 1 if _LAST.search(name) else 0


def natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    parts = re.split(r"([0-9]{1,18})", text)  # text and numbers in turn
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]
