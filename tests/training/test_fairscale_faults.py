"""The faults of FairScale's `OffloadModel`, each as a test that tierstore's passes.

`Exhibit` reproduces FairScale's code (fairscale/experimental/nn/offload.py, version 0.4.13) in a
few lines, fault by fault. It is the control: the tests reject it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, on_both, pretend
from tests.helpers.tensors import parameter_bytes
from tierstore import TierStore
from tierstore.adapters.training import OffloadModel, OffloadOptimizer

pytestmark = pytest.mark.full(
    "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
    keep="any device",
)

recomputed_or_not = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])

WIDTH = 64
BATCH = 10
LAYERS = 6
SLICES = 3
PAGE = 4096

Run = Callable[..., torch.Tensor]


# Models ------------------------------------------------------------------------------------------


def layers(*between: Callable[[], nn.Module], last: int = WIDTH) -> nn.Sequential:
    """Return linear layers with modules between them, and a last one of another width."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(LAYERS):
        parts += [nn.Linear(WIDTH, WIDTH), *(make() for make in between)]
    return nn.Sequential(*parts, nn.Linear(WIDTH, last))


class Mixer(nn.Module):
    """A block with two inputs, and an option that changes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, *, mask: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = torch.tanh(self.left(x) + self.right(y)) * mask
        return x + mixed * scale, y - mixed


class TwoInputs(nn.Module):
    """A list of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mixer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
        for block in self.blocks:
            x, y = block(x, y, **options)
        return x + y


# Training ----------------------------------------------------------------------------------------


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


Found = dict[str, torch.Tensor]


def passes(
    model: nn.Module,
    run: Run,
    device: str,
    *,
    count: int = 1,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Found:
    """Run forward and backward repeatedly: return losses, accumulated gradients and buffers."""
    found: Found = {}
    for number in range(count):
        torch.manual_seed(7 + number)
        with around():
            loss = loss_of(run(batch(number).to(device)))
        loss.backward()
        found[f"loss {number}"] = loss.detach().cpu()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[f"{name}.grad"] = parameter.grad.cpu().clone()
    found |= {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
    return found


def different(found: Found, expected: Found) -> list[str]:
    """Return the names of values that are not bitwise equal."""
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


@contextmanager
def offloaded(
    model: nn.Module, place: Path, device: str, *, recompute: bool = True, **options: Any
) -> Iterator[OffloadModel]:
    """Put the model on a store that holds less than its parameters; check that bytes moved."""
    weights = parameter_bytes(model)
    with TierStore(max(weights // 2, 32 * PAGE), place, device=device) as store:
        options = {"num_slices": SLICES, "checkpoint_activation": recompute, **options}
        offloaded = OffloadModel(model, store, **options)
        yield offloaded
        stats = store.stats()
        if device == "cpu":
            assert stats.bytes_read + stats.bytes_written > weights // 2, "nothing moved"
        else:
            assert stats.bytes_onloaded >= weights, "nothing moved to the device"
        offloaded.disable()


class Exhibit(nn.Module):
    """A sequence of slices that the backward recomputes as FairScale does."""

    def __init__(self, model: nn.Sequential, *, drops_last_dimension: bool = False) -> None:
        super().__init__()
        parts = list(model.children())
        share = -(-len(parts) // SLICES)
        self.slices = [nn.Sequential(*parts[i : i + share]) for i in range(0, len(parts), share)]
        self.drops_last_dimension = drops_last_dimension

    def forward(self, *inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        """Inputs after the first, and options, are lost."""
        way_back = torch.zeros(1, requires_grad=True)
        output: torch.Tensor = _Slices.apply(inputs[0], way_back, self)
        return output


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor, exhibit: Exhibit) -> Any:
        ctx.exhibit, ctx.given = exhibit, []
        ctx.random = torch.get_rng_state()  # once, for all slices
        for part in exhibit.slices:
            ctx.given.append(x.detach())
            x = part(x)
        return x.squeeze(-1) if exhibit.drops_last_dimension else x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient: Any = gradients[0]
        for part, given in zip(reversed(ctx.exhibit.slices), reversed(ctx.given), strict=True):
            torch.set_rng_state(ctx.random)
            given.requires_grad_()
            with torch.enable_grad():
                output = part(given)
            torch.autograd.backward(output, gradient)
            gradient = given.grad
        return None, None, None  # the gradient of the input ends here


# Random numbers and statistics --------------------------------------------------------------------


def with_dropout() -> nn.Sequential:
    return layers(nn.GELU, lambda: nn.Dropout(0.2))


def with_statistics() -> nn.Sequential:
    return layers(lambda: nn.BatchNorm1d(WIDTH), nn.ReLU)


@on_both
@pytest.mark.parametrize("make", [with_dropout, with_statistics])
@recomputed_or_not
def test_losses_gradients_and_statistics_equal_plain_training(
    recompute: bool, make: Callable[[], nn.Sequential], device: str, disk_dir: Path
) -> None:
    plain = make().to(device)
    expected = passes(plain, plain, device, count=3)
    with offloaded(make(), disk_dir, device, recompute=recompute) as model:
        found = passes(model, model, device, count=3)
    assert different(found, expected) == []
    assert len({float(v) for k, v in expected.items() if k.startswith("loss")}) == 3


def test_shared_rng_state_changes_dropout_in_recompute() -> None:
    """The control."""
    plain, model = with_dropout(), with_dropout()
    wrong = different(passes(model, Exhibit(model), "cpu"), passes(plain, plain, "cpu"))
    assert any(name.endswith(".grad") for name in wrong)
    plain, model = layers(nn.GELU), layers(nn.GELU)  # otherwise, the exhibit is right
    assert different(passes(model, Exhibit(model), "cpu"), passes(plain, plain, "cpu")) == []


@on_both
def test_statistics_are_updated_once(device: str, disk_dir: Path) -> None:
    with offloaded(with_statistics(), disk_dir, device) as model:
        found = passes(model, model, device)
        counts = [v for k, v in found.items() if k.endswith("num_batches_tracked")]
        assert counts == [1] * LAYERS
    exhibit = with_statistics()  # the control
    found = passes(exhibit, Exhibit(exhibit), "cpu")
    assert [v for k, v in found.items() if k.endswith("num_batches_tracked")] == [2] * LAYERS


# Outputs and inputs -------------------------------------------------------------------------------


@on_both
@recomputed_or_not
def test_output_with_dimension_of_one_keeps_its_shape(
    recompute: bool, device: str, disk_dir: Path
) -> None:
    plain = layers(nn.Tanh, last=1).to(device)
    expected = passes(plain, plain, device)
    with offloaded(layers(nn.Tanh, last=1), disk_dir, device, recompute=recompute) as model:
        assert model(batch()).shape == (BATCH, 1)
        assert different(passes(model, model, device), expected) == []


def test_output_losing_its_last_dimension_fails_backward() -> None:
    """The control."""
    model = layers(nn.Tanh, last=1)
    run = Exhibit(model, drops_last_dimension=True)
    assert run(batch()).shape == (BATCH,)
    with pytest.raises(RuntimeError, match=r"[Mm]ismatch in shape"):
        passes(model, run, "cpu")


@on_both
@recomputed_or_not
def test_several_inputs_and_options_arrive(recompute: bool, device: str, disk_dir: Path) -> None:
    mask = (batch(5) > 0).float()

    def run_with(model: nn.Module, scale: float) -> Run:
        return lambda x: model(x, batch(4).to(device), mask=mask.to(device), scale=scale)

    expected = {}
    for scale in (1.0, 0.3):
        plain = TwoInputs().to(device)
        expected[scale] = passes(plain, run_with(plain, scale), device)
    assert different(expected[1.0], expected[0.3]), "the option changes nothing"
    for scale, wanted in expected.items():
        place = disk_dir / str(scale)
        with offloaded(TwoInputs(), place, device, recompute=recompute) as model:
            assert different(passes(model, run_with(model, scale), device), wanted) == []


def test_lost_options_would_go_unnoticed() -> None:
    """The control: it ignores them instead of raising."""
    run = Exhibit(layers(nn.Tanh))
    assert torch.equal(run(batch()), run(batch(), batch(2), scale=3.0))


@on_both
@recomputed_or_not
def test_output_without_grad_stays_without(recompute: bool, device: str, disk_dir: Path) -> None:
    plain = with_dropout().to(device)
    expected = passes(plain, plain, device)
    with torch.no_grad():
        looked = plain.eval()(batch().to(device))
    with offloaded(with_dropout(), disk_dir, device, recompute=recompute) as model:
        model.eval()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                output = model(batch())
            assert not output.requires_grad
            assert output.grad_fn is None
            assert torch.equal(output, looked)
        model.train()
        assert different(passes(model, model, device), expected) == []


# Gradients ---------------------------------------------------------------------------------------


@on_both
@recomputed_or_not
def test_input_gets_its_gradient(recompute: bool, device: str, disk_dir: Path) -> None:
    plain, given = layers(nn.GELU).to(device), batch().requires_grad_()
    loss_of(plain(given.to(device))).backward()
    with offloaded(layers(nn.GELU), disk_dir, device, recompute=recompute) as model:
        mine = batch().requires_grad_()
        loss_of(model(mine)).backward()
        assert mine.grad is not None
        assert given.grad is not None
        assert torch.equal(mine.grad, given.grad)
        assert mine.grad.abs().max() > 0


def test_detached_gradient_does_not_reach_the_input() -> None:
    """The control."""
    given = batch().requires_grad_()
    loss_of(Exhibit(layers(nn.GELU))(given)).backward()
    assert given.grad is None


@on_both
@recomputed_or_not
def test_gradients_of_several_batches_add_up(recompute: bool, device: str, disk_dir: Path) -> None:
    plain = layers(nn.GELU).to(device)
    once = passes(plain, plain, device)
    plain.zero_grad()
    expected = passes(plain, plain, device, count=3)
    grads = [name for name in expected if name.endswith(".grad")]
    assert not any(torch.equal(once[name], expected[name]) for name in grads)
    with offloaded(layers(nn.GELU), disk_dir, device, recompute=recompute) as model:
        assert different(passes(model, model, device, count=3), expected) == []


def in_bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@recomputed_or_not
def test_recompute_repeats_casts(recompute: bool, disk_dir: Path) -> None:
    """On the CPU: a pretend accelerator knows no autocast."""
    plain = layers(nn.GELU)
    expected = passes(plain, plain, "cpu", around=in_bfloat16)
    with in_bfloat16():
        assert plain(batch()).dtype is torch.bfloat16
    with offloaded(layers(nn.GELU), disk_dir, "cpu", recompute=recompute) as model:
        assert different(passes(model, model, "cpu", around=in_bfloat16), expected) == []


def test_recompute_without_the_cast_changes_dtype() -> None:
    """The control."""
    model = layers(nn.GELU)
    with pytest.raises(RuntimeError, match="dtype"):
        passes(model, Exhibit(model), "cpu", around=in_bfloat16)


# Bytes -------------------------------------------------------------------------------------------


def on_device() -> int:
    gc.collect()
    torch.accelerator.synchronize(ACCELERATOR)
    return pretend.memory_allocated()


class Swapping:
    """Moves a module's parameters to the device while it runs, by replacing their data."""

    def __init__(self, module: nn.Module) -> None:
        self.homes = {p: p.data for p in module.parameters()}
        module.register_forward_pre_hook(self.bring)
        module.register_forward_hook(self.send_back)

    def bring(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(ACCELERATOR)

    def send_back(self, module: nn.Module, args: Any, output: Any) -> None:
        for parameter, home in self.homes.items():
            parameter.data = home


class Returning(Swapping):
    """Copies them back, changed or not, as `module.to("cpu")` does."""

    def send_back(self, module: nn.Module, args: Any, output: Any) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to("cpu")


def kept_by_a_graph(run: Run) -> int:
    """Return the bytes that stay on the device from the forward to the backward pass."""
    before, given = on_device(), batch().to(ACCELERATOR)
    output = run(given)
    kept = on_device() - before
    assert output.requires_grad
    return kept


@pytest.mark.pretend_only("bytes")
def test_graph_keeps_no_weights_on_the_device(disk_dir: Path) -> None:
    plain = layers(nn.GELU)
    weights = sum(m.weight.nbytes for m in plain.modules() if isinstance(m, nn.Linear))
    activations = kept_by_a_graph(plain.to(ACCELERATOR))

    swapped = layers(nn.GELU)  # the control: autograd's views of the weights keep them
    for part in swapped:
        Swapping(part)
    unneeded = swapped[0].weight.nbytes  # the input needs no gradient
    assert kept_by_a_graph(swapped) >= weights - unneeded + activations

    with offloaded(layers(nn.GELU), disk_dir, ACCELERATOR, recompute=False) as model:
        two = sorted(slice_.nbytes for slice_ in model.slices)[-2:]
        pages = PAGE * sum(len(slice_.groups) for slice_ in model.slices)
        assert sum(two) + pages < weights, "two slices are nearly the whole model"
        assert kept_by_a_graph(model) <= sum(two) + pages + activations
        loss_of(model(batch())).backward()


@pytest.mark.pretend_only("counts")
def test_unchanged_weights_are_never_copied_back(disk_dir: Path) -> None:
    def copied_back(act: Callable[[], Any]) -> int:
        before = pretend.copied("d2h")
        act()
        return pretend.copied("d2h") - before

    given = batch().to(ACCELERATOR)
    returned = layers(nn.GELU)  # the control
    for part in returned:
        Returning(part)
    assert copied_back(lambda: returned(given)) == parameter_bytes(returned)

    with offloaded(layers(nn.GELU), disk_dir, ACCELERATOR, recompute=False) as model:
        optimizer = OffloadOptimizer(model, model.store, torch.optim.AdamW, lr=1e-3)
        gradients = parameter_bytes(model)
        for _ in range(2):
            loaded = pretend.copied("h2d")
            with torch.no_grad():
                assert copied_back(lambda: model(given)) == 0
            before = pretend.copied("d2h")
            loss = loss_of(model(given))
            assert pretend.copied("d2h") == before
            assert copied_back(loss.backward) == gradients
            del loss
            assert copied_back(optimizer.step) == 0
            optimizer.zero_grad()
            assert pretend.copied("h2d") - loaded >= 2 * gradients, "no gradient was loaded"
        assert model.store.stats().bytes_offloaded == 2 * gradients, "only gradients move"
