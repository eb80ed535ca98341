"""Experts of transformers' models over ranks: each keeps some, and tokens travel."""

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
    """Cut a model's experts over the ranks of `mesh`, in place; each takes its own tokens to their experts.

    Ranks are given batches of their own. Call it before `fully_shard`; then shard each of the returned
    modules over the other dims, and have their gradients divided by the number of all ranks with tokens::

        for experts in cut_experts(model, mesh["ep"]):
            fully_shard(experts, mesh=expert_mesh(mesh)).set_gradient_divide_factor(data_ranks(mesh))

    Args:
        model: with modules that hold all experts of a layer and take (hidden_states, top_k_index,
            top_k_weights), as those of Mixtral, Qwen3-MoE, OLMoE or DeepSeek-V3 do.
        mesh: of one dimension, whose size divides the number of experts. The same model on all ranks.
        tp_mesh: ranks with the same tokens, which share them: see `shardwise.nn.ExpertCut`.

    Returns:
        The modules of experts, whose parameters are DTensors now. Collective over `mesh`.

    Raises:
        ShardingError: no such module, or a number of experts that is no multiple of the ranks.
    """
    found: list[Any] = [module for module in model.modules() if _takes_tokens(module)]
    if not found:
        raise ShardingError(
            f"{here()}: {type(model).__name__} has no module of experts that takes ({', '.join(_TAKES)});"
            " cut them by shardwise.nn.ExpertCut"
        )
    for module in found:
        _cut(module, ExpertCut(mesh, module.num_experts, tp_mesh=tp_mesh))
    return found


def _takes_tokens(module: nn.Module) -> bool:
    takes = list(inspect.signature(module.forward).parameters)[:3]
    own = dict(module.named_parameters(recurse=False))
    return takes == _TAKES and bool(own) and hasattr(module, "num_experts")


def _cut(module: nn.Module, cut: ExpertCut) -> None:
    cut.distribute(module)
    kind, mine = type(module), cut.count // cut.ranks

    def of_own_experts(tokens: Tensor, counts: Tensor) -> Tensor:
        """Call what the class does, on a module that has this rank's experts and no others."""
        own: Any = kind.__new__(kind)
        own.__dict__.update(vars(module))
        own.__dict__["_parameters"] = {
            name: None if param is None else local_part(param) for name, param in module._parameters.items()
        }
        own.__dict__["num_experts"] = mine
        chosen = torch.arange(mine, device=tokens.device).repeat_interleave(counts).unsqueeze(1)
        return kind.forward(own, tokens, chosen, torch.ones_like(chosen, dtype=tokens.dtype))  # type: ignore[no-any-return]

    mixture = cut.mixture(of_own_experts)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mixture(hidden_states, top_k_index, top_k_weights.to(hidden_states.dtype))

    module.forward = forward
