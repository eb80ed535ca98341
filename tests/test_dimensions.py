"""Meshes by their text: who is where, who shares what."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from ranks import on_ranks
from shardwise.dimensions import Dimensions, data_ranks, dense_mesh, expert_mesh, part, share_of_batch
from shardwise.errors import RankMismatchError, ShardingError


def test_ranks_are_numbered_with_those_that_talk_most_side_by_side() -> None:
    dimensions = Dimensions("tp2, dp3,pp2")
    assert dimensions.ranks == 12
    assert dimensions.sizes == {"pp": 2, "dp": 3, "tp": 2}
    assert dimensions.place(9) == {"pp": 1, "dp": 1, "tp": 1}
    assert dimensions.peers("tp")[:2] == [[0, 1], [2, 3]]
    assert dimensions.peers("dp") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert Dimensions("pp4").sizes == {"pp": 4, "dp": 1}


@pytest.mark.parametrize("text", ["", "dp", "dp0", "dp2,dp2", "dp2,cp2", "dp-2", "2dp", "dp2;tp2"])
def test_a_text_that_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(ShardingError, match="expected each of pp, replicate, dp, sp, ep, tp at most once"):
        Dimensions(text)


def test_the_picture_has_every_rank_in_its_place_and_who_talks_to_whom() -> None:
    assert Dimensions("pp2,sp2").picture().splitlines() == [
        "       sp 0   sp 1",
        "pp 0      0      1",
        "pp 1      2      3",
        "",
        "pp: activations of a micro-batch, to the next stage and back",
        "    0-2  1-3",
        "sp: queries, keys, values and results of attention; parameters and gradients like dp",
        "    0-1  2-3",
    ]
    assert "    0-2  1-3  4-6  5-7  ...\n" in Dimensions("pp4,dp2,tp2").picture()


@on_ranks(4)
def test_all_but_experts_are_cut_over_ranks_with_tokens_of_their_own() -> None:
    rank = dist.get_rank()
    mesh = Dimensions("tp2,ep2").mesh("cpu")
    assert part(mesh, "pp") is None
    assert data_ranks(mesh) == 2
    assert share_of_batch(mesh) == (rank // 2, 2)
    assert dense_mesh(mesh).mesh.tolist() == [rank % 2, rank % 2 + 2]
    assert expert_mesh(mesh).mesh.tolist() == [rank - rank % 2, rank - rank % 2 + 1]
    mesh = Dimensions("replicate2,sp2").mesh("cpu")
    assert dense_mesh(mesh).mesh.tolist() == [[0, 1], [2, 3]]
    assert data_ranks(mesh) == 4
    assert share_of_batch(mesh) == (rank // 2, 2)  # ranks of sp have pieces of the same rows


@on_ranks(4)
def test_ranks_without_experts_make_the_same_groups_as_the_others() -> None:
    mesh = Dimensions("pp2,tp2").mesh("cpu")
    if mesh.get_local_rank("pp"):
        expert_mesh(mesh)
    dist.barrier(dist.new_group(timeout=timedelta(seconds=5)))  # named by how many a rank has made


@on_ranks(2)
def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ShardingError, match="the mesh dp3 needs 3 ranks, but the job has 2"):
        Dimensions("dp3").mesh("cpu")


@on_ranks(2)
def test_ranks_that_give_different_meshes_are_refused_on_every_rank() -> None:
    with pytest.raises(RankMismatchError, match=r"(?s)the mesh.*dp2.*dp1,sp2.*same mesh on every rank"):
        Dimensions("sp2" if dist.get_rank() else "dp2").mesh("cpu")
