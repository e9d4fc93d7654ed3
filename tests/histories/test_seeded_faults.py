"""The machine notices each seeded fault from outside, with the planner's own check off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.histories import mutants
from tests.histories.machine import play
from tests.histories.test_planner_histories import HISTORIES

SEEDS = HISTORIES
"""The default lane plays these same seeds, so it notices each of these faults."""
# test_known_faults.py has separate tests of these: the first is rare, and the second is only slow.
ELSEWHERE = {mutants.PrefetchesTakeNeededSpace, mutants.EvictsItsSource}

SYMPTOMS = {
    mutants.EvictsTheOnlyCopy: "lost its last copy",
    mutants.OffloadsTheOnlyCopy: "lost its last copy|was to leave",
    mutants.TrustsAFailedCopy: "is complete on",
    mutants.ForgetsArrivals: r"holds \d+ bytes of",
    mutants.CountsARemovalTwice: r"holds \d+ bytes of",
    mutants.SaysThatLessIsUsed: "counted too low",
    mutants.EvictsTheLeased: "dropped while it is leased",
    mutants.EvictsTheHeld: "dropped while it is held",
    mutants.DropsCopiesBeingRead: "dropped while it is read",
    mutants.DropsCopiesBeingWritten: "dropped while it is written",
    mutants.KeepsStaleCopies: "is being changed and on|stale|is complete on",
    mutants.HoldsBesideStaleCopies: "is complete on",
    mutants.LendsWhileItMoves: "the planner says True",
    mutants.LendsToTwo: "the planner says True",
    mutants.LetsTwoHold: "the planner says True",
    mutants.HoldsLeasedGroups: "the planner says True",
    mutants.LendsTheHeldToAChanger: "the planner says True|dropped while it is held",
    mutants.SavesDuringUpdates: "somebody who must be alone",
    mutants.LeavesTheUnwanted: "was to leave|was put away",
    mutants.KeepsFlushedCopies: "was put away",
    mutants.LeavesTheForgotten: "is discarded, but on",
    mutants.DropsBeforeTheWaiterWakes: "before its waiter woke up",
    mutants.DropsBeforeItIsHeld: "before who wants to hold it woke up",
    mutants.CopiesTheCleanDown: "a clean group is copied down",
    mutants.EvictsTheSourceOfADemand: "before its waiter woke up",
    mutants.NeverAsksAgain: "nothing moves|though there is room|was to leave",
    mutants.NeverFailsRequests: "nothing moves",
    mutants.OrphansKeepTheirSpace: "though there is room",
    mutants.LosesInstructions: "an instruction was lost|is discarded, but on",
    mutants.KeepsAnOldError: "an error that everybody was told",
    mutants.NeverChangesItsMind: "before its waiter woke up|before who wants to hold it",
    mutants.KeepsThePromiseOfAClaim: "though there is room|nothing moves",
    mutants.LosesDemands: "nothing moves|before its waiter woke up|though there is room",
    mutants.WaitsForPermanentLeases: "nothing moves",
    mutants.LosesSaves: "nothing moves",
}


def test_every_mutant_is_listed() -> None:
    assert set(mutants.all_of(vars(mutants), ELSEWHERE)) == SYMPTOMS.keys()


@pytest.mark.parametrize("mutant", SYMPTOMS, ids=lambda mutant: mutant.__name__)
def test_state_machine_notices_each_mutant(
    mutant: type[mutants.FaultyPlanner], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=SYMPTOMS[mutant]):
        for seed in range(SEEDS):
            play(seed, ("next-use", "lru")[seed % 2], planner=mutant, logs=tmp_path)


def test_correct_planner_passes_the_same_histories() -> None:
    """Check the control: the machine rejects the fault, not the history."""
    for seed in range(SEEDS):
        play(seed, ("next-use", "lru")[seed % 2], planner=mutants.FaultyPlanner)
