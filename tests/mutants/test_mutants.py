"""What can be left out is found, nothing changes until it is, and then it is seen."""

from __future__ import annotations

import re

import pytest

from mutants.campaign import difference, run, steady
from mutants.cases import WRITTEN, Own, Program
from mutants.places import NOT_LOOKED_AT, SOURCE, Switch, instrumented, places

CALLS = re.compile(r"\.(?:wait_event|wait_stream|record_event|synchronize|record_stream)\(")
CASE = "gathers begun before the optimizer's step"
# Of each kind at least one, with what is seen.
EXAMPLES = [
    ("wait", "reduce_scatter: streams.reduce_scatter.wait_stream(current_stream(plan.device))", "raced"),
    ("event", "Schedule.track_reductions: record_event(result.stream)", "raced"),
    ("context", "finish_reduction: stream", "raced"),
    (
        "keep-alive",
        "Schedule.track_reductions: self.reduce_inputs += [(used, stream) for used in result.inputs]",
        "raced",
    ),
    ("giving back", "ParamGroup.drop_stale: self.abandon_gather()", "other numbers"),
    ("giving back", "FSDPState._end_pass: schedule.end_copy_out()", "held memory"),
]


def test_every_call_on_a_stream_or_an_event_is_a_place() -> None:
    files = [
        path for path in SOURCE.rglob("*.py") if not str(path.relative_to(SOURCE)).startswith(NOT_LOOKED_AT)
    ]
    called = sum(len(CALLS.findall(path.read_text())) for path in files)
    assert called == sum(
        (place.kind in ("wait", "event") or "record_stream" in place.text) and bool(CALLS.search(place.text))
        for place in places()
    )


@pytest.mark.parametrize("name", [name for name, case in WRITTEN.items() if isinstance(case, Own | Program)])
def test_a_case_has_no_finding_where_nothing_is_left_out(name: str) -> None:
    assert not run(WRITTEN[name]).findings


def test_what_is_left_out_is_seen_and_nothing_else() -> None:
    switch, case = Switch(), WRITTEN[CASE]
    numbers = {(place.kind, str(place).partition(" ")[2]): place.number for place in places()}
    plain = run(case)
    with instrumented(switch):
        expected = steady(plain, run(case))
        assert expected == plain
        for kind, name, seen in EXAMPLES:
            switch.place = numbers[kind, name]
            assert difference(CASE, run(case), expected).kind == seen, name
    switch.reached.clear()
    run(case)
    assert not switch.reached
