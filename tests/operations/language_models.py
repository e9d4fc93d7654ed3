"""Operations on a whole transformers model, and PEFT on it."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tests.accelerator import ACCELERATOR
from tests.operations import small_models
from tests.operations.actions import Actions
from tests.operations.generation import dispatched, prompt
from tests.operations.operation import Refusal, Table

LANGUAGE_MODELS = Table("A model of transformers as a whole, and PEFT")
ON_THE_CPU = "computed on the CPU"


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    found: torch.Tensor = model(tokens, **arguments).logits
    return found


def run(actions: Actions, model: Any, **arguments: Any) -> None:
    """Compare the output of a forward."""
    tokens = prompt(actions) % model.config.vocab_size
    actions.compute(lambda: logits(model, tokens, **arguments))


@LANGUAGE_MODELS.row("`output_hidden_states`, `output_attentions`, and `attn_implementation`")
@torch.no_grad()
def all_outputs(actions: Actions) -> None:
    model, tokens = dispatched(actions), prompt(actions)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        run(actions, model)
    actions.check_that_it_changed()

    def everything() -> torch.Tensor:
        found = model(tokens, output_hidden_states=True, output_attentions=True)
        return torch.cat([part.flatten() for part in (*found.hidden_states, *found.attentions)])

    actions.compute(everything)


@LANGUAGE_MODELS.row("a mask with four dimensions")
def mask_of_four_dimensions(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    allowed[3:, 1] = False
    mask = torch.zeros(6, 6, dtype=torch.bfloat16).masked_fill(~allowed, -1e9)
    run(actions, model, attention_mask=mask.expand(2, 1, 6, 6).to(actions.device))
    actions.check_that_it_changed()


@LANGUAGE_MODELS.row("the decoder without its head; the head, or a part of a layer, alone")
@torch.no_grad()
def parts_by_themselves(actions: Actions) -> None:
    model, tokens = dispatched(actions), prompt(actions)
    actions.compute(lambda: model.model(tokens).last_hidden_state)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(2, 6, 128, generator=generator).bfloat16().to(actions.device)
    found = [layer.mlp for layer in model.model.layers] + [model.lm_head]
    actions.compute(lambda: torch.cat([part(states).flatten() for part in found]))


@LANGUAGE_MODELS.row("`resize_token_embeddings`")
def resized(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    with actions.on_the_cpu(model):
        model.resize_token_embeddings(520, mean_resizing=False)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight.data[512:] = 0.25
    tokens = torch.tensor([[3, 515, 519, 7]], device=actions.device)
    actions.compute(lambda: logits(model, tokens))


@LANGUAGE_MODELS.row("`tie_weights`, after `config.tie_word_embeddings = True`")
def tied_later(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    model.config.tie_word_embeddings = True
    model.set_output_embeddings(model.get_output_embeddings())
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    run(actions, model)
    actions.check_that_it_changed()


@LANGUAGE_MODELS.row("`set_input_embeddings`")
def other_embeddings(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    table = torch.nn.Embedding(512, 128, dtype=torch.bfloat16)
    table.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    with actions.on_the_cpu(model):
        model.set_input_embeddings(table)
    run(actions, model)
    actions.check_that_it_changed()


def edit(model: Any) -> None:
    """Make an edit that must be saved."""
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
    model.model.layers[2].self_attn.q_proj.weight.data.neg_()


@LANGUAGE_MODELS.row("`save_pretrained` of an edited model, and `from_pretrained` of the result")
def saved(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    with actions.on_the_cpu(model):
        edit(model)
        model.save_pretrained(actions.folder / "saved", max_shard_size="300KB")
    run(actions, model)
    actions.check_that_it_changed()
    again = type(model).from_pretrained(actions.folder / "saved", dtype="auto")
    actions.dispatch(again)
    run(actions, again)
    assert torch.equal(*actions.outputs[-2:])


@LANGUAGE_MODELS.row("`save_pretrained` into the folder it was loaded from")
def saved_over_itself(actions: Actions) -> None:
    dispatched(actions).save_pretrained(actions.folder / "own")
    model = transformers.LlamaForCausalLM.from_pretrained(actions.folder / "own", dtype="auto")
    actions.dispatch(model)
    run(actions, model)
    with actions.on_the_cpu(model):
        edit(model)
        model.save_pretrained(actions.folder / "own")
    run(actions, model)
    actions.check_that_it_changed()


@LANGUAGE_MODELS.row("`get_memory_footprint`, `num_parameters`")
def footprint(actions: Actions) -> None:
    model = dispatched(actions)
    actions.compare(torch.tensor([model.get_memory_footprint(), model.num_parameters()]))
    run(actions, model)


@LANGUAGE_MODELS.row("`model.half()`, `model.to(torch.float32)`")
def other_dtypes(actions: Actions) -> None:
    model = small_models.load(actions, "gpt2")
    actions.dispatch(model)
    run(actions, model)
    for cast in (model.half, functools.partial(model.to, torch.float32)):
        with actions.on_the_cpu(model):
            cast()
        run(actions, model)
        actions.check_that_it_changed()


@LANGUAGE_MODELS.row("`load_state_dict` of another checkpoint, with `assign=True` and without")
def loaded_anew(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    other = copy.deepcopy(model.state_dict())
    for name in other:
        if "proj" in name:
            other[name] = (other[name].cpu().float() * 0.7).bfloat16()
    model.load_state_dict(other)
    run(actions, model)
    actions.check_that_it_changed()
    half = {name: value.cpu() / 2 for name, value in other.items()}
    with actions.on_the_cpu(model):
        model.load_state_dict(half, assign=True)
    run(actions, model)
    actions.check_that_it_changed()


@LANGUAGE_MODELS.row("`gradient_checkpointing_enable`, which inference ignores")
def with_checkpointing(actions: Actions) -> None:
    model = dispatched(actions)
    model.gradient_checkpointing_enable()
    run(actions, model)


@LANGUAGE_MODELS.row('`model.to("cpu")`, `model.cpu()`', note="nothing is to be done")
def to_the_cpu(actions: Actions) -> None:
    model = dispatched(actions)
    with actions.on_the_cpu(model):
        assert model.to("cpu") is model.cpu()
    run(actions, model)


@LANGUAGE_MODELS.row(
    "`model.to(device)`, `model.cuda()`",
    refusal=Refusal(RuntimeError, "cannot be moved to", "leave it out"),
    devices=(ACCELERATOR,),
)
def to_the_device(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    model.to(actions.device)


# PEFT ---------------------------------------------------------------------------------------------


def lora(seed: int = 3, **config: Any) -> peft.LoraConfig:
    """Return an adapter that changes the model's output, with weights from `seed`."""
    torch.manual_seed(seed)
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**settings, **config})


def adapted(actions: Actions, **config: Any) -> tuple[Any, Any]:
    """Return a PeftModel around an offloaded model, and that model."""
    base = dispatched(actions)
    run(actions, base)
    with actions.on_the_cpu(base):
        model = peft.get_peft_model(base, lora(**config), autocast_adapter_dtype=False)
    run(actions, model)
    actions.check_that_it_changed()
    return model, base


@LANGUAGE_MODELS.row("`PeftModel` around an offloaded model, `disable_adapter()`")
def around(actions: Actions) -> None:
    model, _ = adapted(actions)
    with model.disable_adapter():
        run(actions, model)
    actions.check_that_it_changed()


@LANGUAGE_MODELS.row("`PeftModel`, offloaded with its base")
def offloaded_with_its_base(actions: Actions) -> None:
    base = actions.load("llama")
    model = peft.get_peft_model(base, lora())
    actions.dispatch(model)
    run(actions, model)
    actions.compute(lambda: model.generate(input_ids=prompt(actions), max_new_tokens=2).float())


@LANGUAGE_MODELS.row("two adapters: `add_adapter`, `set_adapter`, `delete_adapter`")
def two_adapters(actions: Actions) -> None:
    model, _ = adapted(actions)
    with actions.on_the_cpu(model):
        model.add_adapter("other", lora(seed=4, target_modules=["up_proj"]))
        model.set_adapter("other")
    run(actions, model)
    actions.check_that_it_changed()
    model.set_adapter("default")
    model.delete_adapter("other")
    run(actions, model)
    actions.check_that_it_changed()


@LANGUAGE_MODELS.row("`merge_adapter`, `unmerge_adapter`, `merge_and_unload`", note=ON_THE_CPU)
def merged(actions: Actions) -> None:
    model, base = adapted(actions)
    for change in (model.merge_adapter, model.unmerge_adapter):
        with actions.on_the_cpu(model):
            change()
        run(actions, model)
    with actions.on_the_cpu(model):
        assert model.merge_and_unload() is base
    run(actions, base)


@LANGUAGE_MODELS.row("`unload`")
def unloaded(actions: Actions) -> None:
    model, base = adapted(actions)
    assert model.unload() is base
    run(actions, base)
    actions.check_that_it_changed()


@LANGUAGE_MODELS.row("DoRA, and `merge_and_unload`", note=ON_THE_CPU)
def dora(actions: Actions) -> None:
    model, _ = adapted(actions, use_dora=True)
    with actions.on_the_cpu(model):
        whole = model.merge_and_unload()
    run(actions, whole)


@LANGUAGE_MODELS.row("`save_pretrained` of a `PeftModel`, `PeftModel.from_pretrained`")
def saved_adapter(actions: Actions) -> None:
    model, base = adapted(actions)
    model.save_pretrained(actions.folder / "adapter")
    base = model.unload()
    run(actions, base)
    again = load_adapter(actions, base, actions.folder / "adapter")
    run(actions, again)
    actions.check_that_it_changed()


def load_adapter(actions: Actions, base: Any, path: Path) -> Any:
    with actions.on_the_cpu(base):
        return peft.PeftModel.from_pretrained(base, path, autocast_adapter_dtype=False)


@LANGUAGE_MODELS.row(
    "transformers' own `add_adapter`, `disable_adapters`, `enable_adapters`, `load_adapter`"
)
def adapters_of_transformers(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    with actions.on_the_cpu(model):
        model.add_adapter(lora())
    run(actions, model)
    actions.check_that_it_changed()
    model.save_pretrained(actions.folder / "adapter")
    model.disable_adapters()
    run(actions, model)
    actions.check_that_it_changed()
    model.enable_adapters()
    model.delete_adapter("default")
    with actions.on_the_cpu(model):
        model.load_adapter(str(actions.folder / "adapter"), device_map="cpu")
    run(actions, model)
    actions.check_that_it_changed()


@LANGUAGE_MODELS.row("a learned prompt (`PromptTuningConfig`), offloaded with its base")
@torch.no_grad()
def prompt_tuning(actions: Actions) -> None:
    base = actions.load("llama")
    torch.manual_seed(4)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(base, config).bfloat16()
    actions.dispatch(model)
    tokens = prompt(actions)
    actions.compute(lambda: model(input_ids=tokens).logits)
