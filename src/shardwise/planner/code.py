"""The Python that builds what was planned."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch.distributed import tensor
from torch.distributed.tensor import parallel

from shardwise.planner.models import Factory, Model, chunked, exits_told, model_of
from shardwise.planner.setup import Setup
from shardwise.planner.sharding import CASTS, OPTIMIZERS, other_dtypes
from shardwise.planner.tensor import STYLES, UNCUT, check, counts_positions, heads_by_rows, tied, words_of


@exits_told()
def python(model: str | Model | Factory, setup: Setup) -> str:
    """Source of `build(model)`, which shards the model and returns its optimizer; for every rank to call."""
    asked = model_of(model, sequence=setup.sequence)
    body = list(_build(chunked(asked) if setup.loss == "chunked" else asked, setup))
    return "\n".join([*_imports(setup, "\n".join(body)), "", "", *body, ""])


def _imports(setup: Setup, body: str) -> Iterator[str]:
    yield "import torch"
    yield from ["import shardwise"] * setup.compile
    yield "from torch.distributed.device_mesh import init_device_mesh"
    called = set(re.findall(r"(\w+)\(", body))
    for module in (tensor, parallel):
        used = sorted(called & {*module.__all__} - {"init_device_mesh"})
        if used and setup.tensor > 1:
            yield f"from {module.__name__} import {', '.join(used)}"
    yield ""
    names = ["MixedPrecisionPolicy", "fully_shard"]
    names += ["optim"] if "optim." in OPTIMIZERS[setup.optimizer].replace("torch.optim.", "") else []
    yield f"from shardwise import {', '.join(names)}"
    if helpers := [name for name in ("recompute", "with_positions") if name in body]:
        yield f"from shardwise.planner import {', '.join(helpers)}"


def _build(model: Model, setup: Setup) -> Iterator[str]:
    blocks, ends, converted = _parts(model, setup)
    yield "def build(model):"
    yield (
        f'    """Over {setup.ranks:,} ranks; a step of each is {setup.accumulation} x {setup.micro_batch}'
        f' sequences of {setup.sequence:,} tokens."""'
    )
    if converted:
        yield f"    model.{CASTS[setup.stored_dtype]}()"
    names, sizes = tuple(setup.axes), tuple(setup.axes.values())
    quoted = ", ".join(f'"{name}"' for name in names)
    named = f", mesh_dim_names=({quoted})" if len(names) > 1 else ""
    yield f'    mesh = init_device_mesh("{setup.device}", {sizes}{named})'
    if setup.tensor > 1:
        yield from _tensor_parallel(model, setup)
        yield f"    mesh = mesh[{quoted.rpartition(', ')[0]}]"
    yield f"    policy = MixedPrecisionPolicy(torch.{setup.param_dtype}, torch.{setup.reduce_dtype})"
    strategy = "" if setup.strategy is None else f', "strategy": "{setup.strategy}"'
    yield f'    options = {{"mesh": mesh, "mp_policy": policy, "layout": "{setup.layout}"{strategy}}}'
    yield f"    blocks = {blocks}"
    if setup.checkpointing != "none":
        yield "    for block in blocks:"
        yield f"        recompute(block, selective={setup.checkpointing == 'selective'})"
    apart = "".join(f", model.{name}" for name in ends) if setup.ends_apart else ""
    yield f"    for module in [*blocks{apart}]:"
    yield f"        fully_shard(module, reshard_after_forward={setup.reshard_after_forward}, **options)"
    yield "    fully_shard(model, **options)"
    if setup.float8:
        yield "    # before: torchao's convert_to_float8_training(block), with enable_fsdp_float8_all_gather"
    if setup.compile:
        yield '    shardwise.compile(model, mode="regional")'
    if setup.async_tensor:
        yield "    # asynchronous: torch._inductor.config._micro_pipeline_tp, and symmetric memory"
    if setup.compile_loss:
        yield "    # the loss is torch.compile's of cross_entropy(logits.float(), targets)"
    if setup.loss == "chunked":
        yield "    # the head returns shardwise.nn.linear_cross_entropy(x, self.weight, targets)"
    if setup.optimizer == "Muon":
        yield "    matrices = [p for block in blocks for p in block.parameters() if p.ndim == 2]"
        yield "    others = [p for p in model.parameters() if all(p is not one for one in matrices)]"
    if setup.reduce_once:
        yield "    # model.set_requires_gradient_sync(False) before micro-batches, (True) before the last"
    if setup.clip_norm:
        yield "    # before the optimizer's step: shardwise.clip_grad_norm_(model.parameters(), 1.0)"
    if setup.expandable_segments:
        yield "    # in the environment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    yield f"    return {OPTIMIZERS[setup.optimizer]}"


def _tensor_parallel(model: Model, setup: Setup) -> Iterator[str]:
    with torch.device("meta"):
        module = model.build(2)
    words = words_of(module, model.name, setup)
    check(module, model.name, setup.tensor)
    yield "    styles = {"
    yield from (f'        "{name}": {STYLES[word]},' for name, word in words.items() if word not in UNCUT)
    yield "    }"
    yield '    parallelize_module(model, mesh["tensor"], styles)'
    if counts_positions(module, words):
        yield "    model.register_forward_pre_hook(with_positions, with_kwargs=True)"
    for head in heads_by_rows(module, words):
        yield f"    head = model.{head}"
        yield "    for name, p in list(head.named_parameters()):"
        yield '        rows = distribute_tensor(p.detach(), mesh["tensor"], [Shard(0)])'
        yield "        setattr(head, name, torch.nn.Parameter(rows))"
    yield from (f"    model.{other} = model.{first}" for other, first in tied(module))
    if {"head_of_sequence", "head_of_loss"} & {*words.values()}:
        yield "    # the loss, with its backward, is for torch.distributed.tensor.parallel.loss_parallel()"


def _parts(model: Model, setup: Setup) -> tuple[str, list[str], bool]:
    """How to get at the blocks, the names of the modules at the ends, whether parameters are converted."""
    with torch.device("meta"):
        module = model.build(2)
    names = {id(one): name for name, one in module.named_modules()}
    blocks = [names[id(block)] for block in model.blocks(module)]
    parents = {name.rpartition(".")[0] for name in blocks}
    ends = [names[id(end)] for end in model.ends(module)]
    converted = bool(other_dtypes(module, setup.stored_dtype))
    if len(parents) == 1 and all(name.rpartition(".")[2].isdecimal() for name in blocks):
        return f"model.{parents.pop()}", ends, converted
    pattern = blocks[0].replace("0", "{i}")
    return f'[model.get_submodule(f"{pattern}") for i in range({model.layers})]', ends, converted
