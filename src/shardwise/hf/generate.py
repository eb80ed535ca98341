"""Generation with a folder's model cut over ranks: each rank reads only its part of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import ExportedProgram

from shardwise import _compat
from shardwise.comm.agree import together
from shardwise.errors import ShardingError
from shardwise.files.stores import on_disk
from shardwise.files.tensors import TensorFiles
from shardwise.hf.boxes import Boxes
from shardwise.hf.load import library, replace_tensors, skeleton_of, take_values
from shardwise.layout import Box
from shardwise.tensor_parallel import counts, cut_steps, export_steps, greedy, materialize
from shardwise.tensor_parallel.package import default_group
from shardwise.tensor_parallel.pretrained import build_model, resolve_strategies
from shardwise.tensor_parallel.serving import Programs, cache_bytes, is_state
from shardwise.tensor_parallel.state import record_of

Strategies = Mapping[str, Any] | Literal["auto"] | None


def cut_folder(
    folder: str | Path, prompt: Tensor, tokens: int, rank: int, world_size: int, strategies: Strategies = None
) -> Programs:
    """Cut the model in a folder as `cut_steps` does, but never hold it whole. Local; raises as `hf.load`."""
    mode = _compat.FakeTensorMode(allow_non_fake_inputs=True)

    def drop_values(_: str, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

    with TensorFiles([Path(folder)]) as files:
        model = skeleton_of(folder, None, "auto", True, files)
        values, buffers = take_values(model), _initialised_buffers(model)
        with mode:
            replace_tensors(model, drop_values)
            steps = export_steps(model.eval(), torch.empty_like(prompt), tokens)
        plan = resolve_strategies(model, strategies)
        return cut_steps(steps, rank, world_size, plan, fill=partial(_fill, values=values, buffers=buffers))


def _initialised_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that no file has, by name, initialised by the model's own rules."""
    buffers: dict[str, Tensor] = {}

    def give_memory(name: str, tensor: Tensor) -> Tensor:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # what transformers looks at
        if isinstance(tensor, nn.Parameter) or not tensor.is_meta:
            return tensor
        buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffers[name]

    replace_tensors(model, give_memory)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()
    return buffers


def _fill(program: ExportedProgram, *, values: Mapping[str, Boxes], buffers: Mapping[str, Tensor]) -> None:
    shapes = {name: entry["shape"] for name, entry in record_of(program)["parameters"].items()}

    def find(name: str) -> Any:
        value = values.get(name)
        if value is None and not is_state(name):
            return None

        def read(dim: int, begin: int, end: int) -> Tensor:
            offsets, sizes = [0] * len(shapes[name]), list(shapes[name])
            if end >= 0:
                offsets[dim], sizes[dim] = begin, end - begin
            return torch.zeros(sizes) if value is None else value.read(Box(tuple(offsets), tuple(sizes)))

        return shapes[name], read

    materialize(program, find, values=buffers)


def generate_command(
    alive: Callable[[], None],
    folder: str | Path,
    ids: str,
    text: str | None,
    tokens: int,
    seed: int,
    strategies: Strategies,
) -> str:
    """Generate with the model in a folder, and return the text to print. Collective over the default group.

    The prompt is `ids`, numbers separated by spaces, or `text`. Without weights, random ones are drawn from
    `seed`. Raises ShardingError on every rank if something cannot be read or the prompt is invalid.
    """
    group = default_group()
    rank, ranks = dist.get_rank(group), group.size()
    prepared: list[Any] = []

    def prepare() -> None:
        config, prompt, tokenizer = _read_prompt(on_disk(folder), ids, text)
        if any(Path(folder).glob("*.safetensors")):
            programs = cut_folder(folder, prompt, tokens, rank, ranks, strategies)
        else:
            torch.manual_seed(seed)
            model = build_model(config)
            plan = resolve_strategies(model, strategies)
            programs = cut_steps(export_steps(model, prompt, tokens), rank, ranks, plan)
        prepared.extend((programs, prompt, tokenizer))

    together(f"reading {folder}", prepare, group=group, kind=ShardingError)
    alive()
    programs, prompt, tokenizer = prepared
    generated = greedy(programs, prompt, tokens, ends=_ends(folder))[0]
    lines = [" ".join(map(str, generated.tolist()))]
    lines += [] if tokenizer is None else [tokenizer.decode(generated, skip_special_tokens=True)]
    messages = ", ".join(f"{count} {kind}" for kind, count in counts(programs[1]).items()) or "nothing"
    return "\n".join(
        [*lines, f"A token: {messages}; {cache_bytes(programs[1]):,} bytes of cache on rank {rank}", ""]
    )


def _read_prompt(folder: str | Path, ids: str, text: str | None) -> tuple[Any, Tensor, Any]:
    """Read a folder's config, a prompt [1, length], and for a text the tokenizer. Download nothing."""
    transformers, tokenizer, source = library(), None, "config"
    if (text is None) == (not ids):
        raise ShardingError("give one prompt, as --ids or as --text")
    if not Path(folder).is_dir():  # transformers would take it for the name of a model on the hub
        raise ShardingError(f"{folder}: no such folder; expected one with a transformers config")
    try:
        tokens = list(map(int, ids.split()))
    except ValueError as error:
        raise ShardingError(f"--ids takes token ids separated by spaces, found {ids!r}") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if text is not None:
            source = "tokenizer"
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            tokens = tokenizer(text)["input_ids"]
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ShardingError(f"cannot read the {source} in {folder}: {first}") from error
    end = config.get_text_config().vocab_size
    if not tokens or not 0 <= min(tokens) <= max(tokens) < end:
        raise ShardingError(f"the prompt has the tokens {tokens}; expected at least one, from 0 to {end - 1}")
    return config, torch.tensor([tokens]), tokenizer


def _ends(folder: str | Path) -> list[int]:
    """Return the end-of-text tokens that the folder's configs name."""
    transformers = library()
    try:
        ends = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        ends = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
