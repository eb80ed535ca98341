"""FSDP2 and this library recorded alike: what is sent and computed is equal, and what costs more shows."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise._compat import local_of
from shardwise.planner import Setup, hardware_of, measure
from shardwise.planner.decoder import Decoder
from shardwise.planner.events import GATHERED, OPTIMIZER, Allocate, Recording
from shardwise.planner.models import Model, logits_loss
from shardwise.planner.noop_group import noop_world
from shardwise.planner.shapes import Shape
from shardwise.planner.storages import Storages

SHAPE = Shape(vocabulary=2048, width=64, layers=4, heads=4, kv_heads=2, ffn=192)
SETUP = Setup(ranks=4, sequence=64, checkpointing="full")
COLUMNS = ("FSDP2", "interleaved", "contiguous")


def model() -> Model:
    def build(layers: int) -> nn.Module:
        return Decoder(SHAPE, layers=layers, positions=64)

    def blocks(module: Any) -> list[nn.Module]:
        return list(module.blocks)

    def ends(module: Any) -> list[nn.Module]:
        return list(module.ends())

    return Model("small", SHAPE.layers, build, blocks, ends, logits_loss)


def recording(column: str, **changes: Any) -> tuple[Any, Setup]:
    from beside_fsdp2 import LIBRARIES, recorded

    library, more = LIBRARIES[column]
    setup = replace(SETUP, **(changes | more))
    (made,) = recorded(model(), setup, library)
    return made, setup


def figures(column: str, **changes: Any) -> Any:
    from beside_fsdp2 import figures_of

    made, setup = recording(column, **changes)
    return figures_of(made, setup, replace(hardware_of("h100"), host_seconds=0.0, host_latency_s=1e-4))


@pytest.mark.parametrize("changes", [{"replicas": 2}, {"accumulation": 2, "reduce_once": True}], ids=str)
def test_all_send_and_compute_the_same(changes: dict[str, Any]) -> None:
    peer, interleaved, contiguous = (figures(column, **changes) for column in COLUMNS)
    assert peer.sent["all_gather"]
    assert peer.sent["reduce_scatter"]
    assert peer.sent == interleaved.sent == contiguous.sent
    assert peer.wire_bytes == interleaved.wire_bytes
    assert peer.model == interleaved.model == contiguous.model, "the model's own operators"


def test_what_is_recorded_of_fsdp2_is_alive_where_it_runs_on_memory_of_the_cpu() -> None:
    """Without streams, with real tensors; gloo's reductions would take memory of their own."""
    from beside_fsdp2 import shard

    made, setup = recording("FSDP2", fused_norms=False)
    asked = model()
    with noop_world(setup.ranks) as mesh:
        module = asked.build(SHAPE.layers)
        shard(module, asked, setup, mesh)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        tokens = torch.zeros(setup.micro_batch, setup.sequence, dtype=torch.int64)
        gc.collect()
        with Storages() as storages:
            storages.see([*module.parameters(), *module.buffers(), tokens])
            storages.see([local_of(one) for one in module.parameters()])
            for _ in range(2):
                optimizer.zero_grad()
                with storages.peak("forward"):
                    loss = logits_loss(module, tokens, tokens)
                with storages.peak("backward"):
                    loss.backward()
                    del loss
                optimizer.step()
    moments = measure.moments(made)
    for phase in ("forward", "backward"):
        recorded = max(one.alive_bytes for one in moments if one.phase.endswith(phase))
        assert storages.peaks[phase] == recorded, phase


def test_a_recording_is_split_and_moved_where_the_cause_is_looked_for() -> None:
    from beside_fsdp2 import by_parameter, states_first

    def sizes(one: Recording, category: str) -> list[int]:
        events = [event for segment in one.segments for event in segment.events]
        return [e.memory.nbytes for e in events if isinstance(e, Allocate) and e.memory.category == category]

    mine, peers = (recording(column)[0] for column in ("interleaved", "FSDP2"))
    split = by_parameter(mine, peers)
    assert len(sizes(mine, GATHERED)) < len(sizes(split, GATHERED))
    assert set(sizes(split, GATHERED)) == set(sizes(peers, GATHERED))
    assert sum(sizes(split, GATHERED)) == sum(sizes(mine, GATHERED))
    first = states_first(mine)
    assert sorted(sizes(first, OPTIMIZER)) == sorted(sizes(mine, OPTIMIZER))
    assert {type(event) for event in first.segments[0].events} == {Allocate}
