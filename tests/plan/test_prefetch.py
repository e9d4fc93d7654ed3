"""Prefetching: the reads that it hides, its cost in bytes, and the need for each rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.plan.scans import cycle, forward_backward, two_experts
from tierstore.model import shares
from tierstore.model.tiers import Tier
from tierstore.plan import policy, prefetch
from tierstore.plan.prefetch import HopSpeed, Prefetcher
from tierstore.plan.schedule import LearnedOrder
from tierstore.simulation import Outcome, Use, simulate

NBYTES = 100_000_000
DISK, LINK = 2e9, 20e9
READ = NBYTES / DISK
"""Seconds to read one group from disk."""
WAYS = {(Tier.DISK, Tier.HOST): DISK, (Tier.HOST, Tier.DEVICE): LINK}


def run(keys: Sequence[str], share: float, seconds: float, device: float | None = None) -> Outcome:
    """Simulate uses of equal groups: a `share` fits the host, a share of `device` the device."""
    groups = dict.fromkeys(keys, NBYTES)
    budgets: dict[Tier, int | None] = {Tier.HOST: int(share * sum(groups.values()))}
    if device is not None:
        budgets[Tier.DEVICE] = int(device * sum(groups.values()))
    uses = [Use(key, seconds) for key in keys]
    return simulate(groups, uses, budgets | {Tier.DISK: None}, bandwidth=WAYS)


def stalled_share(outcome: Outcome, first: int, last: int) -> float:
    """Return the fraction of time that uses `first` to `last` spent waiting."""
    served = outcome.uses[first:last]
    length = outcome.uses[last].start - outcome.uses[first].start
    return sum(use.waited for use in served) / length


PASSES = 8


@pytest.mark.parametrize("device", [None, 0.2])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("computing", [1.0, 1.5, 4.0])
def test_prefetch_with_equal_compute_hides_reads(
    computing: float, share: float, device: float | None
) -> None:
    groups = 40
    outcome = run(cycle(groups, PASSES), share, computing * READ, device)
    assert outcome.bytes_moved[Tier.DISK, Tier.HOST] > groups * NBYTES, "nothing was read again"
    for step in range(2, PASSES - 1):
        assert stalled_share(outcome, step * groups, (step + 1) * groups) <= 0.03


def test_prefetch_disabled_stalls() -> None:
    """Check the control: prefetching hides the reads."""
    keys = cycle(40, PASSES)
    uses = [Use(key, READ) for key in keys]
    budgets = {Tier.HOST: 20 * NBYTES, Tier.DISK: None}
    outcome = simulate(dict.fromkeys(keys, NBYTES), uses, budgets, bandwidth=WAYS, prefetch=False)
    assert stalled_share(outcome, 80, 120) > 0.2


def test_disk_bound_loop_takes_the_missing_bytes_time() -> None:
    groups, fits = 40, 20
    outcome = run(cycle(groups, PASSES), fits / groups, READ / 4)
    for step in range(2, PASSES - 1):
        first, last = outcome.uses[step * groups], outcome.uses[(step + 1) * groups]
        assert last.bytes_read - first.bytes_read <= 1.1 * (groups - fits + 1) * NBYTES
        assert last.start - first.start <= 1.15 * (groups - fits + 1) * READ


def test_second_pattern_is_learned_within_a_pass() -> None:
    """Run two experts that switch half-way: the second run knows the first one's switch."""
    blocks, steps = 20, 6
    outcome = run(two_experts(3, blocks, steps), 0.4, 1.2 * READ)
    once = 2 * blocks * steps
    first_passes = range(blocks * steps + 2 * blocks, once - blocks, blocks)
    for start in first_passes:  # the second expert, from its third pass on
        assert stalled_share(outcome, start, start + blocks) <= 0.03
    assert stalled_share(outcome, 2 * once - 1, 3 * once - 1) <= 0.03


def test_training_order_forward_and_backward_is_learned() -> None:
    layers = 30
    outcome = run(forward_backward(layers, PASSES), 0.5, 1.2 * READ)
    assert stalled_share(outcome, 4 * layers, 2 * layers * PASSES - 1) <= 0.03


def test_changed_order_costs_one_pass() -> None:
    keys = cycle(30, 5)
    other = [f"g{7 * i % 30}" for i in range(30)] * 5
    outcome = run(keys + other, 0.5, 1.2 * READ)
    assert stalled_share(outcome, 6 * 30, 7 * 30) > 0.03, "the new order was already known"
    assert stalled_share(outcome, 8 * 30, 10 * 30 - 1) <= 0.03


# Each rule is needed -----------------------------------------------------------------------------


def take_turns(groups: int, passes: int) -> list[str]:
    """Return the order of modules of two neighbouring groups that run in turns."""
    step = []
    for i in range(groups - 1):
        step += [f"g{i}", f"g{i + 1}"] * 2
    return step * passes


def read_by(keys: Sequence[str], share: float, seconds: float) -> int:
    return run(keys, share, seconds).bytes_moved[Tier.DISK, Tier.HOST]


def test_prefetch_of_harmless_evictions_only_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, seconds = take_turns(40, PASSES), READ / 8
    for other in ("EARLY", "EARLY_IF_STEADY"):  # the other rule that limits prefetches
        monkeypatch.setattr(shares, other, 1)
    careful = read_by(keys, 0.8, seconds)
    monkeypatch.setattr(policy, "HARMLESS", 1.0)
    assert careful < 0.9 * read_by(keys, 0.8, seconds)


def test_prefetch_as_late_as_possible_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loop bound by computing fetch as early as it can: it reads more."""
    keys, seconds = cycle(40, PASSES), 4 * READ
    patient = read_by(keys, 0.8, seconds)
    monkeypatch.setattr(prefetch, "CAUTION", 1e9)
    assert patient < 0.85 * read_by(keys, 0.8, seconds)


def test_prefetched_share_limit_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use erratic computing times, with which every group looks urgent."""
    rng = random.Random(1)
    keys = take_turns(30, PASSES)
    groups = dict.fromkeys(keys, NBYTES)
    uses = [Use(key, READ * rng.choice([0.01, 0.01, 0.01, 4.0])) for key in keys]
    budgets = {Tier.HOST: 10 * NBYTES, Tier.DISK: None}

    def read() -> int:
        outcome = simulate(groups, uses, budgets, bandwidth=WAYS)
        return outcome.bytes_moved[Tier.DISK, Tier.HOST]

    bounded = read()
    monkeypatch.setattr(shares, "EARLY", 1)
    assert bounded < 0.9 * read()


def test_larger_prefetched_share_at_steady_times_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind a loop by computing and disk alike: a reserve of groups keeps both busy."""
    keys = [f"g{i}" for i in range(60)] * PASSES
    sizes = {key: NBYTES * (3 if i < 20 else 1) for i, key in enumerate(keys[:60])}
    uses = [Use(key, sizes[key] / DISK / 1.5) for key in keys]
    budgets = {Tier.HOST: sum(sizes.values()) * 3 // 10, Tier.DISK: None}

    def taken() -> float:
        return simulate(sizes, uses, budgets, bandwidth=WAYS).seconds

    reserve = taken()
    monkeypatch.setattr(prefetch, "STEADY", -1.0)
    assert reserve < 0.97 * taken()


def test_missing_groups_close_together_arrive_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run short uses after long ones: fetching the next group or two is not enough."""
    groups = 40
    keys = cycle(groups, PASSES)
    seconds = [(0.2 if i % groups >= groups // 2 else 2.0) * READ for i in range(len(keys))]
    uses = [Use(key, s) for key, s in zip(keys, seconds, strict=True)]
    budgets = {Tier.HOST: groups // 2 * NBYTES, Tier.DISK: None}

    def stalled() -> float:
        outcome = simulate(dict.fromkeys(keys, NBYTES), uses, budgets, bandwidth=WAYS)
        return stalled_share(outcome, 3 * groups, (PASSES - 1) * groups)

    foreseen = stalled()
    assert foreseen <= 0.03
    monkeypatch.setattr(HopSpeed, "bandwidth", None)  # then two groups are fetched ahead
    assert stalled() > 2 * max(foreseen, 0.03)


# Measuring ---------------------------------------------------------------------------------------


def watch(pauses: Sequence[float]) -> float:
    """Return the computing time that a prefetcher expects after a use, given earlier ones."""
    seen = Prefetcher(LearnedOrder(), {Tier.HOST: 10, Tier.DISK: None})
    seen.know(0, 1)
    seen.know(1, 1)
    for pause in pauses:
        seen.asked(0)
        seen.used(0)
        seen.now += pause
        seen.asked(1)
        seen.now += 100.0  # waiting does not count as computing
        seen.used(1)
    return seen.computing_seconds(0)


def test_compute_time_excludes_waiting() -> None:
    assert watch([2.0] * 3) == pytest.approx(2.0)


def test_pause_counts_for_little() -> None:
    assert watch([2.0] * 5 + [3600.0]) < 2 * 2.0


def test_consecutive_uses_of_a_group_add_up() -> None:
    seen = Prefetcher(LearnedOrder(), {Tier.HOST: 10, Tier.DISK: None})
    seen.know(0, 1)
    for _ in range(3):
        seen.asked(0)
        seen.used(0)
        seen.now += 1.0
    seen.asked(1)
    assert seen.computing_seconds(0) == pytest.approx(3.0)


def on_a_device(runs: Sequence[tuple[int, float, float]]) -> Prefetcher:
    """Return a prefetcher after uses on a device, all of which were queued at once.

    Each is a group, the time from which the device waited for it, and the time when it began.
    """
    seen = Prefetcher(LearnedOrder(), {Tier.HOST: 10, Tier.DISK: None}, timed_by_device=True)
    for number in range(3):
        seen.know(number, 1)
    for number, _, _ in runs:
        seen.asked(number)
        seen.used(number)
    for run in runs:
        seen.ran(*run)
    return seen


def test_device_compute_time_is_the_devices() -> None:
    seen = on_a_device([(0, 0.0, 1.0), (1, 3.0, 3.5), (2, 8.0, 8.0), (0, 9.0, 9.0)])
    assert [seen.computing_seconds(n) for n in range(3)] == pytest.approx([2.0, 4.5, 1.0])


def test_consecutive_uses_on_a_device_add_up() -> None:
    seen = on_a_device([(0, 0.0, 0.0), (0, 2.0, 3.0), (1, 4.0, 4.0)])
    assert seen.computing_seconds(0) == pytest.approx(3.0)


def test_uses_on_several_streams_take_nonnegative_time() -> None:
    seen = on_a_device([(0, 0.0, 5.0), (1, 2.0, 3.0), (2, 4.0, 4.0)])
    assert [seen.computing_seconds(n) for n in range(2)] == [0.0, 1.0]


def test_device_use_of_discarded_group_is_ignored() -> None:
    seen = on_a_device([(0, 0.0, 0.0), (-1, 1.0, 1.0), (1, 5.0, 5.0)])
    assert seen.computing_seconds(0) == pytest.approx(1.0)
    seen.forget(1)
    seen.ran(2, 7.0, 7.0)
    assert seen.computing_seconds(1) == 0.0
    seen.forget(0)  # not the running group
    seen.ran(0, 9.0, 9.0)
    assert seen.computing_seconds(2) == pytest.approx(2.0)


def bandwidth_after(moves: Callable[[HopSpeed], None]) -> float | None:
    hop = HopSpeed()
    moves(hop)
    return hop.bandwidth


def test_copies_sharing_a_hop_share_its_bandwidth() -> None:
    def two_at_once(hop: HopSpeed) -> None:
        for _ in range(2):
            hop.begin(100)
        hop.end(100)
        hop.measure(100, 0.0, 1.0)
        hop.end(100)
        hop.measure(100, 0.0, 2.0)

    assert bandwidth_after(two_at_once) == pytest.approx(100.0)


def test_failed_copy_is_not_measured() -> None:
    def fail(hop: HopSpeed) -> None:
        hop.begin(100)
        hop.end(100)
        hop.measure(100, 0.0, 1.0, counts=False)

    assert bandwidth_after(fail) is None


def test_latest_measurement_counts_most() -> None:
    """Give the previous one a weight of four fifths: 180 bytes in 3.8 seconds."""

    def slower(hop: HopSpeed) -> None:
        for began, ended in ((0.0, 1.0), (1.0, 4.0)):
            hop.begin(100)
            hop.end(100)
            hop.measure(100, began, ended)

    assert bandwidth_after(slower) == pytest.approx(180 / 3.8)


def test_one_use_moves_the_estimate_by_a_quarter() -> None:
    assert watch([2.0, 4.0]) == pytest.approx(2.5)
    assert watch([2.0, 8.0]) == pytest.approx(3.5)
    assert watch([2.0, 9.0]) == pytest.approx(3.5), "more than four times as long: a pause"


# Limits ------------------------------------------------------------------------------------------

HOP = (Tier.DISK, Tier.HOST)


def looking_at(
    sizes: Sequence[int],
    there: Iterable[int],
    budget: int | None = None,
    schedule: LearnedOrder | None = None,
) -> Prefetcher:
    """Return a prefetcher after two passes over groups of `sizes`; `there` are on the host.

    The disk reads 100 bytes per second.
    """
    schedule = LearnedOrder() if schedule is None else schedule
    seen = Prefetcher(schedule, {Tier.HOST: budget, Tier.DISK: None})
    for number, nbytes in enumerate(sizes):
        assert schedule.known.number(f"g{number}") == number
        seen.know(number, nbytes)
    for number in there:
        seen.placed(number, Tier.HOST)
    for _ in range(2):
        for number in range(len(sizes)):
            schedule.advance_past(f"g{number}")
    seen.hops[HOP].begin(100)
    seen.hops[HOP].end(100)
    seen.hops[HOP].measure(100, 0.0, 1.0)
    return seen


def compute(seen: Prefetcher, number: int, seconds: float) -> None:
    """Use a group, and compute for `seconds` until the next one is requested."""
    seen.asked(number)
    seen.used(number)
    seen.now += seconds
    seen.asked(number + 1)


def fetched(seen: Prefetcher) -> int | None:
    """Return the number of the group to fetch to the host now."""
    found = seen.next_missing(Tier.HOST)
    return None if found is None else found[0]


def test_estimate_covers_four_hundred_uses() -> None:
    for last, found in ((399, 399), (400, None)):
        seen = looking_at([1] * 450, there=set(range(450)) - {last})
        assert fetched(seen) == found


@pytest.mark.parametrize(("nbytes", "found"), [(12 << 20, 1), ((12 << 20) + 1, None)])
def test_hop_with_32_mib_queued_is_busy(nbytes: int, found: int | None) -> None:
    seen = looking_at([20 << 20, nbytes], there=[0])
    seen.hops[HOP].begin(20 << 20)
    assert fetched(seen) == found
    seen.hops[HOP].ending = 1
    assert fetched(seen) == 1, "the only copy is ending"


@pytest.mark.parametrize(("computing", "found"), [(1.65, 1), (1.66, None)])
def test_group_that_could_be_late_is_fetched(computing: float, found: int | None) -> None:
    """Read 100 bytes per second: 1.15 s at worst, plus half a group."""
    seen = looking_at([100, 100], there=[0])
    compute(seen, 0, computing)
    assert fetched(seen) == found


@pytest.mark.parametrize(
    ("spent", "found"), [(0.0, None), (2.34, None), (2.36, 2), (4.0, 2), (9.0, 2)]
)
def test_use_in_progress_counts_its_remainder(spent: float, found: int | None) -> None:
    """Run a use of four seconds or more. As above, 1.65 seconds are needed."""
    schedule = LearnedOrder()
    seen = looking_at([100, 100, 100], [0, 1], schedule=schedule)
    for _ in range(3):
        compute(seen, 0, 4.0)
    schedule.advance_past("g0")
    seen.asked(0)
    seen.used(0)
    seen.now += spent
    assert fetched(seen) == found


@pytest.mark.parametrize(("regular", "found"), [(44, None), (45, 3)])
def test_steadiness_needs_45_regular_uses(regular: int, found: int | None) -> None:
    """Each use leaves 0.95 of the surprise: 0.95 ** 44 is 0.105, 0.95 ** 45 is 0.099.

    From then on 20 of 80 bytes, instead of 13, may wait to be used.
    """
    seen = looking_at([10] * 5, there=[0, 1, 2], budget=80)
    seen.fetched_early(2, Tier.HOST)
    for _ in range(1 + regular):  # the first had no prediction
        compute(seen, 0, 0.01)
    assert fetched(seen) == found


@pytest.mark.parametrize(("regular", "found"), [(49, None), (50, 3)])
def test_use_of_double_length_surprises_by_half(regular: int, found: int | None) -> None:
    """Check half the length, too. Half of 0.05 and 0.95 ** 51 are 0.098, below 0.1."""
    for irregular in (0.02, 0.005):
        seen = looking_at([10] * 5, there=[0, 1, 2], budget=80)
        seen.fetched_early(2, Tier.HOST)
        for seconds in [0.01] * (1 + regular) + [irregular]:
            compute(seen, 0, seconds)
        assert fetched(seen) == found


def foretelling(sizes: Sequence[int], named: int, there: Iterable[int]) -> Prefetcher:
    """Call `looking_at` for a tier of 100 bytes, with a hint that the first groups come next."""
    schedule = LearnedOrder()
    seen = looking_at(sizes, there, 100, schedule)
    schedule.known.prefetch(f"g{number}" for number in range(named))
    return seen


def test_expected_bytes_take_half_a_tier_or_one_group() -> None:
    assert fetched(foretelling([60, 1], named=1, there=[])) == 0
    assert fetched(foretelling([30, 20, 1], named=2, there=[0])) == 1
    assert fetched(foretelling([30, 21, 1], named=2, there=[0])) is None


def test_next_group_is_fetched_at_any_cost() -> None:
    schedule = LearnedOrder()
    seen = looking_at([60, 1, 1], [0], 100, schedule)
    schedule.advance_past("g0")
    schedule.known.prefetch(["g0"])
    assert schedule.ahead(2).tolist() == [0, 1, 2]
    assert fetched(seen) == 1


@pytest.mark.parametrize(
    ("large", "budget", "found"),
    [
        (40, 160, 2),
        (39, 160, None),  # two average ones have 39.5 bytes
        (40, 159, None),  # a quarter of the tier has 39
    ],
)
def test_two_groups_are_fetched_before_any_measurement(
    large: int, budget: int, found: int | None
) -> None:
    """Use three next groups of 40 bytes: two average groups, and a quarter of the tier."""
    seen = looking_at([4, 6, 30, large], there=[0, 1, 3], budget=budget)
    seen.hops[HOP] = HopSpeed()
    assert fetched(seen) == found


def test_host_prefetch_stops_in_host_memory() -> None:
    schedule = LearnedOrder()
    budgets = {Tier.DEVICE: 10, Tier.HOST: 10, Tier.DISK: None}
    seen = Prefetcher(schedule, budgets)
    seen.know(schedule.known.number("g0"), 1)
    schedule.known.prefetch(["g0"])
    for highest, hoped in ((Tier.HOST, False), (Tier.DEVICE, True)):
        seen.aim(0, highest)
        assert (seen.next_missing(Tier.DEVICE) is not None) == hoped
        assert seen.next_missing(Tier.HOST) is not None


def test_unknown_key_is_never_missing() -> None:
    """Expect keys that were never registered here, or were discarded."""
    schedule = LearnedOrder()
    seen = Prefetcher(schedule, {Tier.HOST: 10, Tier.DISK: None})
    numbers = [schedule.known.number(f"g{number}") for number in range(40)]
    for number in (2, 3):
        seen.know(numbers[number], 8)
    seen.forget(numbers[2])
    seen.hops[HOP].begin(1)
    seen.hops[HOP].end(1)
    seen.hops[HOP].measure(1, 0.0, 1.0)
    for number in [*numbers, *numbers, *numbers]:
        schedule.advance_past(f"g{number}")
    assert fetched(seen) == 3
    seen.pass_over(3)
    assert fetched(seen) is None
