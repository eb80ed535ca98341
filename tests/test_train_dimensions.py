"""The example on meshes of several dimensions: five steps in fp64 are those of one process."""

from __future__ import annotations

import pytest

from fuzz.meshes_part.train import OnMesh, Record, differences, in_one_process, settings
from ranks import on_ranks

MESHES = ["dp2,tp2", "pp2,dp2", "sp2,ep2", "pp2,ep2", "replicate2,tp2"]


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@on_ranks(4)
def test_five_steps_are_those_of_one_process(layout: str) -> None:
    expected = in_one_process(settings())
    meshes: dict = {}
    for mesh in MESHES:
        found = Record()
        OnMesh(settings(mesh=mesh, layout=layout), meshes).train(5, found)
        assert not differences(found, expected), mesh
