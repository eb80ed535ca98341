"""Explores plans for a program: builds each operation by its own rule, for every state of its inputs.

So this module does not know what operations do. A rule runs on a partition with only its operation, whose
inputs are in one combination of states. What it took, sent and left is then read from that partition. The
first states are those of weights in each style; further ones result from the operations before:

    before  q cut by heads, k whole      ->   sends nothing, 2 * B * H/n * L * L * D FLOP,
                                              after: q as before, k as before, result cut by heads

`find_repeats` finds corresponding weights, which get one style.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.fx.node import map_arg

from shardwise.comm.kinds import GATHER, sent_bytes
from shardwise.errors import ShardingError
from shardwise.graph.nodes import kind_of
from shardwise.tensor_parallel.heads import column_ranges
from shardwise.tensor_parallel.nodes import args_of, name_of, nbytes, op_of, several
from shardwise.tensor_parallel.partition import Parameter, Partition, Value
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split, hint, local_shape
from shardwise.tensor_parallel.program import Whole, build_node, output, outputs, resolve_style

STYLES = ("replicate", "column", "row")  # the first is a parameter's default
_LIMIT = 256  # combinations of states of an operation's inputs


@dataclass(frozen=True)
class State:
    """A value's placement, further placements to which it was sent, and a parameter's style.

    `placement` is None for a parameter before its first use, a tuple for a value with several results.
    `local` and `sent` are what rank 0 then has: a tensor or number, and the values sent, by placement.
    """

    placement: Any
    copies: frozenset[Placement] = frozenset()
    style: str | None = None
    local: Any = field(default=None, compare=False, repr=False)
    sent: dict[Placement, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class Use:
    """The effect of a step on one combination of states."""

    before: tuple[State, ...]  # of its inputs
    after: tuple[State, ...]  # of its inputs, and of the result
    collectives: tuple[tuple[str, int], ...] = ()  # kind, and the least bytes that each rank must send
    flops: int = 0  # of rank 0, which has the largest share
    shards: tuple[tuple[int, tuple[int, ...]], ...] = ()  # inputs first used here: place, bytes by rank

    @cached_property
    def bytes_held(self) -> tuple[int, ...]:
        """Bytes of parameters first used here, by rank."""
        return tuple(map(sum, zip(*(sizes for _, sizes in self.shards), strict=True)))


@dataclass(frozen=True, eq=False)
class Step:
    """An operation or output: its inputs, and the values whose states it sets: inputs and result."""

    inputs: tuple[fx.Node, ...]
    values: tuple[fx.Node, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Group:
    """Weights that get one style."""

    names: tuple[str, ...]
    vectors: tuple[str, ...]  # parameters of their modules that get the same style
    step: Step  # without inputs: a use for each of `STYLES` sets the first states of the parameters


@dataclass
class Space:
    """A program over `ranks`, explored."""

    ranks: int
    decisions: tuple[Group, ...]  # whose styles are to be chosen
    steps: tuple[Step, ...]
    unused_bytes: int  # of parameters and buffers
    _names: dict[fx.Node, str] = field(repr=False)
    _sizes: dict[str, int] = field(repr=False)

    def strategies(self, styles: Sequence[str]) -> dict[str, str]:
        """Return the style by parameter, for all parameters to be cut."""
        return {
            name: style
            for group, style in zip(self.decisions, styles, strict=True)
            for name in (*group.names, *group.vectors)
            if style != STYLES[0]
        }

    def bytes_held(self, uses: Sequence[Use], names: Sequence[str] | None = None) -> tuple[int, ...]:
        """Return bytes by rank of the parameters `names`, or of all and the buffers, given steps' uses."""
        totals = [0 if names is not None else self.unused_bytes] * self.ranks
        for step, use in zip(self.steps, uses, strict=True):
            for place, sizes in use.shards:
                if names is None or self._names[step.inputs[place]] in names:
                    totals = list(map(sum, zip(totals, sizes, strict=True)))
        return tuple(totals)

    def total(self, names: Sequence[str] | None = None) -> int:
        """Return the bytes of the parameters `names`, or of all parameters and buffers, uncut."""
        return sum(self._sizes[name] for name in (self._sizes if names is None else names))


def explore(whole: Whole, ranks: int) -> Space:
    """Explore the plans of a program for `ranks` ranks, without changing it. Local; needs no weights."""
    if ranks < 1:
        raise ShardingError(f"expected at least one rank, got world_size={ranks}")
    groups = _group_weights(whole)
    walk = _Exploration(whole, ranks, groups)
    for node in whole.graph.nodes:
        if node.op == "output":  # each output is a step
            for value, owner in outputs(whole, node):
                if isinstance(value, fx.Node):
                    inputs = list(dict.fromkeys([value] if owner is None else [value, owner]))
                    walk.step(inputs, None, partial(output, value=value, owner=owner))
        elif node.op in ("placeholder", "get_attr"):
            parameter = whole.parameters.get(node)
            placement, style = (REPLICATE, None) if parameter is None else (None, parameter.style)
            walk.states.setdefault(node, (State(placement, style=style, local=node.meta.get("val")),))
        else:
            walk.step(node.all_input_nodes, node, partial(build_node, node=node))
    names = {node: x.name for node, x in whole.parameters.items()}
    sizes = {name: nbytes(node) for node, name in names.items() if node not in whole.aliases}
    used = {names[step.inputs[place]] for step in walk.steps for use in step.uses for place, _ in use.shards}
    unused = sum(size for name, size in sizes.items() if name not in used)
    return Space(ranks, groups, tuple(walk.steps), unused, names, sizes)


class _Exploration:
    """Goes through the program once, and tracks all states that each value can be in."""

    def __init__(self, whole: Whole, ranks: int, groups: Sequence[Group]) -> None:
        self.ranks, self.parameters = ranks, whole.parameters
        self.fake_mode = whole.fake_mode
        self.states: dict[fx.Node, tuple[State, ...]] = {}
        self.steps: list[Step] = []
        self.cache: dict[Any, tuple[Use, ...]] = {}
        for group in groups:
            self._note_states(group.step)

    def step(self, inputs: list[fx.Node], node: fx.Node | None, build: Callable[[Partition], Any]) -> None:
        """Explore an operation, whose result is `node`, or an output."""
        values = inputs if node is None else [*inputs, node]
        key = None if node is None else self._cache_key(node, inputs)
        uses = self.cache.get(key) or tuple(self._uses(inputs, values, build))
        if key is not None:
            self.cache[key] = uses
        if not uses:
            subject = "an output" if node is None else f"{name_of(node)} ({node.name})"
            raise ShardingError(f"no rule can build {subject}, even from whole inputs")
        self.steps.append(Step(tuple(inputs), tuple(values), uses))
        self._note_states(self.steps[-1])

    def _note_states(self, step: Step) -> None:
        for value, states in zip(
            step.values, zip(*(use.after for use in step.uses), strict=True), strict=True
        ):
            self.states[value] = tuple(dict.fromkeys(states))

    def _uses(
        self, inputs: list[fx.Node], values: list[fx.Node], build: Callable[[Partition], Any]
    ) -> Iterator[Use]:
        for before in self._combinations(inputs):
            p = self._partition(inputs, before)
            try:
                build(p)
            except Exception:  # no plan may contain what a rule cannot build
                continue
            after = tuple(_state_of(p, x) for x in values)
            shards = []
            for place, (x, old, new) in enumerate(zip(inputs, before, after, strict=False)):
                if old.placement is None and new.placement is not None:
                    shapes = (local_shape(new.placement, _sizes(x), rank) for rank in range(self.ranks))
                    itemsize = x.meta["val"].element_size()
                    shards.append((place, tuple(math.prod(shape) * itemsize for shape in shapes)))
            calls = [node for node in p.graph.nodes if node.op == "call_function"]
            kinds = [(kind, node) for node in calls if (kind := kind_of(node)) is not None]
            sizes = [(kind, nbytes(node if kind == GATHER else args_of(node)[0])) for kind, node in kinds]
            collectives = tuple((kind, sent_bytes(kind, size, ranks=self.ranks)) for kind, size in sizes)
            yield Use(before, after, collectives, sum(map(_flops, calls)), tuple(shards))

    def _cache_key(self, node: fx.Node, inputs: list[fx.Node]) -> Any:
        """Return a key equal for operations with the same uses, as in repeated layers; None if not known."""
        metadata = [_metadata(x) for x in (*inputs, node)]
        if None in metadata:
            return None
        index = {x: place for place, x in enumerate(inputs)}
        args = repr(map_arg((node.args, node.kwargs), lambda x: f"%{index[x]}"))
        users = tuple(len(x.users) == 1 for x in inputs)
        states = tuple(self.states[x] for x in inputs)
        owned = tuple(x in self.parameters for x in inputs)
        cut: Any = None
        if any(weight and len(choices) > 1 for weight, choices in zip(owned, states, strict=True)):
            # how a weight is cut depends on the uses of the result
            if op_of(node) not in ("linear", "mm", "addmm"):
                return None
            shape = node.meta["val"].shape
            cut = column_ranges(self._partition([], []), node, shape[-1], dim=len(shape) - 1)
        return node.target, args, tuple(metadata), users, states, owned, cut

    def _combinations(self, inputs: list[fx.Node]) -> Iterator[tuple[State, ...]]:
        """Yield combinations of the inputs' states; if too many, inputs with the same states share one."""
        choices = [self.states[x] for x in inputs]
        many = math.prod(map(len, choices)) > _LIMIT
        keys = [states if many else place for place, states in enumerate(choices)]
        counts = {key: range(len(states)) for key, states in zip(keys, choices, strict=True)}
        for picks in itertools.islice(itertools.product(*counts.values()), _LIMIT):
            index = dict(zip(counts, picks, strict=True))
            yield tuple(states[index[key]] for key, states in zip(keys, choices, strict=True))

    def _partition(self, inputs: Sequence[fx.Node], before: Sequence[State]) -> Partition:
        """Return a program for rank 0 that has only these inputs."""
        p = Partition(0, self.ranks, "", self.fake_mode, {})
        for x, state in zip(inputs, before, strict=True):
            placement = REPLICATE if state.placement is None else state.placement
            p.values[x] = Value(_placeholder(p, state.local), placement)
            for target, value in state.sent.items():
                p._copies[x, target] = _placeholder(p, value)
            if x in self.parameters:
                p.parameters[x] = Parameter(self.parameters[x].name, state.style, state.placement)
        return p


def _placeholder(p: Partition, value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    node = p.graph.placeholder("given")
    node.meta["val"] = value
    return node


def _state_of(p: Partition, x: fx.Node) -> State:
    value, parameter = p.values[x], p.parameters.get(x)
    placement = value.placement if parameter is None else parameter.placement
    copies = {  # where moving it needs communication
        target: copy.meta["val"]
        for (source, target), copy in p._copies.items()
        if source is x and (placement == PARTIAL or (isinstance(placement, Split) and target == REPLICATE))
    }
    style = None if parameter is None else parameter.style
    local = value.node.meta.get("val") if isinstance(value.node, fx.Node) else value.node
    return State(placement, frozenset(copies), style, local, copies)


def _metadata(x: fx.Node) -> Any:
    """Return sizes, strides and dtype of a value, or of several; None if none or symbolic."""
    value = x.meta.get("val")
    metadata = []
    for tensor in several(value):
        if not isinstance(tensor, Tensor) or not all(isinstance(size, int) for size in tensor.shape):
            return None
        metadata.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))
    return tuple(metadata)


def _flops(node: fx.Node) -> int:
    """Count the FLOPs of a product, a convolution or attention; other operations count as 0."""
    op, args = op_of(node), args_of(node)
    if op in ("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm"):
        left = args[op in ("addmm", "baddbmm", "addbmm")]
        return 2 * math.prod(_sizes(node)) * _sizes(left)[-1]
    if "convolution" in op or op in ("conv1d", "conv2d", "conv3d"):
        return 2 * math.prod(_sizes(node)) * math.prod(_sizes(args[1])[1:])
    if "scaled_dot_product" in op:
        q, k, v = map(_sizes, args[:3])
        return 2 * k[-2] * math.prod(q[:-1]) * (q[-1] + v[-1])
    return 0


def _sizes(node: fx.Node) -> list[int]:
    return [hint(size) for size in several(node.meta["val"])[0].shape]


def _group_weights(whole: Whole) -> tuple[Group, ...]:
    """Return the weights, those of repeated layers together, each with the vectors of its module."""
    kinds = {spec.target: spec.kind for spec in whole.program.graph_signature.input_specs}
    vectors_of: dict[str, list[str]] = defaultdict(list)
    weights: dict[str, fx.Node] = {}
    for node, parameter in whole.parameters.items():
        name = parameter.name
        skipped = name in whole.mutated or kinds[name] != InputKind.PARAMETER
        if skipped or node in whole.aliases or not node.users:
            continue
        if node.meta["val"].ndim >= 2:
            weights[name] = node
        else:
            vectors_of[name.rpartition(".")[0]].append(name)
    shapes_and_users: dict[str, tuple[Any, ...]] = {}
    for name, node in weights.items():
        value, users = node.meta["val"], [x for user in node.users for x in (user, *user.users)]
        shapes_and_users[name] = (*map(hint, value.shape), str(value.dtype), *map(name_of, users))
    repeats = find_repeats(shapes_and_users)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in weights:
        groups[repeats[name]].append(name)
    result = []
    for names in groups.values():
        vectors = {name: vectors_of.pop(name.rpartition(".")[0], []) for name in names}
        values = {whole.by_name[x]: x for name in names for x in (name, *vectors[name])}
        states = []  # of each parameter before its first use, by style, as that use names the style
        for node, name in values.items():
            module = name.rpartition(".")[0]
            styles = [None, *(resolve_style(node, style, module)[1] for style in STYLES[1:])]
            states.append([State(None, style=style, local=node.meta["val"]) for style in styles])
        uses = tuple(Use((), after) for after in zip(*states, strict=True))
        step = Step((), tuple(values), uses)
        result.append(Group(tuple(names), tuple(itertools.chain(*vectors.values())), step))
    return tuple(result)


def find_repeats(kinds: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    """Return, for each weight, the name of the one that it repeats in another layer, or its own.

    A layer is a numbered module with at least two weights; it repeats the first of its siblings that has the
    same weights, of the same kinds.
    """
    paths = {name: name.split(".") for name in kinds}
    for depth in range(max((len(parts) for parts in paths.values()), default=0)):
        layers: dict[tuple[str, ...], list[Any]] = defaultdict(list)
        for name, parts in paths.items():
            if len(parts) > depth and parts[depth].isdigit():
                layer = tuple(name.split(".")[: depth + 1])
                layers[layer].append((*name.split(".")[depth + 1 :], kinds[name]))
        originals: dict[Any, str] = {}
        repeats: dict[tuple[str, ...], str] = {}
        for layer, weights in layers.items():
            if len(weights) > 1:
                repeats[layer] = originals.setdefault((layer[:-1], tuple(weights)), layer[-1])
        for name, parts in paths.items():
            layer = tuple(name.split(".")[: depth + 1])
            if layer in repeats:
                paths[name] = [*parts[:depth], repeats[layer], *parts[depth + 1 :]]
    return {name: ".".join(parts) for name, parts in paths.items()}
