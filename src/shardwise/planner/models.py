"""The models that can be planned: published shapes, transformers' configs, and users' factories.

A `Model` defines how to make a module with a given number of blocks, which modules are its blocks, and its
loss. Equal blocks make plans of large models cheap, so the whole model of a factory without an argument is
shortened: its forward must iterate over a `ModuleList` of blocks.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._compat import FakeTensorMode
from shardwise.errors import ShardingError, from_extra
from shardwise.launch import place
from shardwise.nn import SequenceCut
from shardwise.nn.linear_cross_entropy import linear_cross_entropy
from shardwise.planner.decoder import Decoder
from shardwise.planner.setup import Setup
from shardwise.planner.shapes import PUBLISHED, Shape, check_positions, check_source, config_of, read_config
from shardwise.planner.tensor import ROWS, check_names, plan_of

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stage:
    """A rank of a pipeline and its size; micro-batches per step, and stages per rank."""

    number: int
    count: int
    micro_batches: int = 1
    stages: int = 1

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    Attributes:
        name: for display.
        layers: the number of blocks.
        build: makes the model with a given number of blocks.
        blocks: returns a module's blocks, in the order of forward; `build(n)` has n.
        ends: returns its first and last modules, which may have their own groups.
        loss: computes the loss from module, inputs and next tokens (int64, micro-batch x sequence).
        assumed: assumptions about the model, for display.
        stage: makes a number of blocks, including the modules before them for the first stage and those after
            them for the last; other stages take and return hidden states.
        cut_sequences: makes a module compute a piece of each sequence, over a 1-D mesh; returns the loss to
            use then, over whole sequences, whose mean over these ranks is the batch's loss.
        at: the stage that this model is.
        positions: how many positions it has learned, if that limits its sequences.
    """

    name: str
    layers: int
    build: Callable[[int], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]]
    ends: Callable[[nn.Module], list[nn.Module]]
    loss: Loss
    assumed: tuple[str, ...] = ()
    stage: Callable[[int, bool, bool], nn.Module] | None = None
    cut_sequences: Callable[[nn.Module, DeviceMesh], Loss] | None = None
    at: Stage = Stage(0, 1)
    positions: int | None = None


Factory = Callable[..., nn.Module]


def resolve(source: str | Model | Factory, setup: Setup) -> tuple[Model, Setup]:
    """Return the model and its setup, whose sequences have a length that it takes.

    Raises:
        ShardingError: there is no such model, or it has fewer positions than `setup.sequence`, or a plan for
            tensor parallelism that names no module.
    """
    model, length = model_of(source, sequence=setup.length), setup.length
    if model.positions is not None and setup.sequence is None:
        while length > model.positions:
            length //= 2
    elif model.positions is not None:
        check_positions(length, model.positions)
    if setup.tensor > 1:
        check_names(whole(model), stages=setup.pipeline)
    return model, replace(setup, sequence=length)


@functools.lru_cache(maxsize=4)  # a deep model takes a second
def whole(model: Model) -> nn.Module:
    """Build the model with all its blocks on the meta device."""
    with torch.device("meta"):
        return model.build(model.layers)


def model_of(source: str | Model | Factory, *, sequence: int) -> Model:
    """Return the model that a name, a path, `module:factory` or a factory identifies.

    Args:
        source: a name in `PUBLISHED`; a transformers config (JSON), or its folder; "package.module:factory";
            a function that returns a module from tokens to logits.
        sequence: the longest sequence that a published model is used with, if its positions are learned.
    """
    if isinstance(source, Model):
        return source
    if not isinstance(source, str):
        return _model_of_factory(source)
    if source in PUBLISHED:
        return of_shape(source, PUBLISHED[source], sequence)
    if path := config_of(source):
        return _model_of_config(path)
    check_source(source)
    try:
        factory = pkgutil.resolve_name(source)
    except (ImportError, AttributeError) as error:
        raise ShardingError(f"{source!r} cannot be imported: {error}") from error
    return _model_of_factory(factory)


def logits_loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Compute cross-entropy in float32; the module maps tokens to logits, or to an object with `logits`."""
    logits = _logits(module(tokens))
    if logits.ndim != 3:
        raise ShardingError(
            "the module must return its logits, a tensor (batch, length, vocabulary); it returned one"
            f" of shape {tuple(logits.shape)}"
        )
    return whole_loss(logits, targets)


def whole_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def loss_of_piece(logits: Tensor, targets: Tensor, cut: SequenceCut) -> Tensor:
    """Return a piece's cross-entropy in float32; its mean over the ranks is that of all `targets`."""
    piece = cut(targets).flatten()
    total = F.cross_entropy(logits.flatten(0, 1).float(), piece, reduction="sum")
    return cut.mean(total, piece.numel())


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ShardingError(
            "the module must return its logits, a tensor (batch, length, vocabulary), or an object with the"
            f" attribute `logits`; it returned a {type(output).__name__}"
        )
    return logits


def chunked(model: Model) -> Model:
    """Return `model` whose head (its last linear layer) computes the loss by chunks of the vocabulary."""
    if model.loss is not logits_loss:
        raise ShardingError(f"{model.name} has its own loss, which cannot be chunked: plan with loss='whole'")

    def build(layers: int) -> nn.Module:
        module = model.build(layers)
        in_blocks = {id(child) for block in model.blocks(module) for child in block.modules()}
        linear = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
        heads = [name for name, child in linear.items() if id(child) not in in_blocks]
        if not heads:
            raise ShardingError(
                f"{model.name} has no linear layer beside its blocks, which a chunked loss takes for the head"
            )
        head: Any = linear[heads[-1]]
        root: Any = module
        head.forward = lambda x: linear_cross_entropy(
            x.full_tensor() if isinstance(x, DTensor) else x, head.weight, root.targets, bias=head.bias
        )
        if plan := plan_of(module):
            root.tensor_plan = plan | {heads[-1]: ROWS}
        return module

    def loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        cast(Any, module).targets = targets
        return _logits(module(tokens))

    return replace(model, build=build, loss=loss)


def no_packed_sequences() -> AbstractContextManager[Any]:
    """Make transformers' models treat each row of tokens as one sequence, instead of reading values for that.

    Fake tensors have no values, and a model that cannot read them builds full masks.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        return nullcontext()
    find_none: Any = lambda position_ids: None  # noqa: E731  # a mock would keep its argument
    return mock.patch.object(masks, "find_packed_sequence_indices", find_none)


@contextmanager
def report_exits() -> Iterator[None]:
    """Turn an exit in user code, such as an argument parser's, into an ordinary error.

    Its exit status would be taken for the plan's.
    """
    try:
        yield
    except SystemExit as error:
        position = f" at {line}" if (line := place(error)) else ""
        raise ShardingError(
            f"the model could not be planned: SystemExit: {error.code}, raised{position}. A factory has"
            " no command line: keep code that parses one or ends the program out of the factory and its"
            " module"
        ) from error


def quiet_fakes() -> AbstractContextManager[Any]:
    """Keep errors of operators on fake tensors from being logged as well."""
    return mock.patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True)


def block_lists(module: nn.Module) -> dict[str, nn.ModuleList]:
    """Return every non-empty `ModuleList` that is in no other, by name, longest first.

    The longest is taken as the list of blocks.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(child, nn.ModuleList) and len(child) and not inside:
            lists[name] = child
    if not lists:
        raise ShardingError(
            f"{type(module).__name__} has no ModuleList of blocks: pass a shardwise.planner.Model that says"
            " which modules are its blocks"
        )
    return dict(sorted(lists.items(), key=lambda item: -len(item[1])))


@functools.lru_cache(maxsize=8)  # one for all plans of it, which then share how its blocks repeat
def of_shape(name: str, shape: Shape, sequence: int) -> Model:

    def make(layers: int, first: bool = True, last: bool = True) -> nn.Module:
        return Decoder(shape, layers=layers, positions=sequence, first=first, last=last)

    def cut_sequences(module: nn.Module, mesh: DeviceMesh) -> Loss:
        cut = SequenceCut(mesh)
        cast(Decoder, module).cut_sequences(cut)

        def loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
            return loss_of_piece(module(cut(tokens)), targets, cut)

        return loss

    return Model(
        name,
        shape.layers,
        make,
        blocks=lambda module: list(cast(Decoder, module).blocks),
        ends=lambda module: cast(Decoder, module).ends(),
        loss=logits_loss,
        stage=make,
        cut_sequences=cut_sequences,
    )


def _model_of_factory(factory: Factory) -> Model:
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ShardingError(
            "a model is planned from its name, its config or a function that returns a module, not a"
            f" {type(factory).__name__}: give a function"
        )
    parameters = inspect.signature(factory).parameters
    takes_layers = "layers" in parameters
    takes_stage = takes_layers and {"first", "last"} <= parameters.keys()
    required = [
        name
        for name, param in parameters.items()
        if param.default is param.empty and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
    ]
    if required:
        raise ShardingError(
            f"the factory of a model is called without arguments, but needs {', '.join(required)}: give a"
            " function that returns a module of tokens to logits; `layers`, if it takes that, needs a default"
        )
    with torch.device("meta"):
        module = factory()
    if not isinstance(module, nn.Module):
        raise ShardingError(
            f"the factory of a model returns a module, not a {type(module).__name__}: {module!r}"
        )

    def build(layers: int) -> nn.Module:
        return factory(layers=layers) if takes_layers else factory()

    def stage(layers: int, first: bool, last: bool) -> nn.Module:
        return factory(layers=layers, first=first, last=last)

    model = _model_of_lists(getattr(factory, "__name__", "model"), module, build, logits_loss, [module])
    return replace(model, stage=stage if takes_stage else None)


def _model_of_lists(
    name: str, module: nn.Module, make: Callable[[int], nn.Module], loss: Loss, towers: list[nn.Module]
) -> Model:
    """Return the model whose blocks are the longest `ModuleList` of each tower; a single one is cut short.

    `towers` are modules in `module`, which `make` makes with at least a given number of blocks.
    """
    names = {path: name for name, path in module.named_modules()}
    lists = block_lists(module)
    chosen = list(dict.fromkeys(names[next(iter(block_lists(tower).values()))] for tower in towers))
    other_lists = [path for path in lists if path not in chosen]

    def blocks(module: nn.Module) -> list[nn.Module]:
        return [block for path in chosen for block in cast(nn.ModuleList, module.get_submodule(path))]

    def build(layers: int) -> nn.Module:
        module = make(layers)
        if len(chosen) == 1:
            del cast(nn.ModuleList, module.get_submodule(chosen[0]))[layers:]
        return module

    places: dict[nn.Module, str] = {}
    for path in chosen:
        for index, block in enumerate(lists[path]):
            place = f"{path}.{index}"
            if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
                raise ShardingError(
                    f"'{place}' is a {type(block).__name__}, which has no forward and so is no block: put its"
                    f" modules into '{path}' itself, or pass a shardwise.planner.Model that says which"
                    " modules are the blocks"
                )
            if (earlier := places.setdefault(block, place)) != place:
                raise ShardingError(
                    f"'{earlier}' and '{place}' are one module, which cannot be sharded as two blocks: plan"
                    " blocks of their own"
                )
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for block, path in places.items():
        for name_in_block, parameter in block.named_parameters():
            earlier, first_name = owners.setdefault(parameter, (path, name_in_block))
            if earlier != path:
                other_name = "" if name_in_block == first_name else f", there '{name_in_block}'"
                raise ShardingError(
                    f"'{earlier}' and '{path}' share the parameter '{first_name}'{other_name}, which cannot"
                    " be sharded with two blocks: give each its own, or pass a shardwise.planner.Model that"
                    " says which modules are the blocks"
                )
    quoted = " and ".join(f"'{path}'" for path in chosen)
    count, rest = len(places), ", ".join(f"'{name}' ({len(lists[name])})" for name in other_lists)
    assumed = (
        f"Its blocks are the {count} of {quoted}, the longest ModuleList; the modules of"
        f" {rest} are no groups of their own: pass a shardwise.planner.Model that says which are"
    )
    return Model(name, count, build, blocks, lambda _: [], loss, (assumed,) if other_lists else ())


# The model class for a config that names no architecture: an encoder with its decoder, or a masked language
# model if it is no decoder, if transformers has that; else the first of these.
_KINDS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
}


def _model_of_config(path: Path) -> Model:
    values = read_config(path)
    attention = values.get("attn_implementation", "sdpa")
    if attention not in ("eager", "sdpa"):  # kernels that the CPU lacks, with the same memory
        values["attn_implementation"] = "sdpa"
    transformers = from_extra("hf", "transformers", feature=f"{path}, a transformers config,")
    if (kind := values["model_type"]) not in transformers.CONFIG_MAPPING:
        raise ShardingError(
            f"{path} is no transformers config: transformers {transformers.__version__} has no model_type"
            f" {kind!r}; those that it has are the keys of transformers.CONFIG_MAPPING"
        )
    try:
        config = transformers.AutoConfig.for_model(**values)
    except Exception as error:  # of transformers' own checks
        raise ShardingError(f"{path} is no transformers config: {error}") from error
    classes = {
        kind: getattr(transformers, mapping).get(type(config), None) for kind, mapping in _KINDS.items()
    }
    if not (kinds := [kind for kind, model_class in classes.items() if model_class is not None]):
        raise ShardingError(
            f"{path}: expected a language model's config: transformers makes none of {', '.join(_KINDS)}"
            f" from {type(config).__name__}"
        )
    architecture = next((name for name in config.architectures or () if hasattr(transformers, name)), "")
    _check_takes_tokens(path, getattr(transformers, architecture, None))
    matching = [kind for kind in kinds if classes[kind].__name__ == architecture]
    decodes = getattr(config, "is_decoder", True)
    family = "Seq2Seq" if config.is_encoder_decoder else ("CausalLM" if decodes else "MaskedLM")
    kind = [*matching, *(kind for kind in kinds if family in kind), *kinds][0]
    seq2seq = "Seq2Seq" in kind and config.is_encoder_decoder
    if config.is_encoder_decoder and not seq2seq and not matching:
        raise ShardingError(
            f"{path}: from this encoder-decoder config transformers makes only a {classes[kind].__name__};"
            " to plan that, name it in the config's architectures"
        )
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    depth = getattr(text, "num_hidden_layers", 0)
    lists = {key: item for key, item in vars(text).items() if isinstance(item, list) and len(item) == depth}

    def build(layers: int | None) -> nn.Module:
        text.use_cache = config.use_cache = False
        if not seq2seq and layers is not None:
            text.num_hidden_layers = layers
            for key, item in lists.items():  # of each block
                setattr(text, key, item[:layers])
        module: nn.Module = getattr(transformers, kind).from_config(copy.deepcopy(config))
        return module

    def loss_of_both(module: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return whole_loss(module(input_ids=tokens, decoder_input_ids=tokens).logits, targets)

    def cut_sequences(module: Any, mesh: DeviceMesh) -> Loss:
        hf: Any = importlib.import_module("shardwise.hf")
        cut: SequenceCut = hf.cut_sequences(module, mesh)
        return lambda module, tokens, targets: loss_of_piece(module(input_ids=tokens).logits, targets, cut)

    try:
        with torch.device("meta"):
            module: Any = build(None)
    except Exception as error:  # of transformers
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ShardingError(
            f"{path}: transformers' {classes[kind].__name__} cannot be made: {reason}"
        ) from error
    _check_takes_tokens(path, type(module))
    limit: int = getattr(config, "max_position_embeddings", 0)
    words = module.get_input_embeddings()
    tables = [table for table in module.modules() if isinstance(table, nn.Embedding) and table is not words]
    learned = any(limit <= table.num_embeddings <= limit + 2 for table in tables)  # some leave two out
    decoder = module.get_decoder()
    has_blocks = any(isinstance(child, nn.ModuleList) and len(child) for child in decoder.modules())
    towers = [module.get_encoder(), decoder] if seq2seq else [decoder if has_blocks else module]
    count = len(next(iter(block_lists(towers[-1]).values())))
    make = build if count == depth else lambda _: build(None)  # it runs blocks several times
    model = _model_of_lists(path.stem, module, make, loss_of_both if seq2seq else logits_loss, towers)
    name = type(module).__name__
    notes: tuple[str, ...] = () if kind == next(iter(_KINDS)) else (f"It is planned as a {name}",)
    if architecture and not matching:
        notes = (f"It is planned as a {name}, not as the {architecture} that its architectures name",)
    if attention not in ("eager", "sdpa"):
        notes += (f"Its attn_implementation, {attention}, is planned as sdpa",)
    if seq2seq:
        notes += ("Its encoder reads as many tokens as its decoder",)
    if getattr(config, "quantization_config", None) is not None:
        notes += ("Its quantization_config is not planned: all parameters are in stored_dtype, and trained",)
    return replace(
        model,
        assumed=(*notes, *model.assumed),
        cut_sequences=None if seq2seq else cut_sequences,
        positions=limit if limit and learned else None,
    )


def _check_takes_tokens(path: Path, kind: Any) -> None:
    takes = getattr(kind, "main_input_name", "input_ids")
    if takes != "input_ids":
        raise ShardingError(f"{path}: {kind.__name__} takes {takes}; expected a model that takes tokens")
