"""Runs an operation on sharded operands and on whole ones, and says what differs: values and gradients."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuzz.sharded_tensor_part.draw import Spec
from fuzz.sharded_tensor_part.draw import cut as draw_cut
from fuzz.sharded_tensor_part.operations import FAMILIES
from fuzz.verdict import Verdict
from shardwise import ShardwiseError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}


def run(case: Spec, _: dict[Any, Any]) -> Verdict:
    """Collective over the default group."""
    whole, sharded = operands(case)
    operation = FAMILIES[case["kind"]][case["operation"]]
    arguments = case.get("arguments", {})
    expected, plainly = attempt(lambda: listed(operation(*whole, **arguments)))
    if case.get("delay") and case["delay"]["rank"] == dist.get_rank():
        time.sleep(case["delay"]["ms"] / 1000)
    try:
        if case.get("reshard") and isinstance(sharded[0], ShardedTensor):
            sharded[0] = sharded[0].detach().reshard(spec_of(case["reshard"]))
            sharded[0].requires_grad_(whole[0].requires_grad)
        found = listed(operation(*sharded, **arguments))
        if plainly is not None:  # what one rank's values fail for is told at the next collective
            [one.full_tensor() for one in found if isinstance(one, ShardedTensor)]
    except ShardwiseError as error:
        return Verdict("refused", str(error), {"refused": case["operation"]})
    except Exception as error:
        if plainly is None:
            raise
        return Verdict(
            "right", f"raised {type(error).__name__} as whole tensors do", {"raised": "as whole ones"}
        )
    if plainly is not None:
        return Verdict("wrong", f"whole tensors raise {type(plainly).__name__}: {plainly}; sharded do not")
    problems = list(compared(case, found, expected))
    if not problems:
        problems = list(gradients(whole, sharded, found, expected))
    problems += generator_problems()
    return Verdict("wrong" if problems else "right", "; ".join(problems))


def attempt(call: Any) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def listed(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return list(value)
    return [value]


# ---------------------------------------------------------------- operands


def operands(case: Spec) -> tuple[list[Any], list[Any]]:
    """The operands whole and sharded, equal on every rank, all of them leaves."""
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    whole: list[Any] = []
    sharded: list[Any] = []
    dtype = getattr(torch, case.get("dtype", "float64"))
    for number, one in enumerate(case["operands"]):
        if case["kind"] == "table" and number == 1:
            value = torch.randint(0, case["operands"][0]["shape"][0], one["shape"], generator=generator)
        elif dtype.is_floating_point:
            value = torch.randn(one["shape"], generator=generator, dtype=torch.float64).to(dtype)
        else:
            value = torch.randint(0, 5, one["shape"], generator=generator).to(dtype)
        cut = spec_of(one["cut"]) if "cut" in one else None
        mine = value.clone() if cut is None else shard_tensor(value, cut, src_rank=None)
        whole.append(value.requires_grad_(value.is_floating_point()))
        sharded.append(mine.requires_grad_(value.is_floating_point()))
    return whole, sharded


def spec_of(cut: Spec) -> ShardingSpec:
    if "boxes" in cut:
        return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}/cpu") for o, s, r in cut["boxes"]])
    places: list[Any] = [f"rank:{rank}/cpu" for rank in cut["ranks"]]
    if "grid" in cut:
        return GridShardingSpec(cut["grid"], places)
    if "ragged" in cut:
        return RaggedShardingSpec(cut["ragged"], cut["sizes"], places)
    return ChunkShardingSpec(cut["chunk"], places)


# ---------------------------------------------------------------- results


def compared(case: Spec, found: list[Any], expected: list[Any]) -> Iterator[str]:
    if len(found) != len(expected):
        yield f"{len(found)} results in place of {len(expected)}"
        return
    for number, (one, right) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(right, Tensor):
            if one != right:
                yield f"result {number} is {one!r}, whole {right!r}"
            continue
        if one.shape != right.shape or one.dtype != right.dtype:
            whole = f"{right.dtype} {tuple(right.shape)}"
            yield f"result {number} is {one.dtype} {tuple(one.shape)}, whole {whole}"
            continue
        if one.requires_grad != right.requires_grad:
            yield f"result {number} has requires_grad={one.requires_grad}, whole {right.requires_grad}"
        value = one
        if isinstance(one, ShardedTensor):
            yield from metadata_problems(number, one)
            if "reshard_result" in case:
                rng = random.Random(case["reshard_result"])
                value = one.reshard(spec_of(draw_cut(rng, list(one.shape), dist.get_world_size())))
            value = value.full_tensor()
        yield from apart(f"result {number}", value, right)


def metadata_problems(number: int, one: ShardedTensor) -> Iterator[str]:
    metadata = one.metadata()
    if metadata.size != one.shape:
        yield f"result {number}: metadata says {metadata.size}"
    mine = [shard.metadata for shard in one.local_shards()]
    if metadata.held_by(dist.get_rank()) != mine:
        yield f"result {number}: local shards are {mine}, metadata says otherwise"
    for shard in one.local_shards():
        if list(shard.tensor.shape) != list(shard.metadata.shard_sizes):
            yield f"result {number}: a shard is {tuple(shard.tensor.shape)}, {shard.metadata} says otherwise"


def apart(what: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    tolerance = TOLERANCE.get(expected.dtype, 0.0)
    found, expected = found.detach(), expected.detach()
    if not torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
        off = (found.double() - expected.double()).abs().nan_to_num(torch.inf).max()
        yield f"{what} is off by {float(off):.3g} of {float(expected.double().abs().max()):.3g}"


def gradients(whole: list[Any], sharded: list[Any], found: list[Any], expected: list[Any]) -> Iterator[str]:
    """After backward from weighted sums of all results, if any has a gradient."""
    total: Any = None
    right: Any = None
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if isinstance(other, Tensor) and other.requires_grad:
            made = torch.Generator().manual_seed(number)
            weights = torch.randn(other.shape, generator=made, dtype=torch.float64).to(other.dtype)
            part, whole_part = (one * weights).sum(), (other * weights).sum()
            total = part if total is None else total + part
            right = whole_part if right is None else right + whole_part
    if right is None:
        return
    if attempt(right.backward)[1] is not None:
        return  # not differentiable
    total.backward()
    for number, (one, other) in enumerate(zip(sharded, whole, strict=True)):
        if not isinstance(other, Tensor) or not other.is_floating_point():
            continue
        present = one.grad is not None
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, present)
        if len(set(everywhere)) > 1:
            yield f"operand {number} has a gradient on some ranks only: {everywhere}"
            continue
        if not present or other.grad is None:
            if present or other.grad is not None:
                who = "the sharded" if present else "the whole"
                yield f"only {who} operand {number} has a gradient"
            continue
        grad = one.grad.full_tensor() if isinstance(one.grad, ShardedTensor) else one.grad
        if grad.shape != other.grad.shape:
            yield f"gradient {number} is {tuple(grad.shape)}"
            continue
        yield from apart(f"gradient {number}", grad, other.grad)


def generator_problems() -> list[str]:
    states: list[Any] = [None] * dist.get_world_size()
    mine = int(torch.default_generator.get_state().double().sum())
    dist.all_gather_object(states, mine)
    return ["the default generator differs between ranks"] if len(set(states)) > 1 else []
