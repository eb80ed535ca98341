"""A sharded tensor that a module holds as an attribute is saved and loaded with it, and is no parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covers import rows, whole_of
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.sharded_tensor import ShardingSpec, empty, shard_tensor
from shardwise.sharded_tensor.module import (
    named_params_with_sharded_tensor,
    pre_load_state_dict_hook,
    state_dict_hook,
)

ROWS = rows(2, 0)  # nothing on rank 1
COLUMNS = rows(1, 0, 1, dim=1)  # several on rank 1, nothing on rank 2


class Table(nn.Module):
    """Holds a sharded tensor that is neither a parameter nor a buffer."""

    def __init__(self, start: Tensor, spec: ShardingSpec) -> None:
        super().__init__()
        self.table = shard_tensor(start, spec)
        self.register_state_dict_post_hook(state_dict_hook)
        self.register_load_state_dict_pre_hook(pre_load_state_dict_hook)


class Tables(Table):
    def __init__(self, start: Tensor, spec: ShardingSpec) -> None:
        super().__init__(start, spec)
        self.inner, self.linear = Table(2 * start, spec), nn.Linear(2, 2)


@on_ranks(3)
def test_hooks_save_and_load_sharded_attributes() -> None:
    start = torch.randn(5, 4)
    saved = Tables(start, ROWS)
    state = saved.state_dict()
    assert set(state) == {"table", "inner.table", "linear.weight", "linear.bias"}
    assert [name for name, _ in named_params_with_sharded_tensor(saved)] == [
        "linear.weight",
        "linear.bias",
        "table",
        "inner.table",
    ]
    named = named_params_with_sharded_tensor(saved, "all", recurse=False)
    assert [name for name, _ in named] == ["all.table"]
    for wrapped in (False, True):
        net: Any = Tables(torch.zeros(5, 4), COLUMNS)
        held = net.table
        prefix = "0." if wrapped else ""
        given = {prefix + key: value for key, value in state.items()}
        (nn.Sequential(net) if wrapped else net).load_state_dict(given)
        assert net.table is held
        assert net.table.sharding_spec() == COLUMNS
        assert torch.equal(whole_of(net.table), start)
        assert torch.equal(whole_of(net.inner.table), 2 * start)
        assert set(given) == {prefix + key for key in state}
    net.load_state_dict({**state, "table": torch.ones(5, 4)})
    assert torch.equal(whole_of(net.table), torch.ones(5, 4))
    net.load_state_dict(state, assign=True)
    assert net.table is state["table"]
    net.table = empty(COLUMNS, 5, 4, requires_grad=True)
    net.load_state_dict(state, assign=True)
    assert net.table.requires_grad
    assert net.table.sharding_spec() == ROWS
    for key in ("table", "inner.table"):
        rest = {k: v for k, v in state.items() if k != key}
        with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
            net.load_state_dict(rest)
        assert net.load_state_dict(rest, strict=False).missing_keys == [key]
    with pytest.raises(
        RuntimeError, match=r"inner\.table: expected a tensor of shape \(5, 4\), found \(2,\)"
    ):
        net.load_state_dict({**state, "inner.table": torch.ones(2)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        net.load_state_dict({**state, "other": torch.ones(2)})


@on_ranks(3)
def test_a_sharded_attribute_is_not_a_parameter() -> None:
    net = nn.Module()
    net.held = empty(ROWS, 5, 4, requires_grad=True)
    assert list(net.parameters()) == []
    named = dict(named_params_with_sharded_tensor(net))
    assert named["held"] is net.held
    net.same = net.held
    assert [name for name, _ in named_params_with_sharded_tensor(net)] == ["held"]
