"""AdamW8bit cut over ranks against itself on one process.

Equal bit for bit: a block lies in one row, and nothing looks beyond a block.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from optim.cuts import owned, places, ragged, whole_of
from optim.eight_bits import plain, tensors, train
from ranks import RankPool, on_ranks
from shardwise import fully_shard
from shardwise.checkpoint import load, save
from shardwise.comm.count import CommCounter
from shardwise.optim.adamw8bit import AdamW8bit, quantise
from shardwise.sharded_tensor.rows import ShardedRows


@functools.cache
def reference_state() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    params = [nn.Parameter(value) for value in tensors()]
    optimizer = AdamW8bit(params, lr=0.01)
    train(optimizer, params, plain, range(3))
    return [param.detach() for param in params], [optimizer.state[param] for param in params]


@pytest.mark.parametrize("how", [ragged, owned, 0])
@on_ranks(1, 2, 3, 4)
def test_row_ranges_train_bit_for_bit_as_on_one_process_without_communication(how: Any) -> None:
    """The last step by what was loaded from the state dict."""
    place, parameter = places(how)
    kind = DTensor if how == 0 else ShardedRows
    params = [parameter(i, value) for i, value in enumerate(tensors())]
    optimizer = AdamW8bit(params, lr=0.01)
    with CommCounter() as counter:
        train(optimizer, params, place, range(2))
        resumed = [copy.deepcopy(param) for param in params]
        other = AdamW8bit(resumed, lr=1.0)
        other.load_state_dict(optimizer.state_dict())
        train(other, resumed, place, range(2, 3))
    assert counter.calls == []
    for param, expected, state in zip(resumed, *reference_state(), strict=True):
        assert torch.equal(whole_of(param).detach(), expected)
        assert list(other.state[param]) == list(state)
        for name, value in other.state[param].items():
            assert isinstance(value, kind) == (name != "step")
            assert value.shape == state[name].shape
            assert torch.equal(whole_of(value), state[name])


@on_ranks(2)
def test_tensors_cut_by_columns_keep_fp32_moments_and_train_as_with_torchs_adamw() -> None:
    place, parameter = places(1)
    ours, theirs = ([parameter(0, value) for value in tensors([(64, 512)])] for _ in range(2))
    optimizer = AdamW8bit(ours)
    train(optimizer, ours, place, range(2))
    train(torch.optim.AdamW(theirs), theirs, place, range(2))
    assert optimizer.state[ours[0]]["exp_avg"].dtype == torch.float32
    assert torch.equal(whole_of(ours[0]), whole_of(theirs[0]))


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@on_ranks(4)
def test_beside_tensor_parallelism_rows_keep_8_bits_and_parts_of_rows_do_not(layout: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 70), nn.ReLU())
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"], layout=layout)
    optimizer = AdamW8bit(model.parameters())
    model(tensors([(6, 70)])[0]).square().mean().backward()
    optimizer.step()
    rows, columns = optimizer.state[model[0].weight], optimizer.state[model[1].weight]
    assert columns["exp_avg"].dtype == torch.float32
    mean = torch.zeros(90, 70).lerp_(whole_of(model[0].weight.grad), 1 - 0.9)
    codes, scales = quantise(mean, block=256, signed=True)
    assert torch.equal(whole_of(rows["exp_avg"]), codes)
    assert torch.equal(whole_of(rows["exp_avg_scale"]), scales)


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 600), st.integers(0, 8), st.booleans())
def test_codes_of_some_rows_are_those_rows_of_the_codes(
    rows: int, columns: int, cut: int, signed: bool
) -> None:
    (values,) = tensors([(rows, columns)])
    values = values if signed else values.square()
    codes, scales = quantise(values, block=256, signed=signed)
    parts = [quantise(part, block=256, signed=signed) for part in (values[:cut], values[cut:])]
    assert torch.equal(torch.cat([part[0] for part in parts]), codes)
    assert torch.equal(torch.cat([part[1] for part in parts]), scales)


# Models


def model_and_optimizer(**options: Any) -> tuple[nn.Module, AdamW8bit]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.ReLU(), nn.Linear(90, 70))
    if options:
        fully_shard(model, **options)
    return model, AdamW8bit(model.parameters(), lr=0.01)


def train_model(model: nn.Module, optimizer: AdamW8bit, steps: range) -> list[Tensor]:
    """All ranks have the same batch: means of 2 or 4 equal gradients are exact."""
    for step in steps:
        model(tensors([(6, 70)], seed=step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole_of(param).detach().clone() for param in model.parameters()]


def train_and_save(path: Path, layout: str) -> None:
    model, optimizer = model_and_optimizer(layout=layout)
    train_model(model, optimizer, range(2))
    state = dict(zip(["model", "optimizer"], get_state_dict(model, optimizer), strict=True))
    save(path, state, step=2)


def load_and_train(path: Path, layout: str) -> None:
    model, optimizer = model_and_optimizer(layout=layout)
    state = dict(zip(["model", "optimizer"], get_state_dict(model, optimizer), strict=True))
    load(path, state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = train_model(model, optimizer, range(2, 4))
    expected = train_model(*model_and_optimizer(), range(4))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("interleaved", "interleaved"), ("contiguous", "contiguous"), ("contiguous", "interleaved")],
)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4)])
def test_a_checkpoint_resumes_bit_for_bit_on_other_ranks_and_in_another_layout(
    ranks: RankPool, tmp_path: Path, saved: str, loaded: str, before: int, after: int
) -> None:
    ranks(train_and_save, tmp_path, saved, world_size=before)
    ranks(load_and_train, tmp_path, loaded, world_size=after)
