"""Parameters of which a rank holds no rows cost its optimizer nothing, and their state is as if they did."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.models import update
from ranks import on_ranks
from shardwise import fully_shard

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def _model() -> nn.Sequential:
    """On every rank some parameters have no rows: most have a row or two."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 2, bias=False), nn.Linear(2, 3))


class _Widest(TorchDispatchMode):
    """The largest number of tensors in one call of an optimizer's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], list) and "_fused" in str(func):
            self.tensors = max(self.tensors, len(args[0]))
        return func(*args, **(kwargs or {}))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, share: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        inputs = torch.randn(world * 2, 4, generator=torch.Generator().manual_seed(step))
        model(inputs[2 * rank : 2 * rank + 2] if share else inputs).square().mean().backward()
        update(optimizer)


@on_ranks(4)
def test_numbers_and_steps_are_those_of_one_process() -> None:
    for kind, (make, options) in KINDS.items():
        alone, model = _model(), fully_shard(_model(), layout="contiguous")
        theirs, ours = make(alone.parameters(), **options), make(model.parameters(), **options)
        _train(alone, theirs, 4, share=False)
        _train(model, ours, 4, share=True)
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            # Means over ranks round in another order than one mean; Adam divides by roots of small squares.
            near = {"rtol": 1e-4, "atol": 1e-5, "msg": lambda text, kind=kind: f"{kind}: {text}"}
            torch.testing.assert_close(mine.full_tensor(), whole.detach(), **near)
            expected, found = theirs.state[whole], ours.state[mine]
            assert set(found) == set(expected), kind
            assert "step" not in expected or found["step"] == expected["step"] == 4, kind
            for name, value in expected.items():
                if isinstance(value, Tensor) and value.ndim:
                    torch.testing.assert_close(found[name].full_tensor(), value, **near)


@on_ranks(2, 4)
def test_steps_pass_them_by_and_gradients_stay() -> None:
    model = fully_shard(_model(), layout="contiguous")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with_rows = sum(param.local.numel() > 0 for param in model.parameters())
    assert with_rows < len(list(model.parameters()))
    for step in range(3):
        model(torch.ones(1, 4)).sum().backward()
        with _Widest() as widest:
            optimizer.step()
        assert widest.tensors == (len(list(model.parameters())) if step == 0 else with_rows)
        assert all(param.grad is not None for param in model.parameters())
        optimizer.zero_grad()


@on_ranks(3)
def test_closures_and_hooks_of_a_step_find_every_gradient() -> None:
    model = fully_shard(_model(), layout="contiguous")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}

    found: list[bool] = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: found.extend(param.grad is not None for param in model.parameters()))
    closure()
    optimizer.step()
    assert found == [True] * 2 * len(list(model.parameters()))


@on_ranks(2)
def test_a_loaded_state_counts_on() -> None:
    model = fully_shard(_model(), layout="contiguous")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer, 3, share=True)
    optimizer.load_state_dict(optimizer.state_dict())
    _train(model, optimizer, 2, share=True)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


@on_ranks(2)
def test_a_state_dict_counts_on_with_the_optimizer_as_fsdp2s_does() -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for shard in (torchs, partial(fully_shard, layout="contiguous")):
        model = shard(_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        _train(model, optimizer, 3, share=True)
        held = get_optimizer_state_dict(model, optimizer, options=options)
        _train(model, optimizer, 2, share=True)
        assert {float(value) for name, value in held.items() if name.endswith(".step")} == {5.0}


def _forget_one(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][1], None)


def _count_from_zero(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"])


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) is torch.optim.SGD:
        optimizer.param_groups[0]["momentum"] = 0.5


@on_ranks(3)
def test_state_that_is_changed_by_hand_is_what_counts() -> None:
    for kind, (make, options) in KINDS.items():
        found = []
        for model in (_model(), fully_shard(_model(), layout="contiguous")):
            optimizer = make(model.parameters(), **options)
            for change in (_forget_one, lambda o: o.state.clear(), _count_from_zero, _begin_momentum):
                _train(model, optimizer, 2, share=False)
                change(optimizer)
            _train(model, optimizer, 2, share=False)
            states = [optimizer.state.get(param, {}) for param in model.parameters()]
            found.append([(sorted(state), float(state.get("step", 0))) for state in states])
        assert found[0] == found[1], kind
