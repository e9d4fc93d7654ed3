"""A save by any number of ranks, with tierstore or torch alone, is resumed by any other.

The trainings are those of `saving_ranks.py`, on gloo and in float32. Everything is compared bit for
bit, with all of the optimizer's state.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.helpers.processes import output_of, results_in
from tests.training.saving_ranks import ON_ONE, ON_RANKS, WAYS, WORLDS

pytestmark = pytest.mark.full("a minute of ranks; test_saving.py goes from store to plain and back")


class Load(NamedTuple):
    """The ranks that saved, the way and ranks that loaded, and whether it was right."""

    saved: str
    how: str
    ranks: int
    right: bool


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> list[Load]:
    place = tmp_path_factory.mktemp("ranks")
    return [
        Load(*each) for each in results_in(output_of("-m", "tests.training.saving_ranks", place))
    ]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("saved", [*ON_RANKS, *ON_ONE])
def test_fsdp2_ranks_load_a_save_of_any_rank_count(
    saved: str, world: int, loads: list[Load]
) -> None:
    found = {each.how: each.right for each in loads if each[:3:2] == (saved, world)}
    wanted = set(WAYS) if saved != "alone by name" else {"tierstore"}
    assert {how for how in found if how in WAYS} == wanted
    assert all(found.values())


@pytest.mark.parametrize("saved", [*ON_RANKS, *ON_ONE])
def test_single_process_loads_it_with_and_without_a_store(saved: str, loads: list[Load]) -> None:
    found = {each.how: each.right for each in loads if each.saved == saved and each.ranks == 1}
    alone = [f"{how} alone" for how in WAYS if (saved, how) != ("alone by name", "torch")]
    assert {"store", *alone} <= found.keys()
    assert all(found.values())


def test_store_training_resumes_as_if_uninterrupted(
    loads: list[Load],
) -> None:
    assert Load("store goes on", "", 0, True) in loads


def test_unloaded_tensors_are_reported(loads: list[Load]) -> None:
    assert Load("nothing", "control", 0, False) in loads


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_failure_raises_on_all_and_changes_nothing(rank: int, loads: list[Load]) -> None:
    assert Load("damaged", "CorruptDataError", rank, True) in loads
    assert Load("full disk", "DiskFullError", rank, True) in loads
