"""Operations of torch on any module."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jvp, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from tests.accelerator import ACCELERATOR
from tests.device import autocast
from tests.dispatch.models import WIDTH, draw, rows
from tests.operations.actions import Actions
from tests.operations.operation import Refusal, Table
from tests.operations.small_models import tower

EDITING = Table("Any module of torch: reading, saving and changing it")
CALLING = Table("Any module of torch: running it")


def dispatched(actions: Actions) -> Any:
    model = tower(actions)
    actions.dispatch(model)
    return model


@torch.no_grad()
def result(model: Any, device: str) -> torch.Tensor:
    found: torch.Tensor = model(rows().to(device))
    return found


def run(actions: Actions, model: Any) -> None:
    """Compare the output of a forward."""
    actions.compute(lambda: result(model, actions.device))


def joined(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])


# Reading and saving -------------------------------------------------------------------------------


@EDITING.row("`state_dict()`, `torch.save` and `torch.load` of it, `load_state_dict`")
def state_dict(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    with actions.on_the_cpu(model):
        model.layers[3].weight.data.neg_()
        torch.save(model.state_dict(), actions.folder / "state.pt")
        state = torch.load(actions.folder / "state.pt")
        actions.compare(joined(state.values()))
        model.load_state_dict({name: value * 0.9 for name, value in state.items()})
    run(actions, model)
    actions.check_that_it_changed()


def is_ordinary(actions: Actions, model: Any, copied: Any) -> None:
    """Compare a copy of an offloaded model, and its output after an edit."""
    copied.layers[0].weight.data.mul_(2)
    actions.compare(joined(copied.state_dict().values()))
    actions.compare(result(copied.to(actions.device), actions.device))
    run(actions, model)
    actions.check_that_it_changed()


@EDITING.row("`copy.deepcopy(model)`: an ordinary model")
def deepcopy(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    is_ordinary(actions, model, copy.deepcopy(model))


@EDITING.row("`copy.copy(model)`: an ordinary model, over the same weights")
def shallow_copy(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    actions.compare(result(copy.copy(model).to(actions.device), actions.device))
    run(actions, model)


@EDITING.row("`pickle`, and `torch.save(model)`: an ordinary model")
def pickled(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    is_ordinary(actions, model, pickle.loads(pickle.dumps(model)))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    is_ordinary(actions, model, torch.load(saved, weights_only=False, map_location="cpu"))


@EDITING.row("statistics of all weights: `parameters()`, `named_parameters()`, `buffers()`")
def statistics(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    with actions.on_the_cpu(model):
        norms = [weight.norm() for _, weight in model.named_parameters()]
        actions.compare(torch.stack(norms))
        actions.compare(nn.utils.parameters_to_vector(model.parameters()))
        actions.compare(nn.utils.get_total_norm(list(model.parameters())))
    run(actions, model)


@EDITING.row("`AveragedModel(model)` and its `update_parameters`")
def averaged(actions: Actions) -> None:
    model, other = dispatched(actions), tower(actions, "other", seed=1)
    run(actions, model)
    with actions.on_the_cpu(model):
        mean = AveragedModel(model)
        mean.update_parameters(model)
        mean.update_parameters(other)
        actions.compare(joined(mean.module.state_dict().values()))
    run(actions, model)


# Changing -----------------------------------------------------------------------------------------


def changing(
    name: str, **arguments: Any
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Add a row for a function that changes a model's output. It runs on the CPU."""

    def add(change: Callable[[Any], None]) -> Callable[[Any], None]:
        def do(actions: Actions) -> None:
            model = dispatched(actions)
            run(actions, model)
            with actions.on_the_cpu(model):
                change(model)
            run(actions, model)
            actions.check_that_it_changed()

        do.__name__ = change.__name__
        EDITING.row(name, **arguments)(do)
        return change

    return add


@changing("`weight.data.mul_()`, `weight.copy_()` under `no_grad`, `weight.data = other`")
@torch.no_grad()
def edited_in_place(model: Any) -> None:
    model.layers[1].weight.data.mul_(2)
    model.layers[2].weight.copy_(model.layers[3].weight)
    model.layers[4].weight.data = model.layers[5].weight * 0.5


@changing("a new Parameter, a new module, one less, one more")
def rebuilt(model: Any) -> None:
    model.layers[1].weight = nn.Parameter(model.layers[2].weight.detach().neg())
    model.layers[3] = draw(nn.Linear(WIDTH, WIDTH), seed=7)
    del model.layers[5]
    model.layers.append(draw(nn.Linear(WIDTH, WIDTH), seed=8))


@changing("`model.apply(init)`, and a walk that changes each weight")
@torch.no_grad()
def initialised(model: Any) -> None:
    def halve(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.mul_(0.5)

    model.apply(halve)
    for weight in model.parameters():
        weight.add_(0.001)


@changing("tying two weights")
def tied(model: Any) -> None:
    model.layers[1].weight = model.layers[6].weight


@changing("`nn.utils.vector_to_parameters`")
def from_a_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


@changing("`parametrize.register_parametrization`, `parametrizations.weight_norm`")
def parametrized(model: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    parametrize.register_parametrization(model.layers[2], "weight", Doubled())
    parametrizations.weight_norm(model.layers[3])
    model.layers[3].parametrizations.weight.original0.data.mul_(2)


@changing("`parametrize.remove_parametrizations`")
def unparametrized(model: Any) -> None:
    parametrizations.weight_norm(model.layers[3])
    model.layers[3].parametrizations.weight.original0.data.mul_(2)
    parametrize.remove_parametrizations(model.layers[3], "weight")


@changing("`prune` made permanent by `prune.remove`")
def pruned_for_good(model: Any) -> None:
    prune.l1_unstructured(model.layers[2], "weight", amount=0.5)
    prune.remove(model.layers[2], "weight")


BEFORE = "computed before the module runs, from memory that is outside of the budget"


@changing("`prune` that is not permanent", note=BEFORE)
def pruned(model: Any) -> None:
    prune.l1_unstructured(model.layers[2], "weight", amount=0.5)


@changing("`torch.nn.utils.weight_norm`, `spectral_norm`: the old ones", note=BEFORE)
def old_norms(model: Any) -> None:
    torch.manual_seed(3)
    nn.utils.weight_norm(model.layers[2])
    model.layers[2].weight_g.data.mul_(2)
    nn.utils.spectral_norm(model.layers[4])


@EDITING.row("`requires_grad_(False)`, `zero_grad()`, `share_memory()`")
def flags(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    with actions.on_the_cpu(model):
        model.requires_grad_(False).zero_grad()
        model.share_memory()
    assert not any(weight.requires_grad for weight in model.parameters())
    run(actions, model)


@EDITING.row("`to(memory_format=torch.channels_last)`")
def other_memory_format(actions: Actions) -> None:
    model = draw(nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(20))))
    actions.dispatch(model)
    image = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(1)).to(actions.device)
    actions.compute(lambda: model(image))
    with actions.on_the_cpu(model):
        model.to(memory_format=torch.channels_last)
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
    actions.compute(lambda: model(image))


# Running ------------------------------------------------------------------------------------------


class Varied(nn.Module):
    """Computes something else in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(20))
        draw(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = nn.functional.dropout(torch.tanh(norm(layer(x))), 0.2, self.training)
        return x


@CALLING.row("`train()` and `eval()`: dropout from a seed, statistics of batches")
def training_mode(actions: Actions) -> None:
    model = Varied()
    actions.dispatch(model)
    run(actions, model)
    for _ in range(2):
        torch.manual_seed(3)
        model.train()
        run(actions, model)
        actions.check_that_it_changed()
        model.eval()
        run(actions, model)
        actions.check_that_it_changed()
    actions.compare(joined(model.state_dict().values()))


@CALLING.row("forward hooks and pre-hooks that read weights, and change inputs and outputs")
def hooks_of_modules(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)

    def scale(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * module.bias.to(output.device).mean()

    def shift(module: Any, inputs: Any, named: Any) -> Any:
        return (inputs[0] + 0.5,), named

    added = [
        model.layers[2].register_forward_hook(scale),
        model.layers[4].register_forward_pre_hook(shift, with_kwargs=True),
        model.register_forward_hook(lambda _, inputs, output: output + inputs[0]),
    ]
    run(actions, model)
    actions.check_that_it_changed()
    for hook in added:
        hook.remove()
    run(actions, model)
    actions.check_that_it_changed()


@CALLING.row("hooks of all modules: `register_module_forward_hook`")
def hooks_of_all(actions: Actions) -> None:
    model = dispatched(actions)
    seen: list[torch.Tensor] = []

    def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen.append(output)

    hook = nn.modules.module.register_module_forward_hook(note)
    try:
        actions.compute(lambda: joined([result(model, actions.device), *seen]))
    finally:
        hook.remove()


@CALLING.row(
    "`no_grad`, `inference_mode`, gradients enabled",
    note="with gradients, the graph keeps memory of weights until it is freed, beyond the budget. "
    "Better `no_grad`",
)
def modes(actions: Actions) -> None:
    model, x = dispatched(actions), rows().to(actions.device)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            actions.compute(lambda: model(x))


@CALLING.row("`torch.autocast`")
def half_precision(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    if actions.device == ACCELERATOR:
        autocast.load()
    with torch.autocast(actions.device, dtype=torch.bfloat16):
        run(actions, model)
    actions.check_that_it_changed()


@CALLING.row(
    "`backward()` where nothing is frozen, and so training of all weights",
    refusal=Refusal(
        RuntimeError,
        "disable_offload",
        "`disable_offload(model)`, or [training](training.md) on a store; to train a few weights, "
        "[freeze the others](fine-tuning.md)",
    ),
)
def trained(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    model(rows().to(actions.device)).sum().backward()


@CALLING.row("`torch.func.functional_call` with other weights, some or all")
@torch.no_grad()
def other_weights(actions: Actions) -> None:
    model, other = dispatched(actions), tower(actions, "other", seed=1).to(actions.device)
    run(actions, model)
    x = rows().to(actions.device)
    few = {name: value for name, value in other.state_dict().items() if "layers.3" in name}
    actions.compute(lambda: functional_call(model, few, x))
    actions.check_that_it_changed()


@CALLING.row("`torch.vmap` over inputs")
@torch.no_grad()
def mapped(actions: Actions) -> None:
    model, x = dispatched(actions), rows().to(actions.device)
    actions.compute(lambda: vmap(model)(x))


@CALLING.row("`torch.func.jvp`, `jacfwd`: derivatives forward", devices=("cpu",))
def forward_derivatives(actions: Actions) -> None:
    model, x = dispatched(actions), rows()
    actions.compute(lambda: joined(jvp(model, (x,), (torch.ones_like(x),))))
    actions.compute(lambda: jacfwd(model)(x[0]))
    run(actions, model)


@CALLING.row(
    "`torch.func.jvp`, `jacfwd`",
    refusal=Refusal(RuntimeError, "cannot be differentiated", "`disable_offload(model)` first"),
    devices=(ACCELERATOR,),
)
def derivatives_on_an_accelerator(actions: Actions) -> None:
    model, x = dispatched(actions), rows().to(actions.device)
    run(actions, model)
    jvp(model, (x,), (torch.ones_like(x),))


@CALLING.row(
    "`torch.func.grad`, `vjp`, `jacrev`",
    refusal=Refusal(RuntimeError, r"disable_offload", "`disable_offload(model)` first"),
)
def gradient_of_a_function(actions: Actions) -> None:
    model, x = dispatched(actions), rows().to(actions.device)
    run(actions, model)
    grad(lambda x: model(x).sum())(x)


@CALLING.row("`torch.func.stack_module_state`: an ensemble")
@torch.no_grad()
def ensemble(actions: Actions) -> None:
    model, other = dispatched(actions), tower(actions, "other", seed=1)
    run(actions, model)
    with actions.on_the_cpu(model):
        stacked, _ = stack_module_state([model, other])
    base, x = copy.deepcopy(other).to("meta"), rows()
    found = vmap(lambda weights: functional_call(base, weights, x))(stacked)
    actions.compare(found)


@CALLING.row("a submodule alone: `model.layers[2:9](x)`, one layer, `nn.Sequential(*some)`")
@torch.no_grad()
def parts(actions: Actions) -> None:
    model, x = dispatched(actions), rows().to(actions.device)
    actions.compute(lambda: model.layers[2:9](x))
    few = nn.Sequential(*model.layers[:7], nn.ReLU())
    actions.compute(lambda: few(x))
    actions.compute(lambda: joined([layer(x) for layer in model.layers]))


@CALLING.row("`F.linear(x, layer.weight)`, outside its module", note="on the CPU")
@torch.no_grad()
def weight_of_a_module(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    with actions.on_the_cpu(model):
        layer = model.layers[5]
        actions.compare(nn.functional.linear(rows(), layer.weight, layer.bias))


@CALLING.row("inside another module")
def inside(actions: Actions) -> None:
    model = dispatched(actions)
    around = nn.Sequential(nn.Flatten(), model, nn.ReLU())
    run(actions, around)


@CALLING.row("`FlopCounterMode`, and other modes of torch's dispatcher")
def counted(actions: Actions) -> None:
    model = dispatched(actions)
    with FlopCounterMode(display=False) as counter:
        run(actions, model)
    actions.compare(torch.tensor(counter.get_total_flops()))


class Recurrent(nn.Module):
    """Modules of torch whose weights are in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.RNN(32, 32) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


@CALLING.row("recurrent modules: `nn.RNN`")
@torch.no_grad()
def recurrent(actions: Actions) -> None:
    model = draw(Recurrent())
    actions.dispatch(model)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).to(actions.device)
    actions.compute(lambda: model(x))


@CALLING.row("`nn.TransformerEncoder`, with its fused path")
@torch.no_grad()
def fused_encoder(actions: Actions) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = draw(nn.TransformerEncoder(layer, 10))
    actions.dispatch(model)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).to(actions.device)
    actions.compute(lambda: model(x))


@CALLING.row(
    "`torch.jit.trace(model, x)`",
    refusal=Refusal(RuntimeError, "cannot be traced", "trace `copy.deepcopy(model)`"),
)
def traced(actions: Actions) -> None:
    model, x = dispatched(actions), rows().to(actions.device)
    run(actions, model)
    with torch.no_grad():
        torch.jit.trace(model, x)


@CALLING.row(
    "`torch.jit.script(model)`",
    refusal=Refusal(AttributeError, "MethodPatch", "compile `copy.deepcopy(model)`"),
)
def scripted(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    torch.jit.script(model)
