"""Searches: what is found is what plans say, from few recordings; and the Python of a plan builds it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.plan_real import decoder, llama, planned_step, stages
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import train_gpt
from fake_ranks import as_one_of
from shardwise import planner
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.planner.decoder import Decoder
from shardwise.planner.models import model_of
from shardwise.planner.search import (
    _degrees,
    _front,
    _message_seconds,
    _space,
    _state_bytes,
    _step_collectives,
    _Survey,
)
from shardwise.planner.setup import Setup
from shardwise.planner.shapes import Shape

SEQUENCE = 32


def gpt(layers: int = 1) -> nn.Module:
    return train_gpt.GPT(width=64, depth=layers, heads=2, seq=SEQUENCE)


def test_a_search_finds_the_fastest_plan_for_each_amount_of_memory_from_few_recordings() -> None:
    found = planner.search(gpt, ranks=16, sequence=SEQUENCE, hardware="h100", micro_batches=(1,))
    assert found.settings > 100
    assert found.planned == found.recordings < 20
    mine = [one.plan for one in found.points if one.plan.setup.reduce_dtype == "float32"]
    assert found.chosen is mine[0]
    speeds = [plan.tokens_per_s for plan in mine]
    assert speeds == sorted(speeds, reverse=True)
    sizes = [plan.reserved_bytes for plan in mine]
    assert sizes == sorted(sizes, reverse=True)
    device = planner.hardware_of("h100")
    for plan in (mine[0], mine[-1]):
        assert _message_seconds(plan.setup, plan, device) == pytest.approx(
            plan.step_times.communication, rel=0.6
        )
        assert plan == planner.plan(gpt, plan.setup, hardware="h100")
    assert "the fastest that fits" in str(found)
    assert f" {mine[0].reserved_bytes / 2**20:.1f}  16 shards" in str(found)  # MiB
    assert planner.from_json(planner.Search, planner.to_json(found)) == found


def test_each_row_takes_15_percent_less_memory_than_the_one_above_it() -> None:
    figures = {
        Setup(ranks=time): (float(time), nbytes) for time, nbytes in enumerate((100, 86, 84, 72, 71), 1)
    }
    assert [figures[setup][1] for setup in _front(figures)] == [100, 84, 71]


def wide(layers: int = 2) -> nn.Module:
    shape = Shape(256, 128, layers, heads=8, kv_heads=8, ffn=256)
    return Decoder(shape, layers=layers, positions=SEQUENCE)


def with_style_of_another(layers: int = 3) -> nn.Module:
    """As mixtures of experts of transformers have, whose experts it cuts itself."""
    model = decoder(layers)
    model.tensor_plan = model.tensor_plan | {next(iter(model.tensor_plan)): "packed_colwise"}
    return model


def test_a_search_goes_over_tensor_parallelism_within_a_host_that_the_model_allows() -> None:
    device = planner.hardware_of("h100")
    assert _degrees(model_of(wide, sequence=SEQUENCE), Setup(ranks=32), device) == [1, 2, 4, 8]
    assert _degrees(model_of(decoder, sequence=SEQUENCE), Setup(ranks=32), device) == [1, 2]
    assert _degrees(model_of(gpt, sequence=SEQUENCE), Setup(ranks=32), device) == [1]
    assert _degrees(model_of(with_style_of_another, sequence=SEQUENCE), Setup(ranks=32), device) == [1]
    sizes = {
        (one.tensor, one.micro_batch * one.accumulation)
        for one in _space(Setup(ranks=32, accumulation=4), device, (1, 2, 4), (1, 8), {"accumulation"})
    }
    assert sizes == {(1, 4), (8, 32)}  # sequences of a step, of as many ranks


@pytest.mark.parametrize(
    "given",
    [
        {"pipeline": 2, "accumulation": 4},
        {"ulysses": 2, "accumulation": 2},
        {"experts": 2},
        {"tensor": 2, "compile": True, "async_tensor": True},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_search_keeps_the_axes_and_options_that_are_given(given: dict[str, Any]) -> None:
    asked = Setup(ranks=8, **given)
    space = [*_space(asked, planner.hardware_of("h100"), (1, 2, 4), (1, 2, 4), given.keys())]
    assert asked in space
    assert len({one.layout for one in space} | {one.micro_batch for one in space}) > 3
    kept = given.keys() - {"accumulation"}
    assert all(getattr(one, name) == given[name] for one in space for name in kept)
    assert all(one.accumulation >= one.pipeline for one in space)


@pytest.mark.parametrize(
    ("given", "open_fields"),
    [
        ({"tensor": 1, "layout": "interleaved"}, {"replicas", "reshard_after_forward", "checkpointing"}),
        ({"layout": "contiguous", "strategy": "zero1"}, {"tensor", "checkpointing"}),
        ({"strategy": "fsdp"}, {"tensor", "layout", "reshard_after_forward"}),
        ({"replicas": 4, "checkpointing": "alternate"}, {"tensor", "layout", "strategy"}),
        ({"reshard_after_forward": True, "param_dtype": "float32"}, {"tensor", "layout", "checkpointing"}),
        ({"micro_batch": 2}, {"tensor", "layout", "checkpointing"}),
        ({"accumulation": 1}, {"tensor", "layout", "checkpointing"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_search_keeps_what_is_given_even_if_it_is_the_default(
    given: dict[str, Any], open_fields: set[str]
) -> None:
    space = [
        *_space(Setup(**{"ranks": 16} | given), planner.hardware_of("h100"), (1, 2), (1, 2), given.keys())
    ]
    values = {name: {getattr(one, name) for one in space} for name in (*given, *open_fields)}
    if "reshard_after_forward" in given:
        assert values.pop("reshard_after_forward") <= {None, True}  # the default, which is the same
    if given == {"strategy": "fsdp"}:
        assert values.pop("strategy") == {None}
    for name, value in given.items():
        assert values.pop(name, {value}) == {value}
    assert [name for name in values if len(values[name]) == 1] == []


def test_a_search_finds_only_what_was_asked_for() -> None:
    asked: dict[str, Any] = {"layout": "interleaved", "checkpointing": "full"}
    found = planner.search(gpt, ranks=4, sequence=SEQUENCE, hardware="h100", micro_batches=(1,), **asked)
    for one in found.points:
        assert asked.items() <= vars(one.plan.setup).items()


@pytest.mark.parametrize("given", ["experts", "ulysses", "pipeline"])
def test_a_search_tries_no_other_degree_of_an_axis_that_is_given(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planner.plan(gpt, ranks=4, sequence=SEQUENCE, checkpointing="full", hardware="h100")
    plan = mock.Mock(side_effect=ShardingError("not so"))
    monkeypatch.setattr(importlib.import_module("shardwise.planner.search"), "plan", plan)
    survey = _Survey(model_of(gpt, sequence=SEQUENCE), made.setup, made.hardware, [], {made.setup: made})
    survey.plan_more_axes({given})
    tried = {axis for call in plan.mock_calls for axis in AXES if getattr(call.args[1], axis) > 1}
    assert tried == AXES - {given}


AXES = {"experts", "ulysses", "pipeline"}


def test_a_search_leaves_out_what_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Setup(ranks=4, pipeline=2, accumulation=2, sequence=SEQUENCE)
    made = planner.plan(stages, asked, hardware="h100")

    def no_contiguous(model: Any, setup: Setup, **_: Any) -> planner.Plan:
        if setup.layout == "contiguous":
            raise ShardingError("not so")
        return replace(made, setup=setup)

    monkeypatch.setattr(importlib.import_module("shardwise.planner.search"), "plan", no_contiguous)
    found = planner.search(stages, asked, hardware="h100", micro_batches=(1,))
    setups = [one.plan.setup for one in found.points]
    assert {(one.layout, one.pipeline) for one in setups} == {("interleaved", 2)}
    with pytest.raises(ShardingError, match="accumulation=1 micro-batches do not fill pipeline=2"):
        planner.search(stages, asked, accumulation=1, hardware="h100")


@pytest.mark.parametrize(
    "cut",
    [
        {"layout": "interleaved", "reshard_after_forward": False},
        {"strategy": "ddp"},
        {"ranks": 2, "strategy": "zero2", "param_dtype": "float32"},
        {"replicas": 4, "strategy": "hierarchical_fsdp"},
        {"replicas": 4, "reshard_after_forward": 2},
        {"replicas": 2, "tensor": 4},
    ],
    ids=lambda cut: "-".join(map(str, cut.values())),
)
def test_what_is_estimated_of_a_cut_is_nearly_what_its_plan_keeps_and_sends(cut: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"layout": "contiguous", "sequence": SEQUENCE, "ends_apart": False}
    made = planner.plan(wide, Setup(**{"ranks": 16} | asked | cut))
    (first, *_) = [one for one in made.groups if one.name.startswith("block")]
    block = sum(p.numel() for p in wide().blocks[0].parameters())
    estimated = sum(times * call.wire_bytes for call, _, times in _step_collectives(made.setup, block))
    assert estimated == pytest.approx(first.wire_bytes, rel=0.05)
    if made.setup.reshard_after_forward is None:  # else more is kept during the step
        kept = sum(made.moments[-1].alive.get(name, 0) for name in KEPT)
        assert _state_bytes(made.setup, made.parameters) == pytest.approx(kept, rel=0.05)


KEPT = ("parameters", "gradients", "optimizer", "gathered")
INTERLEAVED = {"layout": "interleaved", "stored_dtype": "bfloat16"}
CUTS: list[tuple[Any, dict[str, Any]]] = [
    (gpt, {"strategy": "zero2", "checkpointing": "selective", "optimizer": "AdamW flat"}),
    (gpt, {"replicas": 2, "reshard_after_forward": False, "checkpointing": "full", **INTERLEAVED}),
    (llama, {"tensor": 2, "tensor_plan": "torchtitan"}),
]


@pytest.mark.parametrize(("factory", "cut"), CUTS, ids=["one axis", "two axes", "tensor parallel"])
@as_one_of(4, rank=0)
def test_the_python_of_a_plan_builds_what_was_planned(factory: Any, cut: dict[str, Any]) -> None:
    setup = Setup(**{"ranks": 4, "device": "cpu", "sequence": SEQUENCE, "layout": "contiguous"} | cut)
    model = model_of(factory, sequence=SEQUENCE)
    _, issued = planned_step(model, setup, layers=3)

    names: dict[str, Any] = {}
    exec(planner.python(model, setup), names)
    module = factory(layers=3)
    optimizer = names["build"](module)
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
    for _ in range(2):
        optimizer.zero_grad()
        with CommCounter() as counter, loss_parallel():
            output = module(tokens)
            logits = getattr(output, "logits", output).flatten(0, 1).float()
            F.cross_entropy(logits, tokens.flatten()).backward()
            optimizer.step()
    assert counter.calls == issued
