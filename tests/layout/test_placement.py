"""The placements of the contiguous layout refuse what cannot be meant, and the other layout refuses them."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import ShardingError
from shardwise.layout import InterleavedLayout, Owned, ParamSpec, Placement, RaggedShard


@pytest.mark.parametrize("block", [0, -3])
def test_a_block_has_at_least_one_row(block: int) -> None:
    with pytest.raises(ShardingError, match=f"at least 1 row, got {block}"):
        RaggedShard(block)


def test_ranks_are_counted_from_the_first() -> None:
    with pytest.raises(ShardingError, match="got rank -1"):
        Owned(-1)


def test_without_arguments_rows_are_single_and_owners_are_chosen() -> None:
    assert RaggedShard() == RaggedShard(1)
    assert Owned().rank is None


@pytest.mark.parametrize("placement", [RaggedShard(2), Owned()])
def test_the_interleaved_layout_refuses_them_with_the_other_layout_named(placement: Placement) -> None:
    spec = ParamSpec("head.weight", (4, 4), torch.float32, torch.float32, placement)
    with pytest.raises(ShardingError, match=r"'head\.weight' has placement .*contiguous"):
        InterleavedLayout([spec], ranks=2, rank=0)
