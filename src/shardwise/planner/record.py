"""Records what the library allocates, computes and sends in a training step, by running it on fake tensors.

`record` builds a model with a few blocks, shards it as rank 0 of a no-op group of any size, and trains it for
two steps: the first makes optimizer state, and the second equals every later one. A recording is a list
of events in segments. A segment has the events of one block in one phase (forward, backward, optimizer), or
those around the blocks; `unroll` makes a deep model's segments from a shallow one's.

    allocate, free    memory, with a size, a stream and, at the end, a category
    compute           an operator: FLOPs, bytes read and written
    send              a collective, when it is issued
    mark, wait        an event recorded on a stream, and a stream that waits for it

Tensors are on the CPU. To plan for an accelerator, the library gets streams that record the work issued to
them (`watch`), so it behaves as on an accelerator.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from shardwise import _compat
from shardwise._compat import FastFakeTensorMode
from shardwise.errors import ShardingError
from shardwise.optim import clip_grad_norm_
from shardwise.optim.adamw8bit import code_book, has_8_bits
from shardwise.planner import events, models
from shardwise.planner.compiled import compile_segments, partition, partition_function
from shardwise.planner.events import Recording
from shardwise.planner.kernels import kernels, route_evenly
from shardwise.planner.models import Model, chunked, no_packed_sequences
from shardwise.planner.noop_group import make_smaller_shards, mesh_of, noop_world
from shardwise.planner.pipeline import Pipe, hidden_of, order
from shardwise.planner.recorder import Recorder
from shardwise.planner.setup import Setup
from shardwise.planner.sharding import build_module, optimizers_of, shard, shard_experts, split
from shardwise.planner.tensor import cuts, parallelize
from shardwise.planner.unroll import collector_paused
from shardwise.planner.watch import watching

STEPS = 2


class _Logits(TorchFunctionMode):
    """Stands for the variables of a training loop that keeps the logits passed to `cross_entropy`."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is cross_entropy:
            self.logits.append(args[0])
        return func(*args, **(kwargs or {}))


def holding(variable: str) -> AbstractContextManager[Any]:
    """Return a stand-in for a training loop's variables: one that holds the logits, or nothing."""
    return _Logits() if variable == "logits" else nullcontext()


def record(
    model: Model, setup: Setup, *, layers: int, shard: Any = shard, watching: Any = watching
) -> Recording:
    """Train `model` with `layers` blocks for two steps, sharded and watched as by these functions.

    Raises:
        ShardingError: the model, the mesh or the setup does not fit together.
        Whatever the model raises on fake tensors.
    """
    model = chunked(model) if setup.loss == "chunked" else model
    with ExitStack() as stack:
        reshard = int(setup.reshard_after_forward or 0)
        data, tensor = split(stack.enter_context(noop_world(setup.ranks, axes=setup.axes)))
        make_smaller_shards(data, reshard)
        lines = _lines(setup)
        expert_mesh = data
        if setup.experts > 1:  # beside the ranks that hold the same ones
            axes = setup.axes | {"shard": setup.axes["shard"] // setup.experts, events.EXPERTS: setup.experts}
            mesh = mesh_of(torch.arange(setup.ranks), axes)
            expert_mesh, lines[events.EXPERTS] = mesh[tuple(setup.axes)], mesh[events.EXPERTS]
        if tensor is not None:
            lines[events.TENSOR_PARALLEL] = tensor
        lanes = {str(mesh.get_group().group_name): lane for lane, mesh in lines.items()}
        stack.enter_context(collector_paused())
        stack.enter_context(FastFakeTensorMode(allow_non_fake_inputs=True))
        stack.callback(code_book.cache_clear)  # of fake ones
        module, converted = build_module(model, layers, setup.stored_dtype)
        if not any(p.requires_grad for p in module.parameters()):
            raise ShardingError(f"{model.name} has no parameter that requires a gradient: nothing is trained")
        parameters = sum(p.numel() for p in module.parameters())
        blocks = model.blocks(module)
        in_block = sum(p.numel() for p in blocks[(layers - 1) // 2].parameters())
        if tensor is not None:
            parallelize(module, model.name, tensor, setup)
            loss = loss_parallel()
            loss.__enter__()
            stack.callback(loss.__exit__, None, None, None)  # as it forgets to where something raised
        sharded = sum(_compat.local_of(p).numel() for p in module.parameters())
        if setup.ulysses > 1:
            if model.cut_sequences is None:
                raise ShardingError(
                    f"{model.name} does not say how its sequences are cut: give a shardwise.planner.Model"
                    " with cut_sequences, or plan with ulysses=1"
                )
            model = replace(model, loss=model.cut_sequences(module, lines[events.ULYSSES]))
        experts: list[nn.Module] = []
        if setup.experts > 1:
            hf: Any = importlib.import_module("shardwise.hf")
            experts = hf.cut_experts(module, lines[events.EXPERTS])
            stack.enter_context(route_evenly(setup.expert_load))
        expert_params = {id(p) for expert in experts for p in expert.parameters()}
        dense = ([p for p in block.parameters() if id(p) not in expert_params] for block in blocks)
        gathered = tuple(sum(_compat.local_of(p).numel() for p in params) for params in dense)
        for expert in experts:
            shard_experts(expert, setup, expert_mesh)
        shard(module, model, setup, data)
        rows = setup.micro_batch * model.at.micro_batches
        tokens = torch.zeros(rows, setup.length, dtype=torch.int64)
        pipe: Pipe | None = None
        if setup.pipeline > 1:
            hidden = hidden_of(model, setup, tokens[: setup.micro_batch])
            pipe = Pipe(model, module, hidden, lines[events.PIPELINE].get_group())
        optimizers = optimizers_of(module, model, setup)
        code_books: list[Tensor] = []
        if setup.optimizer == "AdamW 8 bits" and any(map(has_8_bits, module.parameters())):
            for signed in (False, True):
                code_books += code_book(signed=signed, device=tokens.device)
        gc.collect(0)  # what was made since, and not what there was
        stack.enter_context(no_packed_sequences())
        functions = stack.enter_context(kernels(setup))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # kernels read what fakes do not have
        touches = setup.compile or setup.compile_loss
        recorder = Recorder(blocks, lanes, touches=touches, record_streams=setup.record_streams)
        if setup.compile and setup.checkpointing == "none" and not lanes:
            partition(blocks, recorder)
        if setup.compile_loss:
            compiled_loss = partition_function(models.whole_loss, recorder)
            stack.enter_context(mock.patch.object(models, "whole_loss", compiled_loss))
        stack.enter_context(watching(recorder, setup.device == "cuda"))
        stack.enter_context(recorder)
        _start(recorder, module, blocks, tokens, pipe)
        recorder.share(code_books)
        for step in range(STEPS):
            _step(recorder, model, module, optimizers, tokens, step, setup, pipe)
        segments = recorder.finish()
        if recorder.touches is not None:
            segments = compile_segments(segments, recorder.touches, narrow=setup.narrow)
        whole_logits = tensor is not None and setup.loss == "whole" and not cuts(module, setup)[1]
        assumed = tuple(_assumptions(module, setup, converted, *functions))
        held = sum(_compat.local_of(p).numel() for p in module.parameters())
        return Recording(
            layers, segments, parameters, in_block, gathered, sharded, held, whole_logits, assumed
        )


def _assumptions(
    module: nn.Module, setup: Setup, converted: Iterable[str], as_kernels: set[str], by_reference: set[str]
) -> Iterator[str]:
    """Yield what was assumed of dtypes, and of functions that ran as their kernels do, or without any."""
    for name in converted:
        if name != "float32":
            yield (
                f"The model makes parameters in {name}: they are converted to stored_dtype,"
                f" {setup.stored_dtype}, before they are cut"
            )
    if as_kernels:
        yield (
            f"{', '.join(sorted(as_kernels))} are planned as the kernels of mamba-ssm, causal-conv1d and"
            " flash-linear-attention, which transformers calls where they are installed: without them it"
            " takes much more memory and time"
        )
    if by_reference:
        yield (
            f"Without kernels, which are not installed here, {', '.join(sorted(by_reference))} ran as"
            " transformers' reference code: with them it takes less memory and time"
        )
    recurrent = {layer.mode for layer in module.modules() if isinstance(layer, nn.RNNBase)}
    if recurrent and setup.device == "cuda":
        yield (
            f"What cuDNN keeps of {', '.join(sorted(recurrent))} for backward is planned by formula, as only"
            " cuDNN tells it: gates and states of every token, and a copy of the weights; it may keep more"
        )
    kinds, dtype = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), getattr(torch, setup.param_dtype)
    norms = [norm for norm in module.modules() if isinstance(norm, kinds) and norm.weight is not None]
    norms = [norm for norm in norms if norm.running_mean is not None and norm.running_mean.dtype != dtype]
    for name in sorted({type(norm).__name__ for norm in norms}) if setup.device == "cpu" else ():
        yield (
            f"{name} computes in {setup.param_dtype} with running statistics of another dtype, which torch's"
            " CPU operators refuse: on CPU ranks its forward raises; give param_dtype='float32'"
        )


def _lines(setup: Setup) -> dict[str, DeviceMesh]:
    """Return rank 0's meshes of its pipeline and of the ranks that share its sequences."""
    sizes = {events.PIPELINE: setup.pipeline, events.ULYSSES: setup.ulysses}
    strides = {events.PIPELINE: setup.ranks // setup.pipeline, events.ULYSSES: setup.experts}
    cut = [(lane, size) for lane, size in sizes.items() if size > 1]
    return {lane: mesh_of(strides[lane] * torch.arange(size), {lane: size}) for lane, size in cut}


def _start(
    recorder: Recorder, module: nn.Module, blocks: list[nn.Module], tokens: Tensor, pipe: Pipe | None
) -> None:
    """Record the memory that exists before the first step."""
    owned = {i: [*block.parameters(), *block.buffers()] for i, block in enumerate(blocks)}
    layer_of = {id(tensor): i for i, tensors in owned.items() for tensor in tensors}
    for tensor in [*module.parameters(), *module.buffers(), tokens]:
        layer = layer_of.get(id(tensor))
        block_tensors = [tensor] if layer is None else owned.pop(layer, [])  # all of a block's
        if not block_tensors:
            continue
        recorder.by_layer(layer)
        recorder.owner = layer
        recorder.see([_compat.local_of(tensor) for tensor in block_tensors])
        recorder.categorize(block_tensors, events.ACTIVATIONS if tensor is tokens else events.PARAMETERS)
    if pipe is not None:
        recorder.by_layer(None)
        recorder.owner = None
        recorder.see(pipe.received + pipe.gradients)
        for tensors in pipe.received + pipe.gradients:
            recorder.categorize(tensors, events.ACTIVATIONS)


def _step(
    recorder: Recorder,
    model: Model,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    tokens: Tensor,
    step: int,
    setup: Setup,
    pipe: Pipe | None,
) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    syncs: Callable[[bool], None] | None = getattr(module, "set_requires_gradient_sync", None)
    for forward, micro in order(setup, model.at.number):
        if forward:
            recorder.go(step=step, micro=micro, phase="forward", layer=None, after=False)
            if pipe is not None:
                pipe.forward(micro, tokens.narrow(0, micro * setup.micro_batch, setup.micro_batch))
            else:
                if setup.reduce_once and syncs is not None:
                    syncs(micro == setup.accumulation - 1)
                with holding(setup.loop_holds) as variables:
                    loss = model.loss(module, tokens, tokens)
            recorder.end_forward()
            continue
        recorder.go(step=step, micro=micro, phase="backward", layer=None, after=model.at.last)
        if pipe is not None:
            pipe.backward(micro)
        else:
            loss.backward()
            del loss, variables
        recorder.categorize([p.grad for p in module.parameters()], events.GRADIENTS)
    if pipe is not None:
        recorder.go(phase="end of backward", layer=None, after=False)
        pipe.reduce()
        recorder.by_layer(None)
        pipe.average()
        recorder.categorize([p.grad for p in module.parameters()], events.GRADIENTS)
    recorder.go(micro=0, phase="optimizer", layer=None, after=False)
    if setup.clip_norm:
        clip_grad_norm_(module.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    recorder.by_layer(None)
