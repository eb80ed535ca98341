"""A deep model's step from shallow ones, against the deep model recorded."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.planner.devices import hardware_of
from shardwise.planner.events import Allocate, Compute, Free, Recording
from shardwise.planner.measure import groups, moments, replay, sent
from shardwise.planner.models import model_of
from shardwise.planner.pipeline import stage_of
from shardwise.planner.plan import plan, record_step, recording_of
from shardwise.planner.record import record
from shardwise.planner.setup import Setup
from shardwise.planner.timing import delay_frees
from shardwise.planner.unroll import FEW, NotRegular, Pattern, extrapolate, numbers_of_blocks, unroll


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


def tiny(layers: int = 12, first: bool = True, last: bool = True) -> nn.Module:
    model = Model(layers)
    model.embedding = model.embedding if first else nn.Identity()
    model.head = model.head if last else nn.Identity()
    return model


def figures(recording: Recording) -> list[Any]:
    """All that plans say, and every allocation in order."""
    sizes = [
        (segment.place, type(event), event.memory.nbytes, event.memory.category)
        for segment in recording.segments
        for event in segment.events
        if isinstance(event, (Allocate, Free))
    ]
    late = moments(delay_frees(recording, hardware_of("h100")))
    return [moments(recording), sent(recording, 1), replay(recording, expandable=False).peak, sizes, late]


@pytest.mark.parametrize(
    ("of", "setup"),
    [
        (tiny, Setup(sequence=16, clip_norm=True)),
        (tiny, Setup(sequence=16, layout="contiguous", checkpointing="full", optimizer="AdamW")),
        (
            tiny,
            Setup(sequence=16, layout="contiguous", checkpointing="selective", reshard_after_forward=False),
        ),
        (
            tiny,
            Setup(sequence=16, ranks=16, replicas=4, reshard_after_forward=2, accumulation=2, device="cpu"),
        ),
        ("llama3-8b", Setup(sequence=16, tensor=2, record_streams=True)),
    ],
    ids=["interleaved", "contiguous", "stays gathered", "two axes", "collectives keep memory"],
)
def test_what_few_blocks_do_tells_exactly_what_more_do(of: Any, setup: Setup) -> None:
    model = model_of(of, sequence=16)
    least = numbers_of_blocks(setup, Pattern(), 99)[0]
    few, more, deep = (record(model, setup, layers=least + i) for i in range(3))
    unrolled = unroll(few, more, least + 2)
    assert unrolled.parameters == deep.parameters
    assert figures(unrolled) == figures(deep)


@pytest.mark.parametrize(
    ("how", "number"),  # the first stage returns what its last block does; the last has a head
    [
        ({}, 0),
        ({"layout": "contiguous", "schedule": "GPipe"}, 1),
        ({"schedule": "Interleaved1F1B", "stages": 2}, 0),
        ({"schedule": "Interleaved1F1B", "stages": 2, "layout": "contiguous"}, 1),
    ],
    ids=str,
)
def test_stages_of_a_pipeline_are_unrolled_too(how: dict[str, Any], number: int) -> None:
    setup = Setup(sequence=16, ranks=4, pipeline=2, accumulation=4, **how)
    stage = stage_of(model_of(tiny, sequence=16), setup, number)
    few, more, deep = (record_step(stage, setup, FEW + i) for i in range(3))
    assert figures(unroll(few, more, FEW + 2)) == figures(deep)


def test_an_optimizer_reads_two_and_writes_one_for_each_element() -> None:
    recording = record(model_of(tiny, sequence=16), Setup(sequence=16, ranks=2, optimizer="SGD"), layers=4)
    events = [
        e
        for one in recording.segments
        if (one.place.step, one.place.phase) == (1, "optimizer")
        for e in one.events
    ]
    computed = [event for event in events if isinstance(event, Compute)]
    assert {event.name for event in computed} == {"aten._foreach_add_"}
    assert sum(event.nbytes for event in computed) == 3 * 4 * recording.parameters // 2


def test_a_block_that_does_something_of_its_own_is_noticed() -> None:
    def irregular(layers: int = 12) -> nn.Module:
        return Model(layers, wider=3)

    model = model_of(irregular, sequence=16)
    few, more = (record(model, Setup(sequence=16), layers=FEW + i) for i in (0, 1))
    with pytest.raises(NotRegular, match="with 5 blocks"):
        unroll(few, more, 12)


def test_blocks_that_are_run_more_often_where_there_are_more_are_noticed() -> None:
    model = model_of(tiny, sequence=16)
    few, more = (record(model, Setup(sequence=16, accumulation=1 + i), layers=FEW + i) for i in (0, 1))
    with pytest.raises(NotRegular, match=f"times with {FEW} blocks"):
        unroll(few, more, 12)


class Late(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(block(x)) if i >= 10 else block(x)
        return self.head(x)


def frozen_late() -> nn.Module:
    model = Model(12)
    model.blocks[10].requires_grad_(False)
    return model


def wider_late() -> nn.Module:
    model = Model(12)
    model.blocks[10].up, model.blocks[10].down = nn.Linear(24, 96), nn.Linear(96, 24, bias=False)
    return model


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.new_ones(2, *gradient.shape).mean(0)


class Tripled(Doubled):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.new_ones(3, *gradient.shape).mean(0)


def dense_first(count: int) -> nn.Module:
    model = Model(12)
    for block in model.blocks[count:]:
        block.up, block.down = nn.Linear(24, 96), nn.Linear(96, 24, bias=False)
    return model


@pytest.mark.parametrize("count", [1, 3])
def test_blocks_at_the_beginning_may_be_others(count: int) -> None:
    model, setup = model_of(lambda: dense_first(count), sequence=16), Setup(ranks=3, sequence=16)
    found, whole = recording_of(model, setup)
    deep = record(model, setup, layers=12)
    assert not whole
    assert found.parameters == deep.parameters
    assert figures(found) == figures(deep)
    assert groups(found, 1) == groups(deep, 1)


def in_turns(layers: int, *, leading: int = 0, period: int = 3) -> nn.Module:
    model = Model(layers)
    for i, block in enumerate(model.blocks):
        if i < leading or i % period == 1:
            width = 72 if i < leading else 96
            block.up, block.down = nn.Linear(24, width), nn.Linear(width, 24, bias=False)
    return model


@pytest.mark.parametrize(
    ("layers", "how", "layout"),
    [
        (19, {"period": 4}, "interleaved"),  # the fewest of which few are run
        (17, {"period": 2, "leading": 1}, "interleaved"),
        (26, {"period": 3}, "contiguous"),
    ],
)
def test_kinds_of_blocks_may_take_turns(
    monkeypatch: pytest.MonkeyPatch, layers: int, how: dict[str, int], layout: Any
) -> None:
    model = model_of(lambda: in_turns(layers, **how), sequence=16)
    setup = Setup(ranks=3, sequence=16, layout=layout)
    ran: list[int] = []

    def counted(*asked: Any, layers: int) -> Recording:
        ran.append(layers)
        return record(*asked, layers=layers)

    monkeypatch.setattr(sys.modules["shardwise.planner.plan"], "record", counted)
    found, whole = recording_of(model, setup)
    assert not whole
    assert len(ran) == 2
    assert ran[1] == ran[0] + how["period"]
    deep = record(model, setup, layers=layers)
    assert found.parameters == deep.parameters
    assert figures(found) == figures(deep)
    assert groups(found, 1) == groups(deep, 1)


@pytest.mark.parametrize(
    ("layers", "wider", "why"),
    [
        (14, -1, "kinds of blocks alternate with a period of 3"),
        (20, 13, "block 1 has something else than block 0"),
    ],
    ids=["few", "irregular"],
)
def test_turns_of_few_blocks_or_that_are_broken_are_all_run(layers: int, wider: int, why: str) -> None:
    def broken() -> nn.Module:
        model = in_turns(layers)
        if wider >= 0:
            model.blocks[wider].up.requires_grad_(False)
        return model

    assert plan(broken, sequence=16).whole == why


def test_more_others_at_the_beginning_than_few_blocks_have_are_all_run() -> None:
    assert plan(lambda: dense_first(4), sequence=16).whole == "block 4 has something else than block 0"


class ByHand(Model):
    """Its backward is written by hand, and of one block it is another one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = (Tripled if i == self.wider else Doubled).apply(block(x))
        return self.head(x)


@pytest.mark.parametrize(
    ("factory", "verb"),
    [
        (frozen_late, "has"),
        (wider_late, "has"),
        (lambda: Late(12), "does"),
        (lambda: ByHand(12, wider=9), "does in backward"),
    ],
)
def test_blocks_that_differ_beyond_those_that_few_stand_for_are_all_run(factory: Any, verb: str) -> None:
    made = plan(factory, ranks=2, sequence=16)
    module = factory()
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    optimizer = made.moments[-1].alive["optimizer"] * 2
    assert made.parameters == sum(p.numel() for p in module.parameters())
    assert optimizer == pytest.approx(8 * trained, rel=0.02)
    first = 1 if "backward" in verb else 0
    assert made.whole == f"block 10 {verb} something else than block {first}"


def test_a_backward_by_hand_that_is_the_same_in_all_blocks_is_run_of_a_few() -> None:
    assert not plan(lambda: ByHand(12), ranks=2, sequence=16).whole


class Joined(Model):
    """Its head is over what all blocks return: with fewer it does not run."""

    def __init__(self) -> None:
        super().__init__(12)
        self.join = nn.Linear(12 * 24, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = [self.embedding(tokens)]
        for block in self.blocks:
            kept.append(block(kept[-1]))
        return self.head(self.join(torch.cat(kept[1:], -1)))


def test_of_a_model_that_does_not_run_with_few_blocks_all_are_run(capfd: pytest.CaptureFixture[str]) -> None:
    made = plan(Joined, ranks=2, sequence=16)
    assert made.parameters == sum(p.numel() for p in Joined().parameters())
    assert "Joined cannot be run on fake tensors with 4 blocks, in 'join' (Linear)" in made.whole
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_two_sizes_of_micro_batches_tell_exactly_what_larger_ones_do(layout: Any) -> None:
    model = model_of(tiny, sequence=16)
    kept: dict[str, Any] = {"layout": layout, "reshard_after_forward": False}

    def recorded(size: int, layers: int) -> Recording:
        setup = Setup(sequence=16, checkpointing="full", micro_batch=size, **kept)
        return record(model, setup, layers=layers)

    few, more = recorded(1, 4), recorded(1, 5)
    small, large = unroll(few, more, 6), unroll(few, more, 6, variant=recorded(2, 4))
    assert figures(extrapolate(small, large, 3)) == figures(recorded(4, 6))
