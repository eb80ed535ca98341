"""Ranks that would communicate differently all raise before they do, and each says what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from shardwise.comm import agree as module
from shardwise.comm.agree import Agreement, agree, fingerprint, gather_text, together
from shardwise.comm.count import CommCounter
from shardwise.comm.differences import by_ranks, differences
from shardwise.errors import CheckpointError, RankMismatchError, ShardingError

SAME = "weight: shape [4, 3]\nbias: shape [4]"
OTHER = "weight: shape [4, 5]\nbias: shape [4]"


def world() -> tuple[int, int, Any]:
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def clash(description: str, group: Any) -> str:
    with pytest.raises(RankMismatchError) as error:
        agree(description, group=group, subject="the boxes of w", advice="Build the same model.")
    message = str(error.value)
    assert message.startswith(f"rank {dist.get_rank()}: ranks disagree about the boxes of w, so")
    assert message.endswith("\nBuild the same model.")
    return message


def sections(message: str) -> dict[str, list[str]]:
    """ "Only on rank R" -> the lines under it."""
    found: dict[str, list[str]] = {}
    for line in message.splitlines():
        if line.startswith("Only on rank"):
            lines = found[line.rstrip(":")] = []
        elif line.startswith("  "):
            lines.append(line.strip())
    return found


def test_a_fingerprint_is_63_bits_and_depends_on_every_character() -> None:
    prints = {fingerprint(text) for text in (SAME, OTHER, SAME + " ", SAME.upper(), "")}
    assert len(prints) == 5
    assert all(0 <= p < 2**63 for p in prints)
    assert fingerprint("shardwise") == 8104194976848289986  # a constant: equal in every process


@on_ranks(2, 3, timeout=20)
def test_an_error_amid_an_agreement_leaves_no_word_for_the_next() -> None:
    rank, _, group = world()
    for other in (False, True):
        error = RankMismatchError if other else KeyError
        with (
            pytest.raises(error),
            Agreement(OTHER if other and rank == 1 else SAME, group=group, subject="the boxes of w"),
        ):
            raise KeyError
        agree("the next", group=group, subject="what comes next")


# ---------------------------------------------------------------- words for what differs


def test_ranks_of_equal_text_stand_together_and_show_the_lines_that_others_lack() -> None:
    texts = {0: "same\nx", 1: "same\ny", 2: "same\nx", 3: "same"}
    assert sections(differences(texts)) == {
        "Only on ranks 0, 2": ["x"],
        "Only on rank 1": ["y"],
        "Only on rank 3": ["nothing"],
    }


def test_lines_in_another_order_are_said_to_be_so() -> None:
    backwards = "\n".join(SAME.splitlines()[::-1])
    assert differences({0: SAME, 1: backwards, 2: SAME}).splitlines() == [
        "Only the order differs; where it does first, there is",
        "  weight: shape [4, 3] on ranks 0, 2",
        "  bias: shape [4] on rank 1",
    ]


def test_of_many_lines_twenty_are_shown_and_of_a_long_one_what_surrounds_the_difference() -> None:
    many = differences({rank: "\n".join(f"p{i}: on {rank}" for i in range(50)) for rank in range(2)})
    assert [len(lines) for lines in sections(many).values()] == [21, 21]
    assert many.count("... and 30 more lines") == 2
    long = differences({rank: "a" * 50_000 + str(rank) + "b" * 50_000 for rank in range(2)})
    assert len(long) < 1000
    assert all(f"aaa{rank}bbb" in long for rank in range(2))
    assert long.count("...") == 4
    assert "Only on rank 1:\n  aaa" in differences({0: "", 1: "a" * 2000})  # one is the other's beginning


def test_a_problem_of_several_ranks_is_said_once() -> None:
    found = by_ranks({2: "disk full\n  also: w", 0: "disk full", 1: ""})
    assert found == "  ranks 0, 2: disk full\n  rank 1: an error without text\n  rank 2: also: w"


# ---------------------------------------------------------------- agreement


@on_ranks(1, 3)
def test_ranks_that_agree_compare_8_bytes_each_and_go_on() -> None:
    _, ranks, group = world()
    with CommCounter() as counter:
        agree("rows to columns", group=group, subject="the boxes")
    assert counter.bytes("send") == counter.bytes("recv") == 8 * (ranks - 1)
    assert {call.kind for call in counter.calls} <= {"send", "recv"}


@on_ranks(3)
def test_one_rank_that_differs_stops_all_and_others_outside_the_group_hear_nothing() -> None:
    rank, _, group = world()
    for odd in (0, 2):
        agreeing = ", ".join(str(r) for r in range(3) if r != odd)
        assert sections(clash(OTHER if rank == odd else SAME, group)) == {
            f"Only on ranks {agreeing}": ["weight: shape [4, 3]"],
            f"Only on rank {odd}": ["weight: shape [4, 5]"],
        }
    pair = dist.new_group([1, 2])
    if rank > 0:
        assert list(sections(clash(str(rank), pair))) == ["Only on rank 1", "Only on rank 2"]
    agree(OTHER if rank == 0 else SAME, group=[], subject="nothing")


@on_ranks(4, timeout=15)
@pytest.mark.parametrize("odd", range(4))
def test_one_odd_cell_of_a_2x2_mesh_stops_all_four_ranks_and_all_name_it(odd: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    message = clash(
        OTHER if dist.get_rank() == odd else SAME, [mesh.get_group("shard"), mesh.get_group("replicate")]
    )
    assert f"Only on rank {odd}:\n  weight: shape [4, 5]" in message
    assert "weight: shape [4, 3]" in message


@on_ranks(4, timeout=15)
def test_rows_of_a_mesh_that_differ_from_each_other_are_found_by_the_second_exchange() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups, rank = [mesh.get_group("shard"), mesh.get_group("replicate")], dist.get_rank()
    found = sections(clash(OTHER if rank >= 2 else SAME, groups))
    assert set(found) == {f"Only on rank {rank}", f"Only on rank {(rank + 2) % 4}"}
    with CommCounter() as counter:
        agree(SAME, group=groups, subject="the model")
    assert counter.bytes("send") == 8 * 2  # once for each axis


# ---------------------------------------------------------------- together


@on_ranks(1, 3)
def test_what_fails_on_one_rank_alone_raises_on_all_in_the_same_words() -> None:
    rank, ranks, _ = world()
    assert together("counting", lambda: (rank, "x")) == [[r, "x"] for r in range(ranks)]

    def fail() -> None:
        if rank == 0:
            raise ShardingError(f"rank {rank}: w is cut")
        raise ValueError("no")

    with pytest.raises(CheckpointError) as error:
        together("loading x", fail)
    others = {1: "", 3: "\n  ranks 1, 2: ValueError: no"}[ranks]
    assert str(error.value) == f"loading x failed\n  rank 0: w is cut{others}"
    assert isinstance(error.value.__cause__, ShardingError if rank == 0 else ValueError)


# ---------------------------------------------------------------- texts


@on_ranks(1, 3)
def test_texts_of_any_length_and_language_arrive_by_rank() -> None:
    rank, ranks, group = world()
    texts = ["", "Zeichen: äöü → 日本語 🜁 \x00 end", "x" * 5000]
    with CommCounter() as counter, torch.device("meta"):  # where a model is made
        assert gather_text(texts[rank], group=group) == texts[:ranks]
    assert [(call.kind, call.bytes) for call in counter.calls] == (
        [] if ranks == 1 else [("all_gather", 8 * 3), ("all_gather", 5000 * 3)]
    )
    assert gather_text("", group=group, device=torch.device("cpu")) == [""] * ranks
    if ranks == 1:
        return
    pair = dist.new_group([2, 0])
    if rank != 1:
        assert gather_text(f"from {rank}", group=pair) == [
            f"from {r}" for r in dist.get_process_group_ranks(pair)
        ]


@on_ranks(1)
def test_a_groups_texts_travel_on_a_device_that_it_serves() -> None:
    fake = dist.new_group([0], backend="fake")
    for group in (dist.group.WORLD, fake, dist.new_group([0], backend="cpu:gloo")):
        assert module.device_of(group) == torch.device("cpu")


@on_ranks(2)
def test_what_was_sent_before_a_difference_was_found_is_taken_for_nothing_later() -> None:
    group, rank, sends = dist.group.WORLD, dist.get_rank(), []
    assert group is not None
    for number in range(300):  # tags repeat
        agreement = Agreement("send" if rank == 0 or number else "nothing", group=group, subject="a number")
        wire = torch.full((1,), number if rank == 0 else -1)
        if rank == 0:
            sends.append((wire, group.send([wire], 1, agreement.tag)))
        elif number:
            group.recv([wire], 0, agreement.tag).wait()
            assert wire.item() == number
        if number:
            agreement.confirm()
            continue
        with pytest.raises(RankMismatchError, match="ranks disagree about a number"):
            agreement.confirm()
    dist.barrier()
