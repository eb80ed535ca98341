"""Styles that the user asks for, by module: how its weights are cut, and where its outputs are to be.

    column      a linear layer's output features, an embedding's columns (what a row of it is made of)
    row         a linear layer's input features, an embedding's rows (the vocabulary)
    replicate   whole on every rank

How a weight lies in memory ([out, in] or [in, out]) is seen from its use, not asked for. Every value of an
exported program means the whole one, wherever its elements are, as a DTensor does: so `input_layouts` only
say what a module may meet, any value being moved to where it is needed, and `use_local_output` says nothing.
`output_layouts` are done: the module's outputs are moved there, whoever uses them. So are the desired
layouts of torch's PrepareModuleInput and PrepareModuleOutput, for modules with one tensor in or out; where
these come from, their other layouts, is known.

Where several entries fit a parameter, its own name comes before its module's, and that before patterns. Two
patterns that ask for different things are an error, as no order of them is meant by everyone.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.tensor as dtensor
from torch import Tensor

from shardwise.errors import ShardingError
from shardwise.tensor_parallel import placement as own


class _Parallel:
    """Layouts of a style, by the keywords that torch's styles of the same names have."""

    def __init__(
        self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True
    ) -> None:
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in vars(self).items() if value not in (None, True)]
        return f"{type(self).__name__}({', '.join(given)})"


class ColwiseParallel(_Parallel):
    """Cut of the module's outputs: a linear layer's output features, an embedding's columns.

    Args:
        input_layouts: a placement (`torch.distributed.tensor`'s) or None. Any is accepted: see this module.
        output_layouts: None or Shard(-1): cut, as they come. Replicate(): gathered there. Shard(dim): moved
            there; that dim must be static.
        use_local_output: either; see this module.
    """


class RowwiseParallel(_Parallel):
    """Cut of the dim that the module contracts: a linear layer's input features, an embedding's rows.

    Args: as `ColwiseParallel`'s; `output_layouts` None or Replicate(): summed where they are needed.
    """


class SequenceParallel:
    """The module's parameters stay whole; its outputs are cut along `sequence_dim`, which must be static."""

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence_dim})"


class Replicate:
    """The module's parameters stay whole on every rank."""


REPLICATED = "replicate"
Layout = int | str  # a dim to be cut along, or REPLICATED


@dataclass(frozen=True)
class Style:
    """One entry: "column", "row" or "replicate", and where the module's outputs are to be; None: anywhere."""

    kind: str
    outputs: Layout | None = None


@dataclass
class Plan:
    """The request for a program.

    Attributes:
        styles: "column" or "row", by parameter; those not named stay whole.
        inputs: where the one input of modules is to be, by fully qualified name.
        outputs: where the outputs of modules are to be.
        asked: every entry as text, in order.
    """

    styles: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, Layout] = field(default_factory=dict)
    outputs: dict[str, Layout] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)


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
    """Return what `strategies` ask of a program with `parameters`.

    Args:
        strategies: by fully qualified name of a module or parameter, or a pattern of them in which `*` is any
            text: a style's class or instance, ours or torch's of the same name; a word ("colwise", "rowwise",
            "replicate", ...); or a function of (parameter's name, tensor without memory) that returns one of
            these, or None to leave the parameter as other entries say. Torch's PrepareModuleInput,
            PrepareModuleOutput and PrepareModuleInputOutput stand beside the style of the same module's
            parameters only under another pattern, as every name has one entry.
        parameters: every parameter and buffer of the program; only shapes and dtypes are looked at.
        modules: of the program, those without parameters too.

    Raises:
        ShardingError: a name that fits nothing, with the nearest ones; something that is no style; layouts
            that cannot be had; a module without a weight of two dims or more that is to be cut.
    """
    plan = Plan(asked={asked: described(entry) for asked, entry in strategies.items()})
    styles: _Claims = {}
    moved: dict[str, _Claims] = {"inputs": {}, "outputs": {}}
    for asked, entry in strategies.items():
        if _kind(entry).startswith("Prepare"):
            for place, layout in _prepared(entry, asked).items():
                for module in _matching_modules(asked, parameters, modules):
                    moved[place].setdefault(module, []).append((asked, layout))
            continue
        for name in _matching(asked, parameters):
            found = _style_for(entry, name, parameters[name], asked)
            if found is not None:
                styles.setdefault(name, []).append((asked, found))
    for name, claims in styles.items():
        asked, style = _decide(name, claims)
        if style.kind != REPLICATED:
            plan.styles[name] = style.kind
        if style.outputs is not None:
            moved["outputs"].setdefault(name.rpartition(".")[0], []).append((asked, style.outputs))
    plan.inputs = {module: _decide(module, claims)[1] for module, claims in moved["inputs"].items()}
    plan.outputs = {module: _decide(module, claims)[1] for module, claims in moved["outputs"].items()}
    _check_dims(plan, parameters)
    return plan


_Claims = dict[
    str, list[tuple[str, Any]]
]  # by parameter or module: the entries that fit it, what each asks for


def _decide(name: str, claims: list[tuple[str, Any]]) -> tuple[str, Any]:
    """Return the entry that decides for `name`, and what it asks: its own name, its module's, or patterns."""
    for names in ((name,), (name.rpartition(".")[0],), None):
        fitting = [claim for claim in claims if names is None or claim[0] in names]
        other = next((claim for claim in fitting if claim[1] != fitting[0][1]), None)
        if other is not None:
            raise ShardingError(
                f"the strategies for {fitting[0][0]!r} and {other[0]!r} both fit {name!r} and ask for"
                f" different things ({fitting[0][1]}, {other[1]}); name {name!r} itself"
            )
        if fitting:
            return fitting[0]
    raise AssertionError(name)


def described(entry: Any) -> str:
    """Return an entry of the strategies as text: its class, with layouts that are not the usual ones."""
    if isinstance(entry, str):
        return entry
    if inspect.isclass(entry) or inspect.isfunction(entry):
        return entry.__name__
    kind: Any = type(entry)
    return kind.__name__ if kind.__repr__ is object.__repr__ else repr(entry)  # no address: ranks must agree


def style_of(entry: Any, *, asked: str) -> Style:
    """Return the style that a class, an instance or a word stands for. `asked` is for messages."""
    if isinstance(entry, str):
        if entry not in _WORDS:
            near = difflib.get_close_matches(entry, _WORDS, n=1) or [", ".join(_WORDS)]
            raise ShardingError(
                f"the strategy for {asked!r} is {entry!r}, which is no style; did you mean {near[0]}?"
            )
        return _WORDS[entry]
    kind = _kind(entry)
    given = None if inspect.isclass(entry) else entry
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        usual: Layout = -1 if kind == "ColwiseParallel" else REPLICATED
        for layout in _several(getattr(given, "input_layouts", None)):
            _layout(layout, asked=asked)
        outputs = [
            _layout(layout, asked=asked) for layout in _several(getattr(given, "output_layouts", None))
        ]
        if len(outputs) > 1:
            raise ShardingError(f"the strategy for {asked!r} has {len(outputs)} output layouts; expected one")
        wanted = outputs[0] if outputs and outputs[0] != usual else None
        return Style("column" if kind == "ColwiseParallel" else "row", wanted)
    if kind == "SequenceParallel":
        sharding = getattr(given, "sequence_sharding", None)
        dim = sharding[0].dim if sharding else getattr(given, "sequence_dim", 1)
        return Style(REPLICATED, dim)
    if kind == "Replicate":
        return Style(REPLICATED)
    raise ShardingError(
        f"the strategy for {asked!r} is {entry!r}; expected ColwiseParallel, RowwiseParallel,"
        f" SequenceParallel, Replicate, a function of (name, tensor), or one of {', '.join(_WORDS)}"
    )


def _kind(entry: Any) -> str:
    """Return the name of the style's class, or of the one that it is derived from."""
    kinds = entry.__mro__ if inspect.isclass(entry) else type(entry).__mro__
    known = {"ColwiseParallel", "RowwiseParallel", "SequenceParallel", "Replicate"}
    known |= {"PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"}
    return next((kind.__name__ for kind in kinds if kind.__name__ in known), "")


def _prepared(entry: Any, asked: str) -> dict[str, Layout]:
    """Return where a PrepareModule... wants the module's "inputs", "outputs" or both."""
    if inspect.isclass(entry):
        raise ShardingError(
            f"the strategy for {asked!r} is {entry.__name__}; give an instance, with its layouts"
        )
    found = {}
    sides = {"inputs": getattr(entry, "prepare_module_input", entry)}
    sides["outputs"] = getattr(entry, "prepare_module_output", entry)
    for place, side in sides.items():
        one = place.removesuffix("s")
        wanted = _several(getattr(side, f"desired_{one}_layouts", None))
        wanted += (getattr(side, f"desired_{one}_kwarg_layouts", None) or {}).values()
        layouts = {_layout(layout, asked=asked) for layout in wanted if layout is not None}
        if not layouts:
            continue
        if len(wanted) > 1 and layouts != {REPLICATED}:
            raise ShardingError(
                f"the strategy for {asked!r} says where {len(wanted)} {place} are to be, which a program does"
                " not tell apart; give output_layouts to the modules that make them"
            )
        found[place] = layouts.pop()
    return found


def _several(layouts: Any) -> list[Any]:
    if layouts is None:
        return []
    return list(layouts) if isinstance(layouts, (tuple, list)) else [layouts]


def _layout(layout: Any, *, asked: str) -> Layout:
    if isinstance(layout, (dtensor.Replicate, own.Replicate, Replicate)):
        return REPLICATED
    if isinstance(layout, dtensor.Shard):
        return layout.dim
    raise ShardingError(
        f"the strategy for {asked!r} has the layout {layout!r}; expected Replicate() or Shard(dim) of"
        " torch.distributed.tensor"
    )


def _style_for(entry: Any, name: str, tensor: Tensor, asked: str) -> Style | None:
    if callable(entry) and not inspect.isclass(entry) and not _kind(entry):
        found = entry(name, tensor)
        return None if found is None else style_of(found, asked=f"{asked} ({name})")
    return style_of(entry, asked=asked)


def _matching(asked: str, names: Iterable[str]) -> list[str]:
    """Return the parameters that `asked` names itself, by their module, or by a pattern of either."""
    known = list(names)
    matching = [
        name
        for name in known
        if asked in (name, module := name.rpartition(".")[0])
        or fnmatch.fnmatchcase(module, asked)
        or fnmatch.fnmatchcase(name, asked)
    ]
    return matching or _no_match(asked, known)


def _matching_modules(asked: str, names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the modules, those with none but modules within too, that `asked` names."""
    known = dict.fromkeys(
        ".".join(parts[:depth])
        for name in names
        for parts in [name.split(".")]
        for depth in range(len(parts))
    )
    known.update(dict.fromkeys(modules))
    matching = [module for module in known if module == asked or fnmatch.fnmatchcase(module, asked)]
    return matching or _no_match(asked, list(names))


def _no_match(asked: str, names: list[str]) -> list[str]:
    within = [name for name in names if name.startswith(f"{asked}.")]
    if within:
        children = list(dict.fromkeys(name.rpartition(".")[0] for name in within))
        raise ShardingError(
            f"the strategy for {asked!r} names a module without parameters of its own; name those within:"
            f" {', '.join(children[:5])}{', ...' if len(children) > 5 else ''}, or {asked}.*"
        )
    modules = list(dict.fromkeys([*(name.rpartition(".")[0] for name in names), *names]))
    near = difflib.get_close_matches(asked, modules, n=3)
    raise ShardingError(
        f"the strategy for {asked!r} fits no parameter of the program"
        + (f"; did you mean {', '.join(near)}?" if near else f"; it has {', '.join(names[:10]) or 'none'}")
    )


def _check_dims(plan: Plan, parameters: Mapping[str, Tensor]) -> None:
    """Check that a module with cut vectors has a weight, by which they are cut."""
    cut = dict.fromkeys(name.rpartition(".")[0] for name in plan.styles if parameters[name].ndim >= 2)
    for name, kind in plan.styles.items():
        if parameters[name].ndim < 2 and name.rpartition(".")[0] not in cut:
            raise ShardingError(
                f"{name} of shape {tuple(parameters[name].shape)} cannot be cut by {kind}: its module has no"
                ' weight of two dims or more; leave it out, or name it itself with "replicate"'
            )
