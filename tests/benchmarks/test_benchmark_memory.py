"""The memory floor against a timeline done by hand, and the whole benchmark on a small model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest


def test_the_floor_of_two_groups_is_the_sum_done_by_hand() -> None:
    from memory import Timeline, Unit, floor

    from shardwise.planner.storages import Life

    # Two groups of 100 and 300 parameters; forward lasts until 30, backward until 60. One activation of 1000
    # bytes lives from 15 to 45.
    small = Unit(100, forward=(5, 10), backward=(50, 55), gradients=[Life([52], [200])])
    large = Unit(300, forward=(10, 20), backward=(32, 44), gradients=[Life([34], [100]), Life([36], [500])])
    timeline = Timeline([small, large], [Life([15, 45], [1000, 0])], backward_begins=30, end=60)
    state = 12 * 400 // 4

    alone = floor(timeline, world=4, ahead=0)
    assert alone["forward"] == state + 1000 + 2 * 300
    assert alone["backward"] == state + 1000 + 2 * 300 + 600
    assert alone["AdamW fused"] == alone["AdamW foreach"] == 16 * 400 // 4

    overlapped = floor(timeline, world=4, ahead=1)
    assert overlapped["forward"] == alone["forward"]  # the last group has nothing ahead
    assert overlapped["backward"] == alone["backward"] + 2 * 100


def test_gradient_shards_made_so_far_count_in_the_floor_of_later_groups() -> None:
    from memory import Timeline, Unit, floor

    from shardwise.planner.storages import Life

    last = Unit(100, forward=(5, 10), backward=(50, 55), gradients=[Life([52], [200])])
    first = Unit(100, forward=(10, 20), backward=(32, 44), gradients=[Life([34], [200])])
    timeline = Timeline([last, first], [], backward_begins=30, end=60)
    assert floor(timeline, world=1, ahead=0)["backward"] == 12 * 200 + 4 * 100 + 2 * 100 + 200
    assert floor(timeline, world=2, ahead=0)["backward"] == 12 * 100 + 4 * 50 + 2 * 100 + 200


class InThisProcess(Executor):
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **options))
        return done


def test_on_a_small_model_nothing_is_under_the_floor_and_we_are_not_over_torch(
    run_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import memory

    monkeypatch.setattr(memory, "ProcessPoolExecutor", InThisProcess)
    figures, results = run_program(memory, "--shape", "small", "--world", "4", "--sequence", "32")

    (case,) = figures["cases"]
    found = case["bytes"]
    least = found.pop("floor, nothing ahead")
    assert found.keys() >= {"floor", "torch", "interleaved", "contiguous"}
    for phase, peak in least.items():
        assert all(one[phase] >= peak for one in found.values())
    for phase in least:
        assert found["interleaved"][phase] <= found["torch"][phase]
        # Whole rows do not divide evenly: in so small a model a row too many is a part in some hundreds.
        assert found["contiguous"][phase] <= found["torch"][phase] * 1.01
    assert "Llama small, 4 ranks, sequence 32" in results
