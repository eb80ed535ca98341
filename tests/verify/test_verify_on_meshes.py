"""`shardwise.verify` on meshes of several dimensions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.verify import verdict, verify
from shardwise.verify.sharded import ABSENT, EMPTY, PRESENT, _on_its_stages

MESHES = str(Path(__file__).parents[1] / "cases" / "meshes.py")


@pytest.mark.parametrize(("mesh", "layout"), [("pp2,ep2", "contiguous"), ("sp2,tp2", "interleaved")])
@pytest.mark.usefixtures("pooled")
def test_a_right_case_is_within_tolerance_on_a_mesh_of_several_dimensions(mesh, layout):
    result = verify(MESHES, mesh=mesh, layout=layout, steps=2)
    assert result.ok, verdict(result)
    assert (result.ranks, result.alone) == (4, {})
    names = {d.name for d in result.differences if d.kind == "gradient" and d.step == 1}
    assert {"embedding.token.weight", "blocks.1.mlp.experts.up", "head.1.weight"} < names  # of both stages


@pytest.mark.usefixtures("pooled")
def test_the_parameter_and_the_dimension_at_fault_are_named():
    result = verify(f"{MESHES}:without_the_divisor_of_experts", mesh="dp2,ep2", steps=1)
    assert result.first_parameter.name == "blocks.1.mlp.experts.up"
    assert result.alone.keys() == {"dp2", "ep2"}
    assert not result.alone["dp2"]
    assert "At fault: ep2 is beyond tolerance alone: step 0: the gradient of blocks.1" in verdict(result)
    together = replace(result, alone={"dp2": "", "ep2": ""})
    assert "Each of dp2, ep2 is within tolerance alone, but not together." in verdict(together)


def test_a_parameter_is_looked_for_on_the_stages_that_have_it():
    states = [PRESENT, EMPTY, ABSENT, ABSENT]
    assert _on_its_stages(states, [0, 0, 1, 1]) == {0: PRESENT, 1: EMPTY}
    assert len(_on_its_stages([ABSENT] * 4, [0, 0, 1, 1])) == 4
    assert _on_its_stages(states[1:], [0, 0, 1]) == {0: EMPTY, 1: ABSENT}
