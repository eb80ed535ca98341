"""Trains a case uncompiled and compiled, and says what differs.

Bit for bit with backends that run the graph as it was traced. Within a rounding: gradients that are sums of
three and more, of uses or of ranks, which are added in another order; other backends; lower precision, where
operators that a backend decomposes round in between; and models of which torch's own graphs, unsharded, give
other bits.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from fsdp.parity.harness import difference, same_bits
from fuzz.fsdp_part.check import blocks_of, far, rounding
from fuzz.fsdp_part.model import Control, Spec, batch, build, loss_of
from fuzz.fsdp_part.shard import OURS, mesh_of, sharded
from fuzz.fsdp_part.train import Record, Run, Tensors
from fuzz.verdict import Verdict
from shardwise import ShardwiseError

LOW_PRECISION = 1e-2  # a rounding of more


def run(case: Spec, meshes: dict[Any, DeviceMesh]) -> Verdict:
    """Collective over the default group."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = mesh_of(case, meshes)
        eager = Uncompiled(case, OURS, mesh).train()
        torch.compiler.reset()
        try:
            compiled = Compiled(case, OURS, mesh).train()
        except ShardwiseError as error:
            return Verdict("refused", str(error), {"refused": case["how"]})
        except torch._dynamo.exc.Unsupported as error:
            if not case.get("fullgraph") and case["how"] != "step":
                raise
            return Verdict("refused", str(error), {"refused": f"{case['how']}: no full graph"})
        finally:
            torch.compiler.reset()
    exact = case["backend"] in ("eager", "aot_eager") and rounding(case) < LOW_PRECISION and adds_alike(case)
    problems = apart(case, compiled, eager, exact)
    if problems and exact and (case["world"] > 2 or graphs_round(case)):
        problems = apart(case, compiled, eager, exact=False)
    return Verdict("wrong" if problems else "right", "; ".join(problems[:4]))


class Uncompiled(Run):
    """A run in which trained parameters that got no gradient get zeros, as graphs give them."""

    def update(self, number: int, *, last: bool) -> None:
        self.fill({name for name, param in self.params.items() if param.requires_grad})
        if self.case.get("clip"):
            shardwise.clip_grad_norm_(self.params.values(), self.case["clip"])
        self.keep(number, last=last)
        self.optimizer.step()


class Compiled(Uncompiled):
    """The same through what the case asks for."""

    def __init__(self, case: Spec, api: Any, mesh: DeviceMesh) -> None:
        super().__init__(case, api, mesh)
        options = {"backend": case["backend"], "fullgraph": case.get("fullgraph", False)}
        how, model = case["how"], self.model
        self.call: Any = model
        self.whole: Any = None
        if how == "torch":
            self.call = torch.compile(model, **options)
        elif how == "inplace":
            model.compile(**options)
        elif how == "blocks":
            for one in sharded(model):
                if one is not model:
                    one.compile(**options)
        elif how in ("shardwise", "regional"):
            mode = "regional" if how == "regional" else "full"
            self.call = shardwise.compile(model, mode=mode, prefetch=case.get("prefetch"), **options)
        elif how == "inside":
            self.whole = torch.compile(self.loss_and_backward, backend=case["backend"])
        elif how == "step":
            more = {"max_norm": case.get("clip"), "prefetch": case.get("prefetch")}
            self.whole = shardwise.compile_step(model, self.step_loss, self.optimizer, **more, **options)

    def step_loss(self, model: nn.Module, x: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.case, {}, model(x, tokens), targets)[0]

    def loss_and_backward(self, x: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.step_loss(self.model, x, tokens, targets)
        loss.backward()
        return loss.detach()

    def one_pass(self, step: Spec, rank: int, record: bool) -> None:
        if step.get("eagerly"):
            super().one_pass(step, rank, record)
            return
        x, tokens, targets = self.inputs(rank)
        if self.whole is not None:
            losses = [self.whole(x, tokens, targets)]
        else:
            losses = loss_of(self.case, step, self.call(x, tokens), targets)
            losses[0].backward()
        self.record.losses.append(torch.stack([loss.detach().double() for loss in losses]))
        self.record.input_gradients.append(x.grad)

    def act(self, action: str, ranks: list[int]) -> None:
        super().act(action, ranks)
        if action.startswith(("freeze", "train")) and self.case["how"] != "step":
            torch.compiler.reset()  # a compiled step traces what trains by itself

    def update(self, number: int, *, last: bool) -> None:
        if self.case["how"] == "step":  # which has done it
            self.keep(number, last=last)
        else:
            super().update(number, last=last)


def graphs_round(case: Spec) -> bool:
    """Does torch's own compilation, or where parameters lie, change gradients of any rank, unsharded?"""
    found: list[list[Tensors]] = []
    for backend in (None, case["backend"]):
        torch.compiler.reset()
        model = build(case, Control(rank=dist.get_rank()))
        compiled = partial(torch.compile, backend=backend) if backend else lambda function: function
        for param in model.parameters() if backend else ():  # in buffers they begin at any address
            buffer = param.data.new_empty(param.numel() + 1)
            param.data = buffer[1:].view_as(param).copy_(param.data)
        if case["how"] in ("inside", "step"):  # with the loss
            loss = compiled(partial(loss_through, case, model))
        else:
            loss = partial(loss_through, case, compiled(model))
        found.append([])
        for rank in range(case["world"]):
            for pass_ in range(len(case["steps"])):
                model.zero_grad()
                x, tokens, targets = batch(case, rank, pass_)
                x = x.float().requires_grad_(case.get("input_gradient", False))
                loss(x, tokens, targets).backward()
                found[-1].append({name: param.grad for name, param in model.named_parameters()})
                found[-1][-1]["the input"] = x.grad
    torch.compiler.reset()
    return any(
        not same_bits(compiled[name], grad)
        for eager, compiled in zip(*found, strict=True)
        for name, grad in eager.items()
    )


def loss_through(case: Spec, call: Any, x: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    return loss_of(case, {}, call(x, tokens), targets)[0]


def apart(case: Spec, compiled: Record, eager: Record, exact: bool) -> list[str]:
    pairs: list[tuple[str, Tensors, Tensors]] = [
        (what, numbered(getattr(compiled, what)), numbered(getattr(eager, what)))
        for what in ("losses", "outputs", "input_gradients")
    ]
    for what in ("gradient_pieces", "parameter_pieces"):
        both = zip(getattr(compiled, what), getattr(eager, what), strict=True)
        pairs += [(f"{what} at step {i}", mine, theirs) for i, (mine, theirs) in enumerate(both)]
    problems = []
    for what, mine, theirs in pairs:
        if not exact:
            wide = {name: None if one is None else one.double() for name, one in theirs.items()}
            problems += far(what, mine, wide, rounding(case) * 4)
            continue
        if list(mine) != list(theirs):
            problems.append(f"{what}: {list(mine)}, uncompiled {list(theirs)}")
            continue
        for name, one in mine.items():
            if not same_bits(one, theirs[name]):
                problems.append(f"{what} {name} differs from uncompiled: {difference(one, theirs[name])}")
    return problems


def adds_alike(case: Spec) -> bool:
    """Does everything have gradients of few enough uses to be added in one order only?

    A sharded module adds those of its uses of an input before those of other modules. A norm adds over a
    whole reduced shard at once (contiguous layout), in a graph over one gradient at a time.
    """
    blocks = list(blocks_of(case))
    again = any(block.get("calls", 1) > 1 or block["kind"] == "again" for block in blocks)
    inner = any("shard" in one for block in blocks for one in block.get("inner", []))
    tapped = any(step.get("backward") for step in case.get("steps", []))
    clipped = case["how"] == "step" and case.get("layout") == "contiguous" and "clip" in case
    return not again and not inner and not tapped and not clipped


def numbered(tensors: list[Any]) -> Tensors:
    return {str(i): one for i, one in enumerate(tensors)}
