"""Strategies for a model of `transformers`: the plan that it brings, in the words of `styles`.

Its words say how a rank's layer is to be cut and what is to be sent before and after it. Here a value means
the whole one wherever its elements are, and moves when it has to, so only the cut is asked for. What a plan
says of gradients, of sums over ranks and of inputs that each rank has whole follows from it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


def read_prompted(folder: str | Path, ids: str, text: str | None, seed: int) -> tuple[nn.Module, Tensor, Any]:
    """The model in a folder, a prompt [1, length], and the tokenizer for a `text`. Nothing is fetched.

    Raises:
        ShardingError: transformers, a config or a tokenizer is not there, or no prompt.
    """
    try:
        import transformers
    except ImportError as error:
        raise ShardingError(
            f"models in folders need transformers: pip install transformers ({error})"
        ) from None
    tokenizer: Any = None
    try:
        found = list(map(int, ids.split()))
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if text is not None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            found = tokenizer(text)["input_ids"]
        torch.manual_seed(seed)
        model = made_from(config, folder if any(Path(folder).glob("*.safetensors")) else None)
    except (OSError, ValueError) as error:
        raise ShardingError(f"no model in {folder}, no tokenizer there, or no token ids: {error}") from error
    size = config.get_text_config().vocab_size
    if not found or not 0 <= min(found) <= max(found) < size:
        raise ShardingError(f"the prompt has the tokens {found}; expected at least one, from 0 to {size - 1}")
    return model, torch.tensor([found]), tokenizer


def made_from(config: Any, folder: str | Path | None = None) -> nn.Module:
    """The model that generates by `config`, in eval mode: with the weights in a folder, or random ones."""
    import transformers

    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM)
    kind: Any = kinds[bool(config.is_encoder_decoder)]
    if folder is None:
        model: nn.Module = kind.from_config(config)
    else:
        model = kind.from_pretrained(folder, config=config, local_files_only=True)
    return model.eval()
