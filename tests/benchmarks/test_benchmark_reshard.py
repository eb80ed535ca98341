"""The benchmark of resharding: its plans are those it names, and it asks torch only for what torch can do."""

from __future__ import annotations

import math

import torch

from shardwise.layout import cover, transfer


def test_plans_are_of_exact_covers_and_have_the_messages_shown() -> None:
    from reshard import plan_table, plans

    for source, target, _ in plans(64).values():
        for side in (source, target):
            cover([box for held in side for box in held], (1024, 1024))
    shown = {(row[0], row[1]): int(row[2].replace(",", "")) for row in plan_table(64).rows}
    assert shown["rows to rows of other ranks", "all ranks"] == 64
    assert shown["rows to columns", "one rank"] == 2 * 64 - 1


def test_a_planned_message_list_moves_every_element_once() -> None:
    from reshard import cut, plans

    for source, target, _ in plans(16).values():
        assert sum(message.box.numel for message in transfer(source, target)) == 256 * 256
    assert sum(math.prod(box.sizes) for (box,) in cut((8, 8), grid=(2, 2), shift=1)) == 64


def test_torch_is_not_asked_for_what_it_lacks_or_aborts_at() -> None:
    from reshard import specs, theirs

    whole = torch.zeros(4, 4)
    cases = specs(4)
    assert theirs(whole, cases["rows to a 2 x 2 grid"]) is None
    assert theirs(whole, cases["rows to the next rank"]) is None
