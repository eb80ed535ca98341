"""What is left out is found, nothing else changes, and it is seen."""

from __future__ import annotations

import re

from mutants import places as found
from mutants.campaign import run, steady
from mutants.cases import WRITTEN
from mutants.places import Place, Switch, instrumented, places

CALLS = re.compile(r"\.(?:wait_event|wait_stream|record_event|synchronize|record_stream)\(")
CASE = "gathers begun before the optimizer's step"
# Of each kind one, with how it is seen.
EXAMPLES = [
    ("wait", "reduce_scatter: streams.reduce_scatter.wait_stream(current_stream(how.device))", "raced"),
    ("event", "Schedule.track_reductions: record_event(result.stream)", "raced"),
    ("context", "finish_reduction: stream", "raced"),
    ("keep-alive", "Schedule.track_reductions: self.reduce_inputs += result.inputs", "raced"),
    ("giving back", "ParamGroup.drop_stale: self.abandon_gather()", "other numbers"),
    ("giving back", "FSDPState._end_pass: schedule.drop_copying_gather()", "held memory"),
]


def place_named(kind: str, text: str) -> Place:
    [place] = [one for one in places() if one.kind == kind and str(one).endswith(text)]
    return place


def test_every_call_of_a_streams_or_events_method_is_a_place() -> None:
    called = 0
    for path in found.SOURCE.rglob("*.py"):
        if not path.relative_to(found.SOURCE).as_posix().startswith(found.NOT_LOOKED_AT):
            called += len(CALLS.findall(path.read_text()))
    assert called == sum(bool(CALLS.search(place.text.partition(")")[0])) for place in places())


def test_functions_are_given_back_what_they_did() -> None:
    before = found.SOURCE.joinpath("comm/streams.py").read_text()
    assert before
    seen = run(WRITTEN[CASE])
    with instrumented(Switch()) as _:
        again = run(WRITTEN[CASE])
    assert steady(seen, again) == seen
