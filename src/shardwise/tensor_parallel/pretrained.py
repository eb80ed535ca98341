"""Strategies for a model of `transformers`: the plan that the model defines, in the words of `styles`.

A plan says how each rank's layer is cut, and what is sent before and after it. Here a value stands for the
whole value, wherever its elements are, and moves when needed, so only the cut is used. What a plan says
about gradients, sums over ranks and inputs that each rank has whole follows from the cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from shardwise.errors import ShardingError, from_extra

_COLUMN, _ROW = "colwise", "rowwise"
_WORDS: dict[str, str | None] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "embedding_colwise"), _COLUMN),
    **dict.fromkeys(("packed_colwise", "packed_rowwise"), _COLUMN),  # both cut the outputs of a fused weight
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise"), _ROW),
    "sequence_parallel": "sequence_parallel",
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"), None),
    **dict.fromkeys(("all_reduce", "local_params", "moe_tp_experts", "moe_identity_expert"), None),
}
LEAST_CUT = 0.5  # of a model's bytes; a plan that cuts less warns
_FLIPPED = {_COLUMN: _ROW, _ROW: _COLUMN}

# For model types without a plan: columns, then rows, by the ends of names.
_PLANS: dict[str, tuple[str, str]] = {
    "gpt2": ("attn.c_attn mlp.c_fc lm_head", "attn.c_proj mlp.c_proj"),
    "t5": ("SelfAttention.[qkv] EncDecAttention.[qkv] wi wi_0 wi_1 lm_head", "Attention.o wo"),
}


def resolve_strategies(
    model: nn.Module, strategies: Mapping[str, Any] | Literal["auto"] | None
) -> Mapping[str, Any] | Literal["auto"]:
    """Return `strategies`; if None, those of the model's plan, or "auto" with a warning if it has none."""
    if strategies is not None:
        return strategies
    if _plan_of(model):
        return strategies_of(model)
    warnings.warn(
        f"{type(model).__name__} has no tensor-parallel plan, so strategies='auto' chooses how it is cut",
        stacklevel=3,
    )
    return "auto"


def strategies_of(model: Any) -> dict[str, str]:
    """Return strategies from the plan that a model, or the generative model of a config, defines.

    Entries that match nothing in this model, or only vectors, are left out. Warns if the plan leaves most of
    the model's bytes whole on every rank.

    Raises:
        ShardingError: a model without a plan, or a plan with a word that is not supported.
    """
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = build_model(model)
    plan = _plan_of(model)
    if not plan:
        raise ShardingError(
            f"{type(model).__name__} has no tensor-parallel plan; pass strategies by module, or 'auto'"
        )
    parameters = list(model.named_parameters(remove_duplicate=False))
    fused = {name.rpartition(".")[0] for name, word in plan.items() if word == "packed_rowwise"}
    strategies, cut = {}, dict[int, int]()
    for name, word in plan.items():
        if word not in _WORDS:
            raise ShardingError(
                f"the plan of {type(model).__name__} has {word!r} for {name!r}, which is not supported;"
                f" expected one of {', '.join(sorted(_WORDS))}"
            )
        style = _WORDS[word]
        if name.rpartition(".")[0] in fused and word in _FLIPPED:  # there, words name dims, not uses
            style = _FLIPPED[word]
        weights = [
            x for key, x in parameters if fnmatchcase(key, name) or fnmatchcase(key.rpartition(".")[0], name)
        ]
        if style is not None and any(x.ndim > 1 for x in weights):
            strategies[name] = style
            cut |= {id(x): x.nbytes for x in weights if x.ndim > 1}
    whole = sum({id(x): x.nbytes for _, x in parameters}.values())
    if sum(cut.values()) < LEAST_CUT * whole:
        warnings.warn(
            f"the plan of {type(model).__name__} cuts only {sum(cut.values()) / max(whole, 1):.0%} of its"
            f" {whole:,} bytes ({', '.join(strategies) or 'nothing'}); every rank holds the rest whole. Pass"
            " strategies='auto', or strategies by module",
            stacklevel=2,
        )
    return strategies


def _plan_of(model: nn.Module) -> dict[str, str]:
    """Return the plan that a model defines, or this module's for its type; empty if there is none."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    columns, rows = _PLANS.get(getattr(getattr(model, "config", None), "model_type", ""), ("", ""))
    return plan or {f"*{name}": _COLUMN for name in columns.split()} | {f"*{n}": _ROW for n in rows.split()}


def build_model(config: Any) -> nn.Module:
    """Return the generative model of `config`, with random weights, in eval mode."""
    transformers = from_extra("hf", "transformers", feature="a model from a config")
    kinds: Any = (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM)
    model: nn.Module = kinds[bool(config.is_encoder_decoder)].from_config(config)
    return model.eval()
