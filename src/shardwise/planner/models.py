"""The models that can be planned for: published shapes, transformers' configs, and anyone's factory.

A `Model` says how to make a module with so many blocks, which modules are its blocks, and its loss. Equal
blocks are what makes plans of large models cheap, so a factory without an argument is asked for its whole
model, which is then cut short: its forward must go through a `ModuleList` of blocks.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardingError
from shardwise.nn import linear_cross_entropy
from shardwise.planner.decoder import PUBLISHED, Decoder
from shardwise.planner.tensor import ROWS, plan_of


@dataclass(frozen=True)
class Model:
    """What a plan is made from.

    Attributes:
        name: for people.
        layers: how many blocks it has.
        build: makes it with so many blocks.
        blocks: a module's blocks, in the order of forward: those of `build(n)` are n.
        ends: its first and last modules, which may be groups of their own.
        loss: of the module, of inputs and of the tokens that follow them (int64, micro-batch x sequence).
    """

    name: str
    layers: int
    build: Callable[[int], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]]
    ends: Callable[[nn.Module], list[nn.Module]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]


Factory = Callable[..., nn.Module]


def model_of(source: str | Model | Factory, *, sequence: int) -> Model:
    """The model that a name, a path, `module:factory` or a factory stands for.

    Args:
        source: a name of `PUBLISHED`; a transformers config (JSON); "package.module:factory"; a function that
            returns a module of tokens to logits.
        sequence: the longest that it is used with, where positions are learned.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, nn.Module) or not (callable(source) or isinstance(source, str)):
        raise ShardingError(
            "a model is planned from its name, its config or a function that returns a module, not a"
            f" {type(source).__name__}"
        )
    if callable(source):
        return _of_factory(source)
    if source in PUBLISHED:
        return _published(source, sequence)
    if source.endswith(".json"):
        return _of_transformers(Path(source))
    module, _, name = source.partition(":")
    if not name:
        raise ShardingError(
            f"unknown model {source!r}: give one of {', '.join(PUBLISHED)}, a transformers config (.json) or"
            " package.module:factory"
        )
    try:
        return _of_factory(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ShardingError(f"{source!r} cannot be imported: {error}") from error


def logits_loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in float32 of a module of tokens to logits, or to something that has `logits`."""
    output = module(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def chunked(model: Model) -> Model:
    """`model` whose head, its last linear layer, makes the loss, by chunks of the vocabulary."""

    def build(layers: int) -> nn.Module:
        made = model.build(layers)
        in_blocks = {id(one) for block in model.blocks(made) for one in block.modules()}
        linear = {name: one for name, one in made.named_modules() if isinstance(one, nn.Linear)}
        heads = [name for name, one in linear.items() if id(one) not in in_blocks]
        if not heads:
            raise ShardingError(
                f"{model.name} has no linear layer beside its blocks, which a chunked loss takes for the head"
            )
        head: Any = linear[heads[-1]]
        whole: Any = made
        head.forward = lambda x: linear_cross_entropy(
            x.full_tensor() if isinstance(x, DTensor) else x, head.weight, whole.targets, bias=head.bias
        )
        if plan := plan_of(made):
            whole.tensor_plan = plan | {heads[-1]: ROWS}
        return made

    def loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        cast(Any, module).targets = targets
        output = module(tokens)
        found: Tensor = output if isinstance(output, Tensor) else output.logits
        return found

    return replace(model, build=build, loss=loss)


@contextmanager
def no_packed_sequences() -> Iterator[None]:
    """Let transformers' models take each row of tokens for one sequence, which they look up in values else.

    Fake tensors have none, and a model that cannot look makes its masks in full.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    kept, masks.find_packed_sequence_indices = masks.find_packed_sequence_indices, lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = kept


def longest_list(module: nn.Module) -> nn.ModuleList:
    """The list of blocks: the longest `ModuleList`, which must not be empty."""
    lists = [one for one in module.modules() if isinstance(one, nn.ModuleList)]
    if not lists or not len(best := max(lists, key=len)):
        raise ShardingError(
            f"{type(module).__name__} has no ModuleList of blocks: pass a shardwise.planner.Model that says"
            " which modules are its blocks"
        )
    return best


def _blocks(module: nn.Module) -> list[nn.Module]:
    return list(longest_list(module))


def _no_ends(module: nn.Module) -> list[nn.Module]:
    return []


def _published(name: str, sequence: int) -> Model:
    shape = PUBLISHED[name]

    def build(layers: int) -> nn.Module:
        return Decoder(shape, layers=layers, positions=sequence)

    def ends(module: nn.Module) -> list[nn.Module]:
        return cast(Decoder, module).ends()

    return Model(name, shape.layers, build, _blocks, ends, logits_loss)


def _of_factory(factory: Factory) -> Model:
    takes_layers = "layers" in inspect.signature(factory).parameters
    with torch.device("meta"):
        whole = factory()
    blocks = longest_list(whole)

    def build(layers: int) -> nn.Module:
        if takes_layers:
            return factory(layers=layers)
        made = factory()
        del longest_list(made)[layers:]
        return made

    name = getattr(factory, "__name__", "model")
    return Model(name, len(blocks), build, _blocks, _no_ends, logits_loss)


def _of_transformers(path: Path) -> Model:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ShardingError(f"{path} is a transformers config: pip install transformers") from error
    try:
        told = json.loads(path.read_text())
        config = AutoConfig.for_model(**told)
    except (OSError, ValueError, TypeError) as error:
        raise ShardingError(f"{path} is no transformers config: {error}") from error

    def build(layers: int) -> nn.Module:
        config.num_hidden_layers, config.use_cache = layers, False
        if getattr(config, "layer_types", None):
            config.layer_types = (config.layer_types * layers)[:layers]
        try:
            made: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ShardingError(
                f"{path}: transformers makes no causal language model, which alone are planned, of"
                f" {type(config).__name__}: {str(error).splitlines()[0]}"
            ) from error
        return made

    def loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = module(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    layers: Any = told.get("num_hidden_layers", config.num_hidden_layers)
    return Model(path.stem, layers, build, _blocks, _no_ends, loss)
