"""A model whose passes repeat is planned once and the plan is followed until something differs.

Values and budgets are the same as without a plan.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.accelerator import ACCELERATOR, needs_accelerator, on_both
from tests.helpers.calls import calls_of_functions
from tests.helpers.tensors import parameter_bytes
from tests.lanes import by_lane
from tests.store.helpers import assert_sound, open_store
from tierstore import TierStore, enable_group_offload
from tierstore.engine.loop_memory import LoopMemory, LoopRing
from tierstore.engine.loop_runner import LoopRunner
from tierstore.engine.loops import MAX_REST_DOUBLINGS
from tierstore.model.outline import LEAST_TILE
from tierstore.model.sizes import PAGE, slot_bytes
from tierstore.observe.stats import Stats
from tierstore.observe.trace import COMPUTE, PLANS
from tierstore.plan.loop_follower import LoopFollower
from tierstore.plan.loop_plan import Resident, TileCopy
from tierstore.store import engine_of
from tierstore.trace import read_trace

LAYERS, WIDTH = 12, 128
TILE = 4 * PAGE
"""A layer's weights take five tiles."""
RELEARNED = 2
"""Passes within which a loop is followed again after a single disturbance."""
LEARNED = 6
"""Passes within which an undisturbed loop is followed."""


class Layer(nn.Linear):
    """A layer that runs an action once in the middle of its forward, if one is set."""

    act: Callable[[], object] | None = None
    address = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.address = self.weight.data_ptr()
        act, self.act = self.act, None
        if act is not None:
            act()
        return torch.tanh(super().forward(x))


class Repeated:
    """A model in a store that holds half of it, and its expected output."""

    width = WIDTH

    @staticmethod
    def make_model(layers: list[Layer]) -> nn.Module:
        return nn.Sequential(*layers)

    def __init__(
        self, path: Path, device: str, fraction: float = 0.6, tile: int = TILE, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.layers = [Layer(self.width, self.width) for _ in range(LAYERS)]
        self.model = self.make_model(self.layers).requires_grad_(False).eval()
        self.load(path.with_suffix(".safetensors"))
        self.x = torch.randn(3, self.width)
        self.right = self.plain()
        self.nbytes = parameter_bytes(self.model)
        if device != "cpu":
            options["device_budget"] = int(self.nbytes * fraction * 5 / 6)
        self.store = open_store(path, int(self.nbytes * fraction), device, **options)
        self.device = device
        loops = engine_of(self.store).loops
        loops.refines = False  # otherwise depends on measured times
        loops.least_tile = tile
        enable_group_offload(self.model, self.store, offload_type="leaf_level")

    def load(self, path: Path) -> None:
        """Load the model's weights from a file, in subclasses."""

    @torch.no_grad()
    def plain(self) -> torch.Tensor:
        result: torch.Tensor = self.model(self.x)
        return result

    def plain_copy(self) -> nn.Sequential:
        """Return the current layers, in no store."""
        return nn.Sequential(*map(copy.deepcopy, self.layers))

    @torch.no_grad()
    def run(self) -> None:
        assert torch.equal(self.model(self.x.to(self.device)).cpu(), self.right)

    @property
    def runner(self) -> LoopRunner | None:
        found = engine_of(self.store).loops.runner
        return None if found is None or found.left is not None else found

    def follow(self, passes: int = LEARNED) -> LoopRunner:
        """Run until the plan is followed."""
        for _ in range(passes):
            self.run()
            if self.runner is not None:
                return self.runner
            planned = engine_of(self.store).loops.steps().planned
            waits_until = time.monotonic() + 60
            while planned is not None and not planned.ready and time.monotonic() < waits_until:
                time.sleep(0.001)
        raise AssertionError(f"the loop is not followed after {passes} passes")

    def follow_for(self, passes: int) -> LoopRunner:
        """Run until the plan is followed, and then some passes of it."""
        runner = self.follow()
        for _ in range(passes):
            self.run()
        assert self.runner is runner
        return runner


@pytest.fixture
def repeated(tmp_path: Path, device: str) -> Iterator[Repeated]:
    made = Repeated(tmp_path / "store", device)
    with made.store:
        yield made


def tiled_groups(runner: LoopRunner) -> set[int]:
    """Return the groups that move in tiles."""
    return runner.memory.keyed.plan.tiled_groups


@on_both
def test_followed_plan_uses_the_same_addresses_in_each_pass(repeated: Repeated) -> None:
    runner, before = repeated.follow(), repeated.store.stats()
    repeated.run()
    addresses = [layer.address for layer in repeated.layers]
    for _ in range(3):
        repeated.run()
        assert [layer.address for layer in repeated.layers] == addresses
    assert repeated.runner is runner
    after = repeated.store.stats()
    read = after.bytes_read - before.bytes_read
    assert 0 < read <= 4 * LAYERS * slot_bytes(repeated.nbytes // LAYERS + PAGE)
    assert after.misses == before.misses
    assert len(set(addresses)) < LAYERS, "no group passed through a ring"
    assert tiled_groups(runner), "in tiles"


def assert_within_budgets(store: TierStore, done: object = None) -> None:
    stats = store.stats()
    for tier, budget in stats.budget_bytes.items():
        assert budget is None or stats.peak_bytes[tier] <= budget, (tier, done)
        assert budget is None or stats.used_bytes[tier] <= budget, (tier, done)


@on_both
def test_budgets_hold_while_a_plan_begins_runs_and_ends(repeated: Repeated) -> None:
    for _ in range(3):
        repeated.follow()
        repeated.store.put("other", torch.ones(repeated.nbytes // 16), durable=False)
        repeated.run()
    assert_within_budgets(repeated.store)


@pytest.mark.pretend_only("counts")
@needs_accelerator
@pytest.mark.parametrize("device", [ACCELERATOR])
def test_followed_plan_leaves_no_memory_in_the_torch_cache(
    repeated: Repeated, pretend: Any
) -> None:
    """The plan's memory is one piece, for which slots of groups are freed."""
    torch.accelerator.empty_cache()
    pretend.reset_peak_memory_stats()
    before = pretend.memory_reserved()
    repeated.follow()
    repeated.run()
    budget = repeated.store.stats().budget_bytes["DEVICE"]
    assert budget is not None
    most = pretend.max_memory_reserved() - before
    assert budget // 2 < most <= budget + repeated.nbytes // LAYERS


class Failure(Exception):
    pass


def fail(store: TierStore) -> None:
    raise Failure


def on_another_thread(store: TierStore) -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(store.get("mine")))
    thread.start()
    thread.join()
    assert len(results) == 1


ACTIONS: dict[str, Callable[[TierStore], object]] = {
    "get": lambda store: store.get("mine"),
    "get on another thread": on_another_thread,
    "put": lambda store: store.put("mine", torch.ones(WIDTH), durable=False),
    "put a group that does not fit": lambda store: store.put(
        "more", torch.ones(30_000), durable=False
    ),
    "prefetch": lambda store: store.prefetch(["mine"]),
    "keep": lambda store: store.make_sticky("mine"),
    "flush": lambda store: store.flush(),
    "fail": fail,
}


@pytest.mark.full("the action, its place", keep="any device")
@on_both
@pytest.mark.parametrize("where", [0, 5, LAYERS - 1])
@pytest.mark.parametrize("action", ACTIONS)
def test_action_in_any_step_keeps_values_and_the_loop_resumes(
    action: str, where: int, repeated: Repeated
) -> None:
    store = repeated.store
    store.put("mine", torch.ones(WIDTH), durable=False)
    for _ in range(2):
        repeated.follow()
        repeated.layers[where].act = lambda: ACTIONS[action](store)
        with suppress(Failure):
            repeated.run()
        if "more" in store:
            store.discard("more")
        assert_sound(store)
        repeated.follow(RELEARNED)
    assert torch.equal(store.get("mine").cpu(), torch.ones(WIDTH))


class Disturbed:
    """Runs any action at any place of a pass, and checks the outputs."""

    def __init__(self, repeated: Repeated, seed: int) -> None:
        self.repeated, self.store = repeated, repeated.store
        self.rng = random.Random(seed)
        self.beside = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.beside.requires_grad_(False).eval()
        enable_group_offload(self.beside, self.store, offload_type="leaf_level")
        self.store.put("mine", torch.ones(WIDTH), durable=False)
        self.actions: dict[str, Callable[[], object]] = {
            name: functools.partial(action, self.store) for name, action in ACTIONS.items()
        }
        self.actions |= {
            "another model": lambda: self.beside(repeated.x.to(repeated.device)),
            "another unit": lambda: self.layer()(repeated.x.to(repeated.device)),
            "interrupt": self.interrupt,
        }

    def layer(self) -> Layer:
        return self.rng.choice(self.repeated.layers)

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def edit(self) -> None:
        """Edit a weight between two passes."""
        repeated = self.repeated
        with torch.no_grad():
            self.layer().weight.mul_(-1)
            plain = repeated.plain_copy()
            repeated.right = plain(repeated.x)

    def disturb(self) -> str:
        """Run one pass in which something happens, or before which a weight is edited."""
        name = self.rng.choice(["edit", *self.actions])
        if name == "edit":
            self.edit()
        else:
            self.layer().act = self.actions[name]
        with suppress(Failure, KeyboardInterrupt):
            self.repeated.run()
        if "more" in self.store:
            self.store.discard("more")
        return name


@on_both
@pytest.mark.parametrize("seed", range(by_lane(2, 20, 200)))
def test_random_actions_in_a_loop_keep_values_and_budgets(seed: int, repeated: Repeated) -> None:
    repeated.follow()
    disturbed = Disturbed(repeated, seed)
    done = []
    for _ in range(12):
        done.append(disturbed.disturb())
        assert_sound(repeated.store)
        for _ in range(disturbed.rng.randrange(3)):
            repeated.run()
        assert_within_budgets(repeated.store, done)
    repeated.follow(LEARNED + (1 << MAX_REST_DOUBLINGS))  # left often, the loop pauses
    assert torch.equal(repeated.store.get("mine").cpu(), torch.ones(WIDTH))


@on_both
@pytest.mark.parametrize("where", [0, 5, LAYERS - 1])
def test_edited_weight_is_used_in_a_loop(where: int, repeated: Repeated) -> None:
    repeated.follow()
    with torch.no_grad():
        repeated.layers[where].weight.mul_(-1)
    repeated.right = nn.Sequential(*repeated.layers)(repeated.x.to(repeated.device)).cpu()
    for _ in range(LEARNED):
        repeated.run()
    repeated.follow()
    assert repeated.layers[where].weight.device.type == "cpu"


@on_both
def test_layers_in_another_order_leave_the_plan(repeated: Repeated) -> None:
    repeated.follow()
    y = repeated.x.to(repeated.device)
    with torch.no_grad():
        for layer in reversed(repeated.layers):
            y = layer(y)
    assert repeated.runner is None
    repeated.follow()


@on_both
def test_store_closed_in_the_middle_of_a_loop_leaves_the_plan(repeated: Repeated) -> None:
    repeated.follow()
    repeated.store.close()
    assert repeated.runner is None


def run_on_a_late_device(repeated: Repeated, rng: random.Random) -> list[torch.Tensor]:
    """Return outputs of passes on a device so late that the host is whole passes ahead.

    In some runs, the plan is left and entered meanwhile. Outputs are read once all is queued.
    """
    repeated.follow()
    often = rng.choice([0.0, 1.0])
    x, outputs = repeated.x.to(repeated.device), []
    with torch.no_grad():
        for number in range(24):
            if rng.random() < 0.3 * often:
                size = rng.randrange(1000, repeated.nbytes // 16)
                repeated.store.put("other", torch.ones(size), durable=False)
            if rng.random() < 0.1 * often:
                repeated.layers[rng.randrange(LAYERS)](x)
            outputs.append(repeated.model(x + number))
    return [output.cpu() for output in outputs]


@pytest.mark.pretend_only("late")
@needs_accelerator
@pytest.mark.parametrize("device", [ACCELERATOR])
@pytest.mark.parametrize("seed", range(by_lane(2, 8)))
def test_values_are_right_however_late_the_device_is(
    seed: int, repeated: Repeated, late_pretend: Any
) -> None:
    repeated.store.get(next(iter(repeated.store.keys())))
    outputs = run_on_a_late_device(repeated, random.Random(seed))
    plain = repeated.plain_copy()
    with torch.no_grad():
        for number, output in enumerate(outputs):
            assert torch.equal(output, plain(repeated.x + number)), number


@on_both
def test_held_lease_prevents_a_plan(repeated: Repeated) -> None:
    repeated.store.put("mine", torch.ones(WIDTH), durable=False)
    with repeated.store.acquire("mine"):
        for _ in range(LEARNED):
            repeated.run()
        assert repeated.store.stats().plans_followed == 0
    repeated.follow()


class RepeatedOdd(Repeated):
    """Tensors whose layout in the file differs from that in memory."""

    width = WIDTH + 1


@on_both
def test_groups_rearranged_after_reading_are_not_tiled(device: str, tmp_path: Path) -> None:
    made = RepeatedOdd(tmp_path / "store", device)
    with made.store:
        assert not tiled_groups(made.follow_for(3))
        assert_within_budgets(made.store)


@on_both
def test_groups_verified_at_each_read_are_not_tiled(device: str, tmp_path: Path) -> None:
    made = Repeated(tmp_path / "store", device, verify="always")
    with made.store:
        assert not tiled_groups(made.follow_for(1))


class RepeatedFromFile(RepeatedOdd):
    def load(self, path: Path) -> None:
        save_file(self.model.state_dict(), path)
        self.model.load_state_dict(load_file(path), assign=True)


@on_both
def test_checkpoint_groups_are_tiled_where_the_device_allows(device: str, tmp_path: Path) -> None:
    """There, tensors are aligned, and a tile must not reach beyond its slot."""
    made = RepeatedFromFile(tmp_path / "store", device)
    with made.store:
        runner = made.follow_for(3)
        plan, entries = runner.memory.keyed.plan, runner.memory.entries
        moved = {copy.group for tier in plan.tiers for copy in tier.copies}
        ahead = {
            group
            for group in moved
            if any(run.device_offset > run.host_offset for run in entries[group].spec.runs)
        }
        assert not any(entries[group].source.moves for group in moved)  # type: ignore[union-attr]
        assert tiled_groups(runner) == (moved if device == "cpu" else moved - ahead)
        assert tiled_groups(runner)
        assert_within_budgets(made.store)


class WithScale(nn.Module):
    """Has its own weight, which it uses around all layers."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]), requires_grad=False)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


class RepeatedInUnit(Repeated):
    @staticmethod
    def make_model(layers: list[Layer]) -> nn.Module:
        return WithScale(layers)


@on_both
def test_nested_units_are_followed(device: str, tmp_path: Path) -> None:
    made = RepeatedInUnit(tmp_path / "store", device)
    with made.store:
        made.follow()
        before = made.store.stats()
        for _ in range(3):
            made.run()
        after = made.store.stats()
        assert after.plans_followed == 1
        assert after.followed_seconds > before.followed_seconds > 0
        assert after.bytes_read > before.bytes_read


@on_both
@pytest.mark.parametrize("fraction", [0.6, 4.0])
def test_followed_step_takes_few_calls(fraction: float, device: str, tmp_path: Path) -> None:
    made = Repeated(tmp_path / "store", device, fraction, tile=LEAST_TILE)
    with made.store:
        made.follow()
        made.run()
        x = made.x.to(made.device)
        plain = made.plain_copy()
        before = made.store.stats()
        with torch.no_grad():
            calls = sorted(calls_of_functions(lambda: made.model(x)) for _ in range(9))
            fewest = calls_of_functions(lambda: plain(made.x))
        after = made.store.stats()
        assert after.plans_followed == 1
    moved = moved_bytes(after) - moved_bytes(before)
    assert (moved > 0) == (fraction < 1)
    tiles = moved / made.nbytes / 9
    beyond = (calls[4] - fewest) / LAYERS
    assert beyond <= (100 if (device, fraction) == ("cpu", 4.0) else 120) + 12 * tiles


def moved_bytes(stats: Stats) -> int:
    return stats.bytes_read + stats.bytes_onloaded


# Stats and traces ------------------------------------------------------------------------------


@on_both
def test_stats_report_when_a_plan_is_followed(repeated: Repeated) -> None:
    store = repeated.store
    assert store.stats().plans_followed == 0
    assert store.stats().followed_seconds == 0.0
    before = time.monotonic()
    repeated.follow()
    first = store.stats()
    repeated.run()
    second = store.stats()
    assert first.plans_followed == second.plans_followed == 1
    assert 0 < first.followed_seconds < second.followed_seconds < time.monotonic() - before
    with torch.no_grad():
        for number in (0, 1, 7):
            repeated.layers[number](repeated.x.to(repeated.device))
    assert store.stats().followed_seconds == 0.0
    repeated.follow()
    assert store.stats().plans_followed == 2


@on_both
def test_trace_shows_the_plan_and_its_uses(repeated: Repeated, tmp_path: Path) -> None:
    repeated.follow()
    uses = engine_of(repeated.store).core.mover.journal.uses
    before = uses.added
    repeated.run()
    repeated.run()
    assert uses.added - before == 2 * LAYERS
    with torch.no_grad():
        for number in (0, 1, 7):
            repeated.layers[number](repeated.x.to(repeated.device))
    assert repeated.runner is None
    repeated.store.trace(tmp_path / "trace.json")
    recorded = read_trace(tmp_path / "trace.json")
    (plan,) = [one for one in recorded.slices if one.kind == PLANS]
    assert plan.args["steps"] == LAYERS
    assert plan.args["at"] == 2
    assert "different" in plan.args["left"]
    ends = plan.start + plan.seconds
    within = [one for one in recorded.slices if plan.start <= one.start <= ends]
    computed = [one for one in within if one.kind == COMPUTE]
    assert len(computed) >= 2 * LAYERS
    assert sum(one.kind == "disk read" for one in within) >= 2


# Controls --------------------------------------------------------------------------------------


def steps_do_not_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopRunner, "_order_after", lambda runner, arrivals: False)


def reads_do_not_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    def read_into(runner: LoopRunner, ring: LoopRing, read: TileCopy) -> float:
        runner.memory.read(ring, Resident(read.group, read.offset, read.nbytes, read.target))
        return time.monotonic()

    patch.setattr(LoopRunner, "_read_into", read_into)


def memory_returns_before_the_device_is_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopMemory, "note_device_work", lambda memory, streams, copied: None)


def slots_are_free_one_step_early(patch: pytest.MonkeyPatch) -> None:
    released = LoopFollower.released

    def early(follower: LoopFollower, level: int) -> int:
        follower.steps += 1
        try:
            return released(follower, level)
        finally:
            follower.steps -= 1

    patch.setattr(LoopFollower, "released", early)


class OneStepEarly(list[Any]):
    """Step marks, each recorded one step too early."""

    def __setitem__(self, number: Any, mark: Any) -> None:
        super().__setitem__((number + 1) % len(self), mark)


class NeverStored(list[Any]):
    """Step marks that are never stored."""

    def __setitem__(self, number: Any, mark: Any) -> None:
        pass


def use_marks(kind: type[list[Any]], patch: pytest.MonkeyPatch) -> None:
    enter = LoopRunner.enter

    def enter_so(runner: LoopRunner, source: Any) -> bool:
        runner.step_marks = kind(runner.step_marks)
        return enter(runner, source)

    patch.setattr(LoopRunner, "enter", enter_so)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "steps do not wait for copies": steps_do_not_wait_for_copies,
    "copies do not wait for steps": functools.partial(use_marks, NeverStored),
    "copies wait for the step before": functools.partial(use_marks, OneStepEarly),
    "reads do not wait for copies": reads_do_not_wait_for_copies,
    "memory comes back too early": memory_returns_before_the_device_is_done,
    "slots are free too early": slots_are_free_one_step_early,
}


def goes_wrong(seed: int, place: Path) -> bool:
    """Return whether outputs are wrong, or anything fails, on a late device."""
    made = Repeated(place, ACCELERATOR)
    plain = made.plain_copy()
    try:
        with made.store, torch.no_grad():
            outputs = run_on_a_late_device(made, random.Random(seed))
            right = [torch.equal(out, plain(made.x + n)) for n, out in enumerate(outputs)]
    except (AssertionError, RuntimeError):
        return True
    return not all(right)


@pytest.mark.pretend_only("late")
@needs_accelerator
@pytest.mark.full("runs with each fault until it shows")
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_following_is_detected(
    fault: str, tmp_path: Path, late_pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    assert any(goes_wrong(seed, tmp_path / str(seed)) for seed in range(256))
