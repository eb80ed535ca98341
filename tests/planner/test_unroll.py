"""A deep model's step from shallow ones, against the deep model recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.planner.events import Allocate, Free, Recording
from shardwise.planner.measure import allocated, moments, sent
from shardwise.planner.models import model_of
from shardwise.planner.record import record
from shardwise.planner.setup import Setup
from shardwise.planner.unroll import RECORDED, NotRegular, grown, unroll


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, layers: int, *, wider: int = -1) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 24), nn.Linear(24, 40)
        self.blocks = nn.ModuleList(Block(24) for _ in range(layers))
        self.wider = wider

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.wider:
                x = x + torch.ones_like(x)
        return self.head(x)


def tiny(layers: int = 12) -> nn.Module:
    return Model(layers)


def figures(recording: Recording) -> list[Any]:
    """All that plans say, and every allocation in order."""
    sizes = [
        (segment.place, type(event), event.memory.nbytes, event.memory.category)
        for segment in recording.segments
        for event in segment.events
        if isinstance(event, (Allocate, Free))
    ]
    return [moments(recording), sent(recording, 1), allocated(recording, expandable=False).peak, sizes]


@pytest.mark.parametrize(
    "setup",
    [
        Setup(sequence=16, clip_norm=True),
        Setup(sequence=16, layout="contiguous", checkpointing="full", optimizer="AdamW"),
        Setup(sequence=16, layout="contiguous", checkpointing="selective", reshard_after_forward=False),
        Setup(sequence=16, ranks=16, replicas=4, reshard_after_forward=2, accumulation=2, device="cpu"),
    ],
    ids=["interleaved", "contiguous", "stays gathered", "two axes"],
)
def test_what_few_blocks_do_tells_exactly_what_more_do(setup: Setup) -> None:
    model = model_of(tiny, sequence=16)
    few, more = (record(model, setup, layers=RECORDED + i) for i in (0, 1))
    deep = record(model, setup, layers=RECORDED + 4)
    unrolled = unroll(few, more, RECORDED + 4)
    assert unrolled.parameters == deep.parameters
    assert figures(unrolled) == figures(deep)


def test_a_block_that_does_something_of_its_own_is_noticed() -> None:
    def irregular(layers: int = 12) -> nn.Module:
        return Model(layers, wider=3)

    model = model_of(irregular, sequence=16)
    few, more = (record(model, Setup(sequence=16), layers=RECORDED + i) for i in (0, 1))
    with pytest.raises(NotRegular, match="with 9 blocks"):
        unroll(few, more, 12)


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_two_sizes_of_micro_batches_tell_exactly_what_larger_ones_do(layout: Any) -> None:
    model = model_of(tiny, sequence=16)
    kept: dict[str, Any] = {"layout": layout, "reshard_after_forward": False}

    def recorded(size: int, layers: int) -> Recording:
        setup = Setup(sequence=16, checkpointing="full", micro_batch=size, **kept)
        return record(model, setup, layers=layers)

    few, more = recorded(1, 4), recorded(1, 5)
    small, large = unroll(few, more, 6), unroll(few, more, 6, instead=recorded(2, 4))
    assert figures(grown(small, large, 3)) == figures(recorded(4, 6))
