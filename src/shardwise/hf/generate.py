"""Generation with a folder's model cut over ranks: each rank reads only its part of the files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import ExportedProgram

from shardwise import _compat
from shardwise.comm.agree import together
from shardwise.errors import ShardingError, ShardwiseError
from shardwise.files.tensors import TensorFiles
from shardwise.hf.boxes import Boxes
from shardwise.hf.load import find_weights, library, quiet, replace_tensors, skeleton_of, take_values
from shardwise.layout import Box
from shardwise.tensor_parallel import counts, cut_steps, export_steps, greedy, materialize
from shardwise.tensor_parallel.package import default_group
from shardwise.tensor_parallel.pretrained import build_model, resolve_strategies
from shardwise.tensor_parallel.serving import (
    Programs,
    cache_bytes,
    check_generates,
    check_positions,
    is_state,
    scores_of,
)
from shardwise.tensor_parallel.state import record_of
from shardwise.tensor_parallel.styles import plan_of

Strategies = Mapping[str, Any] | Literal["auto"] | None
# suffixes of files of weights, also of those that are not read
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf"}


def cut_folder(
    folder: str | Path, prompt: Tensor, tokens: int, rank: int, world_size: int, strategies: Strategies = None
) -> Programs:
    """Cut the model in a folder as `cut_steps` does, but never hold it whole. Local; raises as `hf.load`."""
    mode = _compat.FakeTensorMode(allow_non_fake_inputs=True)

    def drop_values(_: str, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

    with TensorFiles(find_weights(folder)) as files:
        model = _with_settings(skeleton_of(folder, None, "auto", True, files), folder)
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
    prompt: Sequence[int],
    tokens: int,
    seed: int,
    strategies: Strategies,
) -> tuple[list[int], str, list[str]]:
    """Generate with the model in a folder; return the tokens, a line on what each takes, and warnings.

    Collective over the default group. Without weights, random ones are drawn from `seed`. Raises
    ShardwiseError on every rank if the model cannot be read or cut.
    """
    group = default_group()
    rank, ranks = dist.get_rank(group), group.size()
    ids, cut = torch.tensor([prompt]), list[Programs]()

    def prepare() -> None:
        if _has_weights(folder):
            cut.append(cut_folder(folder, ids, tokens, rank, ranks, strategies))
            return
        warnings.warn(f"{folder} has no weights: they are random, from seed {seed}", stacklevel=2)
        torch.manual_seed(seed)
        config = library().AutoConfig.from_pretrained(folder, local_files_only=True)
        model = _with_settings(build_model(config), folder)
        plan = resolve_strategies(model, strategies)
        cut.append(cut_steps(export_steps(model, ids, tokens), rank, ranks, plan))

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            together(f"cutting the model in {folder}", prepare, group=group, kind=ShardingError)
    except ShardingError as error:  # what this rank found says it best
        raise error.__cause__ if isinstance(error.__cause__, ShardwiseError) else error from None
    alive()
    programs, model = cut[0], model_of(folder)
    ends, scores = _ends_and_scores(model, ids, tokens)
    generated: list[int] = greedy(programs, ids, tokens, ends=ends, scores=scores)[0].tolist()
    own = Path(_compat.__file__).parents[1]  # others' warnings are not about this model
    notes = [str(x.message) for x in caught if Path(x.filename).is_relative_to(own)]
    messages = ", ".join(f"{count} {kind}" for kind, count in counts(programs[1]).items()) or "nothing"
    line = f"A token: {messages}; {cache_bytes(programs[1]):,} bytes of cache on rank {rank}"
    return generated, line, list(dict.fromkeys(notes))


def _has_weights(folder: str | Path) -> bool:
    return any(file.suffix in _WEIGHTS or file.match("*.index.json") for file in Path(folder).iterdir())


def model_of(folder: str | Path) -> Any:
    """Return the generative model in a folder without values, with its generation config. Local."""
    transformers = library()
    try:
        with quiet(), torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            if _has_weights(folder):
                find_weights(folder)
                model = skeleton_of(config, None, "auto", True, TensorFiles([]))
            else:
                model = build_model(config)
            check_generates(model)
            return _with_settings(model, folder)
    except ShardwiseError:
        raise
    except Exception as error:  # from a config of any kind
        raise ShardingError(f"cannot read the config in {folder}: {_one_line(error)}") from error


def _with_settings(model: Any, folder: str | Path) -> Any:
    """Return the model, with the folder's generation config if it has one."""
    if (Path(folder) / "generation_config.json").is_file():
        read = library().GenerationConfig.from_pretrained
        model.generation_config = read(folder, local_files_only=True)
    return model


def _ends_and_scores(model: Any, prompt: Tensor, tokens: int) -> tuple[list[int], Any]:
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    with quiet():
        return ends, scores_of(model, prompt, tokens, ends=ends)


def _one_line(error: Exception) -> str:
    """Return an error's first line, or all of its text if that line only introduces it."""
    text = str(error).strip()
    first = text.partition("\n")[0].strip()
    return (" ".join(text.split()) if first.endswith(":") else first).rstrip(".")


def read_prompt(
    folder: str | Path, ids: str, text: str | None, *, tokens: int, strategies: Strategies
) -> tuple[list[int], Any]:
    """Read a prompt, token ids separated by spaces or a text, and for a text the folder's tokenizer. Local.

    Downloads nothing. Raises ShardwiseError for a prompt or folder that cannot be read, tokens that the model
    does not have, and all that can be known to be wrong before ranks start.
    """
    if (text is None) == (not ids):
        found = "both" if ids else "neither"
        raise ShardingError(f"expected one prompt, --ids or --text, found {found}; give one of them")
    try:
        prompt = list(map(int, ids.split()))
    except ValueError as error:
        raise ShardingError(f"--ids takes token ids separated by spaces, found {ids!r}") from error
    if not Path(folder).is_dir():  # transformers would take it for the name of a model on the hub
        raise ShardingError(f"{folder}: no such folder; expected one with a transformers config")
    model, tokenizer = model_of(folder), None
    if text is not None:
        try:
            tokenizer = library().AutoTokenizer.from_pretrained(folder, local_files_only=True)
            prompt = tokenizer(text)["input_ids"]
        except (OSError, ValueError) as error:
            raise ShardingError(
                f"cannot read the tokenizer in {folder}: {_one_line(error)}; give token ids with --ids"
            ) from error
    end = model.config.get_text_config().vocab_size
    if not prompt or not 0 <= min(prompt) <= max(prompt) < end:
        raise ShardingError(f"the prompt has the tokens {prompt}; expected at least one, from 0 to {end - 1}")
    _ends_and_scores(model, torch.tensor([prompt]), tokens)
    check_positions(model, torch.tensor([prompt]), tokens)
    if isinstance(strategies, Mapping):
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        plan_of(strategies, dict(tensors), modules=[name for name, _ in model.named_modules()])
    return prompt, tokenizer
