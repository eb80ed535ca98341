"""Containers that a model hands to its blocks, which write to them."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from fake_ranks import as_one_of
from fsdp.models import LAYOUTS, assert_same_gradients, in_each_layout
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, fully_shard

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass
class Notes:
    last: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)


class Sums(OrderedDict[str, Tensor]):
    """Adds what is written to what a key has, and counts."""

    writes = 0

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.writes += 1
        super().__setitem__(key, self[key] + value if key in self else value)


class Tagged(list[Tensor]):
    """Has an attribute beside its items, and another way to write."""

    last: Tensor

    def __setitem__(self, *_: Any) -> None:
        raise AssertionError("no block writes so")


def note(container: Any, loss: Tensor) -> None:
    """Add a loss, replace the first one, and remove what the block before left."""
    if isinstance(container, Sums):
        container["sum"] = loss
    elif isinstance(container, Tagged):
        container.append(loss)
        container.last = loss
    elif isinstance(container, Notes):
        container.losses.append(loss)
        container.last = loss if container.last is None else container.last + loss
    elif isinstance(container, dict):
        container.pop("before", None)
        container["before"] = loss
        container["sum"] = container["sum"] + loss if "sum" in container else loss
    else:
        container.append(loss)
        container[0] = container[0] + loss


def total(container: Any) -> Tensor:
    if isinstance(container, Notes):
        assert container.last is not None
        return sum(container.losses, container.last)
    if isinstance(container, Sums):
        return container.writes * container["sum"]
    if isinstance(container, Tagged):
        return sum(container, 10 * container.last)
    return sum(container.values() if isinstance(container, dict) else container)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, container: Any) -> Tensor:
        x = x + self.linear(x)
        note(container[0] if isinstance(container, tuple) else container, x.square().mean())
        return x


class Noting(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        container = self.make()
        for number, block in enumerate(self.blocks):
            x = block(x, (container,)) if number == 1 else block(x, container=container)
        return x.mean() + total(container)


@on_ranks(2)
@pytest.mark.parametrize(
    ("make", "compiled", "layout"),
    [
        (list, False, "interleaved"),
        (dict, False, "contiguous"),
        (OrderedDict, False, "interleaved"),
        (Notes, False, "contiguous"),
        (Sums, False, "interleaved"),
        (Tagged, False, "contiguous"),
        (list, True, "contiguous"),
        (dict, True, "interleaved"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_blocks_write_to_the_container_that_the_model_holds(
    make: Callable[[], Any], compiled: bool, layout: Any
) -> None:
    torch.manual_seed(0)
    whole = Noting(make)
    unsharded = copy.deepcopy(whole)
    x = torch.randn(4, 6)
    expected = whole(x)
    expected.backward()
    for policy in [BF16] if compiled else [MixedPrecisionPolicy(), BF16]:
        model = copy.deepcopy(unsharded)
        for module in (*model.blocks, model):
            fully_shard(module, layout=layout, mp_policy=policy)
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        loss = run(x)
        loss.backward()
        # bf16 keeps 8 bits; fp32 differs where ranks average gradients.
        near: dict[str, float] = {"rtol": 2e-2, "atol": 2e-2} if policy.param_dtype else {}
        torch.testing.assert_close(loss.float(), expected, **near)
        assert_same_gradients(model, whole, **near)


@as_one_of(2)
def test_keys_keep_the_order_in_which_compiled_blocks_write_them() -> None:
    class Renews(nn.Linear):
        def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Tensor:
            notes.pop("gone", None)
            last = notes.pop("last", x)
            notes["new"], notes["last"] = x * 2, super().forward(x) + last
            return notes["last"]

    model = [fully_shard(Renews(6, 6)) for _ in range(2)]

    def run(x: Tensor) -> dict[str, Tensor]:
        notes = {"last": x, "gone": x, "kept": x}
        for block in model:
            x = block(x, notes)
        return notes

    for call in (run, torch.compile(run, backend="eager")):
        assert [*call(torch.ones(2, 6, requires_grad=True))] == ["kept", "new", "last"]


@on_ranks(2)
@pytest.mark.parametrize(("layout", "precise"), [("interleaved", False), ("contiguous", True)])
def test_a_container_stays_one_however_often_it_is_given_or_returned(layout: Any, precise: bool) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor, one: list[Tensor], more: dict[str, Any]) -> Any:
            x = super().forward(x).tanh()
            one.append(x.mean())
            more["same"].append(x.sum())
            return x, {"one": one, "more": (more,)}

    def loss(blocks: list[Any], x: Tensor) -> Tensor:
        one: list[Tensor] = [x.mean()]
        more: dict[str, Any] = {"same": one}
        given = one, more
        for block in blocks:
            x, out = block(x, given[0], more=given[1])
            assert out["one"] is one
            assert out["more"][0] is more
            assert more["same"] is one
            given = out["one"], out["more"][0]
        return sum(note.float() for note in one) + x.float().sum()

    policy = MixedPrecisionPolicy(None if precise else torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    whole = [Twice(6, 6) for _ in range(3)]
    blocks = [fully_shard(copy.deepcopy(one), layout=layout, mp_policy=policy) for one in whole]
    x = torch.randn(2, 6, requires_grad=True)
    expected, found = loss(whole, x), loss(blocks, x)
    expected.backward()
    found.backward()
    near: dict[str, float] = {} if precise else {"rtol": 5e-2, "atol": 5e-2}  # bf16 keeps 8 bits
    torch.testing.assert_close(found, expected, **near)
    torch.testing.assert_close(blocks[0].weight.grad.full_tensor(), whole[0].weight.grad, **near)


@as_one_of(2)
def test_a_container_given_twice_put_into_another_and_returned_stays_the_callers() -> None:
    class Puts(nn.Linear):
        def forward(self, x: Tensor, one: list[Tensor], more: dict[str, Any], same: list[Tensor]) -> Any:
            x = super().forward(x)
            one.append(x.mean())
            same.append(x.sum())
            more["put"] = one
            return Notes(x, one)

    blocks = [fully_shard(Puts(6, 6), layout=layout, mp_policy=BF16) for layout in LAYOUTS]

    def run(x: Tensor) -> tuple[list[Tensor], bool, bool]:
        one, more = [x.mean()], {"x": x}
        given = one
        for block in blocks:
            out = block(x, given, more, same=given)
            x, given = out.last, out.losses
        return one, more["put"] is one, given is one

    eager, found = (
        call(torch.ones(2, 6)) for call in (run, torch.compile(run, backend="eager", fullgraph=True))
    )
    assert eager[1:] == found[1:] == (True, True)
    assert len(eager[0]) == len(found[0]) == 5
    torch.testing.assert_close(found[0], eager[0])


@dataclass
class Hidden(ModelOutput):
    state: Tensor | None = None


class Files(nn.Linear):
    """Files the list that it is given in what else it is given, and reads what the block before filed."""

    def forward(self, out: Hidden, states: list[Tensor], places: list[Any]) -> Hidden:
        hidden = super().forward(out.state + sum(places[0].get("states", ()))).tanh()
        states.append(hidden)
        for place in places[:2]:
            place["states"] = states
        places[2].losses = places[2].extra = states
        out["twice"], out.state, out.mean, out["states"] = 2 * hidden, hidden, hidden.mean(), states
        return out


@in_each_layout(2)
def test_a_list_that_a_block_files_stays_the_callers_and_outputs_keep_what_is_set(layout: Any) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleList(Files(4, 4) for _ in range(2))
    blocks = copy.deepcopy(whole)
    for block in blocks:
        fully_shard(block, layout=layout)
    losses = []
    for each in (whole, blocks):
        start = torch.ones(2, 4, requires_grad=True)
        out, states = Hidden(start.sin()), [start.cos()]
        places: list[Any] = [{}, UserDict(), Notes()]
        for block in each:
            out = block(out, states, places)
        assert len(states) == 3
        assert all(place["states"] is states for place in places[:2])
        assert places[2].losses is places[2].extra is states
        assert out.states is out["states"] is states
        assert out.state is out["state"]
        assert out.twice is out["twice"]
        losses.append((out.state + out.twice + out.mean).square().sum() + sum(states).sum())
        losses[-1].backward()
    assert losses[0] == losses[1]
    for block, reference in zip(blocks, whole, strict=True):
        torch.testing.assert_close(block.weight.grad.full_tensor(), reference.weight.grad)
