"""Text that a transformers model writes while it is offloaded."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

import tokenizers
import torch
import transformers

from tests.accelerator import ACCELERATOR
from tests.operations.actions import Actions
from tests.operations.operation import Refusal, Table

GENERATION = Table("Generating text with transformers")
NEW_TOKENS = 4
HOME = "with inputs at `model.device`"


def prompt(actions: Actions, seed: int = 1, length: int = 6) -> torch.Tensor:
    """Return two rows of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (2, length), generator=generator).to(actions.device)


def dispatched(actions: Actions) -> Any:
    """Return the offloaded model that most rows use."""
    model = actions.load("llama")
    actions.dispatch(model)
    return model


def generated(model: Any, tokens: torch.Tensor, arguments: dict[str, Any]) -> Any:
    """Return generated text; adds a mask and a length where `arguments` have none."""
    torch.manual_seed(5)
    return model.generate(
        tokens,
        **{
            "attention_mask": torch.ones_like(tokens),
            "max_new_tokens": NEW_TOKENS,
            "min_new_tokens": NEW_TOKENS,
            "do_sample": False,
            "output_logits": True,
            "return_dict_in_generate": True,
            **arguments,
        },
    )


def write(actions: Actions, model: Any, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Compare the tokens that a model generates, and their logits. Returns the tokens."""
    found: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        output = generated(model, tokens, arguments)
        found[:] = [output.sequences]
        return torch.cat([part.flatten().float() for part in (*found, *output.logits)])

    actions.compute(work)
    return found[0]


@GENERATION.row("greedy")
def greedy(actions: Actions) -> None:
    write(actions, dispatched(actions), prompt(actions))


@GENERATION.row("sampling (`do_sample`, `temperature`, `top_k`, `top_p`, `min_p`) from a seed")
def sampling(actions: Actions) -> None:
    model = dispatched(actions)
    few = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    write(actions, model, prompt(actions), do_sample=True, **few)
    write(actions, model, prompt(actions), do_sample=True, temperature=3.0)
    actions.check_that_it_changed()


@GENERATION.row("beams (`num_beams`, `num_return_sequences`, with sampling and without)")
def beams(actions: Actions) -> None:
    model = dispatched(actions)
    write(actions, model, prompt(actions), num_beams=3, num_return_sequences=2)
    write(actions, model, prompt(actions), num_beams=2, do_sample=True)


@GENERATION.row("a batch of prompts of different lengths, padded on the left")
def padded(actions: Actions) -> None:
    tokens = prompt(actions)
    mask = torch.ones_like(tokens)
    tokens[1, :3], mask[1, :3] = 0, 0
    write(actions, dispatched(actions), tokens, attention_mask=mask)


@GENERATION.row('`cache_implementation="static"`')
def static_cache(actions: Actions) -> None:
    write(actions, dispatched(actions), prompt(actions), cache_implementation="static")


@GENERATION.row('`cache_implementation="quantized"`')
def quantised_cache(actions: Actions) -> None:
    cache = {"backend": "fp8"}
    write(
        actions,
        dispatched(actions),
        prompt(actions),
        cache_implementation="quantized",
        cache_config=cache,
    )


@GENERATION.row("`use_cache=False`")
def without_a_cache(actions: Actions) -> None:
    write(actions, dispatched(actions), prompt(actions), use_cache=False)


@GENERATION.row("continued with earlier `past_key_values`")
def continued(actions: Actions) -> None:
    model = dispatched(actions)
    cache = transformers.DynamicCache(config=model.config)
    written = write(actions, model, prompt(actions), past_key_values=cache)
    tokens = torch.cat([written, prompt(actions, 2, 3)], dim=1)
    write(actions, model, tokens, past_key_values=cache)


@GENERATION.row("a long prompt in parts (`prefill_chunk_size`)")
def prompt_in_parts(actions: Actions) -> None:
    tokens = prompt(actions, length=9)
    write(actions, dispatched(actions), tokens, prefill_chunk_size=4)


@GENERATION.row("`inputs_embeds` from `model.get_input_embeddings()`")
def from_embeddings(actions: Actions) -> None:
    model = dispatched(actions)
    tokens = prompt(actions)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
    found = {"inputs_embeds": embedded, "attention_mask": torch.ones_like(tokens)}
    actions.compute(
        lambda: model.generate(**found, max_new_tokens=NEW_TOKENS, do_sample=False).float()
    )


@GENERATION.row("prompt lookup (`prompt_lookup_num_tokens`)", note=HOME)
def prompt_lookup(actions: Actions) -> None:
    model = dispatched(actions)
    tokens = prompt(actions, length=4)[:1].repeat(1, 3)
    write(actions, model, tokens.to(model.device), prompt_lookup_num_tokens=3)


@GENERATION.row("`assistant_model=`, on the same store", note=HOME)
def assisted(actions: Actions) -> None:
    model, assistant = dispatched(actions), dispatched(actions)
    tokens = prompt(actions)[:1].to(model.device)
    write(actions, model, tokens, assistant_model=assistant)


@GENERATION.row(
    "`assistant_model=`, an ordinary one on the device",
    note=f"{HOME}, and without `min_new_tokens`, of which both would need a copy on their device",
)
def assisted_by_an_ordinary_model(actions: Actions) -> None:
    model, assistant = dispatched(actions), actions.load("llama").to(actions.device)
    tokens = prompt(actions)[:1].to(model.device)
    write(actions, model, tokens, assistant_model=assistant, min_new_tokens=None)


@GENERATION.row("early exit (`assistant_early_exit`)", note=HOME)
def early_exit(actions: Actions) -> None:
    model = dispatched(actions)
    write(actions, model, prompt(actions)[:1].to(model.device), assistant_early_exit=2)


@GENERATION.row(
    "prompt lookup, an assistant or early exit, with inputs on the accelerator",
    refusal=Refusal(
        RuntimeError,
        "same device",
        "give it inputs at `model.device`, as `generate` warns",
    ),
    devices=(ACCELERATOR,),
)
def assisted_from_the_accelerator(actions: Actions) -> None:
    model = dispatched(actions)
    tokens = prompt(actions, length=4)[:1].repeat(1, 3)
    write(actions, model, tokens)
    generated(model, tokens, {"prompt_lookup_num_tokens": 3})


class Shift(transformers.LogitsProcessor):
    """Prefers the tokens that a weight of the model favours."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        bias = self._model.lm_head.weight[:, 0].float().to(scores.device)
        return scores + bias * input_ids.shape[1]


@GENERATION.row(
    "`logits_processor=` (one that reads a weight), `repetition_penalty`, `bad_words_ids`"
)
def logits_processors(actions: Actions) -> None:
    model = dispatched(actions)
    written = write(actions, model, prompt(actions), logits_processor=[Shift(model)])
    bad = [[int(token)] for token in written[0, -2:]]
    write(actions, model, prompt(actions), repetition_penalty=1.5, bad_words_ids=bad)
    actions.check_that_it_changed()


@GENERATION.row("`guidance_scale` with `negative_prompt_ids`")
def guided(actions: Actions) -> None:
    other = {"negative_prompt_ids": prompt(actions, 2), "guidance_scale": 1.5}
    write(actions, dispatched(actions), prompt(actions), **other)


@GENERATION.row("`stopping_criteria=`")
def stopped(actions: Actions) -> None:
    def after_eight(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 8, device=input_ids.device)

    criteria = transformers.StoppingCriteriaList([after_eight])
    free = {"min_new_tokens": 0, "max_new_tokens": 20}
    written = write(
        actions, dispatched(actions), prompt(actions), stopping_criteria=criteria, **free
    )
    assert written.shape[1] == 8


@GENERATION.row("`custom_generate=` with a function")
def of_their_own(actions: Actions) -> None:
    def pick(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        for _step in range(2):
            chosen = model(input_ids).logits[:, -1].topk(2).indices[:, 1:]
            input_ids = torch.cat([input_ids, chosen], dim=1)
        return input_ids

    model = dispatched(actions)
    actions.compute(lambda: model.generate(prompt(actions), custom_generate=pick).float())


def tokenizer() -> Any:
    """Return a tokenizer with a word for each token of the model."""
    words = {f"w{number}": number for number in range(512)}
    model = tokenizers.models.WordLevel(words, unk_token="w3")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def as_numbers(text: str) -> torch.Tensor:
    return torch.tensor([float(number) for number in re.findall(r"w(\d+)", text)])


@GENERATION.row("`TextIteratorStreamer`: `generate` on a thread")
def streamed(actions: Actions) -> None:
    model = dispatched(actions)

    def work() -> torch.Tensor:
        streamer = transformers.TextIteratorStreamer(tokenizer(), timeout=30)
        arguments = {"streamer": streamer}
        tokens = prompt(actions)[:1]
        thread = threading.Thread(target=generated, args=(model, tokens, arguments))
        thread.start()
        text = "".join(streamer)
        thread.join()
        return as_numbers(text)

    actions.compute(work)


@GENERATION.row(
    '`pipeline("text-generation", model=model, device="cpu")`',
    note="the pipeline's own default is the first GPU, to which it would move the model",
)
def text_generation(actions: Actions) -> None:
    model = dispatched(actions)
    device = actions.device_of_an_ordinary_model
    pipe = transformers.pipeline("text-generation", model, tokenizer=tokenizer(), device=device)
    texts = ["w7 w8 w9", "w10 w11"]
    written = functools.partial(pipe, texts, max_new_tokens=NEW_TOKENS, do_sample=False)
    for batch in (1, 2):
        actions.compute(
            lambda batch=batch: torch.cat(
                [as_numbers(found[0]["generated_text"]) for found in written(batch_size=batch)]
            )
        )


@GENERATION.row('`pipeline("feature-extraction", model=model, device="cpu")`')
def features(actions: Actions) -> None:
    model = dispatched(actions).model
    device = actions.device_of_an_ordinary_model
    pipe = transformers.pipeline("feature-extraction", model, tokenizer=tokenizer(), device=device)
    actions.compute(lambda: pipe("w7 w8 w9", return_tensors=True).float())


@GENERATION.row(
    "`pipeline(..., device=` an accelerator `)`",
    refusal=Refusal(
        RuntimeError,
        "cannot be moved to",
        'pass `device="cpu"`: inputs come to the device by themselves',
    ),
    devices=(ACCELERATOR,),
)
def pipeline_on_an_accelerator(actions: Actions) -> None:
    model = dispatched(actions)
    write(actions, model, prompt(actions))
    transformers.pipeline("text-generation", model, tokenizer=tokenizer(), device=actions.device)


@GENERATION.row("`generate` with inputs on the CPU", note="its output is on the CPU, too")
def inputs_on_the_cpu(actions: Actions) -> None:
    model = dispatched(actions)
    write(actions, model, prompt(actions).to(actions.device_of_an_ordinary_model))


@GENERATION.row(
    "`model.device`, `model.dtype`, and inputs moved to the first",
    note="`model.device` is the CPU, where the weights show; inputs there come to the device",
)
def device_and_dtype(actions: Actions) -> None:
    model = dispatched(actions)
    assert model.device.type == actions.device_of_an_ordinary_model
    assert model.dtype is torch.bfloat16
    write(actions, model, prompt(actions).to(model.device))
