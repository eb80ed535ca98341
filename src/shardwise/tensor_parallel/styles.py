"""Styles that the user gives by module: how its weights are cut, and the layout of its outputs.

    column      a linear layer's output features, an embedding's columns (the embedding dim)
    row         a linear layer's input features, an embedding's rows (the vocabulary)
    replicate   whole on every rank

Whether a weight is stored as [out, in] or [in, out] is found from its use. Like a DTensor, every value of an
exported program stands for the whole value, wherever its elements are, and moves where it is needed. So
`input_layouts` and `use_local_output` have no effect. `output_layouts` are applied: the module's outputs are
moved there for all their users. So are the desired layouts of torch's PrepareModuleInput and
PrepareModuleOutput, for modules with one tensor in or out; their other layouts, the current ones, are known.

If several entries match a parameter, its own name takes precedence over its module's name, and that over
patterns. Two matching patterns that ask for different things are an error.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.tensor as dtensor
from torch import Tensor

from shardwise.errors import ShardingError
from shardwise.tensor_parallel import placement as own


@dataclass(eq=False, kw_only=True)
class _Parallel:
    """Layouts of a style, with the keywords of torch's styles of the same names."""

    input_layouts: Any = None
    output_layouts: Any = None
    use_local_output: bool = True

    def __repr__(self) -> str:
        arguments = [f"{name}={value!r}" for name, value in vars(self).items() if value not in (None, True)]
        return f"{type(self).__name__}({', '.join(arguments)})"


class ColwiseParallel(_Parallel):
    """Cut along the module's outputs: a linear layer's output features, an embedding's columns.

    Args:
        input_layouts: a placement of `torch.distributed.tensor`, or None. Has no effect.
        output_layouts: None or Shard(-1): leave the outputs cut. Replicate(): gather them. Shard(dim): move
            them to that cut; the dim must be static.
        use_local_output: has no effect.
    """


class RowwiseParallel(_Parallel):
    """Cut along the dim that the module contracts: a linear layer's input features, an embedding's rows.

    Args: as for `ColwiseParallel`. If `output_layouts` is None or Replicate(), outputs are summed if needed.
    """


@dataclass(eq=False, kw_only=True)
class SequenceParallel:
    """The module's parameters stay whole; its outputs are cut along `sequence_dim`, which must be static."""

    sequence_dim: int = 1
    use_local_output: bool = field(default=True, repr=False)


class Replicate:
    """The module's parameters stay whole on every rank."""


REPLICATED = "replicate"
Layout = int | str  # a dim to be cut along, or REPLICATED


@dataclass(frozen=True)
class Style:
    """One entry: "column", "row" or "replicate", and the layout of the module's outputs; None: any."""

    kind: str
    outputs: Layout | None = None

    def __str__(self) -> str:
        whole = "whole outputs" if self.outputs == REPLICATED else f"outputs cut along dim {self.outputs}"
        return f"{self.kind} with {'any outputs' if self.outputs is None else whole}"


@dataclass
class Plan:
    """The request for a program."""

    strategies: dict[str, str]  # every entry as text, in order
    styles: dict[str, str]  # "column" or "row", by parameter; those not named stay whole
    inputs: dict[str, Layout]  # of a module's one input, by the module's fully qualified name
    outputs: dict[str, Layout]  # of a module's outputs, likewise


_WORDS = {
    "colwise": Style("column"),
    "rowwise": Style("row"),
    "column": Style("column"),
    "row": Style("row"),
    "replicate": Style(REPLICATED),
    "colwise_rep": Style("column", REPLICATED),
    "colwise_gather_output": Style("column", REPLICATED),
    "packed_colwise": Style("column"),
    "packed_rowwise": Style("row"),
    "embedding_rowwise": Style("row"),
    "sequence_parallel": Style(REPLICATED, 1),
}


def plan_of(
    strategies: Mapping[str, Any], parameters: Mapping[str, Tensor], *, modules: Iterable[str] = ()
) -> Plan:
    """Return the plan that `strategies` describe for a program with `parameters`.

    Args:
        strategies: styles by fully qualified name of a module or parameter, or by a pattern in which `*`
            matches any text. A style is a class or instance, ours or torch's of the same name; a word
            ("colwise", "rowwise", "replicate", ...); or a function of (parameter's name, tensor without
            memory) that returns one of these, or None to leave the parameter to other entries. A name has one
            entry, so to give a module both a style and torch's PrepareModuleInput, PrepareModuleOutput or
            PrepareModuleInputOutput, give one of them under a pattern.
        parameters: every parameter and buffer of the program; only shapes and dtypes are used.
        modules: names of the program's modules, including those without parameters.

    Raises:
        ShardingError: a name that matches nothing, with the nearest names; an entry that is not a style;
            impossible layouts; a module to be cut that has no weight of two dims or more.
    """
    texts = {key: describe(entry) for key, entry in strategies.items()}
    styles: _Claims = {}
    layouts: dict[str, _Claims] = {"inputs": {}, "outputs": {}}
    for key, entry in strategies.items():
        if _kind(entry).startswith("Prepare"):
            for place, layout in _prepared_layouts(entry, key).items():
                for module in _match_modules(key, parameters, modules):
                    layouts[place].setdefault(module, []).append((key, layout))
            continue
        by_tensor = callable(entry) and not inspect.isclass(entry) and not _kind(entry)
        names = [x for x in parameters if _matches(key, x) or _matches(key, x.rpartition(".")[0])]
        for name in names or _raise_no_match(key, list(parameters)):
            request = entry(name, parameters[name]) if by_tensor else entry
            if request is not None or not by_tensor:
                style = style_of(request, key=f"{key} ({name})" if by_tensor else key)
                styles.setdefault(name, []).append((key, style))
    kinds = {}
    for name, claims in styles.items():
        key, style = _decide(name, claims)
        if style.kind != REPLICATED:
            kinds[name] = style.kind
        if style.outputs is not None:
            layouts["outputs"].setdefault(name.rpartition(".")[0], []).append((key, style.outputs))
    inputs, outputs = (
        {module: _decide(module, claims)[1] for module, claims in side.items()} for side in layouts.values()
    )
    cut = {name.rpartition(".")[0] for name in kinds if parameters[name].ndim >= 2}
    for name, kind in kinds.items():
        if parameters[name].ndim < 2 and name.rpartition(".")[0] not in cut:  # a weight determines its cut
            raise ShardingError(
                f"{name} of shape {tuple(parameters[name].shape)} cannot be cut by {kind}: its module has no"
                ' weight of two dims or more; leave it out, or give it the style "replicate"'
            )
    return Plan(texts, kinds, inputs, outputs)


# by parameter or module: the keys that match it, and the style or layout of each
_Claims = dict[str, list[tuple[str, Any]]]


def _decide(name: str, claims: list[tuple[str, Any]]) -> tuple[str, Any]:
    """Return the entry that takes precedence for `name`, and its style or layout."""
    for names in ((name,), (name.rpartition(".")[0],), None):
        matches = [claim for claim in claims if names is None or claim[0] in names]
        rival = next((claim for claim in matches if claim[1] != matches[0][1]), None)
        if rival is not None:
            raise ShardingError(
                f"the strategies for {matches[0][0]!r} and {rival[0]!r} both match {name!r} but ask for"
                f" different things ({matches[0][1]}, {rival[1]}); add an entry for {name!r} itself"
            )
        if matches:
            return matches[0]
    raise AssertionError(name)


def describe(entry: Any) -> str:
    """Return an entry of the strategies as text: its class, and layouts that are not the default."""
    if isinstance(entry, str):
        return entry
    if inspect.isclass(entry) or inspect.isfunction(entry):
        return entry.__name__
    kind: Any = type(entry)
    return kind.__name__ if kind.__repr__ is object.__repr__ else repr(entry)  # no address: ranks must agree


def style_of(entry: Any, *, key: str) -> Style:
    """Return the style that a class, an instance or a word stands for. `key` is for messages."""
    if isinstance(entry, str):
        if entry not in _WORDS:
            near = difflib.get_close_matches(entry, _WORDS, n=1) or [", ".join(_WORDS)]
            raise ShardingError(
                f"the strategy for {key!r} is {entry!r}, which is not a style; did you mean {near[0]}?"
            )
        return _WORDS[entry]
    kind = _kind(entry)
    instance = None if inspect.isclass(entry) else entry
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        default: Layout = -1 if kind == "ColwiseParallel" else REPLICATED
        for layout in _several(getattr(instance, "input_layouts", None)):
            _layout(layout, key=key)
        outputs = [_layout(layout, key=key) for layout in _several(getattr(instance, "output_layouts", None))]
        if len(outputs) > 1:
            raise ShardingError(f"the strategy for {key!r} has {len(outputs)} output layouts; expected one")
        output = outputs[0] if outputs and outputs[0] != default else None
        return Style("column" if kind == "ColwiseParallel" else "row", output)
    if kind == "SequenceParallel":
        sharding = getattr(instance, "sequence_sharding", None)
        dim = sharding[0].dim if sharding else getattr(instance, "sequence_dim", 1)
        return Style(REPLICATED, dim)
    if kind == "Replicate":
        return Style(REPLICATED)
    raise ShardingError(
        f"the strategy for {key!r} is {entry!r}; expected ColwiseParallel, RowwiseParallel,"
        f" SequenceParallel, Replicate, a function of (name, tensor), or one of {', '.join(_WORDS)}"
    )


def _kind(entry: Any) -> str:
    """Return the name of the style's class, or of the known class that it derives from."""
    kinds = entry.__mro__ if inspect.isclass(entry) else type(entry).__mro__
    known = {"ColwiseParallel", "RowwiseParallel", "SequenceParallel", "Replicate"}
    known |= {"PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"}
    return next((kind.__name__ for kind in kinds if kind.__name__ in known), "")


def _prepared_layouts(entry: Any, key: str) -> dict[str, Layout]:
    """Return the layouts that a PrepareModule... wants for the module's "inputs", "outputs" or both."""
    if inspect.isclass(entry):
        raise ShardingError(
            f"the strategy for {key!r} is the class {entry.__name__}; pass an instance with its layouts"
        )
    prepared = {}
    sides = {"inputs": getattr(entry, "prepare_module_input", entry)}
    sides["outputs"] = getattr(entry, "prepare_module_output", entry)
    for place, side in sides.items():
        singular = place.removesuffix("s")
        desired = _several(getattr(side, f"desired_{singular}_layouts", None))
        desired += (getattr(side, f"desired_{singular}_kwarg_layouts", None) or {}).values()
        layouts = {_layout(layout, key=key) for layout in desired if layout is not None}
        if not layouts:
            continue
        if len(desired) > 1 and layouts != {REPLICATED}:
            raise ShardingError(
                f"the strategy for {key!r} has layouts for {len(desired)} {place}, which an exported program"
                " does not tell apart; set output_layouts on the modules that produce them"
            )
        prepared[place] = layouts.pop()
    return prepared


def _several(layouts: Any) -> list[Any]:
    if layouts is None:
        return []
    return list(layouts) if isinstance(layouts, (tuple, list)) else [layouts]


def _layout(layout: Any, *, key: str) -> Layout:
    if isinstance(layout, (dtensor.Replicate, own.Replicate, Replicate)):
        return REPLICATED
    if isinstance(layout, dtensor.Shard):
        return layout.dim
    raise ShardingError(
        f"the strategy for {key!r} has the layout {layout!r}; expected Replicate() or Shard(dim) from"
        " torch.distributed.tensor"
    )


def _match_modules(key: str, names: Collection[str], modules: Iterable[str]) -> list[str]:
    """Return the modules that `key` matches, including those that only contain modules."""
    split = [name.split(".") for name in names]
    within = (".".join(parts[:depth]) for parts in split for depth in range(len(parts)))
    matching = [module for module in dict.fromkeys([*within, *modules]) if _matches(key, module)]
    return matching or _raise_no_match(key, list(names))


def _matches(key: str, name: str) -> bool:
    return name == key or fnmatch.fnmatchcase(name, key)


def _raise_no_match(key: str, names: list[str]) -> list[str]:
    within = [name for name in names if name.startswith(f"{key}.")]
    if within:
        children = list(dict.fromkeys(name.rpartition(".")[0] for name in within))
        raise ShardingError(
            f"the strategy for {key!r} names a module that has no parameters itself; name its submodules:"
            f" {', '.join(children[:5])}{', ...' if len(children) > 5 else ''}, or {key}.*"
        )
    modules = list(dict.fromkeys([*(name.rpartition(".")[0] for name in names), *names]))
    near = difflib.get_close_matches(key, modules, n=3)
    raise ShardingError(
        f"the strategy for {key!r} matches no parameter of the program"
        + (f"; did you mean {', '.join(near)}?" if near else f"; it has {', '.join(names[:10]) or 'none'}")
    )
