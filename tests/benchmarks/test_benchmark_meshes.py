"""The table of meshes, of one mesh."""

from __future__ import annotations

from ranks import RankPool


def test_a_mesh_stands_beside_one_process_and_fsdp2_and_loads_its_checkpoint(ranks: RankPool) -> None:
    from meshes import tables

    training, checkpoints = tables(ranks, ["dp2"])
    (row,) = training.rows
    assert row[:2] == ["dp2", "2"]
    assert all(float(cell) < 1e-9 for cell in row[2:4])
    assert row[4] == "equal bits"
    assert checkpoints.rows == [["2", "1", "1", "1", "-"]]


def test_pairs_and_triples_are_all_there() -> None:
    from meshes import meshes

    assert len(meshes(2)) == 15
    assert len(meshes(3)) == 20
