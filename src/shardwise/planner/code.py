"""Python code that builds what was planned."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed import device_mesh, pipelining, tensor
from torch.distributed.tensor import parallel

from shardwise.planner.decoder import Decoder
from shardwise.planner.models import Factory, Model, chunked, report_exits, resolve
from shardwise.planner.setup import Setup
from shardwise.planner.shapes import check_divided
from shardwise.planner.sharding import CASTS, OPTIMIZERS, other_dtypes
from shardwise.planner.tensor import STYLES, UNCUT, counts_positions, heads_by_rows, sizes_of, ties, words_of


@report_exits()
def python(model: str | Model | Factory, setup: Setup) -> str:
    """Return the source of `build(model)`, which shards the model and returns its optimizer, on each rank.

    With "Muon" it returns two optimizers; of a pipeline, the schedule first.
    """
    model, setup = resolve(model, setup)
    body = list(_build(chunked(model) if setup.loss == "chunked" else model, setup))
    return "\n".join([*_imports("\n".join(body)), "", "", *body, ""])


def _imports(body: str) -> Iterator[str]:
    yield "import torch"
    yield from ["import shardwise"] * ("shardwise." in body)
    called = set(re.findall(r"(\w+)\(", body))
    for module in (device_mesh, pipelining, tensor, parallel):
        used = sorted(called & {*module.__all__} - ({"init_device_mesh"} if module is tensor else set()))
        if used:
            yield f"from {module.__name__} import {', '.join(used)}"
    yield ""
    names = ["MixedPrecisionPolicy", "fully_shard"]
    names += [package for package in ("hf", "optim") if re.search(rf"(?<![.\w]){package}\.", body)]
    yield f"from shardwise import {', '.join(names)}"
    for home, available in _HOMES.items():
        if helpers := sorted(available.intersection(re.findall(r"\w+", body))):
            yield f"from {home} import {', '.join(helpers)}"


_HOMES = {
    "shardwise.dimensions": {"Dimensions", "data_ranks", "dense_mesh", "expert_mesh"},
    "shardwise.nn": {"SequenceCut"},
    "shardwise.planner": {"recompute", "with_positions"},
}


def _build(model: Model, setup: Setup) -> Iterator[str]:
    staged, several = setup.pipeline > 1, setup.stages > 1
    count = setup.pipeline * setup.stages
    takes = "parts, loss" if several else "model, number, loss" if staged else "model"
    yield f"def build({takes}):"
    yield (
        f'    """Over {setup.ranks:,} ranks; a step of each is {setup.accumulation} x {setup.micro_batch}'
        f' sequences of {setup.length:,} tokens."""'
    )
    if several:
        yield f"    # this rank's stages by number, of {count}: each an even share of {model.layers} blocks"
    elif staged:
        yield f"    # stage `number` of {count}: an even share of the {model.layers} blocks"
    yield from _meshes(setup)
    if staged:
        yield "    shardwise.install()  # torch's stages ask FSDP2 whether a module is sharded"
        yield f'    device, group = torch.device("{setup.device}"), whole.get_group("pp")'
    shards = _shards(model, setup)
    if several:
        yield "    stages, every = [], []"
        yield "    for number, model in parts.items():"
        yield from (f"    {line}" for line in shards)
        yield "        every += blocks"
        yield f"        stages.append(PipelineStage(model, number, {count}, device, group=group))"
        yield "    model, blocks = torch.nn.ModuleList(parts.values()), every"
    else:
        yield from shards
    if setup.optimizer == "Muon":
        yield "    matrices = [p for block in blocks for p in block.parameters() if p.ndim == 2]"
        yield "    others = [p for p in model.parameters() if all(p is not one for one in matrices)]"
    if setup.reduce_once:
        yield "    # model.set_requires_gradient_sync(False) before micro-batches, (True) before the last"
    if setup.clip_norm:
        yield "    # before the optimizer's step: shardwise.clip_grad_norm_(model.parameters(), 1.0)"
    if setup.expandable_segments:
        yield "    # in the environment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    optimizers = OPTIMIZERS[setup.optimizer]
    if not staged:
        yield f"    return {optimizers}"
        return
    if not several:
        yield f"    stages = PipelineStage(model, number, {count}, device, group=group)"
    kind = f"Schedule{setup.schedule}"
    yield f"    schedule = {kind}(stages, {setup.accumulation}, loss_fn=loss)"
    yield "    # schedule.step(..., return_outputs=False), or the last stage keeps all logits"
    yield f"    return schedule, {optimizers}"


def _meshes(setup: Setup) -> Iterator[str]:
    names, sizes = tuple(setup.axes), tuple(setup.axes.values())
    quoted = ", ".join(f'"{name}"' for name in names)
    if setup.pipeline * setup.ulysses * setup.experts > 1:
        yield f'    whole = Dimensions("{setup.dimensions}").mesh("{setup.device}")'
        yield "    mesh = dense_mesh(whole)"
    else:
        named = f", mesh_dim_names=({quoted})" if len(names) > 1 else ""
        mesh = "whole" if setup.tensor > 1 else "mesh"
        yield f'    {mesh} = init_device_mesh("{setup.device}", {sizes}{named})'
        if setup.tensor > 1:
            yield f"    mesh = whole[{quoted.rpartition(', ')[0]}]"
    yield f"    policy = MixedPrecisionPolicy(torch.{setup.param_dtype}, torch.{setup.reduce_dtype})"
    strategy = "" if setup.strategy is None else f', "strategy": "{setup.strategy}"'
    yield f'    options = {{"mesh": mesh, "mp_policy": policy, "layout": "{setup.layout}"{strategy}}}'


def _shards(model: Model, setup: Setup) -> Iterator[str]:
    with torch.device("meta"):
        module = model.build(model.layers if setup.tensor > 1 else 2)  # a tensor_plan may name any block
    blocks, ends = _parts(model, module)
    if other_dtypes(module, setup.stored_dtype):
        yield f"    model.{CASTS[setup.stored_dtype]}()"
    if setup.tensor > 1:
        axis = "tp" if setup.pipeline > 1 else "tensor"  # with other dimensions it is not planned
        yield from _tensor_parallel(module, model.name, setup, f'whole["{axis}"]')
    if setup.ulysses > 1 and isinstance(module, Decoder):
        yield '    model.cut_sequences(SequenceCut(whole["sp"]))  # takes cut(tokens); the loss by cut.mean'
    elif setup.ulysses > 1:
        yield '    hf.cut_sequences(model, whole["sp"])  # takes whole sequences, with labels'
    if setup.experts > 1:
        yield '    for experts in hf.cut_experts(model, whole["ep"]):'
        yield '        over = options | {"mesh": expert_mesh(whole)}'
        yield f"        fully_shard(experts, reshard_after_forward={setup.reshard}, **over)"
        yield "        experts.set_gradient_divide_factor(data_ranks(whole))"
    yield f"    blocks = {blocks}"
    if setup.checkpointing != "none":
        yield f"    for block in blocks{'[1::2]' * (setup.checkpointing == 'alternate')}:"
        yield f"        recompute(block, selective={setup.checkpointing == 'selective'})"
    extra = "".join(f", {_module(name)}" for name in ends) if setup.ends_apart else ""
    yield f"    for module in [*blocks{extra}]:"
    indent = " " * 8
    if setup.pipeline > 1 and extra:
        yield f"{indent}if module is not None:  # another stage's"
        indent += " " * 4
    yield f"{indent}fully_shard(module, reshard_after_forward={setup.reshard}, **options)"
    yield "    fully_shard(model, **options)"
    if setup.float8:
        rows = setup.float8_scales == "row"
        recipe = 'the recipe "rowwise"' if rows else "enable_fsdp_float8_all_gather"
        yield f"    # before: torchao's convert_to_float8_training(block), with {recipe}"
    if setup.nvfp4:
        yield "    # before: linear layers of NVFP4 in blocks, as by Transformer Engine's NVFP4BlockScaling"
    is_chunked = setup.loss == "chunked"
    lines = {
        'shardwise.compile(model, mode="regional")': setup.compile,
        "# asynchronous: torch._inductor.config._micro_pipeline_tp, and symmetric memory": setup.async_tensor,
        "# the loss is torch.compile's of cross_entropy(logits.float(), targets)": setup.compile_loss,
        "# the head returns shardwise.nn.linear_cross_entropy(x, self.weight, targets)": is_chunked,
    }
    yield from (f"    {line}" for line, is_so in lines.items() if is_so)


def _tensor_parallel(module: nn.Module, name: str, setup: Setup, axis: str) -> Iterator[str]:
    words = words_of(module, setup)
    check_divided(name, sizes_of(module), setup.tensor)
    yield "    styles = {"
    yield from (f'        "{name}": {STYLES[word]},' for name, word in words.items() if word not in UNCUT)
    yield "    }"
    if setup.pipeline > 1:
        yield "    # torch warns of those that are other stages'"
    yield f"    parallelize_module(model, {axis}, styles)"
    if counts_positions(module, words):
        yield "    model.register_forward_pre_hook(with_positions, with_kwargs=True)"
    for head in heads_by_rows(module, words):
        yield f"    head = {_module(head)}"
        yield "    for name, p in list(head.named_parameters()):"
        yield f"        rows = distribute_tensor(p.detach(), {axis}, [Shard(0)])"
        yield "        setattr(head, name, torch.nn.Parameter(rows))"
    if setup.pipeline == 1:  # no stage has both
        for names in ties(module):
            places = (name.rpartition(".") for name in names)
            yield f"    {' = '.join(f'{_module(owner)}.{attribute}' for owner, _, attribute in places)}"
    if {"head_of_sequence", "head_of_loss"} & {*words.values()}:
        yield "    # the loss, with its backward, is for torch.distributed.tensor.parallel.loss_parallel()"


def _module(name: str) -> str:
    """Return code for a module of the model."""
    if all(part.isidentifier() for part in name.split(".")):
        return f"model.{name}"
    return f'model.get_submodule("{name}")' if name else "model"


def _parts(model: Model, module: nn.Module) -> tuple[str, list[str]]:
    """Return code for the blocks, and names of the modules at the ends."""
    names = {id(child): name for name, child in module.named_modules()}
    blocks = [names[id(block)] for block in model.blocks(module)]
    parents = list(dict.fromkeys(name.rpartition(".")[0] for name in blocks))
    ends = [names[id(end)] for end in model.ends(module)]
    if all(name.rpartition(".")[2].isdecimal() for name in blocks):
        lists = [_module(name) for name in parents]
        return lists[0] if len(lists) == 1 else f"[*{', *'.join(lists)}]", ends
    pattern = blocks[0].replace("0", "{i}")
    return f'[model.get_submodule(f"{pattern}") for i in range({model.layers})]', ends
