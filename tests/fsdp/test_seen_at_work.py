"""What a user sees of a sharded model at work: profiles, the log, and the table of its groups."""

import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp.models import in_each_layout, sharded_net, step
from ranks import on_ranks
from shardwise.fsdp.module_state import state_of


@in_each_layout(2)
def test_profiles_name_what_each_module_does_and_nothing_stays_after_them(layout: str) -> None:
    model = sharded_net(blocks=2, layout=layout)
    step(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(model)
    found = {event.name for event in profiled.events() if event.name.startswith("shardwise: ")}
    for name in ("blocks.0", "blocks.1", "the root module"):
        for what in ("gather", "wait for", "forward", "reduce"):
            assert f"shardwise: {what} {name}" in found
    step(model)
    state = state_of(model)
    assert state is not None
    assert "pre_forward" not in vars(state)
    assert all("unshard" not in vars(group) for group in state.groups)


@on_ranks(2)
def test_a_profiled_forward_that_raises_leaves_no_range_open() -> None:
    model = sharded_net(blocks=2)
    step(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        step(model)
    ranges = [event.name for event in profiled.events() if event.name.startswith("shardwise: forward")]
    assert sorted(ranges) == [
        "shardwise: forward blocks.0",
        "shardwise: forward blocks.1",
        *["shardwise: forward the root module"] * 2,
    ]


@on_ranks(2)
def test_the_log_says_what_was_grouped_and_who_gathers_it() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardwise")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        step(sharded_net(blocks=1))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    text = "\n".join(lines)
    assert "fully_shard(Block) groups 4 parameters: " in text
    assert "gathered from 2 ranks, fsdp over the shard axis; parameters are freed" in text
    assert "group 'blocks.0' is gathered by c10d (gloo; smaller than 250,000 bytes)" in text


@in_each_layout(2)
def test_the_report_counts_what_every_group_holds(layout: str) -> None:
    model = sharded_net(blocks=2, layout=layout)
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    report = model.shard_report()
    assert sum(group.gathered_bytes - group.padding_bytes for group in report.groups) == whole
    assert 2 * report.shard_bytes == sum(group.gathered_bytes for group in report.groups)
    step(model)
    names = [group.module for group in model.shard_report().groups]
    assert sorted(names) == ["FSDPNet", "blocks.0", "blocks.1"]
    assert "blocks.1" in str(model.shard_report())


@in_each_layout(2)
def test_a_module_that_backward_does_not_gather_is_prefetched_in_forward(layout: str) -> None:
    model = sharded_net(blocks=2, layout=layout, reshard_after_forward=False)
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_unshard_in_backward(False)
    step(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(model)
    at = {event.name: event.time_range for event in profiled.events()}
    assert at["shardwise: gather blocks.1"].start < at["shardwise: forward blocks.0"].end
