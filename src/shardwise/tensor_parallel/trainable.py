"""One rank's program as a module of DTensor parameters, which `fully_shard` can shard further."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.export import ExportedProgram

from shardwise.errors import ShardingError, here
from shardwise.layout.placement import EvenShard
from shardwise.tensor_parallel.package import bind
from shardwise.tensor_parallel.placement import REPLICATE, Split, normal
from shardwise.tensor_parallel.state import placement_from_json, record_of


def trainable(program: ExportedProgram, mesh: DeviceMesh) -> fx.GraphModule:
    """Return a program's module, with parameters as DTensors over the ranks that it is cut for.

        cut = tensor_parallel_transformation(program, ..., group_name="later", training=True)
        block = fully_shard(trainable(cut, mesh["tp"]), mesh=mesh["dp"])

    Optimizers, norms and checkpoints then see the whole program's parameters under its names, as after
    torch's `parallelize_module`. The program is changed to communicate over `mesh`. Local.

    Args:
        program: from `tensor_parallel_transformation`, with training=True.
        mesh: a 1-D mesh of the program's ranks, in order.

    Raises:
        ShardingError: a mesh of other ranks; a parameter whose cut no DTensor can express, such as a fused
            projection of queries, keys and values, or heads that the ranks do not divide evenly.
    """
    if mesh.ndim != 1:
        raise ShardingError(
            f"{here()}: expected a 1-D mesh, got dims {mesh.mesh_dim_names}; pass one, such as mesh['tp']"
        )
    record = record_of(program)
    entries = record["parameters"]
    params = {name: x for name, x in program.state_dict.items() if isinstance(x, nn.Parameter)}
    dtensors: dict[Tensor, nn.Parameter] = {}  # names of one tensor share its parameter
    for name, param in params.items():
        shape = torch.Size(entries[name]["shape"]) if name in entries else param.shape
        placement = placement_from_json(entries[name]["placement"]) if name in entries else REPLICATE
        shard: Shard | Replicate = Replicate()
        if isinstance(placement, Split):
            shard = Shard(placement.dim)
            for rank, part in enumerate(placement.ranges):
                box = EvenShard(placement.dim).box(shape, rank=rank, ranks=len(placement.ranges))
                chunk = box.offsets[placement.dim], box.ends[placement.dim]
                if part != normal([chunk]):
                    raise ShardingError(
                        f"{here()}: rank {rank} holds {list(part)} of dim {placement.dim} of {name},"
                        f" {tuple(shape)}, where a DTensor holds {chunk}; use a number of ranks that divides"
                        " widths and head counts, and unfuse projections, or train the program's module"
                        " without fully_shard"
                    )
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(param.detach(), mesh, [shard], run_check=False, shape=shape, stride=stride)
        dtensors.setdefault(param, nn.Parameter(whole, param.requires_grad))
    bind(program, mesh.get_group())
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    for name, param in params.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, dtensors[param])
    for node in module.graph.find_nodes(op="get_attr"):
        if node.target in params:
            with module.graph.inserting_after(node):
                local = module.graph.call_method("to_local", (node,))
            node.replace_all_uses_with(local, lambda user, local=local: user is not local)
    module.recompile()
    return module
