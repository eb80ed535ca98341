"""A compiled sharded model is one graph with the numbers of the eager one, bit for bit where the order of
arithmetic is the same."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fake_ranks import as_one_of
from fsdp.compiled.harness import Run, batch, by_block, compare, compiled, local, loss_of, train
from fsdp.compiled.models import (
    Attention,
    Block,
    CheckpointedBlock,
    Mlp,
    Nested,
    Transformer,
    llama,
    shard_llama,
    shard_nested,
)
from fsdp.models import in_each_layout, update
from ranks import on_ranks
from shardwise import FSDPModule, MixedPrecisionPolicy, _compat, fully_shard
from shardwise.comm import AutoAllGather, AutoReduceScatter, GlooAllGather, GlooReduceScatter
from shardwise.errors import LifecycleError
from shardwise.graph import record

AOT, DECOMPOSED = "aot_eager", "aot_eager_decomp_partition"
TRANSFORMER = Run(Transformer, by_block, compile=compiled(AOT))
ONE_BLOCK = replace(TRANSFORMER, model=partial(Transformer, depth=1))
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# Decompositions and the order in which several uses' gradients are added differ by roundings of fp32.
ROUNDING = 2e-6


def with_layout(run: Run, layout: str) -> Run:
    return replace(run, options={"layout": layout, **run.options})


@on_ranks(1, 3)
def test_a_model_sharded_over_any_number_of_ranks() -> None:
    def in_both_layouts(model: nn.Module) -> nn.Module:
        for module, layout in ((model.up, "interleaved"), (model.down, "interleaved"), (model, "contiguous")):
            fully_shard(module, layout=layout)
        return model

    compare(Run(Mlp, in_both_layouts, compile=compiled(AOT)))


@on_ranks(2)
def test_a_transformer_with_tied_embeddings_and_a_block_that_stays_gathered() -> None:
    def shard(model: nn.Module, **options: Any) -> nn.Module:
        first, second = model.blocks
        fully_shard(first, reshard_after_forward=False, **options)
        fully_shard(second, **options)
        return fully_shard(model, **options)

    # The other layout, and attention: under checkpoints, below.
    compare(with_layout(replace(TRANSFORMER, shard=shard), "contiguous"))


@on_ranks(3)
def test_graphs_exchange_directly_what_hooks_do() -> None:
    def shard(model: nn.Module, **options: object) -> nn.Module:
        by_block(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(AutoAllGather(min_bytes=0))
                module.set_custom_reduce_scatter(AutoReduceScatter(min_bytes=0))
        return model

    run = with_layout(replace(ONE_BLOCK, shard=shard, steps=2), "contiguous")
    counts, trained = [], []
    for eager in (True, False):
        torch.compiler.reset()
        with ExitStack() as patches:
            spies = [
                patches.enter_context(
                    mock.patch.object(kind, "__call__", autospec=True, side_effect=kind.__call__)
                )
                for kind in (GlooAllGather, GlooReduceScatter)
            ]
            trained.append(train(run, eager=eager).parameters)
        counts.append(tuple(spy.call_count for spy in spies))
    # A step of graphs gathers the block again in backward; hooks keep the last group that ran.
    assert counts == [(4, 4), (6, 4)]
    assert all(map(torch.equal, *trained))


@in_each_layout(2)
def test_finalization_by_hand_reduces_what_compiled_backwards_left(layout: str) -> None:
    def moved(*, eager: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = fully_shard(Mlp(), layout=layout)
        model.set_manual_backward_finalization(True)
        call = model if eager else compiled(AOT)(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model.set_requires_gradient_sync(False)
            for micro in range(2):
                loss_of(call, batch(2 * step + micro, 4, 5)).backward()
            model.set_requires_gradient_sync(True)
            with pytest.raises(LifecycleError, match="before the optimizer's step"):
                optimizer.step()
            model.finalize_backward()
            update(optimizer)
        return [local(param.detach()).clone() for param in model.parameters()]

    expected = moved(eager=True)
    torch.compiler.reset()
    assert all(map(torch.equal, moved(eager=False), expected))


@as_one_of(2)
def test_decompositions_and_sizes_that_vary() -> None:
    dynamic = Run(Mlp, fully_shard, compile=compiled(DECOMPOSED), sizes=((4, 5), (3, 7), (6, 2)))
    compare(with_layout(dynamic, "contiguous"), graphs=2, tolerance=ROUNDING)


@as_one_of(2)
def test_modules_inside_sharded_modules_that_run_several_times() -> None:
    run = Run(Nested, shard_nested, options={"layout": "interleaved"}, compile=compiled(AOT), steps=2)
    compare(run, tolerance=ROUNDING)


@as_one_of(2)
def test_activation_checkpointing_inside_and_around_sharded_blocks() -> None:
    for model, layout in [
        (partial(Transformer, CheckpointedBlock, depth=1), "contiguous"),
        (partial(Transformer, recompute="all", depth=1), "interleaved"),
        (partial(Transformer, Attention, recompute="selected", depth=1), "contiguous"),
    ]:
        compare(with_layout(replace(TRANSFORMER, model=model), layout))


@on_ranks(2)
def test_accumulation_mixed_precision_and_blocks_that_share_a_group() -> None:
    def as_a_pair(model: nn.Module, **options: object) -> nn.Module:
        fully_shard([*model.blocks, model.norm], **options)
        return fully_shard(model, **options)

    mixed = replace(ONE_BLOCK, shard=as_a_pair, microbatches=2, options={"mp_policy": BF16})
    # Since 2.15 eager backwards that are not reduced sum the uses of a tied parameter in fp32.
    compare(with_layout(mixed, "contiguous"), graphs=2, tolerance=5e-2 if _compat.SUMS_AS_KEPT else 0.0)


@as_one_of(2)
def test_accumulation_where_a_layer_is_frozen() -> None:
    def all_but_one_layer_train() -> nn.Module:
        model = Mlp()
        model.up.requires_grad_(False)
        return model

    root = Run(all_but_one_layer_train, fully_shard, compile=compiled(AOT), microbatches=3)
    compare(with_layout(root, "interleaved"), graphs=2)


@on_ranks(4)
def test_replicas_and_frozen_parameters() -> None:
    def a_projection_trains() -> nn.Module:
        model = Transformer(depth=1)
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith("down.weight"))
        return model

    frozen = replace(TRANSFORMER, model=a_projection_trains, mesh={"replicate": 2, "shard": 2})
    compare(with_layout(frozen, "contiguous"))


@as_one_of(2)
def test_a_graph_break_that_the_user_put_into_a_block() -> None:
    broken = replace(TRANSFORMER, model=lambda: Transformer(partial(Block, breaks=True)), steps=2)
    # What FSDP2's two graphs have: a block before and after. One break in the root, which then runs eagerly.
    broken = replace(broken, compile=compiled(AOT, fullgraph=False))
    compare(with_layout(broken, "contiguous"), graphs=2, breaks=2)


@as_one_of(2)
def test_a_llama_of_transformers() -> None:
    # Its own code takes another path when compiled: attention's mask is added instead of implied.
    recorder = record(AOT)
    run = Run(llama, shard_llama, options={"layout": "contiguous"}, compile=compiled(recorder))
    compare(run, tolerance=ROUNDING)
    counts = [graph.counts for graph in recorder.report().graphs]
    assert [(each.gathers, each.reduce_scatters) for each in counts] == [(2, 0), (1, 2)]


@on_ranks(2)
def test_inductor_within_roundings_of_eager() -> None:
    def in_both_layouts(model: nn.Module) -> nn.Module:
        fully_shard(model.up, layout="contiguous")
        return fully_shard(model, layout="interleaved")

    parted = compiled("inductor", options={"graph_partition": True})
    compare(Run(Mlp, in_both_layouts, compile=parted, steps=2), tolerance=ROUNDING)
