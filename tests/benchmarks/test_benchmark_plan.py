"""The table of plans beside published figures: every figure is there, and calibration sees three rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.planner import Setup, hardware_of, pipeline
from shardwise.planner.shapes import PUBLISHED


@pytest.fixture
def program() -> Any:
    import plan

    return plan


def test_every_published_figure_is_compared_or_says_why_it_is_not(program: Any) -> None:
    rows = json.loads(program.ROWS.read_text())
    ids = [one for row in rows for one in row["ids"]]
    assert len(ids) == len(set(ids)) == 189
    for row in rows:
        if "why" in row:
            continue
        assert row["model"] in PUBLISHED
        assert hardware_of(row["hardware"])
        made = Setup(**{**row["setup"], **row.get("otherwise", {})})
        figures = len(program.published(row)) + ("fits" in row)  # what ran out of memory has no other
        assert 1 <= figures <= len(row["ids"]), made  # tokens/s and MFU are one
        assert ("assumed" in row) == ("otherwise" in row)
    left_out = [row for row in rows if "why" in row]
    # Another reason is looked at here, and again when plans learn what it says that they lack.
    assert {row["why"].partition(",")[0] for row in left_out} == {"SimpleFSDP"}
    assert len(program.uncompared(rows).rows) == len(left_out)
    assert len(left_out) + sum("setup" in row for row in rows) == len(rows)


def test_memory_is_planned_as_the_runs_that_were_measured_had_it(program: Any) -> None:
    """Each name that is replaced exists."""
    with program.as_measured("DeepSpeed"):
        assert pipeline.buffer_count is program._under_way


def test_calibration_takes_out_a_factor_and_marks_the_rows_that_it_saw(program: Any) -> None:
    factors = {"here": 0.5, "there": 2.0}
    rows = [
        program.Row(f"{n}", 100.0 * n, 100.0 * n / factor, 1.0, True, True, hardware)
        for hardware, factor in factors.items()
        for n in range(1, 6)
    ]
    made = program.calibrated(rows)
    assert [row.error() for row in made] == pytest.approx([0.0] * 10)
    assert [row.name for row in made if row.seen] == ["1", "3", "5"] * 2
    assert program.left_out(rows).rows[0] == ["median of absolute errors", "0.0%", "0.0%", "0.0%"]


def test_megatrons_operations_are_eight_a_parameter_and_attention(program: Any) -> None:
    """Of 174.6e9 parameters, 0.63e9 in the embedding, which is multiplied in forward and backward only."""
    blocks, embedding = 96 * 12 * 12288**2, 51200 * 12288
    attention = 4 * 4 * 96 * 12288 * 2048
    assert program.convention("megatron-175b", 2048) == pytest.approx(
        8 * blocks + 6 * embedding + attention, rel=1e-9
    )
