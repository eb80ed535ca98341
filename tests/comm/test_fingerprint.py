"""Ranks that would communicate differently all raise before they do, and each says what differs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from shardwise.comm import check_fingerprint
from shardwise.comm.count import CommCounter
from shardwise.comm.fingerprint import fingerprint
from shardwise.errors import RankMismatchError

CPU = torch.device("cpu")
SAME = "weight: shape [4, 3]\nbias: shape [4]"
OTHER = "weight: shape [4, 5]\nbias: shape [4]"


def clash(description: str, groups: list[dist.ProcessGroup]) -> str:
    with pytest.raises(RankMismatchError) as error:
        check_fingerprint(description, groups=groups, device=CPU)
    message = str(error.value)
    assert f"rank {dist.get_rank()}: ranks disagree about the sharded model" in message
    assert "Build the same model" in message
    return message


def sections(message: str) -> dict[str, list[str]]:
    """ "Only on rank R" -> the lines under it."""
    found: dict[str, list[str]] = {}
    for line in message.splitlines():
        if line.startswith("Only on rank "):
            lines = found[line.rstrip(":")] = []
        elif line.startswith("  "):
            lines.append(line.strip())
    return found


def test_a_fingerprint_is_63_bits_and_depends_on_every_character() -> None:
    prints = {fingerprint(text) for text in (SAME, OTHER, SAME + " ", SAME.upper(), "")}
    assert len(prints) == 5
    assert all(0 <= p < 2**63 for p in prints)
    assert fingerprint("shardwise") == 8104194976848289986  # a constant: equal in every process


@on_ranks(1, 3)
def test_ranks_that_agree_compare_16_bytes_each_and_go_on() -> None:
    with CommCounter() as counter:
        check_fingerprint(SAME, groups=[dist.group.WORLD], device=CPU)
    assert [(call.kind, call.bytes) for call in counter.calls] == [("all_gather", 16 * dist.get_world_size())]


@on_ranks(3)
@pytest.mark.parametrize("odd", [0, 2])
def test_one_rank_of_three_that_differs_stops_all_three_with_both_sides(odd: int) -> None:
    rank = dist.get_rank()
    found = sections(clash(OTHER if rank == odd else SAME, [dist.group.WORLD]))
    agreeing = next(r for r in range(3) if r != odd)
    mine, theirs = (odd, agreeing) if rank == odd else (rank, odd)
    changed = {False: ["weight: shape [4, 3]"], True: ["weight: shape [4, 5]"]}
    assert found == {
        f"Only on rank {mine}": changed[mine == odd],
        f"Only on rank {theirs}": changed[theirs == odd],
    }


@on_ranks(2)
def test_parameters_in_another_order_are_said_to_be_so() -> None:
    lines = SAME.splitlines()
    message = clash("\n".join(lines if dist.get_rank() else lines[::-1]), [dist.group.WORLD])
    assert "the order of parameters differs" in message


@on_ranks(2)
def test_a_layer_that_only_one_rank_has_is_shown() -> None:
    extra = "head: shape [9, 4]"
    message = clash(f"{SAME}\n{extra}" if dist.get_rank() == 0 else SAME, [dist.group.WORLD])
    assert sections(message)["Only on rank 0"] == [extra]
    assert "order of parameters" not in message


@on_ranks(2)
def test_of_many_differences_twenty_are_shown() -> None:
    rank = dist.get_rank()
    message = clash("\n".join(f"p{i}: on {rank}" for i in range(50)), [dist.group.WORLD])
    assert [len(lines) for lines in sections(message).values()] == [20, 20]


@on_ranks(3)
def test_ranks_outside_the_group_neither_take_part_nor_hear_of_it() -> None:
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank == 0:
        check_fingerprint(OTHER, groups=[], device=CPU)
        return
    found = sections(clash(SAME if rank == 1 else OTHER, [group]))
    assert list(found) == [f"Only on rank {rank}", f"Only on rank {3 - rank}"]


@on_ranks(4, timeout=15)
@pytest.mark.parametrize("odd", range(4))
def test_one_odd_cell_of_a_2x2_mesh_stops_all_four_ranks(odd: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = [mesh.get_group("shard"), mesh.get_group("replicate")]
    rank = dist.get_rank()
    message = clash(OTHER if rank == odd else SAME, groups)
    met = {r for group in groups for r in dist.get_process_group_ranks(group)}
    if odd in met:
        assert f"Only on rank {odd}" in message
        assert "weight: shape [4, 5]" in message
        assert "weight: shape [4, 3]" in message
    else:
        assert "the mismatch is between other ranks" in message


@on_ranks(4, timeout=15)
def test_rows_that_differ_from_each_other_are_found_by_the_second_exchange() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = [mesh.get_group("shard"), mesh.get_group("replicate")]
    rank = dist.get_rank()
    found = sections(clash(OTHER if rank >= 2 else SAME, groups))
    assert list(found) == [f"Only on rank {rank}", f"Only on rank {(rank + 2) % 4}"]


@on_ranks(4)
def test_a_mesh_that_agrees_exchanges_once_for_each_axis() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with CommCounter() as counter:
        check_fingerprint(SAME, groups=[mesh.get_group(0), mesh.get_group(1)], device=CPU)
    assert [(call.kind, call.bytes) for call in counter.calls] == [("all_gather", 32)] * 2
