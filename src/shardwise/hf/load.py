"""Load a transformers model from files straight into shards.

    skeleton    run `from_pretrained` itself, with `Boxes` in place of weights: it renames, converts, ties and
                finds missing weights as usual, but computes nothing
    shard       apply `fully_shard` to each block, then to the model
    initialise  by the model's own rules, one whole tensor at a time, the weights that no file has
    read        for every other parameter, the elements that this rank holds

A rank therefore holds its shards and at most one whole tensor: one being initialised, or one that a
conversion computes rather than moves. Elements are copied from the mapped file to the shard.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import _compat
from shardwise.comm.agree import agree, each_its_own, fingerprint, together
from shardwise.comm.count import on_tensors
from shardwise.errors import CheckpointError, ShardingError, from_extra, here
from shardwise.files.manifest import inside
from shardwise.files.stores import StrPath, on_disk
from shardwise.files.tensors import TensorFiles
from shardwise.fsdp.fully_shard import Options, fully_shard
from shardwise.fsdp.module_state import states_in
from shardwise.hf.boxes import Boxes, Computed, Piece, Plain
from shardwise.sharded_tensor.group import group_or_default
from shardwise.sharded_tensor.kinds import held_by_this_rank, store_whole, whole_of

_LOG = logging.getLogger("shardwise")
aten = torch.ops.aten


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a rank's host memory that loading takes, without mapped files, which the system manages.

    Attributes:
        whole: all parameters and buffers of the model.
        shards: this rank's shards of the parameters, with padding.
        buffers: the buffers, which every rank holds whole.
        tensor: the largest tensor held whole for a time, while it is initialised or computed.
    """

    whole: int
    shards: int
    buffers: int
    tensor: int

    @property
    def peak(self) -> int:
        return self.shards + self.buffers + self.tensor


def host_memory(model: nn.Module) -> HostMemory:
    """Return the host memory that loading `model` took on this rank. Local."""
    memory: HostMemory | None = model.__dict__.get("_shardwise_host_memory")
    if memory is None:
        raise ShardingError(f"{here()}: hf.load has not made this {type(model).__name__}")
    return memory


def load(
    path_or_config: Any,
    *,
    model_class: Any = None,
    dtype: torch.dtype | str = "auto",
    strict: bool = True,
    adapt: Callable[[Any], Any] | None = None,
    **options: Unpack[Options],
) -> Any:
    """Load a transformers model from a folder, sharded block by block, in evaluation mode.

    Collective over all ranks. Blocks are the modules whose classes the model's `_no_split_modules` names.

    Args:
        path_or_config: a folder that `save_pretrained` wrote, or a config. A config's model gets random
            values: those that `from_pretrained(None, config=config, state_dict={})` draws in one process
            from the same seed, for any number of ranks and any layout. Each rank draws all of them.
        model_class: class of the model. Default: the one that the config names in `architectures`.
        dtype: dtype to which weights are converted as they are read; "auto" means what `from_pretrained`
            means by it.
        strict: raise if the folder lacks weights of the model or has others. Otherwise missing weights are
            initialised and others ignored, as `from_pretrained` does.
        adapt: function that changes the model before it is sharded, and returns the model to shard: it can
            freeze parameters or add adapters. Weights have no values yet; parameters that it adds may.
        **options: options of `fully_shard`: mesh, layout, mp_policy, and so on.

    Raises:
        CheckpointError: on every rank, if files are missing, damaged or outside the folder, or weights are
            missing, unexpected or of another shape. The message names them.
        ShardingError: if there is no class to build, the model is quantized, or `fully_shard` raises it.
        RankMismatchError: if ranks load different things, or draw values from different seeds.
    """
    is_folder = isinstance(path_or_config, (str, os.PathLike))
    source = path_or_config if is_folder else "a config"
    operation = f"hf.load of {source}"
    group = group_or_default(None)
    agree(
        f"{operation} as {model_class}, dtype {dtype}, strict {strict}", group=group, subject="what to load"
    )
    with TensorFiles(each_its_own(operation, lambda: find_weights(source)) if is_folder else []) as files:
        skeleton = each_its_own(
            operation, lambda: skeleton_of(path_or_config, model_class, dtype, strict, files)
        )
        # An adapter that reads weights gets an error.
        replace_tensors(skeleton, lambda _, t: Boxes.of(_NoValues(), t.shape, t.dtype) if t.is_meta else t)
        keys = [name.rpartition(".") for name in skeleton.all_tied_weights_keys]
        tied = [(skeleton.get_submodule(prefix), last) for prefix, _, last in keys]  # adapters move modules
        model = each_its_own(operation, lambda: skeleton if adapt is None else adapt(skeleton))
        values = take_values(model)
        _shard(model, skeleton._no_split_modules or (), options)
        model.__dict__["_shardwise_host_memory"] = _memory_for(model, values)
        _initialise(skeleton, model, values, tied)
        together(operation, lambda: _read_shards(model, values))
    return model.eval()


def library() -> Any:
    """Import transformers."""
    return from_extra("hf", "transformers", feature="shardwise.hf")


# ------------------------------------------------------------ the model without values


def find_weights(source: StrPath) -> list[Path]:
    """Return the one file or index of a folder's weights; raises CheckpointError if there is none."""
    folder = on_disk(source)
    files = [inside(folder, name) for name in ("model.safetensors", "model.safetensors.index.json")]
    existing = [file for file in files if file.is_file()]
    if not existing:
        raise CheckpointError(
            f"{folder}: expected a folder with model.safetensors or model.safetensors.index.json and"
            " config.json, as save_pretrained writes it; pickled weights are not read, convert them"
        )
    return existing[:1]


def skeleton_of(source: Any, model_class: Any, dtype: Any, strict: bool, files: TensorFiles) -> Any:
    """Return the model with `Boxes` for weights that files have, and other weights on the meta device."""
    transformers = library()
    from_files = isinstance(source, (str, os.PathLike))
    if not from_files and not isinstance(source, transformers.PreTrainedConfig):
        raise ShardingError(
            f"{here()}: expected a folder, or a config of transformers, found {type(source).__name__}"
        )
    if model_class is not None and not hasattr(model_class, "from_pretrained"):
        raise ShardingError(
            f"{here()}: expected a class of transformers as model_class, found {model_class!r}"
        )
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True) if from_files else source
    if getattr(config, "quantization_config", None) is not None:
        raise ShardingError(f"{here()}: a quantized model cannot be cut; load weights that are not quantized")
    name = (config.architectures or [""])[0]
    cls = model_class or getattr(transformers, name, None)
    if cls is None:
        found = f"{name}, which transformers lacks" if name else "no architecture"
        raise ShardingError(
            f"{here()}: the config names {found}; name a class of transformers in its architectures, or give"
            " hf.load a model_class="
        )
    if not from_files:
        with torch.device("meta"):
            model = cls._from_config(config, **({} if dtype == "auto" else {"dtype": dtype}))
        replace_tensors(model, lambda _, t: t.to("meta") if isinstance(t, nn.Parameter) else t)
        return model
    stored = {name: files.find(name) for name in files.names()}
    weights = {name: Boxes.of(t, t.shape, t.dtype) for name, t in stored.items() if t is not None}
    with quiet(), _NoAllocation():  # type: ignore[no-untyped-call]
        try:
            model, info = cls.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:
            raise CheckpointError(f"{source}: transformers cannot convert the weights: {error}") from error
    _check_info(source, info, strict)
    model.config.name_or_path = str(source)
    if (Path(source) / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source, local_files_only=True)
    return model


def _check_info(folder: Any, info: dict[str, Any], strict: bool) -> None:
    wrong = [
        f"{name}: expected shape {tuple(expected)}, found {tuple(shape)}"
        for name, shape, expected in sorted(info["mismatched_keys"])
    ]
    advice = "Use the folder's own config and class"
    if strict:
        if not wrong:  # strict=False does not initialise weights of another shape
            advice += ", or hf.load(..., strict=False), which initialises what is missing"
        wrong += [f"missing: {name}" for name in sorted(info["missing_keys"])]
        wrong += [f"unexpected: {name}" for name in sorted(info["unexpected_keys"])]
    if wrong:
        suffix = [f"and {len(wrong) - 20} more"] if len(wrong) > 20 else []
        raise CheckpointError(
            "\n".join([f"{folder}: the weights do not fit the model", *wrong[:20], *suffix, advice])
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings; what matters of them raises errors here."""
    logging = library().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class _NoAllocation(_compat.TorchDispatchMode):
    """Mode that keeps `empty_like` of a meta tensor on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.empty_like.default and args[0].is_meta:
            kwargs = kwargs | {"device": torch.device("meta")}
        return func(*args, **kwargs)


class _NoValues:
    """Source of a tensor that has no values yet."""

    def read(self, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        raise ShardingError(f"{here()}: weights have no values before the model is cut; adapt only its form")


def _lacks_values(value: Boxes) -> bool:
    return any(isinstance(piece.source, _NoValues) for piece in value.pieces)


def take_values(model: nn.Module) -> dict[str, Boxes]:
    """Return the values of parameters and buffers by name, and move parameters to the meta device."""
    values: dict[str, Boxes] = {}

    def take(name: str, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter or isinstance(tensor, Boxes):
            value = tensor.detach()
            if not isinstance(value, Boxes):
                value = Boxes.of(Plain(value), value.shape, value.dtype)
            values[name] = value
        elif not is_parameter:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta" if is_parameter else "cpu")

    replace_tensors(model, take)
    return values


def replace_tensors(model: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Replace parameters and buffers by what `change` returns; keep ties."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for prefix, module in model.named_modules():
        params = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        for name, tensor in [*params, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(tensor) not in replaced:
                new = change(f"{prefix}.{name}" if prefix else name, tensor)
                if isinstance(tensor, nn.Parameter) and new is not tensor:
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                replaced[id(tensor)] = tensor, new
            setattr(module, name, replaced[id(tensor)][1])


# ------------------------------------------------------------ the model in shards


def _shard(model: nn.Module, classes: Iterable[str], options: Options) -> None:
    """Apply `fully_shard` to every block, inner ones first, then to the model with what blocks share."""
    modules = [*model.named_modules(remove_duplicate=False)]
    times = Counter(m for _, m in modules if m is not model and type(m).__name__ in classes)
    inside = tuple(f"{name}." for name, m in modules if m in times)
    params = [*model.named_parameters(remove_duplicate=False)]
    paths = Counter(id(param) for _, param in params)
    outside = {param for name, param in params if not name.startswith(inside)}
    ignored = options.get("ignored_params") or set()
    for block in reversed(times):
        counts = Counter(param for _, param in block.named_parameters(remove_duplicate=False))
        shared = {param for param, count in counts.items() if paths[id(param)] != count * times[block]}
        if counts and shared <= outside:  # else the model could not find parameters that only blocks have
            fully_shard(block, **options | {"ignored_params": ignored | shared})
    fully_shard(model, **options)


def owners_of(model: nn.Module) -> Counter[int]:
    """Count the registrations of each parameter, by its id."""
    return Counter(
        id(param)
        for module in model.modules()
        for _, param in module.named_parameters(recurse=False, remove_duplicate=False)
    )


def _memory_for(model: nn.Module, values: Mapping[str, Boxes]) -> HostMemory:
    """Allocate the shards, and return the host memory that loading takes."""
    groups = [group for state in states_in(model.modules()) for group in state.groups]
    sizes = [_whole_bytes(values[name]) for name, _ in model.named_parameters()]
    adapters = sum(
        value.nbytes for value in values.values() for piece in value.pieces if isinstance(piece.source, Plain)
    )
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    total = buffers + sum(param.nbytes for param in model.parameters())
    for group in groups:
        group.pack(group.device)
    shards = sum(shard.untyped_storage().nbytes() for group in groups for shard in group.shards)
    memory = HostMemory(total, shards, buffers, max(sizes, default=0) + adapters)
    _LOG.info("%s: loading takes %s bytes of host memory, of a model of %s", here(), memory.peak, total)
    return memory


def _whole_bytes(value: Boxes) -> int:
    """Return the bytes that are held whole while a value is made."""
    if _lacks_values(value):
        return value.nbytes
    computed = [piece.source for piece in value.pieces if isinstance(piece.source, Computed)]
    return sum(value.nbytes + source.nbytes for source in computed)


def _initialise(
    skeleton: Any, model: nn.Module, values: Mapping[str, Boxes], tied: list[tuple[nn.Module, str]]
) -> None:
    """Initialise tensors without values by the model's own rules; copies get their original's. Collective."""
    missing = {name for name, value in values.items() if _lacks_values(value)}
    tensors = _tensors(model)
    copies = _copies({name: values[name].pieces for name in values if name in missing}, tensors, skeleton)
    for name in [*(values.keys() - missing), *copies]:
        tensors[name]._is_hf_initialized = True  # type: ignore[attr-defined]  # the flag that transformers checks
    params = sorted(name for name in missing if isinstance(tensors[name], nn.Parameter))
    state = f"{fingerprint(str(torch.get_rng_state().tolist())):x}"
    source = [f"from seed {torch.initial_seed()}, state {state}"] if params else []
    agree(
        "\n".join(["initialised:", *params, *source]),
        group=group_or_default(None),
        subject="the parameters to initialise, and the seed to initialise from",
        advice="Give every rank the same files, and call torch.manual_seed with the same number.",
    )
    for module in skeleton.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    with _hide_tied(tied), _Drawing() as drawing:
        skeleton.initialize_weights()
    drawing.store()
    for name, first in copies.items():
        store_whole(tensors[name], whole_of(tensors[first].detach()))


def _copies(
    pieces: Mapping[str, tuple[Piece, ...]], tensors: Mapping[str, Tensor], skeleton: nn.Module
) -> dict[str, str]:
    """Map each copy's name to its original's, the one of equal tensors that the model initialises."""
    param_ids = {id(param) for param in skeleton.parameters()}
    originals: dict[tuple[Piece, ...], str] = {}
    original_of = {
        name: originals.setdefault(pieces[name], name)
        for name in sorted(pieces, key=lambda name: id(tensors[name]) not in param_ids)
    }
    return {name: original for name, original in original_of.items() if name != original}


@contextmanager
def _hide_tied(tied: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """Prevent tied parameters from being initialised twice."""
    saved = [(owner, last, getattr(owner, last)) for owner, last in tied]
    for owner, last in tied:
        stand_in: Any = nn.Parameter(torch.empty(0))
        stand_in._is_hf_initialized = True
        setattr(owner, last, stand_in)
    yield
    for owner, last, param in saved:
        setattr(owner, last, param)


class _Drawing(_compat.TorchDispatchMode):
    """Mode in which operations on a sharded parameter run on the whole tensor; each rank keeps its part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._param: DTensor | None = None  # the parameter whose values `_whole` has
        self._whole = torch.empty(0)
        self._stored: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*on_tensors(args, self._whole_of), **on_tensors(kwargs or {}, self._whole_of))
        return self._param if self._param is not None and result is self._whole else result

    def _whole_of(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor is not self._param:
            self.store()
            self._param = tensor
            if id(tensor) in self._stored:
                self._whole = cast(DTensor, tensor.detach()).full_tensor()
            else:
                self._whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._whole

    def store(self) -> None:
        """Store this rank's part of the current whole tensor."""
        if self._param is not None:
            store_whole(self._param, self._whole)
            self._stored.add(id(self._param))
        self._param, self._whole = None, torch.empty(0)


@torch.no_grad()
def _read_shards(model: nn.Module, values: dict[str, Boxes]) -> None:
    """Fill the shards. Local."""
    tensors = _tensors(model)
    for name in list(values):
        value, tensor = values.pop(name), tensors[name]
        if _lacks_values(value):
            continue
        for box, local in held_by_this_rank(tensor):
            if not box.is_empty:
                value.read(box, into=local)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
