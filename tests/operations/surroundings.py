"""Threads, processes and other libraries around an offloaded model."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import accelerate
import diffusers
import torch
from torch.utils.data import DataLoader, Dataset

from tests.dispatch.models import WIDTH
from tests.operations.actions import Actions
from tests.operations.operation import Refusal, Table
from tests.operations.plain_modules import dispatched, joined, result, run
from tests.operations.small_models import tower

SURROUNDINGS = Table("Threads, processes and other libraries")


@SURROUNDINGS.row("several threads that run one model")
def threads(actions: Actions) -> None:
    model = dispatched(actions)

    def work() -> torch.Tensor:
        with ThreadPoolExecutor(3) as pool:
            return joined(pool.map(lambda _: result(model, actions.device), range(6)))

    actions.compute(work)


@SURROUNDINGS.row("several models in one store, each on its own thread")
def models_on_threads(actions: Actions) -> None:
    models = [dispatched(actions), tower(actions, "other", seed=1)]
    actions.dispatch(models[1])

    def work() -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return joined(pool.map(lambda model: result(model, actions.device), models * 3))

    actions.compute(work)


@SURROUNDINGS.row("`asyncio.to_thread`, `gather`")
def coroutines(actions: Actions) -> None:
    model = dispatched(actions)

    async def gathered() -> torch.Tensor:
        found = (asyncio.to_thread(result, model, actions.device) for _ in range(3))
        return joined(await asyncio.gather(*found))

    actions.compute(lambda: asyncio.run(gathered()))


@SURROUNDINGS.row("a state dict that another thread takes while the model runs")
def state_meanwhile(actions: Actions) -> None:
    model = dispatched(actions)
    states: list[torch.Tensor] = []

    def look() -> None:
        states.extend(joined(model.state_dict().values()) for _ in range(3))

    thread = threading.Thread(target=look)
    thread.start()
    run(actions, model)
    thread.join()
    for state in states:
        actions.compare(state)


class Numbers(Dataset[torch.Tensor]):
    """A data set that the workers of a DataLoader read."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index / 10)


@SURROUNDINGS.row("the workers of a `DataLoader`, which are forked meanwhile")
@torch.no_grad()
def forked_workers(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    actions.compute(lambda: joined([model(batch.to(actions.device)) for batch in loader]))


@SURROUNDINGS.row("`os.fork` while it is offloaded: the parent goes on")
def forked(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    run(actions, model)


# accelerate and diffusers -------------------------------------------------------------------------


@SURROUNDINGS.row("`Accelerator().prepare(model)`, on the CPU", devices=("cpu",))
def prepared(actions: Actions) -> None:
    model = dispatched(actions)
    accelerator = accelerate.Accelerator(cpu=True)
    ready = accelerator.prepare_model(model, evaluation_mode=True)
    run(actions, ready)
    run(actions, accelerator.unwrap_model(ready))


@SURROUNDINGS.row(
    "`Accelerator().prepare_model(model, device_placement=False)`",
    note="the accelerator's own default moves the model to the device, which is refused",
)
def prepared_without_placement(actions: Actions) -> None:
    model = dispatched(actions)
    accelerator = accelerate.Accelerator(cpu=True)
    run(actions, accelerator.prepare_model(model, device_placement=False, evaluation_mode=True))


ON_A_STORE = Refusal(
    ValueError, "is in a tierstore", "leave it out, or `disable_offload(model)` first"
)


@SURROUNDINGS.row("accelerate's `cpu_offload`", refusal=ON_A_STORE)
def offloaded_by_accelerate(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    accelerate.cpu_offload(model, torch.device("cpu"))


@SURROUNDINGS.row("accelerate's `dispatch_model`", refusal=ON_A_STORE)
def dispatched_by_accelerate(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


@SURROUNDINGS.row("diffusers' `apply_group_offloading`", refusal=ON_A_STORE)
def offloaded_by_diffusers(actions: Actions) -> None:
    model = dispatched(actions)
    run(actions, model)
    diffusers.hooks.apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level")
