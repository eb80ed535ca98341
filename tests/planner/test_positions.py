"""Plans of sequences that a model has no positions for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise
from planner.models import Even
from shardwise.errors import ShardingError

POSITIONS = 64


class Kept(Even):
    """A buffer of its positions, or of their numbers, a part of which is taken."""

    def __init__(self, *, numbers: bool) -> None:
        super().__init__()
        self.learned = nn.Embedding(POSITIONS, 512) if numbers else nn.Identity()
        self.register_buffer("kept", torch.arange(POSITIONS) if numbers else torch.ones(POSITIONS, 512))
        self.tensor_plan = {"blocks.*": "colwise_rep"}

    def forward(self, tokens: Tensor) -> Tensor:
        placed: Tensor = super().forward(tokens) + self.learned(self.kept[: tokens.shape[1]])
        return placed


class Placed(Even):
    def __init__(self, positions: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.learned, self.positions = nn.Embedding(POSITIONS, 512), positions

    def forward(self, tokens: Tensor) -> Tensor:
        placed: Tensor = super().forward(tokens) + self.learned(self.positions(tokens.shape[1]))
        return placed


@pytest.mark.parametrize(
    ("positions", "longest"),
    [
        (torch.arange, 64),
        (lambda length: torch.arange(length).int()[None].expand(1, -1), 64),
        (lambda length: torch.arange(2, length + 2), 62),
        (lambda length: torch.arange(length) + 2, 62),
        (lambda length: torch.arange(1000)[:length], 64),
        (lambda length: torch.arange(0, 2 * length, 2), 32),
        (lambda length: torch.arange(length) // 2, 80),  # what is computed otherwise is not known
    ],
    ids=["plain", "expanded", "from two", "plus two", "a part", "by twos", "halved"],
)
def test_a_sequence_may_be_as_long_as_there_are_positions(
    positions: Callable[[int], Tensor], longest: int
) -> None:
    def factory() -> nn.Module:
        return Placed(positions)

    shardwise.plan(factory, ranks=1, sequence=longest)
    if longest != 80:
        with pytest.raises(ShardingError, match=r"positions, but its table has only 64 learned ones"):
            shardwise.plan(factory, ranks=1, sequence=longest + 1)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama"])
def test_so_may_those_of_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {
        "gpt2": {"n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": POSITIONS},
        "opt": {"num_hidden_layers": 1, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128},
        "llama": {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128},
    }[kind]
    heads = {} if kind == "gpt2" else {"num_attention_heads": 4, "max_position_embeddings": POSITIONS}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 200, **sizes, **heads}))
    shardwise.plan(str(path), ranks=1, sequence=POSITIONS)
    if kind == "llama":  # which computes its positions
        shardwise.plan(str(path), ranks=1, sequence=2 * POSITIONS)
    else:
        with pytest.raises(ShardingError, match=r"looks up 65 positions, but its table has only 64"):
            shardwise.plan(str(path), ranks=1, sequence=POSITIONS + 1)


@pytest.mark.parametrize(("positions", "length"), [(1024, 1024), (514, 512), (4096, 2048)])
def test_sequences_are_by_default_as_long_as_the_positions_allow(
    positions: int, length: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": positions, "vocab_size": 200}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    made = shardwise.plan(str(path), ranks=1)
    assert made.setup.sequence == length
    assert f"1 x 1 x {length} tokens" in str(made)
    assert made.moments == shardwise.plan(str(path), ranks=1, sequence=length).moments


@pytest.mark.parametrize(("numbers", "tensor"), [(False, 2), (True, 1)], ids=["positions", "numbers"])
def test_a_sequence_longer_than_a_buffer_is_told_with_a_shorter_one_that_runs(
    numbers: bool, tensor: int
) -> None:
    told = (
        r"length 64 .*\[1, 200, 512\]. With sequence=50 it runs, with 200 it does not: plan a shorter"
        r" sequence, or a model that takes longer ones$"
    )
    with pytest.raises(ShardingError, match=told):
        shardwise.plan(lambda: Kept(numbers=numbers), ranks=2, tensor=tensor, sequence=200)
