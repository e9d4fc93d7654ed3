"""Passes are recorded once, by whichever thread ends them, in any number."""

from __future__ import annotations

import threading
import time

from tierstore.observe.passes import ModelPasses, Passes


def on_the_host(kept: int = 100) -> Passes:
    return Passes(None, lambda: False, kept)


def test_pass_lasts_from_begin_to_end() -> None:
    passes = on_the_host()
    before = time.monotonic()
    begun = passes.begin("model")
    time.sleep(0.01)
    passes.end(begun)
    after = time.monotonic()
    [one] = passes.events(after)
    assert (one.model, one.does, one.number, one.failed) == ("model", "forward", 1, False)
    assert before <= one.start <= one.end - 0.01 <= one.end <= after


def test_passes_are_numbered_by_model_and_kind() -> None:
    passes = on_the_host()
    for model, does in [("a", "forward"), ("b", "forward"), ("a", "encode"), ("a", "forward")]:
        passes.end(passes.begin(model, does))
    found = [(one.model, one.does, one.number) for one in passes.events(0.0)]
    assert found == [
        ("a", "forward", 1),
        ("b", "forward", 1),
        ("a", "encode", 1),
        ("a", "forward", 2),
    ]


def test_second_end_does_nothing() -> None:
    passes = on_the_host()
    begun = passes.begin("model")
    passes.end(begun)
    ended = begun.end
    passes.end(begun, failed=True)
    passes.end(None)
    assert [(one.end, one.failed) for one in passes.events(0.0)] == [(ended, False)]


def test_running_pass_is_shown_until_now() -> None:
    passes = on_the_host()
    begun = passes.begin("model")
    now = time.monotonic()
    [one] = passes.events(now)
    assert one.end == now
    assert begun.end == 0.0, "polling must not end it"
    passes.end(begun)
    assert len(passes.events(now)) == 1


def test_newest_passes_are_kept_and_the_rest_counted() -> None:
    passes = on_the_host(kept=3)
    for _ in range(5):
        passes.end(passes.begin("model"))
    assert [one.number for one in passes.events(0.0)] == [3, 4, 5]
    assert passes.dropped == 2


def test_threads_number_their_passes_uniquely() -> None:
    passes = on_the_host(kept=4000)
    of_model = ModelPasses(passes, "model")

    def run() -> None:
        for _ in range(500):
            of_model.end(of_model.begin())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.number for one in passes.events(0.0)) == list(range(1, 2001))
    assert passes.dropped == 0
