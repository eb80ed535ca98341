"""Lists of modules, which are gathered together, compiled: in a graph of their root, or outside of graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

from fake_ranks import as_one_of
from fsdp.compiled.harness import WORDS, Run, batch, compare, compiled
from shardwise import fully_shard


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Blocks(nn.Module):
    """Equal blocks.

    Args:
        first: of the blocks under checkpoints.
        reentrant: the kind of checkpoint.
    """

    def __init__(self, first: int = 3, *, reentrant: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))
        self.first, self.reentrant = first, reentrant

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for index, block in enumerate(self.blocks):
            x = block(x) if index < self.first else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def by_twos(model: nn.Module, **options: Any) -> nn.Module:
    """Shard the first block by itself, as what is left of a list, and the others as one."""
    fully_shard(model.blocks[0], **options)
    fully_shard([*model.blocks[1:]], **options)
    return fully_shard(model, **options)


def in_place(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def wrapped(model: nn.Module) -> nn.Module:
    model.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in model.blocks)
    return model


RUN = Run(Blocks, by_twos, {"layout": "contiguous"}, steps=2)


@as_one_of(2)
@pytest.mark.parametrize(
    ("layout", "made", "reentrant"), [("interleaved", in_place, True), ("contiguous", wrapped, False)]
)
def test_modules_of_a_list_that_are_compiled_one_by_one_are_gathered_together_eagerly(
    layout: str, made: Any, reentrant: bool
) -> None:
    run = replace(RUN, options={"layout": layout}, compile=made)
    compare(run, graphs=2, breaks=1)
    recomputed = replace(run, model=partial(Blocks, 0, reentrant=reentrant), microbatches=2)
    compare(recomputed, graphs=None, breaks=None, tolerance=1e-7)


@as_one_of(2)
@pytest.mark.parametrize(("layout", "reentrant"), [("interleaved", False), ("contiguous", True)])
def test_a_list_whose_first_module_runs_under_a_checkpoint_leaves_the_graph_of_its_root(
    layout: str, reentrant: bool
) -> None:
    made = compiled("aot_eager", fullgraph=False)
    run = replace(
        RUN, options={"layout": layout}, compile=made, model=partial(Blocks, 0, reentrant=reentrant)
    )
    compare(run, graphs=None, breaks=None, tolerance=1e-7)


@as_one_of(2)
def test_checkpoints_behind_the_first_of_a_list_and_around_its_root_are_in_one_graph() -> None:
    def around(model: nn.Module) -> Any:
        def call(words: Tensor) -> Tensor:
            return checkpoint(model, words, use_reentrant=False)

        return torch.compile(call, backend="aot_eager", fullgraph=True)

    compare(replace(RUN, model=partial(Blocks, 2), compile=around))


@as_one_of(2)
def test_a_list_that_no_graph_holds_is_named_where_there_must_be_one_graph() -> None:
    named = "modules that fully_shard got as a list are gathered together"
    with pytest.raises(Unsupported, match=named):
        torch.compile(by_twos(Blocks(0)), backend="eager", fullgraph=True)(batch(0, 4, 5))
    model = by_twos(Blocks())  # an eager checkpoint that raises leaves its hooks until it is collected
    model.blocks[1].compile(backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match=named):
        model(batch(0, 4, 5))
