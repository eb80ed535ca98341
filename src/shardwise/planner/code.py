"""The Python that builds what was planned."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.planner.models import Factory, Model, model_of
from shardwise.planner.setup import Setup
from shardwise.planner.sharding import CASTS, other_dtypes

_OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)",
    "AdamW fused": "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
    "AdamW flat": "optim.flat(torch.optim.AdamW, model, lr=1e-3, fused=True)",
    "AdamW 8 bits": "optim.AdamW8bit(model.parameters(), lr=1e-3)",
    "Muon": "optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3, fused=True)",
    "SGD": "torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)",
}


def python(model: str | Model | Factory, setup: Setup) -> str:
    """Source of `build(model)`, which shards the model and returns its optimizer; for every rank to call."""
    asked = model_of(model, sequence=setup.sequence)
    return "\n".join([*_imports(setup), "", "", *_build(asked, setup), ""])


def _imports(setup: Setup) -> Iterator[str]:
    yield "import torch"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield ""
    names = ["MixedPrecisionPolicy", "fully_shard"]
    names += ["optim"] if "optim." in _OPTIMIZERS[setup.optimizer].replace("torch.optim.", "") else []
    yield f"from shardwise import {', '.join(names)}"
    if setup.checkpointing != "none":
        yield "from shardwise.planner import recompute"


def _build(model: Model, setup: Setup) -> Iterator[str]:
    blocks, ends, converted = _parts(model, setup)
    yield "def build(model):"
    yield (
        f'    """Over {setup.ranks:,} ranks; a step of each is {setup.accumulation} x {setup.micro_batch}'
        f' sequences of {setup.sequence:,} tokens."""'
    )
    if converted:
        yield f"    model.{CASTS[setup.stored_dtype]}()"
    if setup.replicas == 1:
        yield f'    mesh = init_device_mesh("{setup.device}", ({setup.ranks},))'
    else:
        sizes = f"({setup.replicas}, {setup.ranks // setup.replicas})"
        yield f'    mesh = init_device_mesh("{setup.device}", {sizes}, mesh_dim_names=("replicate", "shard"))'
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
    if setup.loss == "chunked":
        yield "    # the head returns shardwise.nn.linear_cross_entropy(x, self.weight, targets)"
    if setup.optimizer == "Muon":
        yield "    matrices = [p for block in blocks for p in block.parameters() if p.ndim == 2]"
        yield "    others = [p for p in model.parameters() if all(p is not one for one in matrices)]"
    yield f"    return {_OPTIMIZERS[setup.optimizer]}"


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
