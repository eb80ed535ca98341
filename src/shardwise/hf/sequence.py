"""Sequence parallelism for transformers' causal language models: each rank computes a piece of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import LifecycleError, ShardingError
from shardwise.hf.load import library
from shardwise.nn.sequence import SequenceCut

_IGNORED = -100  # label that the loss ignores
# Kinds of layers in which only attention mixes tokens.
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def cut_sequences(model: Any, group: dist.ProcessGroup | DeviceMesh) -> SequenceCut:
    """Cut each sequence of a causal language model's batches over the ranks of `group`.

    Every rank is given the same whole batch. Its logits are those of its own tokens. The mean of the ranks'
    losses is the whole batch's loss, and gradients that `fully_shard` averages over a mesh with these ranks
    are the whole batch's. Call this before compiling the model. It cannot be undone.

    Args:
        model: a transformers model whose attention uses transformers' interface ("sdpa",
            "flash_attention_2", ...).
        group: the ranks, which take the pieces in the group's order; or a 1-D mesh.

    Returns:
        The cut, for what the caller computes itself, such as other losses or metrics.

    Raises:
        ShardingError: if the model is of another kind; and, from the model's forward, if it is given
            positions or a cache.
        LifecycleError: from the model's forward, if attention did not go through the interface.
    """
    transformers = library()
    name, config = type(model).__name__, model.config
    kind = config._attn_implementation
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    loss = getattr(getattr(model, "loss_function", None), "__name__", None)
    if kind not in functions or kinds or loss != "ForCausalLMLoss":
        raise ShardingError(
            f"{name} has attention {kind!r}, other layers {kinds} and the loss {loss}; expected attention of"
            " transformers' interface ('sdpa', 'flash_attention_2', ...), no other layers, and the loss"
            " ForCausalLMLoss. Load it with attn_implementation='sdpa', or use shardwise.nn.SequenceCut"
        )
    cut = SequenceCut(group)
    interface = f"{kind}_by_heads_of_{cut.group.group_name}"
    called: set[Any] = set()

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        called.add(module)
        options.pop("position_ids", None)  # of this rank's tokens
        groups = query.shape[-3] // key.shape[-3]

        def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Tensor:
            grouped = query.shape[-3] == groups * key.shape[-3]
            target = module if grouped else _Ungrouped(module)
            output, _ = functions[kind](target, query, key, value, attention_mask, **options)
            return output.transpose(1, 2)  # type: ignore[no-any-return]

        return cut.attention(attend)(query, key, value, attention_mask=mask).transpose(1, 2), None

    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    make_mask: Callable[..., Any] = masks[kind]

    def mask(*args: Any, q_length: int, kv_length: int, **options: Any) -> Any:
        return make_mask(*args, q_length=cut.length, kv_length=cut.length, **options)

    def take_piece(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = {**dict(zip(("input_ids", "attention_mask"), args, strict=False)), **kwargs}
        extra = {key for key in ("position_ids", "past_key_values") if kwargs.get(key) is not None}
        if extra or len(args) > 2:
            raise ShardingError(
                f"{name} was given {', '.join(sorted(extra)) or 'more than two arguments without names'};"
                " expected input_ids or inputs_embeds, attention_mask and labels of whole sequences. Packed"
                " sequences and caches cannot be cut"
            )
        called.clear()
        for key in ("input_ids", "inputs_embeds"):
            if kwargs.get(key) is not None:
                kwargs[key] = cut(kwargs[key])
                kwargs["position_ids"] = cut.positions(kwargs[key].device).unsqueeze(0)
        if kwargs.get("labels") is not None:
            labels = F.pad(kwargs["labels"][..., 1:], (0, 1), value=_IGNORED)
            count = kwargs.get("num_items_in_batch")
            count = (labels != _IGNORED).sum() if count is None else count
            kwargs["labels"] = kwargs["shift_labels"] = cut(labels).contiguous()
            kwargs["num_items_in_batch"] = count / cut.ranks
        return (), kwargs | {"use_cache": False}

    def check(*_: Any) -> None:
        if len(called) < config.num_hidden_layers:
            raise LifecycleError(
                f"only {len(called)} of {config.num_hidden_layers} layers of {name} computed attention by the"
                " interface; the others saw only a piece of each sequence. Use shardwise.nn.SequenceCut"
            )

    functions.register(interface, attention)
    masks.register(interface, mask)
    model.set_attn_implementation(interface)
    model.register_forward_pre_hook(take_piece, with_kwargs=True)
    model.register_forward_hook(check)
    return cut


class _Ungrouped:
    """An attention module, seen as one in which each query head has its own keys."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
