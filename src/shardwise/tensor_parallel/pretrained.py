"""Strategies for a model of `transformers`: the plan that it brings, in the words of `styles`.

Its words say how a rank's layer is to be cut and what is to be sent before and after it. Here a value means
the whole one wherever its elements are, and moves when it has to, so only the cut is asked for. What a plan
says of gradients, of sums over ranks and of inputs that each rank has whole follows from it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardingError

_COLUMN, _ROW = "colwise", "rowwise"
_WORDS: dict[str, str | None] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "embedding_colwise"), _COLUMN),
    **dict.fromkeys(("packed_colwise", "packed_rowwise"), _COLUMN),  # both: the outputs of a fused weight
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise"), _ROW),
    "sequence_parallel": "sequence_parallel",
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"), None),
    **dict.fromkeys(("all_reduce", "local_params", "moe_tp_experts", "moe_identity_expert"), None),
}
_FLIPPED = {_COLUMN: _ROW, _ROW: _COLUMN}

# Of kinds that bring none: columns, then rows, by the ends of names.
_PLANS: dict[str, tuple[str, str]] = {
    "gpt2": ("attn.c_attn mlp.c_fc lm_head", "attn.c_proj mlp.c_proj"),
    "t5": ("SelfAttention.[qkv] EncDecAttention.[qkv] wi wi_0 wi_1 lm_head", "Attention.o wo"),
}


def strategies_of(model: Any) -> dict[str, str]:
    """Strategies for a model, or for the one that generates by a config, from the plan that it brings.

    Entries that fit nothing in this model, or parameters that are vectors by themselves, are left out.

    Raises:
        ShardingError: a model without a plan, or a plan with a word that is not known here, naming it.
    """
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = made_from(model)
    config: Any = getattr(model, "config", None)
    plan = dict(getattr(model, "_tp_plan", None) or {})
    columns, rows = _PLANS.get(getattr(config, "model_type", ""), ("", ""))
    plan = plan or {f"*{name}": _COLUMN for name in columns.split()} | {f"*{n}": _ROW for n in rows.split()}
    if not plan:
        raise ShardingError(
            f"{type(model).__name__} brings no tensor-parallel plan; give strategies by module, or 'auto'"
        )
    parameters = list(model.named_parameters(remove_duplicate=False))
    fused = {name.rpartition(".")[0] for name, word in plan.items() if word == "packed_rowwise"}
    found = {}
    for name, word in plan.items():
        if word not in _WORDS:
            raise ShardingError(
                f"the plan of {type(model).__name__} has {word!r} for {name!r}, which cannot be done with a"
                f" program; known are {', '.join(sorted(_WORDS))}"
            )
        style = _WORDS[word]
        if name.rpartition(".")[0] in fused and word in _FLIPPED:  # beside [in, out], by dims and not by use
            style = _FLIPPED[word]
        fits = [
            x for own, x in parameters if fnmatchcase(own, name) or fnmatchcase(own.rpartition(".")[0], name)
        ]
        if style is not None and any(x.ndim > 1 for x in fits):
            found[name] = style
    return found


def made_from(config: Any) -> nn.Module:
    """The model that generates by `config`, with random weights, in eval mode."""
    import transformers

    kinds: Any = (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM)
    model: nn.Module = kinds[bool(config.is_encoder_decoder)].from_config(config)
    return model.eval()
