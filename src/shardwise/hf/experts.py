"""Expert parallelism for transformers models: each rank keeps some experts, and tokens travel to them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ShardingError, here
from shardwise.nn.experts import ExpertCut
from shardwise.sharded_tensor.kinds import local_part

_TAKES = ["hidden_states", "top_k_index", "top_k_weights"]


def cut_experts(model: nn.Module, mesh: DeviceMesh, *, tp_mesh: DeviceMesh | None = None) -> list[nn.Module]:
    """Cut a model's experts over the ranks of `mesh`, in place; tokens travel to the ranks of their experts.

    Collective over `mesh`. Each rank is given its own batch. Call this before `fully_shard`; then shard each
    returned module over the other dims, and divide its gradients by the number of all ranks with tokens::

        for experts in cut_experts(model, mesh["ep"]):
            fully_shard(experts, mesh=expert_mesh(mesh)).set_gradient_divide_factor(data_ranks(mesh))

    Args:
        model: the same on all ranks. It has modules that hold all experts of a layer and take (hidden_states,
            top_k_index, top_k_weights), as in Mixtral, Qwen3-MoE, OLMoE or DeepSeek-V3.
        mesh: a 1-D mesh whose size divides the number of experts.
        tp_mesh: ranks that have the same tokens and divide them: see `shardwise.nn.ExpertCut`.

    Returns:
        The modules of experts. Their parameters are now DTensors.

    Raises:
        ShardingError: if there is no such module, or the ranks do not divide the number of experts.
    """
    modules: list[Any] = [module for module in model.modules() if _takes_tokens(module)]
    if not modules:
        raise ShardingError(
            f"{here()}: {type(model).__name__} has no module of experts that takes ({', '.join(_TAKES)});"
            " cut them by shardwise.nn.ExpertCut"
        )
    for module in modules:
        _cut_module(module, ExpertCut(mesh, module.num_experts, tp_mesh=tp_mesh))
    return modules


def _takes_tokens(module: nn.Module) -> bool:
    takes = list(inspect.signature(module.forward).parameters)[:3]
    parameters = dict(module.named_parameters(recurse=False))
    return takes == _TAKES and bool(parameters) and hasattr(module, "num_experts")


def _cut_module(module: nn.Module, cut: ExpertCut) -> None:
    cut.distribute(module)
    kind, local_count = type(module), cut.count // cut.ranks

    def run_local_experts(tokens: Tensor, counts: Tensor) -> Tensor:
        """Call the class's forward on a module that has only this rank's experts."""
        local: Any = kind.__new__(kind)
        local.__dict__.update(vars(module))
        local.__dict__["_parameters"] = {
            name: None if param is None else local_part(param) for name, param in module._parameters.items()
        }
        local.__dict__["num_experts"] = local_count
        indices = torch.arange(local_count, device=tokens.device).repeat_interleave(counts).unsqueeze(1)
        return kind.forward(local, tokens, indices, torch.ones_like(indices, dtype=tokens.dtype))  # type: ignore[no-any-return]

    mixture = cut.mixture(run_local_experts)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mixture(hidden_states, top_k_index, top_k_weights.to(hidden_states.dtype))

    module.forward = forward
