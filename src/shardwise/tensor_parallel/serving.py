"""Runs a `transformers` language model over ranks: prefill and decode programs on one key/value cache.

    prefill    a prompt in, the logits of the next token out; fills the cache
    decode     a token in, the logits of the next one out; adds to the cache

Each rank's cache holds the heads of keys and values that its program computes. For a model with an encoder,
prefill runs the encoder and caches what the decoder attends to; decoding begins with the start token.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import ExportedProgram

from shardwise import _compat
from shardwise.comm.agree import agree
from shardwise.errors import ShardingError
from shardwise.tensor_parallel.explain import explain
from shardwise.tensor_parallel.package import default_group
from shardwise.tensor_parallel.pretrained import resolve_strategies
from shardwise.tensor_parallel.state import record_of
from shardwise.tensor_parallel.transform import tensor_parallel_transformation

Programs = tuple[ExportedProgram, ExportedProgram]  # prefill and decode
_OWN, _CROSS = "cache", "cross"
_POSITION = "next_position"
# settings of a generation config that need more than logits: a model, a tokenizer, candidates, a clock
_REFUSED = (
    *("constraints", "dola_layers", "force_words_ids", "guidance_scale"),
    *("max_time", "penalty_alpha", "stop_strings", "token_healing"),
)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    tokens: int,
    *,
    strategies: Mapping[str, Any] | Literal["auto"] | None = None,
    ends: Sequence[int] = (),
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Generate tokens [batch, at most `tokens`] greedily with a model cut over ranks. Collective.

    Logits are changed as the model's `generation_config` says (`scores_of`), except for its end tokens.

    Args:
        model: a generative model of `transformers` in eval mode, the same on every rank.
        prompt: token ids [batch, length], the same on every rank, all rows of one length.
        tokens: how many to generate.
        strategies: by names within the model; by default its own (`strategies_of`), or 'auto' if it has none.
        ends: tokens that end a row, which is then filled with the first of them until all rows end.
        group: the ranks; by default the default group.

    Raises:
        RankMismatchError: on every rank, if prompts differ.
        ShardingError: as `scores_of` and `export_steps`, or if the model cannot be cut.
    """
    group = group or default_group()
    agree(f"{tokens} tokens after {prompt.tolist()}", group=group, subject="what to generate")
    scores = scores_of(model, prompt, tokens, ends=ends)
    whole = export_steps(model, prompt, tokens)
    programs = cut_steps(
        whole,
        dist.get_rank(group),
        group.size(),
        resolve_strategies(model, strategies),
        group_name=group.group_name,
    )
    return greedy(programs, prompt, tokens, ends=ends, scores=scores)


def scores_of(
    model: Any, prompt: Tensor, tokens: int, *, ends: Sequence[int] = ()
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what a model's generation config does to logits: a function for `greedy`. Local.

    Settings of sampling and beams do not count. The model's values are not used.

    Raises:
        ShardingError: a model of no text, or one whose generation config has a setting that needs more than
            logits.
    """
    check_generates(model)
    name = type(model).__name__
    settings = {key: getattr(model.generation_config, key, None) for key in _REFUSED}
    if settings["guidance_scale"] == 1:
        del settings["guidance_scale"]
    if wrong := [f"{key}={value!r}" for key, value in settings.items() if value not in (None, False)]:
        raise ShardingError(
            f"the generation config of {name} sets {', '.join(wrong)}, which greedy generation over ranks"
            " cannot apply; remove it from generation_config, or generate with the whole model"
        )
    taken: list[tuple[Tensor, Any]] = []
    vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", 0)

    def take(_: Any, begin: Tensor, logits_processor: Any, **__: Any) -> Tensor:
        if vocabulary:  # some check their tokens when they are called
            logits_processor(begin, torch.zeros(len(begin), vocabulary))
        taken.append((begin, logits_processor))
        return begin

    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
    options |= {"use_cache": False, "cache_implementation": None, "eos_token_id": [*ends] or None}
    if model.config.is_encoder_decoder:  # or it would run the encoder
        options["encoder_outputs"] = (torch.empty(0),)
    try:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            custom_generate=take,
            **options,
        )
    except Exception as error:
        cause = str(error).strip().partition("\n")[0]
        raise ShardingError(
            f"{name} cannot generate with its generation config ({type(error).__name__}: {cause}); change it"
        ) from error
    begin, processors = taken[0]
    return lambda generated, logits: processors(torch.cat([begin, generated], 1), logits.float())


def check_generates(model: Any) -> None:
    """Raise ShardingError for a model that generates no text. Local."""
    if not getattr(model, "can_generate", bool)():
        raise ShardingError(
            f"{type(model).__name__} generates no text; use a causal language model, or one with an encoder"
            " and a decoder"
        )


def check_positions(model: Any, prompt: Tensor, tokens: int) -> None:
    """Raise ShardingError if a model has a table of fewer positions than it will look up. Local."""
    lengths, is_pair = (prompt.shape[1], tokens), model.config.is_encoder_decoder
    window: Any = getattr(model.config, "window_size", None)
    kinds = getattr(model.config, "attention_layers", None) or ()  # GPT-Neo's
    if "local" in kinds and sum(lengths) > window:
        raise ShardingError(
            f"{type(model).__name__} places its windows of {window} tokens by the size of its cache, which is"
            f" fixed for {sum(lengths)} (prompt and tokens); generate fewer tokens, or use the whole model"
        )
    needed = max(lengths) if is_pair else sum(lengths) - 1  # nothing follows the last token
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is None or needed <= limit:
        return
    for name, module in model.named_modules():  # rotary embeddings have no table, and no end
        table = module._buffers.get("embed_positions")
        if isinstance(module, nn.Embedding) and re.search("wpe$|position", name):
            table = module.weight
        if table is not None and len(table) - getattr(module, "offset", 0) == limit:  # not of images
            raise ShardingError(
                f"{type(model).__name__} looks up {needed} positions, but its table {name} has only {limit};"
                " generate fewer tokens, or use a model with more positions"
            )


def export_steps(model: nn.Module, prompt: Tensor, tokens: int) -> Programs:
    """Export the whole model's prefill for prompts of `prompt`'s size, and decode of up to `tokens`. Local.

    Raises:
        ShardingError: `tokens` is less than 1; torch.export fails, or the model does with a cache of fixed
            size; or within the prompt and `tokens` its rotary frequencies would change, or learned positions
            end.
    """
    if tokens < 1:
        raise ShardingError(f"tokens={tokens}: prefill gives the first token; generate at least 1")
    check_positions(model, prompt, tokens)
    step = _Step(model, prompt, tokens)
    try:
        with torch.no_grad(), _fixed_frequencies(model, prompt.shape[1] + tokens):
            prefill = torch.export.export(step.module, (prompt,), strict=False)
            _compat.check_index_copies(prefill)
            step.prefill = False
            return prefill, torch.export.export(step.module, (prompt[:, :1],), strict=False)
    except ShardingError:
        raise
    except Exception as error:
        cause = str(error).strip().partition("\n")[0]
        raise ShardingError(
            f"{type(model).__name__} cannot be exported with a cache of fixed size"
            f" ({type(error).__name__}: {cause}); generate with the whole model, or use another model"
        ) from error


def cut_steps(
    whole: Programs,
    rank: int,
    world_size: int,
    strategies: Mapping[str, Any] | Literal["auto"],
    *,
    device_type: str = "cpu",
    group_name: str | None = None,
    fill: Callable[[ExportedProgram], Any] = lambda _: None,
) -> Programs:
    """Return one rank's prefill and decode, which share weights and cache. Local.

    Arguments are those of `tensor_parallel_transformation`, except:

    Args:
        fill: gives the prefill's weights values if the model has none, for example by `materialize`.
    """
    transform = partial(tensor_parallel_transformation, group_name=group_name)
    target = rank, world_size, device_type
    prefill = transform(whole[0], *target, strategies)
    fill(prefill)
    if isinstance(strategies, str):
        strategies = record_of(prefill)["strategies"]
        if rank == 0:
            warnings.warn(describe_choice(prefill), stacklevel=2)
    return prefill, transform(whole[1], *target, strategies, sharing=prefill)


def describe_choice(program: ExportedProgram) -> str:
    """Describe what "auto" chose: modules by style, layers merged, and the bytes that this rank holds."""
    by_style: dict[str, dict[str, None]] = {}
    for name, style in record_of(program)["strategies"].items():
        by_style.setdefault(str(style), {})[re.sub(r"\b\d+\b", "*", name)] = None
    listing = "; ".join(f"{style}: {', '.join(names)}" for style, names in by_style.items())
    summary = explain(program)
    return (
        f"strategies='auto' chose {listing or 'to cut nothing, which is fastest (pass strategies to cut)'};"
        f" rank {summary.rank} holds {summary.bytes_here:,} of {summary.bytes_whole:,} bytes"
    )


@torch.no_grad()
def greedy(
    programs: Programs,
    prompt: Tensor,
    tokens: int,
    *,
    ends: Sequence[int] = (),
    scores: Callable[[Tensor, Tensor], Tensor] = lambda _, logits: logits,
) -> Tensor:
    """Generate tokens greedily, as `generate` does, with this rank's programs. Collective.

    Args:
        scores: takes the tokens generated so far, [batch, n], and the next one's logits; returns what to take
            the largest of (`scores_of`).
    """
    prefill, decode = (program.module() for program in programs)
    end_ids = torch.tensor(ends)
    generated = token = scores(prompt[:, :0], prefill(prompt)).argmax(-1, keepdim=True)
    while generated.shape[1] < tokens and not (ended := torch.isin(token, end_ids)).all():
        token = scores(generated, decode(token)).argmax(-1, keepdim=True)
        token = token.masked_fill(ended, ends[0]) if ends else token
        generated = torch.cat([generated, token], 1)
    return generated


def is_state(name: str) -> bool:
    """Return whether a program has this buffer beside the model: keys, values, or the next position."""
    return name == _POSITION or re.fullmatch(rf"({_OWN}|{_CROSS})_(keys|values)_\d+", name) is not None


def cache_bytes(program: ExportedProgram) -> int:
    """Return the bytes of keys and values in a program's cache."""
    constants = program.constants.items()
    return sum(x.nbytes for name, x in constants if is_state(name) and isinstance(x, Tensor) and x.ndim)


@contextmanager
def _fixed_frequencies(model: nn.Module, longest: int) -> Iterator[None]:
    """Fix rotary frequencies for `longest` tokens; a program cannot choose them by the number of tokens."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            kinds = getattr(module, "rope_type", None)
            by_layer = kinds if isinstance(kinds, dict) else {"": kinds}
            changing = ((key, kind) for key, kind in by_layer.items() if kind)
            dynamic = {key: kind for key, kind in changing if "dynamic" in kind or kind == "longrope"}
            for key, kind in dynamic.items():
                rope = module.config.rope_parameters
                rope = rope[key] if key else rope
                limit = rope.get("original_max_position_embeddings") or module.original_max_seq_len
                if longest > limit:
                    raise ShardingError(
                        f"{name} of {type(model).__name__} ({kind}) changes its frequencies after {limit}"
                        f" tokens, which an exported program cannot do: prompt and generated tokens"
                        f" are {longest}; generate fewer tokens, or use the whole model"
                    )
                prefix = f"{key}_" if key else ""
                original = getattr(module, f"{prefix}original_inv_freq")
                stack.enter_context(mock.patch.dict(module._buffers, {f"{prefix}inv_freq": original}))
            if dynamic:
                fixed = by_layer | dict.fromkeys(dynamic, "default")
                kind = fixed if isinstance(kinds, dict) else fixed[""]
                stack.enter_context(mock.patch.object(module, "rope_type", kind))
        yield


class _Step:
    """One call of a model, on caches that are buffers of `module`, whose other names are the model's own."""

    config: Any
    prefill = True  # whether this is the first call, of a whole prompt

    def __init__(self, model: nn.Module, prompt: Tensor, tokens: int) -> None:
        self.config, self.prompt_shape = model.config, prompt.shape
        self.model, self.module = copy.copy(model), nn.Module()  # a child's name would precede the model's
        self.module._modules, self.module._parameters = model._modules, model._parameters
        self.model._buffers = self.module._buffers = dict(model._buffers)
        vars(self.module)["forward"] = self.forward
        length = prompt.shape[1]
        sizes = [tokens, length] if self.config.is_encoder_decoder else [length + tokens]
        self.module.register_buffer(_POSITION, torch.zeros((), dtype=torch.long), persistent=False)
        self.layers = [_make_layers(model, len(prompt), size) for size in sizes]
        for name, layer, key in self._buffers_of_layers():
            self.module.register_buffer(name, getattr(layer, key), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the token after `ids`, [batch, vocabulary]."""
        from transformers.cache_utils import Cache, EncoderDecoderCache

        position = self.module.get_buffer(_POSITION)
        begin = torch.zeros_like(position) if self.prefill else position.clone()
        for name, layer, key in self._buffers_of_layers():
            setattr(layer, key, self.module.get_buffer(name))
        batch: dict[str, Any] = {"input_ids": ids}
        if self.config.is_encoder_decoder and self.prefill:
            batch["decoder_input_ids"] = ids = torch.full_like(ids[:, :1], _start_token(self.model))
        elif self.config.is_encoder_decoder:  # the encoder's output is in the cache: only its sizes are used
            encoded = torch.zeros(*self.prompt_shape, self.config.hidden_size)
            batch = {"encoder_outputs": (encoded,), "decoder_input_ids": ids}
        all_layers = [layer for layers in self.layers for layer in layers]
        for layer in all_layers:
            layer.cumulative_length = 0 if self.prefill else 1  # EncoderDecoderCache reads it as a number
        caches = [Cache(layers=layers) for layers in self.layers]
        cache = EncoderDecoderCache(*caches) if len(caches) > 1 else caches[0]
        for layer in all_layers:
            layer.cumulative_length = begin.clone()
        result = self.model(**batch, past_key_values=cache, use_cache=True)
        position.copy_(begin + ids.shape[1])
        return result.logits[:, -1]  # type: ignore[no-any-return]

    def _buffers_of_layers(self) -> list[tuple[str, Any, str]]:
        return [
            (f"{kind}_{key}_{index}", layer, key)
            for kind, layers in zip((_OWN, _CROSS), self.layers, strict=False)
            for index, layer in enumerate(layers)
            for key in ("keys", "values")
        ]


def _start_token(model: Any) -> Any:
    """Return the token that a decoder begins with, as transformers chooses it."""
    start: Any = model.generation_config.decoder_start_token_id
    return model.generation_config.bos_token_id if start is None else start


def _make_layers(model: Any, batch: int, capacity: int) -> list[Any]:
    """Return a cache of `capacity` tokens for each layer of the model's decoder."""
    from transformers.cache_utils import StaticCache, StaticLayer
    from transformers.configuration_utils import get_head_shapes

    config = model.config.get_text_config(decoder=True)
    templates = StaticCache(config=config, max_cache_len=capacity).layers
    misfit = next((layer for layer in templates if not isinstance(layer, StaticLayer)), None)
    if misfit is not None:
        raise ShardingError(
            f"a layer of {type(model).__name__} has the cache {type(misfit).__name__}; only attention's keys"
            " and values can be cached by heads"
        )
    heads, width = (x if isinstance(x, list) else [x] * len(templates) for x in get_head_shapes(config))
    layers = [StaticLayer(max_cache_len=capacity) for _ in templates]  # of all tokens: windows are masked
    for layer, count, size in zip(layers, heads, width, strict=True):
        latent = getattr(config, "kv_lora_rank", None)  # from which every head makes its keys and values
        count, *sizes = (1, latent, config.qk_rope_head_dim) if latent else (count, size, size)
        empty = [torch.empty(batch, count, 0, dim, dtype=model.dtype, device=model.device) for dim in sizes]
        layer.lazy_initialization(*empty)
    return layers
