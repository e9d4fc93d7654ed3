"""Forward passes of models of many kinds."""

from __future__ import annotations

from typing import Any

import torch

from tests.operations.actions import Actions
from tests.operations.operation import Table
from tests.operations.small_models import WORDS, load, numbers, words

ARCHITECTURES = Table("Models of transformers")
IN_GROUPS = "offloaded by `enable_group_offload`"
WRITING = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}


def dispatched(actions: Actions, kind: str) -> Any:
    model = load(actions, kind)
    actions.dispatch(model)
    return model


def grouped(actions: Actions, kind: str) -> Any:
    """Do the same with `enable_group_offload`."""
    model = load(actions, kind)
    actions.offload(model)
    return model


def joined(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.flatten().float() for tensor in tensors])


@torch.no_grad()
def write_and_compute(actions: Actions, model: Any, **inputs: torch.Tensor) -> None:
    """Compare the tokens that a model generates, and its logits."""
    actions.compute(lambda: model.generate(**inputs, **WRITING).float())
    if model.config.is_encoder_decoder:
        (of_the_encoder, *_) = inputs.values()
        inputs["decoder_input_ids"] = words(actions, 2, 3, seed=2).to(of_the_encoder.device)
    actions.compute(lambda: model(**inputs).logits)


@ARCHITECTURES.row("T5, with a mask")
def t5(actions: Actions) -> None:
    model, tokens = dispatched(actions, "t5"), words(actions, 2, 7)
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    write_and_compute(actions, model, input_ids=tokens, attention_mask=mask)


@ARCHITECTURES.row("T5: all outputs of a forward")
@torch.no_grad()
def everything_of_t5(actions: Actions) -> None:
    model, tokens = dispatched(actions, "t5"), words(actions, 2, 7)
    model.set_attn_implementation("eager")
    wanted = {"output_hidden_states": True, "output_attentions": True}

    def everything() -> torch.Tensor:
        found = model(input_ids=tokens, decoder_input_ids=tokens[:, :2], **wanted)
        states = (*found.encoder_hidden_states, *found.decoder_hidden_states)
        return joined(*states, *found.cross_attentions, found.encoder_last_hidden_state)

    actions.compute(everything)


@ARCHITECTURES.row("T5: its encoder alone, and `generate` with its output")
def encoder_by_itself(actions: Actions) -> None:
    model, tokens = dispatched(actions, "t5"), words(actions, 2, 7)
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=tokens)
    actions.compute(lambda: model.generate(encoder_outputs=encoded, **WRITING).float())


@ARCHITECTURES.row("BART")
def bart(actions: Actions) -> None:
    write_and_compute(actions, dispatched(actions, "bart"), input_ids=words(actions, 2, 7))


@ARCHITECTURES.row("Whisper", note="with inputs at `model.device`")
def whisper(actions: Actions) -> None:
    model, sound = dispatched(actions, "whisper"), numbers(actions, 2, 16, 40)
    write_and_compute(actions, model, input_features=sound.to(model.device))


@ARCHITECTURES.row("Wav2Vec2, whose position embedding is parametrised")
@torch.no_grad()
def wav2vec2(actions: Actions) -> None:
    model, sound = dispatched(actions, "wav2vec2"), numbers(actions, 2, 400)
    actions.compute(lambda: model(sound).logits)


@ARCHITECTURES.row("CLIP: a forward, `get_text_features`, `get_image_features`")
@torch.no_grad()
def clip(actions: Actions) -> None:
    model = dispatched(actions, "clip")
    image, tokens = numbers(actions, 2, 3, 16, 16), words(actions, 2, 5)
    both = {"pixel_values": image, "input_ids": tokens}
    actions.compute(lambda: joined(*model(**both)[:4]))
    actions.compute(lambda: model.get_text_features(tokens).pooler_output)
    actions.compute(lambda: model.get_image_features(image).pooler_output)


@ARCHITECTURES.row("BERT with its pooler, and one of its layers alone", note=IN_GROUPS)
@torch.no_grad()
def bert(actions: Actions) -> None:
    model, tokens = grouped(actions, "bert"), words(actions, 2, 7)
    actions.compute(lambda: joined(*model(tokens)[:2]))
    states = numbers(actions, 2, 7, 64)
    for layer in model.encoder.layer[:2]:
        actions.compute(lambda layer=layer: layer(states))


@ARCHITECTURES.row("ViT", note=IN_GROUPS)
@torch.no_grad()
def vit(actions: Actions) -> None:
    model, image = grouped(actions, "vit"), numbers(actions, 2, 3, 16, 16)
    actions.compute(lambda: model(image).logits)


@ARCHITECTURES.row("Llava: text and an image")
def llava(actions: Actions) -> None:
    model, tokens = dispatched(actions, "llava"), words(actions, 1, 24)
    tokens[:, 2:18] = WORDS - 1
    write_and_compute(
        actions,
        model,
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        pixel_values=numbers(actions, 1, 3, 16, 16),
    )


@ARCHITECTURES.row("Qwen2-VL: text and an image")
def qwen2_vl(actions: Actions) -> None:
    model, tokens = dispatched(actions, "qwen2_vl"), words(actions, 1, 12)
    tokens[:, 2:6] = WORDS - 1
    kinds = (tokens == WORDS - 1).int()
    write_and_compute(
        actions,
        model,
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        mm_token_type_ids=kinds,
        pixel_values=numbers(actions, 16, 3 * 2 * 4 * 4),
        image_grid_thw=torch.tensor([[1, 4, 4]], device=actions.device),
    )


@ARCHITECTURES.row("GPT-2", note=IN_GROUPS)
def gpt2(actions: Actions) -> None:
    write_and_compute(actions, grouped(actions, "gpt2"), input_ids=words(actions, 2, 5))


@ARCHITECTURES.row("Gemma 2, with a sliding window")
def gemma2(actions: Actions) -> None:
    write_and_compute(actions, dispatched(actions, "gemma2"), input_ids=words(actions, 2, 7))


@ARCHITECTURES.row("Mixtral, a mixture of experts, and `set_experts_implementation`")
@torch.no_grad()
def mixtral(actions: Actions) -> None:
    model, tokens = dispatched(actions, "mixtral"), words(actions, 2, 5)
    model.set_experts_implementation("eager")
    write_and_compute(actions, model, input_ids=tokens)
    base = model.model
    actions.compute(lambda: joined(*base(tokens, output_router_logits=True).router_logits))


@ARCHITECTURES.row("Mamba")
def mamba(actions: Actions) -> None:
    write_and_compute(actions, dispatched(actions, "mamba"), input_ids=words(actions, 2, 5))


@ARCHITECTURES.row("Mamba 2", note=IN_GROUPS)
def mamba2(actions: Actions) -> None:
    write_and_compute(actions, grouped(actions, "mamba2"), input_ids=words(actions, 2, 5))
