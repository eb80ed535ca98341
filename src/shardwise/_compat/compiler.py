"""Private names of torch's compilers: tracing, graphs, inductor, export. See the package's docstring."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Functional collectives look groups up in this registry.
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

# Tells the frame tracer which functions to skip.
from torch._C._dynamo import eval_frame as _frames

# What AOTAutograd traces with.
from torch._subclasses.functional_tensor import FunctionalTensor

# A functional collective carries the name of its group; only this function maps it to the group.
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _resolve_process_group as resolve_process_group,
)

Function = TypeVar("Function", bound=Callable[..., Any])

# Compilation. A tracer records these as they are; the public functional collectives would add a wrapper
# tensor around each result, for eager use, and have no reduce-scatter by the name of a group.


def traced_all_gather(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    """Gather [n] into [ranks * n], and wait for it."""
    functional = torch.ops._c10d_functional
    return cast(Tensor, functional.wait_tensor(functional.all_gather_into_tensor(shard, ranks, group_name)))


def traced_reduce_scatter(whole: Tensor, op: str, ranks: int, group_name: str) -> Tensor:
    """Reduce-scatter [ranks * n] into [n], and wait for it."""
    functional = torch.ops._c10d_functional
    return cast(
        Tensor, functional.wait_tensor(functional.reduce_scatter_tensor(whole, op, ranks, group_name))
    )


def traced_all_reduce(shard: Tensor, op: str, group_name: str) -> Tensor:
    functional = torch.ops._c10d_functional
    return cast(Tensor, functional.wait_tensor(functional.all_reduce(shard, op, group_name)))


# Concatenates tensors of one dtype in new memory (two or more; a single one stays where it is).
flatten: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors


def in_compiled_autograd() -> bool:
    """Return whether the running backward is one that compiled autograd traced beforehand."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")  # if imported, which takes a second
    return compiled is not None and bool(compiled.in_compiled_autograd_region)


def compiler_in_use() -> bool:
    """Return whether this process has made a function with `torch.compile`."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # None and False also stand for backends there
    return frames is not None and any(callable(backend) for backend in frames.cached_backends.values())


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module compiles its calls: by its `compile()`, or as what `torch.compile` made."""
    if module._compiled_call_impl is not None:
        return True
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # if imported, which takes a second
    return frames is not None and isinstance(module, frames.OptimizedModule)


def is_functional(tensor: Tensor) -> bool:
    """Return whether `tensor` stands for values in a graph of operators that is being traced."""
    return isinstance(tensor, FunctionalTensor)


def while_tracing(function: Callable[[Any], None], subject: Any) -> None:
    """Run a function once, when the call is traced; it is not part of the graph.

    The function gets a context, from which `traced_object` returns `subject` itself without reading from it.
    """
    from torch._dynamo.comptime import comptime

    comptime(function)


def traced_object(context: Any) -> Any:
    """Return the `subject` of `while_tracing`, to which only the tracer has the variable."""
    return context.get_local("subject")._i_will_not_complain_if_bc_breaks_VariableTracker().realize().value


def depth_in_graph() -> int:
    """Return the number of checkpoints around the code being traced, as a constant of its graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer, depth = InstructionTranslator.current_tx().output.current_tracer, 0
    while tracer.parent is not None:
        tracer, depth = tracer.parent, depth + 1
    return depth


# As `torch.compiler.assume_constant_result` does, which imports the compiler.
cast(Any, depth_in_graph)._dynamo_marked_constant = True


def runs_eagerly(function: Function, reason: str | None = None) -> Function:
    """Mark a function, and what it calls, as never compiled, at no cost per call."""
    # A tracer that meets it breaks its graph; with `fullgraph=True` the compiler raises with the reason.
    # While a compiled function calls `backward`, the tracer compiles whatever Python autograd calls. The
    # wrapper of `torch.compiler.disable` costs several calls each time, in uncompiled training too.
    _pass_by(function, _frames._FrameAction.SKIP)
    marked = cast(Any, function)
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
    return function


def only_inlined(function: Function) -> Function:
    """Mark a function as traced into its callers' graphs, but not compiled when eager code calls it."""
    _pass_by(function, _frames._FrameAction.DEFAULT)
    return function


def runs_outside_graphs(function: FunctionType, reason: str) -> Callable[..., Any]:
    """Return a copy of a function that is never compiled, while functions that it calls may be.

    A tracer that meets it breaks its graph; with `fullgraph=True` the compiler raises with the reason.
    """
    copy: Any = FunctionType(function.__code__, function.__globals__, function.__name__)
    _pass_by(copy, _frames._FrameAction.DEFAULT)
    copy._torchdynamo_disable, copy._torchdynamo_disable_msg = True, reason
    return cast(Callable[..., Any], copy)


def _pass_by(function: Callable[..., Any], callees: Any) -> None:
    strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, callees)
    _frames.set_code_exec_strategy(function.__code__, strategy)  # for calls from eager code


def traced_side_effect(setter: Callable[..., None], *args: Any) -> None:
    """Call a setter inside a checkpointed region, where tracers refuse to change outer objects."""
    # Tracers cannot know that the change is undone before the region ends.
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as allow

    allow(setter, *args)


# shardwise.graph: what torch.compile's backends keep private.


def name_process_group(name: Any, group: dist.ProcessGroup) -> None:
    """Register `group` under `name` for functional collectives, replacing any other; held weakly."""
    with suppress(RuntimeError, ValueError, LookupError):
        _unregister_process_group(name)
    _register_process_group(name, group)


def group_known_as(name: Any) -> dist.ProcessGroup | None:
    """Return the process group that functional collectives find by this name; None once it is destroyed."""
    with suppress(RuntimeError, ValueError, TypeError, LookupError):
        return resolve_process_group(name)
    return None


# Names of "aot_eager" backends: whether each decomposes operators as inductor does.
AOT_EAGER = {"aot_eager": False, "aot_eager_decomp_partition": True}


def aot_edited(
    graph_module: Any,
    inputs: Any,
    *,
    edit: Callable[[torch.fx.Graph], None],
    compiler: Callable[..., Any] | None = None,
    decompose: bool = False,
) -> Callable[..., Any]:
    """Compile a graph with AOTAutograd, after `edit` has changed each of its graphs of operators.

    The graphs run as in backend "aot_eager" or, with `decompose`, "aot_eager_decomp_partition", which has no
    hook between its partitioner and its compiler. If given, `compiler` compiles them.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
    from torch._functorch.partitioners import min_cut_rematerialization_partition as partition

    def compile_edited(module: torch.fx.GraphModule, fakes: Any) -> Callable[..., Any]:
        edit(module.graph)
        module.recompile()
        if compiler is None:
            return boxed_nop(module, fakes)
        return cast(Callable[..., Any], make_boxed_func(compiler(module, fakes)))

    options: dict[str, Any] = {"partition_fn": partition, "keep_inference_input_mutations": True}
    if decompose:
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
        options = {"partition_fn": partial(partition, compiler="inductor"), "decompositions": table}
    with config.patch(unlift_effect_tokens=True) if decompose else nullcontext():
        backend: Any = aot_autograd(fw_compiler=compile_edited, **options)
        return cast(Callable[..., Any], backend(graph_module, inputs))


@contextmanager
def tracing_autograd() -> Iterator[None]:
    """Let calls that compile in this context trace `torch.autograd.grad`, which is off by default."""
    # Torch's own recomputation in the resulting graphs is turned off: it expects backward to be one run of
    # nodes, refuses regions with random numbers, and keeps tensors alive through views of recomputed ones.
    from torch._dynamo import config as tracer
    from torch._functorch import config as graphs

    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    with tracer.patch(trace_autograd_ops=True), graphs.patch({name: False}):
        yield


def why_untraceable(error: Exception) -> str | None:
    """Return why a compiler cannot make one graph of a function; None if `error` has another cause."""
    from torch._dynamo.exc import Unsupported

    if not isinstance(error, Unsupported):
        return None
    text = str(error).strip()
    parts = [text.partition("\n")[0]]
    parts += re.findall(r"Developer debug context: (.+)", text)[:1]
    parts += [f"{file}:{line}" for file, line in re.findall(r'File "(.+)", line (\d+)', text)[-1:]]
    return "; ".join(parts)


def compiled_frame() -> tuple[int, int] | None:
    """Return the number of the frame being compiled, and how often it was compiled before."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    numbers: Any = (getattr(current, "frame_id", None), getattr(current, "frame_compile_id", None))
    return None if None in numbers else numbers


def graph_breaks() -> int:
    """Return the number of times a tracer has left a graph in this process; there is no public counter."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def graphs_traced() -> int:
    """Return the number of graphs tracers gave to backends in this process; there is no public counter."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def aoti_compile(program: torch.export.ExportedProgram, path: str) -> None:
    """Compile an exported program to machine code in one file; AOTInductor has no public name yet."""
    from torch import _inductor

    cast(Any, _inductor).aoti_compile_and_package(program, package_path=path)


def aoti_load(path: str) -> Callable[..., Any]:
    """Return the function of a file that `aoti_compile` wrote."""
    from torch import _inductor

    function: Callable[..., Any] = cast(Any, _inductor).aoti_load_package(path)
    return function


def check_index_copies(program: torch.export.ExportedProgram) -> None:
    """Raise for an index_copy_ whose source does not fit: torch before 2.13 raises only at run time."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.index_copy_.default):
        dest, dim, _, source = (x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in node.args)
        actual, expected = ([*x.shape[:dim], *x.shape[dim + 1 :]] for x in (source, dest))
        if actual != expected:
            raise RuntimeError(f"index_copy_ of slices of {actual} into slices of {expected}")


@contextmanager
def no_compilation() -> Iterator[bool]:
    """Hold off compilation; yields False while another thread compiles: torch has one lock for all."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    free = lock is None or lock.acquire(blocking=False)
    try:
        yield free
    finally:
        if free and lock is not None:
            lock.release()
