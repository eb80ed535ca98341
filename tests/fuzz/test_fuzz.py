"""A small fixed draw of every part, what was found before, and the shrinking itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fuzz.campaign import REGRESSIONS, Runner, Summary, draw_cases
from fuzz.shrink import shrink
from ranks import RankPool

# seed and cases
FIXED = {
    "fsdp": (21, 8),
    "sharded_tensor": (12, 24),
    "compiled": (4, 1),
    "streams": (1, 6),
    "meshes": (5, 2),
    "disagree": (2, 6),
}
KEPT = [json.loads(path.read_text()) for path in sorted(REGRESSIONS.glob("*.json"))]


@pytest.mark.parametrize("part", FIXED)
def test_a_fixed_draw_is_right(ranks: RankPool, part: str) -> None:
    check(ranks, part, draw_cases(part, *FIXED[part]))


@pytest.mark.parametrize("part", sorted({case["part"] for case in KEPT}))
def test_what_failed_before_is_right(ranks: RankPool, part: str) -> None:
    check(ranks, part, [case for case in KEPT if case["part"] == part])


def check(ranks: RankPool, part: str, cases: list[dict[str, Any]]) -> None:
    summary = Summary(part)
    for case, result in Runner(ranks).run(cases):
        summary.add(case, result)
    failures = [f"{json.dumps(case)}\n{result.text}" for f in summary.failures.values() for case, result in f]
    assert summary.cases == len(cases)
    assert not failures, "\n\n".join(failures)


def test_a_case_that_hangs_costs_its_own_limit_and_shows_its_stacks(mortal_ranks: RankPool) -> None:
    short = {"part": "fsdp", "world": 2, "blocks": [{"kind": "linear"}]}
    long = short | {"steps": [{"delay": {"rank": 1, "ms": 60_000}}], "limit": 1.0}
    results = [result for _, result in Runner(mortal_ranks).run([short, long, short])]
    assert [result.kind for result in results] == ["right", "hung", "right"]
    assert "rank 1" in results[1].text
    assert "time.sleep" in results[1].text or " in at" in results[1].text


def test_shrinking_leaves_only_what_the_failure_needs() -> None:
    case = {"part": "x", "world": 4, "steps": [{"a": 1}, {"b": [5, 6]}, {"a": 2, "c": 9}], "more": {"d": 1}}

    def fails(smaller: dict[str, Any]) -> bool:
        return any("c" in step for step in smaller.get("steps", [])) and smaller["world"] > 1

    assert shrink(case, fails, seconds=5) == {"part": "x", "world": 2, "steps": [{"c": 1}]}


def test_a_case_does_not_depend_on_how_many_are_drawn() -> None:
    assert draw_cases("fsdp", 3, 2) == draw_cases("fsdp", 3, 5)[:2]
    assert draw_cases("fsdp", 3, 2) != draw_cases("fsdp", 4, 2)


def test_kept_cases_say_what_was_found() -> None:
    assert all({"part", "world", "found"} <= set(case) for case in KEPT)
