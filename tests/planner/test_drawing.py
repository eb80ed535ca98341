"""What a plan is written as: a page, a trace, a picture."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

import shardwise
from planner.models import Even
from shardwise import planner
from shardwise.cli import app
from shardwise.errors import ShardingError, ShardwiseError
from shardwise.planner.page import (
    HEIGHT,
    LANE,
    LEFT,
    TOP,
    WIDTH,
    _held,
    _lanes,
    _memory,
    streams,
    ticks,
    top_bytes,
    windows,
)


@cache
def plan_of_gpt2() -> planner.Plan:
    return shardwise.plan("gpt2", ranks=8, sequence=128, hardware="a100-40gb")


def test_a_plan_is_a_page_that_loads_nothing_and_a_trace_of_its_streams(tmp_path: Path) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    command = ["plan", "gpt2", "--ranks", "8", "--sequence", "128", "--hardware", "a100-40gb"]
    result = CliRunner().invoke(app, [*command, "--html", str(page), "--trace", str(trace)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "src=" not in text
    assert "href=" not in text
    assert "backward of block 3: gathered" in text
    assert "all-gather: forward of block 2" in text
    spans = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X"]
    made = plan_of_gpt2()
    assert made.times is not None
    assert max(one["ts"] + one["dur"] for one in spans) == pytest.approx(1e6 * made.times.step)
    busy = sum(span.busy for span in made.times.spans)
    assert busy >= made.times.computation + made.times.communication - 1e-9
    with pytest.raises(ShardingError, match="needs hardware"):
        planner.trace(replace(made, hardware=None, times=None))


def test_a_picture_says_what_to_install_where_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan_of_gpt2()
    if importlib.util.find_spec("matplotlib") is not None:
        assert planner.picture(made).startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ShardwiseError, match=r"shardwise\[plan\]"):
        planner.picture(made)
    monkeypatch.setattr(planner, "search", None)  # nothing is planned before
    for options in ([], ["--search", "--json", os.devnull]):
        result = CliRunner().invoke(app, ["plan", "gpt2", "--png", os.devnull, *options])
        assert (result.exit_code, "shardwise[plan]" in result.stderr) == (2, True)


@pytest.mark.parametrize(("step", "unit"), [(1, "GiB"), (1000, "MiB")])
def test_a_picture_has_units_for_its_sizes(monkeypatch: pytest.MonkeyPatch, step: int, unit: str) -> None:
    matplotlib = MagicMock()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", matplotlib)
    made = plan_of_gpt2()
    moments = [
        replace(moment, alive={name: size // step for name, size in moment.alive.items()})
        for moment in made.moments
    ]
    sizes = {"reserved_bytes": made.reserved_bytes // step, "needed_bytes": made.needed_bytes // step}
    planner.picture(replace(made, moments=moments, hardware=None, times=None, **sizes))
    axes = matplotlib.Figure.return_value.subplots.return_value.__getitem__.return_value.__getitem__
    label = axes.return_value.set.call_args_list[0].kwargs["ylabel"]
    assert label == f"{unit} of a rank"


def test_labels_of_phases_end_within_the_drawing() -> None:
    labels = re.findall(
        r"<text x=\"([\d.]+)\"( text-anchor=\"end\")? y=\"290.0\">(\w+)<", planner.page(plan_of_gpt2())
    )
    assert [name for *_, name in labels] == ["forward", "backward", "optimizer"]
    assert all(end or float(at) + 80 < 900 for at, end, _ in labels)


@pytest.mark.parametrize("option", ["--json", "--html", "--trace", "--png"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_planned(
    tmp_path: Path, option: str
) -> None:
    for path in (tmp_path, tmp_path / "none" / "plan"):
        result = CliRunner().invoke(app, ["plan", "no such model", option, str(path)])
        assert (result.exit_code, f"{path} cannot be written" in result.stderr) == (2, True)


def test_what_a_page_draws_lies_in_its_drawing_and_each_stream_in_its_lane() -> None:
    made = plan_of_gpt2()
    held, memory, lanes = list(_held(made)), list(_memory(made)), list(_lanes(made))
    ends = [*itertools.accumulate(one.width for one in held)]
    assert [one.x for one in held] == pytest.approx([0, *ends[:-1]])
    assert ends[-1] == pytest.approx(100)
    for lane, stream in enumerate(streams(made)):
        assert {one.y for one in lanes if one.text.startswith(f"{stream}:")} == {TOP + LANE * lane}
    assert all(LEFT <= one.x < one.x + one.width <= WIDTH + 1 for one in memory + lanes)
    for _, stack in itertools.groupby(memory, lambda one: one.x):  # one category on top of another
        assert all(high.y + high.height == pytest.approx(low.y) for low, high in pairwise(stack))
    assert min(one.y for one in memory) >= TOP
    assert max(one.y + one.height for one in memory) == pytest.approx(TOP + HEIGHT)


@pytest.mark.parametrize(("times", "is_device"), [(0.5, False), (1.2, True), (9.0, False)])
def test_the_axis_of_memory_ends_at_the_devices_unless_that_flattens_the_rest(
    times: float, is_device: bool
) -> None:
    made = plan_of_gpt2()
    assert made.hardware is not None
    most = int(1.1 * max(made.peak_bytes, made.reserved_bytes))
    hardware = replace(made.hardware, memory_bytes=int(times * most), context_bytes=0)
    expected = int(1.05 * hardware.usable_bytes) if is_device else most
    assert top_bytes(replace(made, hardware=hardware)) == expected


def test_memory_is_drawn_over_the_time_of_its_computation() -> None:
    made = plan_of_gpt2()
    found = windows(made)
    assert found[0].begin == 0
    assert found[-1].end == made.step_times.step
    assert all(one.end == other.begin for one, other in pairwise(found))
    assert max(one.moment.alive_bytes for one in found) == made.peak_bytes
    phases = [phase for phase, _ in itertools.groupby(one.moment.phase for one in found)]
    assert phases[:2] == ["forward", "backward"]
    backward = sum(one.end - one.begin for one in found if one.moment.phase == "backward")
    assert 0.4 < backward / made.step_times.step < 0.8
    (blocks,) = [one for one in made.groups if one.groups > 1]
    assert (blocks.name, blocks.gathers, blocks.reductions) == ("blocks 0 to 10", 2, 1)  # the last one stays
    assert sum(one.groups * one.wire_bytes for one in made.groups) == made.wire_bytes
    assert blocks.padding == pytest.approx(0, abs=1e-3)


def test_a_page_has_the_units_of_the_text_for_a_model_of_any_size() -> None:
    made = shardwise.plan(Even, ranks=2, sequence=2, device="cpu")
    page, mib = planner.page(made), made.peak_bytes / 2**20
    assert "GiB" not in page
    assert f"{mib:.2f} MiB" in page
    assert f"Memory of a rank, MiB: {mib:.2f} alive at most" in str(made)
    assert [text for _, text in ticks(45 * 2**10)] == ["10 KiB", "20 KiB", "30 KiB", "40 KiB"]
