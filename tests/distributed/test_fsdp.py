"""A model that FSDP2 shards trains on stores as without them, each rank within its budget."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import tierstore
from tests.accelerator import ACCELERATOR
from tests.distributed.ranks import Ranks
from tests.distributed.training import (
    Block,
    Case,
    Run,
    assert_alike,
    assert_equal,
    batch,
    local,
    on_store,
    opened,
    plain_run,
    side_by_side,
)
from tierstore import OffloadModel, OffloadOptimizer

pytestmark = pytest.mark.full("processes take seconds to start")

Of = Callable[[int], Ranks]


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("share", (0.15, 0.5, 2.0))
def test_ten_steps_match_plain_fsdp(ranks: Of, place: str, share: float, world: int) -> None:
    for found in ranks(world).call(side_by_side, Case(share=share), place):
        if share > 1:
            assert found["read"] == found["written"] == 0
        else:
            # Six times the parameters are read and four times are written; clipping reads gradients
            # twice more and writes them once. Groups this small have more bytes than their tensors.
            assert 0 < found["written"] <= 1.4 * 5 * found["parameters"] * found["steps"]
            assert 0 < found["read"] <= 1.4 * 8 * found["parameters"] * found["steps"]


CASES = {
    "sgd": Case(optimizer=torch.optim.SGD),
    "rmsprop": Case(optimizer=torch.optim.RMSprop),
    "frozen": Case(frozen=True),
    "kept unsharded": Case(reshard=False),
    "root resharded": Case(reshard=True),
    "bfloat16": Case(bfloat16=True),
    "checkpointed": Case(checkpoint=True),
    "checkpointed, frozen, bfloat16": Case(share=0.2, checkpoint=True, frozen=True, bfloat16=True),
    "whole copies": Case(replicas=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_way_to_train_matches_plain_fsdp(ranks: Of, place: str, case: Case) -> None:
    for found in ranks(2).call(side_by_side, case, place, steps=4):
        assert found["read"] > 0 and found["written"] > 0


@pytest.mark.pretend_only("collectives")
@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("share", (0.15, 2.0))
def test_pretend_accelerator_matches_plain_fsdp(
    ranks: Of, place: str, share: float, world: int
) -> None:
    """torch's gloo does not support this device, so FSDP2 gets other collectives.

    Norms over several ranks are not compared.
    """
    case = Case(share=share, device=ACCELERATOR)
    for found in ranks(world).call(side_by_side, case, place, steps=4):
        assert found["read"] > 0 or share > 1


def refused_with_a_policy(place: str) -> None:
    mesh = init_device_mesh(ACCELERATOR, (dist.get_world_size(),))
    module = nn.Linear(8, 8).to(ACCELERATOR)
    fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    refused = pytest.raises(ValueError, match="has a CPUOffloadPolicy")
    with opened(Case(share=100, device=ACCELERATOR), module, place) as store, refused:
        OffloadModel(module, store)


@pytest.mark.pretend_only("collectives")
def test_policies_that_move_shards_raise(ranks: Of, place: str) -> None:
    ranks(1).call(refused_with_a_policy, place)


def test_replicas_of_shards_match_plain_fsdp(ranks: Of, place: str) -> None:
    ranks(4).call(side_by_side, Case(replicas=2), place, steps=4)


# Operations of a training loop --------------------------------------------------------------------


def accumulated(place: str) -> None:
    case = Case(share=0.2)
    expected = plain_run(case)
    with on_store(case, place) as (run, _):
        for each in (run, expected):
            model: Any = each.model
            each.losses(0, 1)
            model.set_requires_gradient_sync(False)
            each.losses(2)
            model.set_requires_gradient_sync(True)
            each.losses(3)
        assert_equal(run, expected)
        for each in (run, expected):
            for i, parameter in enumerate(each.model.parameters()):
                assert parameter.grad is not None
                if i % 3 == 0:
                    parameter.grad = None
                elif i % 3 == 1:
                    parameter.grad *= 0.5
                else:
                    parameter.grad = parameter.grad.clone() * 2
            each.losses(4)
        assert_equal(run, expected)
        for each in (run, expected):  # of a part of the model alone
            model = each.model
            model.blocks[1](torch.ones(2, 67)).square().mean().backward()
        assert_equal(run, expected)
        run.step()
        expected.step()
        assert_equal(run, expected)


def test_accumulated_gradients_match_plain_fsdp(ranks: Of, place: str) -> None:
    ranks(2).call(accumulated, place)


def validated(place: str) -> None:
    case = Case(share=0.2)
    expected = plain_run(case)
    with on_store(case, place) as (run, _):
        for each in (run, expected):
            each.losses(0)
        tokens, _ = batch(1)
        with torch.no_grad():
            assert torch.equal(run.model(tokens), expected.model(tokens))
        for each in (run, expected):
            model: Any = each.model
            model.reshard()
        assert_equal(run, expected)
        for each in (run, expected):
            each.step()
            with torch.no_grad():
                for parameter in each.model.parameters():
                    parameter.mul_(0.9)
        assert torch.equal(run.losses(2), expected.losses(2))
        assert_equal(run, expected)


def test_validation_and_edits_between_steps_match(ranks: Of, place: str) -> None:
    ranks(2).call(validated, place)


def prefetched(place: str) -> None:
    case = Case(share=0.2, reshard=True)
    expected = plain_run(case)
    with on_store(case, place) as (run, _):
        for each in (run, expected):
            model: Any = each.model
            for one, other in itertools.pairwise(model.blocks):
                one.set_modules_to_forward_prefetch([other])
                other.set_modules_to_backward_prefetch([one])
        for step in range(3):
            for each in (run, expected):
                model = each.model
                handle = model.unshard(async_op=True)
                handle.wait()
            assert torch.equal(run.losses(step), expected.losses(step))
            run.step()
            expected.step()
            assert_equal(run, expected)


def test_explicit_prefetching_matches(ranks: Of, place: str) -> None:
    ranks(2).call(prefetched, place)


def loaded(place: str) -> None:
    case = Case(share=0.2)
    expected = plain_run(case)
    with on_store(case, place) as (run, store):
        for each in (run, expected):
            each.losses(0)
            each.step()
        kept = {name: value.clone() for name, value in run.model.state_dict().items()}
        other = {name: value.clone() for name, value in expected.model.state_dict().items()}
        assert kept.keys() == other.keys()
        for name in kept:
            assert_alike(kept[name], other[name], name)
        states = run.optimizer.state_dict()
        assert states.keys() == expected.optimizer.state_dict().keys()
        for each in (run, expected):
            each.losses(1)
            each.step()
        run.model.load_state_dict(kept)
        expected.model.load_state_dict(kept)
        assert_equal(run, expected)
        before = store.stats().bytes_read
        for each in (run, expected):
            each.losses(2)
            each.step()
        assert_equal(run, expected)
        assert store.stats().bytes_read > before
        module: nn.Module = run.model.module  # type: ignore[assignment]
        for each_model in (module, expected.model):
            each_model.load_state_dict(kept)  # of the module itself, unknown to the model
        assert torch.equal(run.losses(3), expected.losses(3))
        assert_equal(run, expected)


def test_state_dicts_are_saved_and_loaded(ranks: Of, place: str) -> None:
    ranks(2).call(loaded, place)
    ranks(4).call(loaded, place)


def states_moved(place: str) -> None:
    """An optimizer on a store continues with the state of a plain one, and the other way round."""
    case = Case(share=0.2)
    expected = plain_run(case)
    with on_store(case, place) as (run, _):
        for step in range(2):
            expected.losses(step)
            expected.step()
        run.model.load_state_dict(expected.model.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(expected.optimizer.state_dict()))
        assert_equal(run, expected)
        for each in (run, expected):
            each.losses(2)
            each.step()
        assert_equal(run, expected)
        whole = copy.deepcopy(expected.optimizer.state_dict())
        for state in whole["state"].values():
            state["exp_avg"] = state["exp_avg"].full_tensor()
        with pytest.raises(ValueError, match="pass a DTensor"):
            run.optimizer.load_state_dict(whole)
        run.optimizer.load_state_dict(copy.deepcopy(expected.optimizer.state_dict()))
        again = plain_run(case)
        again.model.load_state_dict(run.model.state_dict())
        again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        again.losses(3)
        again.step()
        run.losses(3)
        run.step()
        assert_equal(run, again)


def test_optimizer_states_move_to_a_store_and_back(ranks: Of, place: str) -> None:
    ranks(2).call(states_moved, place)


def disabled(place: str, device: str = "cpu") -> None:
    case = Case(share=0.2, device=device)
    expected = plain_run(case)
    module = case.sharded()
    for _ in range(2):
        with opened(case, module, place) as store:
            model = OffloadModel(module, store)
            optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, **case.options)
            tokens, wanted = (each.to(device) for each in batch(0))
            functional.mse_loss(model(tokens), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.optimizer.state.clear()
            expected.losses(0)
            expected.step()
            functional.mse_loss(model(tokens), wanted).backward()
            expected.losses(0)
            assert model.disable() is module
        for ours, theirs in zip(module.parameters(), expected.model.parameters(), strict=True):
            assert local(ours).device.type == device
            assert_alike(ours, theirs, "given back")
            assert_alike(ours.grad, theirs.grad, "gradient")
        tokens, wanted = (each.to(device) for each in batch(1))
        functional.mse_loss(module(tokens), wanted).backward()
        expected.losses(1)
        for ours, theirs in zip(module.parameters(), expected.model.parameters(), strict=True):
            assert_alike(ours.grad, theirs.grad, "added gradient")
        for each in (module, expected.model):
            each.zero_grad()


def test_disabled_model_is_a_plain_fsdp_model(ranks: Of, place: str) -> None:
    ranks(2).call(disabled, place)
    ranks(4).call(disabled, place)


@pytest.mark.pretend_only("collectives")
def test_disabled_model_on_an_accelerator_is_a_plain_one(ranks: Of, place: str) -> None:
    ranks(1).call(disabled, place, ACCELERATOR)


def unfrozen(place: str) -> None:
    case = Case(share=0.3, frozen=True)
    expected = plain_run(case)
    with on_store(case, place) as (run, _):
        for step in range(2):
            assert torch.equal(run.losses(step), expected.losses(step))
            run.step()
            expected.step()
        for each in (run, expected):
            each.model.requires_grad_(True)
        assert torch.equal(run.losses(2), expected.losses(2))
        assert_equal(run, expected)
        with torch.no_grad():
            for each in (run, expected):
                for parameter in each.model.parameters():
                    parameter.add_(0.01)
        assert torch.equal(run.losses(3), expected.losses(3))
        assert_equal(run, expected)


def test_frozen_parameters_are_unfrozen(ranks: Of, place: str) -> None:
    ranks(2).call(unfrozen, place)


def activations(place: str) -> None:
    case = Case(share=0.5)
    expected = plain_run(case)
    with on_store(case, place) as (run, store):
        for step in range(3):
            tokens, wanted = batch(step)
            with tierstore.offload_activations(store, model=run.model, min_size=1):
                loss = functional.mse_loss(run.model(tokens), wanted)
            loss.backward()
            assert torch.equal(loss.detach(), expected.losses(step)[0])
            assert_equal(run, expected)
            run.step()
            expected.step()


def test_activations_in_the_same_store_match(ranks: Of, place: str) -> None:
    ranks(2).call(activations, place)


def microbatched(place: str) -> None:
    case = Case(share=0.5)
    expected = plain_run(case)
    module = case.sharded()
    with opened(case, module, place) as store:
        model = OffloadModel(module, store, num_microbatches=2)
        tokens, wanted = batch(0)
        functional.mse_loss(model(tokens), wanted).backward()
        for part, target in zip(tokens.chunk(2), wanted.chunk(2), strict=True):
            (functional.mse_loss(expected.model(part), target) / 2).backward()
        for ours, theirs in zip(model.parameters(), expected.model.parameters(), strict=True):
            assert_alike(ours.grad, theirs.grad, "gradient")
        model.disable()


def test_microbatches_match_plain_fsdp(ranks: Of, place: str) -> None:
    ranks(2).call(microbatched, place)


def failed_backward(place: str) -> None:
    case = Case(share=0.2)
    expected = plain_run(case)
    with on_store(case, place) as (run, _):
        for each in (run, expected):
            model: Any = each.model
            handle = model.blocks[2].norm.register_full_backward_hook(_raise)
            with pytest.raises(RuntimeError, match="given up"):
                each.losses(0)
            handle.remove()
            model.reset_iter_state()
            each.optimizer.zero_grad()
        assert torch.equal(run.losses(1), expected.losses(1))
        assert_equal(run, expected)


def _raise(*_: Any) -> None:
    raise RuntimeError("given up")


def test_backward_that_raised_leaves_no_state(ranks: Of, place: str) -> None:
    ranks(2).call(failed_backward, place)


def clipped_in_other_norms(place: str) -> None:
    case = Case(share=0.5)
    expected = plain_run(case)
    trained = list(expected.model.parameters())
    with on_store(case, place) as (run, _):
        run.losses(0)
        expected.losses(0)
        for norm in (1.0, 3.0, float("inf")):
            theirs = nn.utils.clip_grad_norm_(trained, 0.1, norm_type=norm)
            ours = run.optimizer.clip_grad_norm_(0.1, norm_type=norm)
            assert torch.equal(local(ours), theirs.full_tensor()), norm
            assert_equal(run, expected)


def test_clipping_in_other_norms_matches(ranks: Of, place: str) -> None:
    ranks(2).call(clipped_in_other_norms, place)


class Parallel(nn.Module):
    """Blocks that `parallelize_module` spreads and FSDP2 shards again."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block(inner=304) for _ in range(4))
        for block in self.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["parts"], plan)
            fully_shard(block, mesh=mesh["data"])
        fully_shard(self, mesh=mesh["data"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_two_dimensions(place: str, data: int) -> None:
    case = Case(share=0.3)
    shape = (data, dist.get_world_size() // data)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "parts"))
    plain, module = Parallel(mesh), Parallel(mesh)
    usual = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    with opened(case, module, place) as store:
        model = OffloadModel(module, store)
        ours = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-2, foreach=False)
        run = Run(case, model, ours, ours.clip_grad_norm_)
        expected = Run(case, plain, usual, lambda norm: None)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank() // shape[1])
            given = torch.randn(4, 67, generator=generator)
            for each in (model, plain):
                each(given).square().mean().backward()
            assert_equal(run, expected)
            run.step()
            expected.step()
            assert_equal(run, expected)
        assert store.stats().bytes_written > 0
        model.disable()


def test_tensor_parallelism_inside_matches(ranks: Of, place: str) -> None:
    ranks(4).call(in_two_dimensions, place, 2)
    ranks(2).call(in_two_dimensions, place, 1)
