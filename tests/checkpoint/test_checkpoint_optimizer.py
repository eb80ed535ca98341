"""What an optimizer tells before its first step and after it, saved, loaded and trained on."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from ranks import on_ranks
from shardwise import fully_shard
from shardwise.checkpoint import load, optimizer_state, save
from shardwise.errors import CheckpointError
from shardwise.optim import AdamW8bit, Muon, ShardedOptimizer, flat


class CountsInGroups(torch.optim.SGD):
    """As a schedule-free optimizer does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{"params": list(params), "steps": 0}], lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    param.sub_(mean.lerp_(param.grad, 0.3), alpha=group["lr"] / group["steps"])


KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.5, "initial_accumulator_value": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"lambd": 0.1, "t0": 1}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (Muon, {}),
    (AdamW8bit, {}),
    (CountsInGroups, {}),
]


@on_ranks(2)
@pytest.mark.parametrize("how", ["interleaved", "contiguous", "flat", "ShardedOptimizer"])
def test_an_optimizer_loaded_with_what_a_new_one_told_trains_as_a_new_one(how: str) -> None:
    own = how in ("flat", "ShardedOptimizer")

    def built(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(4, 3, bias=kind is not Muon)
        if how == "ShardedOptimizer":
            return model, ShardedOptimizer(dict(model.named_parameters()), kind, **options)
        fully_shard(model, layout="interleaved" if how == "interleaved" else "contiguous")
        if how == "flat":
            return model, flat(kind, model, **options)
        return model, kind(model.parameters(), **options)

    def trained(model: nn.Module, optimizer: Any) -> list[Any]:
        for step in range(4):
            model(torch.ones(2, 4) * (step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [
            each.tolist() if own and how != "flat" else each.full_tensor().tolist()
            for each in model.parameters()
        ]

    for kind, options in KINDS:
        if own and kind in (Muon, AdamW8bit, CountsInGroups):
            continue
        expected = trained(*built(kind, {"lr": 0.1, **options}))
        told = optimizer_state(*built(kind, {"lr": 0.1, **options}))
        assert told["state"]
        model, optimizer = built(kind, {"lr": 0.7, **options})
        if own:
            optimizer.load_state_dict(told)
        else:
            set_optimizer_state_dict(model, optimizer, told)
        assert trained(model, optimizer) == expected, kind.__name__


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [("interleaved", "adamw"), ("contiguous", "adamw"), ("contiguous", "momentum"), ("contiguous", "flat")],
)
def test_a_new_optimizer_tells_its_state_and_trains_as_if_it_had_not(
    tmp_path: Path, layout: str, kind: str
) -> None:
    def trained(steps: int, *, asked_at: str = "") -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(3, 1), layout=layout)  # of which a rank has no rows
        make: Any = {
            "adamw": partial(torch.optim.AdamW, model.parameters()),
            "momentum": partial(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9),
            "flat": partial(flat, torch.optim.AdamW, model),
        }[kind]
        optimizer, told = make(), dict[str, Any]()
        if asked_at == "start":
            told = optimizer_state(model, optimizer)
        for step in range(steps):
            model(torch.ones(2, 3) * (step + 1)).square().mean().backward()
            if asked_at == "gradients" and step == 0:
                told = optimizer_state(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        if asked_at == "saved":
            save(tmp_path, {"optimizer": optimizer_state(model, optimizer)}, step=1)
        return model, told

    expected = [each.full_tensor().tolist() for each in trained(3)[0].parameters()]
    trained(1, asked_at="saved")
    for asked_at in ("start", "gradients"):
        model, told = trained(3, asked_at=asked_at)
        assert [each.full_tensor().tolist() for each in model.parameters()] == expected
        assert load(tmp_path, {"optimizer": told}) == 1


@on_ranks(2)
def test_several_optimizers_have_one_state(tmp_path: Path) -> None:
    def built() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 4))
        return model, [Muon([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)]

    def step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()

    model, optimizers = built()
    step(model, optimizers)
    told = optimizer_state(model, optimizers)
    theirs = get_optimizer_state_dict(model, optimizers)
    assert list(told["state"]) == list(theirs["state"]) == ["weight", "bias"]
    assert told["param_groups"] == theirs["param_groups"]
    save(tmp_path, {"model": get_model_state_dict(model), "optimizer": told}, step=1)
    step(model, optimizers)
    again, optimizers = built()
    state = {"model": get_model_state_dict(again), "optimizer": optimizer_state(again, optimizers)}
    assert not any(one.state for one in optimizers)
    load(tmp_path, state)
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, optimizers, state["optimizer"])
    step(again, optimizers)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    rows = fully_shard(nn.Linear(4, 4), layout="contiguous")
    mixed = [flat(torch.optim.AdamW, rows, params=[rows.bias]), Muon([rows.weight])]
    with pytest.raises(CheckpointError, match="FlatAdamW loads a state of its own parameters only"):
        optimizer_state(rows, mixed)
    alone = optimizer_state(rows, mixed[:1])
    assert alone["param_groups"] == optimizer_state(rows, mixed[0])["param_groups"]


class PartlyTrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.used.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean() + self.empty.sum()


@on_ranks(2)
def test_runs_resume_where_parameters_are_frozen_empty_or_without_a_gradient_so_far(tmp_path: Path) -> None:
    def built(kind: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = fully_shard(PartlyTrained(), layout="contiguous")
        if kind == "flat":
            return model, flat(torch.optim.AdamW, model, lr=0.1)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()

    kinds = ("flat", "ordinary")
    for number, (before, after) in enumerate(itertools.product(kinds, kinds)):
        model, optimizer = built(before)
        step(model, optimizer)
        state = {"model": get_model_state_dict(model), "optimizer": optimizer_state(model, optimizer)}
        save(tmp_path, state, step=number)
        step(model, optimizer)
        again, optimizer = built(after)
        state = {"model": get_model_state_dict(again), "optimizer": optimizer_state(again, optimizer)}
        assert not any(name.startswith("used.weight") for name in state["optimizer"]["state"])
        load(tmp_path, state)
        set_model_state_dict(again, state["model"])
        assert not any(name.startswith("unused") for name in state["optimizer"]["state"])
        if after == "flat":
            optimizer.load_state_dict(state["optimizer"])
        else:
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(again, optimizer, state["optimizer"], options=options)
        step(again, optimizer)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())
    # of an optimizer without any state, or without the parameter, nothing is left out
    for saved in ({"state": {}}, {"state": {"b": {"step": 1}}, "param_groups": [{"params": ["b"]}]}):
        groups: list[Any] = [{"params": ["a", "b"]}]
        save(tmp_path, {"param_groups": groups, **saved}, step=9)
        wanted = {"param_groups": groups, "state": {"a": {"step": 2}, "b": {"step": 2}}}
        with pytest.raises(CheckpointError, match=r"state\.a\.step: expected by the state"):
            load(tmp_path, wanted)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_state_is_that_of_what_trains_where_evaluation_left_modules_gathered(
    layout: Any, steps: int
) -> None:
    model = fully_shard(nn.Linear(4, 2), layout=layout, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.bias.requires_grad_(False)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    model.eval()(torch.ones(2, 4))
    model.bias.requires_grad_(steps == 0)
    model.weight.requires_grad_(steps == 1)
    state = optimizer_state(model, optimizer)["state"]
    assert list(state) == (["weight"] if steps else ["bias"])


@on_ranks(2)
def test_what_a_saved_run_trained_is_frozen_after_loading(tmp_path: Path) -> None:
    def built(*, frozen: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        model[1].requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, {"optimizer": optimizer_state(model, optimizer)}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, _ = built()
    step(model, optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": optimizer_state(model, optimizer)}
    save(tmp_path, state, step=1)
    again, _, state = built(frozen=True)
    fix = r"where 1\.bias is frozen, build the optimizer over it and load first, then freeze it"
    with pytest.raises(CheckpointError, match=r"1\.bias\.momentum_buffer: in the checkpoint.* " + fix):
        load(tmp_path, {"model": get_model_state_dict(again), **state})
    again, optimizer_again, state = built()
    state["model"] = get_model_state_dict(again)
    load(tmp_path, state)
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, optimizer_again, state["optimizer"])
    for one, other in ((model, optimizer), (again, optimizer_again)):
        one[1].requires_grad_(False)
        step(one, other)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    # of an optimizer that tells no state at all nobody knows what is frozen
    state["optimizer"]["state"] = {}
    with pytest.raises(CheckpointError, match=r"1\.bias\.momentum_buffer: .* the one saved$"):
        load(tmp_path, state)


@on_ranks(2)
def test_a_state_of_stages_and_one_of_the_whole_model_load_each_other(tmp_path: Path) -> None:
    stages = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    def built(names: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
        groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.5}]
        return model, torch.optim.SGD(groups, lr=0.1 * len(names), momentum=0.9)

    def state(of: Any, mesh: Any = None) -> dict[str, Any]:
        return {"optimizer": optimizer_state(*of, stages=mesh)}

    mine = "ab"[dist.get_rank()]
    for path, source, target in (("stages", mine, "ab"), ("whole", "ab", mine)):
        torch.manual_seed(0)
        saved, loaded = built(source), built(target)
        for number, (_, param) in enumerate(sorted(saved[0].named_parameters())):
            param.grad = torch.full_like(param, ord(source[number]))
        saved[1].step()
        save(tmp_path / path, state(saved, stages if source == mine else None), step=1)
        filled = state(loaded, stages if target == mine else None)
        load(tmp_path / path, filled)
        set_optimizer_state_dict(*loaded, filled["optimizer"])
        for name, param in loaded[0].named_parameters():
            assert loaded[1].state[param]["momentum_buffer"].unique().tolist() == [ord(name[0])]
    model, optimizer = built(mine)
    if dist.get_rank() == 1:
        optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match=r"stages have \[2, 1\] parameter groups"):
        optimizer_state(model, optimizer, stages=stages)
