"""Low-rank adapters on a frozen base that is sharded with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf.families import make, write
from ranks import on_ranks
from shardwise import fully_shard, hf
from shardwise.comm.count import CommCounter
from shardwise.planner.storages import Storages

LAYOUTS = ("interleaved", "contiguous")


class Adapted(nn.Module):
    """A linear layer with an adapter, as PEFT has it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))

    def merge(self) -> None:
        self.base_layer.weight += self.up.weight @ self.down.weight


def adapted(model: Any) -> Any:
    model.requires_grad_(False)
    for one in [one for one in model.modules() if hasattr(one, "q_proj")]:
        one.q_proj = Adapted(one.q_proj)
    return model


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_base_in_one_group_with_adapters_takes_no_memory_for_gradients(layout: Any) -> None:
    blocks = nn.Sequential(*(Adapted(nn.Linear(256, 256, bias=False)) for _ in range(3)))
    for block in blocks:
        fully_shard(block, layout=layout)
    fully_shard(blocks, layout=layout)
    base, adapter = 4 * 256 * 256, 4 * 2 * 2 * 256
    with Storages() as storages, CommCounter() as counter, storages.peak("step"):
        blocks(torch.ones(1, 256)).sum().backward()
    assert counter.bytes("reduce_scatter") == 3 * adapter
    assert all((param.grad is not None) == param.requires_grad for param in blocks.parameters())
    # Two blocks are gathered at a time; gradients of one are staged, those of all kept; then activations.
    shards = 3 * (base + adapter) // 2
    assert storages.peaks["step"] <= shards + 2 * (base + adapter) + 5 * adapter
    assert 5 * adapter < base / 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write("llama", tmp_path / "base")


@on_ranks(2)
def test_adapters_are_trained_merged_and_saved_as_a_plain_checkpoint(folder: Path) -> None:
    for layout in LAYOUTS:
        torch.manual_seed(0)
        model = hf.load(folder, layout=layout, adapt=adapted)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        ids = torch.arange(8)[None]
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = {name: param.full_tensor() for name, param in model.named_parameters()}
        expected = adapted(make("llama"))
        expected.load_state_dict(whole)
        for one in expected.modules():
            if isinstance(one, Adapted):
                with torch.no_grad():
                    one.merge()
        saved = hf.save(hf.merge(model), folder / layout)
        read = type(expected).from_pretrained(saved)
        assert torch.equal(read(input_ids=ids).logits, model(input_ids=ids).logits)
        for name, weight in expected.state_dict().items():
            if "up" not in name.split(".") and "down" not in name.split("."):
                assert torch.equal(weight, read.state_dict()[name.replace(".base_layer", "")]), name
