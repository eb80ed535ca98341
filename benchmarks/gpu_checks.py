"""Is training on this device what FSDP2 and the unsharded model make of it?

Each case trains the same small transformer on the same batches four times: unsharded, by torch's FSDP2, and
by shardwise in either layout. Losses, norms and parameters are compared:

    with FSDP2            bit by bit on one and two ranks. On more, sums of gradients depend on where an
                          element lies in its buffer, and may differ by rounding
    with the unsharded    bit by bit on one rank; else within rounding
    clipped by rows       within rounding: the norm adds rows in another order
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from gpu_place import Check, Place, Shape, Transformer, make, tokens
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

import shardwise

STEPS, SHAPE = 4, Shape()
STEPS_SIMULATED, SIMULATED = 2, Shape(blocks=2)  # tens of microseconds an operator
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of a tensor's greatest element
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FSDP2": (torch_fsdp, {}),
    "interleaved": (shardwise, {"layout": "interleaved"}),
    "contiguous": (shardwise, {"layout": "contiguous"}),
}
Options = Callable[[Any], dict[str, Any]]


def _bf16(api: Any) -> dict[str, Any]:
    return {"mp_policy": api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        options: keyword arguments of `fully_shard`.
        micro: backwards in a step.
        without: a method of the model that is called with False before all of these but the last.
        ranks: the least that it takes; an even number above 1.
    """

    options: Options = lambda api: {}
    computes: torch.dtype = torch.float32
    micro: int = 1
    without: str = ""
    replicas: bool = False
    prefetch: bool = False
    again: bool = False
    clip: bool = False
    fused: bool = False
    ranks: int = 1


CASES = {
    "plain": Case(),
    "bf16, gradients reduced in fp32": Case(_bf16, computes=torch.bfloat16),
    "offloaded, pinned": Case(lambda api: {"offload_policy": api.CPUOffloadPolicy()}),
    "offloaded, not pinned": Case(lambda api: {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)}),
    "offloaded, bf16": Case(
        lambda api: _bf16(api) | {"offload_policy": api.CPUOffloadPolicy()}, computes=torch.bfloat16
    ),
    "kept after forward": Case(lambda api: {"reshard_after_forward": False}),
    "freed after forward, the root too": Case(lambda api: {"reshard_after_forward": True}),
    "kept by 2 ranks after forward": Case(lambda api: {"reshard_after_forward": 2}, ranks=4),
    "two backwards, each reduced": Case(micro=2),
    "two backwards, reduced once": Case(micro=2, without="set_requires_gradient_sync"),
    "two backwards, the last one said": Case(micro=2, without="set_is_last_backward"),
    "two backwards, bf16, reduced once": Case(
        _bf16, computes=torch.bfloat16, micro=2, without="set_requires_gradient_sync"
    ),
    "HSDP": Case(replicas=True, ranks=4),
    "HSDP, bf16": Case(_bf16, computes=torch.bfloat16, replicas=True, ranks=4),
    "HSDP, two backwards, replicas reduced once": Case(
        micro=2, without="set_requires_all_reduce", replicas=True, ranks=4
    ),
    "prefetched in forward and backward": Case(prefetch=True),
    "activation checkpointing": Case(again=True),
    "clipped": Case(clip=True),
    "fused AdamW": Case(fused=True),
}


def _size(place: Place) -> tuple[int, Shape]:
    return (STEPS_SIMULATED, SIMULATED) if place.is_simulated else (STEPS, SHAPE)


def runs_on(case: Case, ranks: int) -> bool:
    return ranks >= case.ranks and (case.ranks == 1 or ranks % 2 == 0)


def train(way: str, case: Case, place: Place) -> dict[str, Tensor]:
    """What one way to shard makes of it: losses, norms and whole parameters, on the CPU."""
    api, how = WAYS[way]
    how = how | case.options(api) | {"mesh": place.replicas if case.replicas else place.mesh}
    steps, shape = _size(place)
    model: Any = make(shape, place, again=case.again)
    for block in model.blocks:
        api.fully_shard(block, **how)
    api.fully_shard(model, **how)
    if case.prefetch:
        _prefetch(model)
    optimizer = _optimizer(model, case)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        for micro in range(case.micro):
            if case.without:
                getattr(model, case.without)(micro == case.micro - 1)
            loss = model(tokens(shape, place, rank=place.rank, number=step * case.micro + micro))
            loss.backward()
            found[f"loss {step}.{micro}"] = loss.detach().cpu()
        _step(model, optimizer, case, found, step)
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().full_tensor().cpu()
    return found


def train_unsharded(case: Case, place: Place) -> dict[str, Tensor]:
    """The same on this rank alone, which takes all ranks' batches; its losses are those of its own."""
    steps, shape = _size(place)
    model = make(shape, place, again=case.again)
    optimizer = _optimizer(model, case)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        computing = copy.deepcopy(model).to(case.computes)
        for micro in range(case.micro):
            for rank in range(place.ranks):
                computing.zero_grad()
                loss = computing(tokens(shape, place, rank=rank, number=step * case.micro + micro))
                loss.backward()
                if rank == place.rank:
                    found[f"loss {step}.{micro}"] = loss.detach().cpu()
                _add_gradients(model, computing, place.ranks)
        _step(model, optimizer, case, found, step)
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().cpu()
    return found


def _add_gradients(model: Transformer, computing: Transformer, ranks: int) -> None:
    for kept, used in zip(model.parameters(), computing.parameters(), strict=True):
        gradient = used.grad.to(kept.dtype, copy=True).div_(ranks)
        kept.grad = gradient if kept.grad is None else kept.grad + gradient


def _prefetch(model: Any) -> None:
    blocks = list(model.blocks)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    if case.fused:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, found: dict[str, Tensor], step: int
) -> None:
    if case.clip:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found[f"norm {step}"] = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).cpu()
    optimizer.step()
    optimizer.zero_grad()


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The greatest, relative to the greatest element of its tensor; 0 only where all is equal bit by bit."""
    if ours.keys() != theirs.keys():
        return float("inf")
    worst = 0.0
    for name, mine in ours.items():
        other = theirs[name]
        if torch.equal(mine, other):
            continue
        scale = max(other.abs().max().item(), 1e-30)
        far = (mine - other).abs().max().item() / scale
        worst = max(worst, far if far == far else float("inf"), 1e-30)
    return worst


def allowed(case: Case, way: str, beside: str, ranks: int) -> float:
    exact = ranks == 1 if beside == "unsharded" else ranks <= 2
    by_rows = case.clip and way == "contiguous"
    return 0.0 if exact and not by_rows else ROUNDING[case.computes]


def check(name: str, place: Place, ways: Sequence[str] = ("interleaved", "contiguous")) -> Iterator[Check]:
    """One case in these ways."""
    case = CASES[name]
    with same_each_time():
        with place.running(name, ours=False):
            peers = {"FSDP2": train("FSDP2", case, place), "unsharded": train_unsharded(case, place)}
        for way in ways:
            title = f"{name}, {way}"
            with place.running(title):
                ours = train(way, case, place)
            words, passed = [], True
            for beside, theirs in peers.items():
                far = place.greatest(difference(ours, theirs))
                most = allowed(case, way, beside, place.ranks)
                passed = passed and far <= most
                words.append(f"{beside}: {_in_words(far, most)}")
            yield Check(title, passed, "; ".join(words))


def _in_words(far: float, most: float) -> str:
    if far == 0:
        return "bit-equal"
    return f"{far:.1e} apart, {'at most ' + format(most, '.0e') if most else 'not bit-equal'}"


def all_checks(place: Place, names: Sequence[str] = tuple(CASES)) -> Iterator[Check]:
    """Every case for which there are ranks. One that raises on any rank has failed."""
    for name in names:
        if not runs_on(CASES[name], place.ranks):
            continue
        done: list[Check] = []
        try:
            done += check(name, place)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            done.append(Check(name, False, f"rank {place.rank}: {text}"))
        yield from _agreed(done, name)


def _agreed(done: list[Check], name: str) -> list[Check]:
    """Passed only where it has on every rank."""
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, [(one.passed, one.found) for one in done])
    if any(len(one) != len(done) for one in words):
        said = next(text for one in words for passed, text in one if not passed)
        return [Check(name, False, said)]
    failed = [
        next((text for passed, text in column if not passed), "") for column in zip(*words, strict=True)
    ]
    return [Check(c.name, not text, text or c.found) for c, text in zip(done, failed, strict=True)]


@contextmanager
def same_each_time() -> Iterator[None]:
    """Choose kernels that compute alike each time."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # else nobody would see what reads it
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills
