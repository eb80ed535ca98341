"""The setup of a plan: how a model is cut and trained; and conversion of dataclasses to and from JSON."""

from __future__ import annotations

import functools
import itertools
import json
import types
import typing
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from shardwise.errors import ShardingError

DType = Literal["float32", "bfloat16", "float16"]
Optimizer = Literal["AdamW", "AdamW fused", "AdamW flat", "AdamW 8 bits", "Muon", "SGD"]
Strategy = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp", "hierarchical_fsdp"]  # of `fully_shard`
MOST = 10_000_000  # limit of ranks and so on: plans make lists of ranks, of parts of a loss, of micro-batches
T = TypeVar("T")
_CONTIGUOUS: dict[str, tuple[str, ...]] = {  # what only that layout has
    "strategy": ("ddp", "zero1", "zero2", "hierarchical_fsdp"),
    "optimizer": ("AdamW flat",),
}
_AXES = ("pipeline", "replicas", "tensor", "ulysses", "experts")  # the rest is the data-parallel axis


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@dataclass(frozen=True)
class Setup:
    """How a model is cut over ranks and trained.

    Attributes:
        ranks: total number of ranks, over all mesh axes.
        device: "cuda" has streams for communication; on "cpu" each collective ends before its call returns.
        replicas: number of copies of each shard (HSDP); 1 shards over all ranks.
        pipeline: ranks of a pipeline; each has even shares of the blocks, and computes the `accumulation`
            micro-batches of a step in the order of `schedule`. Parameters stay gathered in between, unless
            `reshard_after_forward` says otherwise; gradients are reduced once.
        stages: stages on each of these ranks; more than one for "Interleaved1F1B".
        ulysses: ranks that share each sequence of a micro-batch: `shardwise.nn.SequenceCut`.
        experts: ranks that share the experts of each layer: `shardwise.nn.ExpertCut`. Dense parameters are
            also sharded over these ranks and those of `ulysses`.
        expert_load: tokens of the busiest rank's experts, as a multiple of an even share.
        tensor: adjacent ranks that share each micro-batch by tensor parallelism; 1 means none.
        tensor_plan: "torchtitan" cuts the sequence between matmuls, and the logits up to the loss;
            "transformers" does neither: every rank has whole logits. "auto" is the second, except for
            built-in models of Llama's kind.
        sequence_parallel, loss_parallel: override one of the two, whatever the plan.
        async_tensor: gathers and reductions of the sequence run in pieces, overlapping the matmul that needs
            or makes them, as compiled (asynchronous tensor parallelism).
        layout: as for `fully_shard`; also `strategy`, and `reshard_after_forward` of the blocks (the root has
            its default).
        stored_dtype: dtype of sharded parameters, and so of gradients and optimizer state.
        param_dtype: dtype of gathered parameters and computation.
        reduce_dtype: dtype of gradients while they are reduced.
        ends_apart: whether the model's first and last modules have their own groups, as its blocks do: those
            of built-in models, and those that a `Model` names (`ends`). Others are in the root's group.
        checkpointing: activation checkpointing of blocks: "none"; "selective" keeps attention and every
            second matmul; "alternate" recomputes only every second block; "full" recomputes all.
        compile: whether blocks are compiled: `shardwise.compile(mode="regional")`.
        compile_loss: whether the loss of whole logits is compiled too; logits then keep their dtype.
        float8: whether linear layers of compiled blocks multiply in float8, in which they are also gathered.
        float8_scales: one scale per tensor, or one float32 scale per row that is multiplied; then parameters
            are gathered in `param_dtype` and cast for each use.
        nvfp4: whether all linear layers of compiled blocks multiply in NVFP4, forward and backward, as in
            arXiv 2509.25149; parameters are gathered in `param_dtype` and cast for each use.
        fused_norms: whether RMSNorm is one kernel on "cuda", as since torch 2.9, or several operators.
        optimizer: "Muon" updates the matrices of blocks, and fused AdamW the rest; "AdamW flat" needs the
            contiguous layout.
        loss: "whole" logits in float32, or "chunked": `shardwise.nn.linear_cross_entropy` in the head.
        loop_holds: "logits" if the training loop still has the loss's input logits in a variable while
            backward runs.
        micro_batch: sequences that a rank computes at a time.
        sequence: tokens per sequence; None: 2,048, or the largest power of two that a model with learned
            positions takes.
        accumulation: micro-batches per optimizer step.
        reduce_once: whether gradients are reduced only with the step's last micro-batch.
        record_streams: whether collectives that computation waits for keep their memory from the allocator
            until the device has passed them, as in older torch (TORCH_NCCL_AVOID_RECORD_STREAMS=0).
        clip_norm: whether gradients are clipped by their norm.
        expandable_segments: of the caching allocator (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
    """

    ranks: int = 8
    device: Literal["cuda", "cpu"] = "cuda"
    replicas: int = 1
    pipeline: int = 1
    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B"] = "1F1B"
    stages: int = 1
    ulysses: int = 1
    experts: int = 1
    expert_load: float = 1.0
    tensor: int = 1
    tensor_plan: Literal["auto", "torchtitan", "transformers"] = "auto"
    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    async_tensor: bool = False
    layout: Literal["interleaved", "contiguous"] = "interleaved"
    strategy: Strategy | None = None
    reshard_after_forward: bool | int | None = None
    stored_dtype: DType = "float32"
    param_dtype: DType = "bfloat16"
    reduce_dtype: DType = "float32"
    ends_apart: bool = True
    checkpointing: Literal["none", "selective", "alternate", "full"] = "none"
    compile: bool = False
    compile_loss: bool = False
    float8: bool = False
    float8_scales: Literal["tensor", "row"] = "tensor"
    nvfp4: bool = False
    fused_norms: bool = True
    optimizer: Optimizer = "AdamW fused"
    loss: Literal["whole", "chunked"] = "whole"
    loop_holds: Literal["nothing", "logits"] = "nothing"
    micro_batch: int = 1
    sequence: int | None = None
    accumulation: int = 1
    reduce_once: bool = False
    record_streams: bool = False
    clip_norm: bool = False
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        for name in (*_AXES, "ranks", "stages", "micro_batch", "accumulation", "expert_load", "sequence"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ShardingError(f"{name} must be at least 1, got {value}")
        for name in ("ranks", "sequence", "micro_batch", "accumulation"):
            if (getattr(self, name) or 0) > MOST:
                raise ShardingError(f"{name} must be at most {MOST:,}, got {getattr(self, name):,}")
        if self.expert_load > self.experts:
            raise ShardingError(
                f"expert_load={self.expert_load:g} must be at most experts={self.experts}: one rank's experts"
                f" cannot get more than all tokens of {self.experts} ranks"
            )
        if (self.float8 or self.nvfp4) and not self.compile:
            raise ShardingError(
                "float8 and nvfp4 need compiled blocks, whose kernels compute the scales: give compile=True"
                " (--compile)"
            )
        if self.float8 and self.nvfp4:
            raise ShardingError("float8 and nvfp4 are both asked for: blocks multiply in one of them")
        if self.float8_scales == "row" and not self.float8:
            raise ShardingError("float8_scales='row' needs matmuls in float8: give float8=True (--float8)")
        if self.async_tensor and not (self.compile and self.tensor > 1):
            raise ShardingError(
                "async_tensor needs compiled blocks and tensor parallelism: give compile=True (--compile) and"
                " tensor (--tensor) of more than 1"
            )
        if self.loss == "chunked" and (self.compile_loss or self.loop_holds == "logits"):
            setting = "loop_holds='logits'" if self.loop_holds == "logits" else "compile_loss"
            raise ShardingError(
                f"{setting} needs whole logits, but loss='chunked' never has them: give loss='whole'"
            )
        if self.compile_loss and self.tensor > 1:
            raise ShardingError(
                "compile_loss needs logits that are not cut by tensor parallelism: give tensor=1"
            )
        for name, values in _CONTIGUOUS.items():
            if self.layout != "contiguous" and (value := getattr(self, name)) in values:
                raise ShardingError(
                    f"{name} {value!r} needs the contiguous layout: give layout='contiguous'"
                    " (--layout contiguous)"
                )
        several = self.replicas > 1
        if self.strategy is not None and (self.strategy in ("hsdp", "hierarchical_fsdp")) != several:
            needs, fix = "more than 1 replica", "replicas (--replicas), a divisor of ranks"
            if several:
                needs, fix = f"1 replica, got {self.replicas}", "replicas=1, or hsdp or hierarchical_fsdp"
            raise ShardingError(f"strategy {self.strategy!r} needs {needs}: give {fix}")
        if self.layout != "contiguous":
            object.__setattr__(self, "strategy", None)  # the same plan, as all other settings compare
        ranks = self.ranks
        for index, name in enumerate(_AXES):
            if ranks % (size := getattr(self, name)):
                before = [axis for axis in _AXES[:index] if getattr(self, axis) > 1]
                note = f", left of {self.ranks} after {', '.join(before)}" if before else ""
                raise ShardingError(
                    f"{name}={size} does not divide {ranks} ranks{note}: choose {name} among their divisors"
                )
            ranks //= size
        if (self.stages > 1) != (self.schedule == "Interleaved1F1B"):
            raise ShardingError(
                f"schedule={self.schedule!r} with stages={self.stages}: Interleaved1F1B needs more than one"
                " stage on each rank, other schedules exactly one"
            )
        if self.pipeline == 1 and (self.schedule == "GPipe" or self.stages > 1):
            setting = "stages > 1" if self.stages > 1 else "schedule='GPipe'"
            raise ShardingError(f"{setting} needs a pipeline: give pipeline (--pipeline) of more than 1 rank")
        if self.length % self.ulysses:
            raise ShardingError(
                f"ulysses={self.ulysses} does not divide sequence={self.length}: choose one of its divisors"
            )
        axes = [name for name in ("pipeline", "ulysses", "experts") if getattr(self, name) > 1]
        if axes and self.loss == "chunked":
            raise ShardingError(
                f"loss='chunked' cannot be planned with {', '.join(axes)}: choose loss='whole'"
            )
        for first, second in itertools.product(("tensor", "pipeline"), ("ulysses", "experts")):
            if getattr(self, first) > 1 and getattr(self, second) > 1:
                raise ShardingError(f"{first} and {second} cannot be planned together: choose {second}=1")

    @property
    def narrow(self) -> str | None:
        """Format in which compiled blocks multiply: "nvfp4", or for float8 its scales, "tensor" or "row"."""
        return "nvfp4" if self.nvfp4 else self.float8_scales if self.float8 else None

    @property
    def reshard(self) -> bool | int | None:
        """The effective `reshard_after_forward`: a pipeline by default gathers once for all micro-batches."""
        requested = self.reshard_after_forward
        return False if requested is None and self.pipeline > 1 else requested

    @property
    def named_strategy(self) -> Strategy:
        """The effective `strategy`."""
        return self.strategy or ("hsdp" if self.replicas > 1 else "fsdp")

    @property
    def axes(self) -> dict[str, int]:
        """The mesh of a stage: sizes by axis, adjacent ranks last; `shard` includes all dense axes."""
        shards = self.ranks // self.pipeline // self.replicas // self.tensor
        sizes = {"replicate": self.replicas, "shard": shards, "tensor": self.tensor}
        return {name: size for name, size in sizes.items() if size > 1 or name == "shard"}

    @property
    def dimensions(self) -> str:
        """The whole mesh, as `shardwise.dimensions.Dimensions` takes it."""
        sizes = {"pp": self.pipeline, "replicate": self.replicas, "dp": self.axes["shard"]}
        sizes["dp"] //= self.ulysses * self.experts
        sizes |= {"sp": self.ulysses, "ep": self.experts, "tp": self.tensor}
        return ",".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "dp")

    @property
    def sharing(self) -> int:
        """The number of ranks that compute a rank's tokens together."""
        return self.pipeline * self.ulysses * self.tensor

    @property
    def length(self) -> int:
        return 2048 if self.sequence is None else self.sequence

    @property
    def tokens(self) -> int:
        """The tokens of a rank's optimizer step, which `sharing` ranks compute together."""
        return self.micro_batch * self.length * self.accumulation


def check_filled(setup: Setup) -> None:
    """Raises ShardingError for micro-batches that do not fill a pipeline; recordings may have fewer."""
    count, ranks = setup.accumulation, setup.pipeline
    if count < ranks:
        raise ShardingError(
            f"accumulation={count} micro-batches do not fill pipeline={ranks}: give at least {ranks}"
        )
    if setup.schedule == "Interleaved1F1B" and count % (rounds := count // ranks):
        raise ShardingError(
            f"accumulation={count} micro-batches do not make {rounds} equal rounds over pipeline={ranks}, as"
            f" Interleaved1F1B needs: give {count - count % rounds}, or {ranks * (rounds + 1)}"
        )


def check_stages(name: str, layers: int, setup: Setup) -> None:
    stages = setup.pipeline * setup.stages
    if layers < stages:
        raise ShardingError(
            f"{name} has {layers} blocks, which do not fill the {stages} stages of"
            f" pipeline={setup.pipeline}: choose fewer"
        )


def with_changes(setup: Setup, changes: dict[str, Any]) -> Setup:
    """Return `setup` with other values of these fields."""
    if not isinstance(setup, Setup):
        raise ShardingError(
            f"setup must be a shardwise.planner.Setup, got a {type(setup).__name__}: give Setup(ranks=8), or"
            " its fields by name, ranks=8"
        )
    _check_names(Setup, changes)
    return replace(setup, **changes)


def _check_names(kind: type, changes: dict[str, Any]) -> None:
    if unknown := sorted(changes.keys() - _hints(kind).keys()):
        known = ", ".join(_hints(kind))
        raise ShardingError(f"{kind.__name__} has no field {', '.join(unknown)}: its fields are {known}")


def _check_types(instance: Any) -> None:
    """Raises ShardingError for a field of a dataclass whose value does not match its annotation."""
    kind: Any = type(instance)
    for name, hint in _hints(kind).items():
        value = getattr(instance, name)
        if not _matches(value, hint):
            choices = ", ".join(map(repr, _choices(hint)))
            expected = f"one of {choices}" if choices else f"of type {kind.__annotations__[name]}"
            raise ShardingError(f"{kind.__name__}: {name} must be {expected}, got {value!r}")


def _choices(hint: Any) -> list[Any]:
    """Return the literals of an annotation, or of the parts of a union."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [*arguments]
    return [choice for part in arguments for choice in _choices(part)]


def _matches(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if origin is not None:
        return isinstance(value, origin)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def to_json(value: Any) -> str:
    """Return a dataclass as JSON, which `from_json` reads."""
    return json.dumps(asdict(value), indent=1)


def from_json(kind: type[T], text: str) -> T:
    """Read a dataclass from JSON. Raises ShardingError for unknown or missing fields, or other types."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ShardingError(f"{kind.__name__} cannot be read: this is no JSON: {error}") from error
    result: T = _convert(kind, value)
    return result


def _convert(kind: Any, value: Any) -> Any:
    """Convert `value`, read from JSON, to the type that `kind` annotates."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kind = next((argument for argument in arguments if is_dataclass(argument)), None)
        return value if kind is None or value is None else _convert(kind, value)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_convert(arguments[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(arguments[1], item) for key, item in value.items()}
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return value
    if not isinstance(value, dict):
        raise ShardingError(f"{kind.__name__} is read from a JSON object of its fields, got {value!r}")
    _check_names(kind, value)
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in value]:
        raise ShardingError(f"{kind.__name__} needs {', '.join(missing)}, which the JSON does not have")
    instance = kind(**{name: _convert(_hints(kind)[name], item) for name, item in value.items()})
    _check_types(instance)
    return instance
