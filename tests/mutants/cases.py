"""What is run with a place left out: the fixed draw of the suite, and what was written for a place.

Case       a training that a dict describes, as `fuzz.streams_part` has it
Own        such a model, trained in a way of its own
Program    any code on the simulated device
OnRanks    collectives over gloo on two ranks, of which one is late; there are no streams
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fsdp.test_simulated_streams import released_on_a_stream_of_its_own
from fuzz.campaign import REGRESSIONS, draw_cases
from fuzz.streams_part.train import Block, Case, Planned, Run
from mutants import side_streams
from shardwise import _compat, compile_step, fully_shard
from shardwise.adapters.pipelining import StateOfStage
from shardwise.comm.exchange import exchange
from shardwise.comm.gloo import GlooAllGather, GlooReduceScatter
from shardwise.fsdp.module_state import state_of
from shardwise.layout import Box
from shardwise.layout.messages import Message
from shardwise.optim.tied import _swap as swap
from shardwise.sharded_tensor.dtensor import from_dtensor
from shardwise.tensor_parallel import operators
from shardwise.verify.streams import DEVICE

Tensors = Sequence[Tensor]
FIXED = (1, 40)  # seed and cases, as in `fuzz.test_fuzz`
LATE_SECONDS = 0.05


@dataclass(frozen=True)
class Own:
    case: Case
    train: Callable[[Run], Tensors | None]


@dataclass(frozen=True)
class Program:
    run: Callable[[], Tensors]
    ranks: int = 2


@dataclass(frozen=True)
class OnRanks:
    run: Callable[[int], Tensors]


AnyCase = Case | Own | Program | OnRanks

# ---------------------------------------------------------------- training in other ways


def blocks_of(run: Run) -> list[Any]:
    return [module for module in run.each() if isinstance(module, Block)]


def other_work(run: Run) -> None:
    """For so long that memory shows which is held meanwhile."""
    for _ in range(120):
        run.batch().mul_(2)


def gather_that_is_given_up(run: Run) -> None:
    for number in range(3):
        for module in run.each():
            module.unshard(async_op=True)
            module.reshard()
        other_work(run)
        with torch.no_grad():
            for param in run.model.parameters():
                param.mul_(1.1)
        run.step(number)
        for module in run.each():
            module.reshard()
        other_work(run)


def gather_that_is_given_up_when_moved(run: Run) -> None:
    for number in range(3):
        blocks_of(run)[0].unshard(async_op=True)
        run.model.to(DEVICE)
        other_work(run)
        run.step(number)


def gather_that_is_given_up_when_parameters_are_replaced(run: Run) -> None:
    for number in range(2):
        run.step(number)
        blocks_of(run)[0].unshard(async_op=True)
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(state, assign=True)
        run.optimizers = run.optimizer()
    run.step(2)


def forward_that_raises_and_is_tried_again(run: Run) -> None:
    def raising(*_: Any) -> None:
        raise Planned

    for number in range(3):
        hook = blocks_of(run)[1].down.register_forward_hook(raising)
        with suppress(Planned):
            run.forward()
        hook.remove()
        other_work(run)
        run.step(number)


def forward_that_raises_and_is_reset(run: Run) -> None:
    for number in range(3):
        run.fail("forward")
        other_work(run)
        with torch.no_grad():
            for param in run.model.parameters():
                param.mul_(1.1)
        run.step(number)


def backward_that_raises_after_reductions(run: Run) -> None:
    def raising(*_: Any) -> None:
        raise Planned

    for number in range(3):
        hook = run.model.first.register_full_backward_pre_hook(raising)
        with suppress(Planned):
            run.backward()
        hook.remove()
        run.model.reset_iter_state()
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=run.case.get("zero") != "zeros")
        run.step(number)


def weights_that_the_user_gathers(run: Run) -> Tensors:
    seen = []
    for number in range(3):
        block = blocks_of(run)[1]
        block.unshard()
        seen.append(block.up.weight * 2)
        block.reshard()
        run.step(number)
        block.unshard()
        seen.append(block.up.weight * 2)
    return seen


def gather_that_forward_began_and_the_user_waits_for(run: Run) -> None:
    blocks = blocks_of(run)
    for before, block in pairwise(blocks):
        before.set_modules_to_forward_prefetch([block])
    blocks[0].up.register_forward_pre_hook(lambda *_: blocks[1].unshard())
    run.train()


def step_of_a_pipeline_stage(run: Run) -> None:
    stage = StateOfStage(state_of(run.model))
    for _ in range(3):
        run.model.set_is_last_backward(False)
        run.model.set_requires_gradient_sync(False)
        for _ in range(2):
            run.backward()
        run.model.set_is_last_backward(True)
        run.model.set_requires_gradient_sync(True)
        stage._root_post_backward_final_callback()
        run.update()
        for optimizer in run.optimizers:
            optimizer.zero_grad()


def backward_that_gathers_what_does_not_run(run: Run) -> None:
    *_, before, last = blocks_of(run)
    before.set_modules_to_backward_prefetch([last])
    run.train()


def first_forward_after_an_event_and_other_work(run: Run) -> None:
    event = torch.accelerator.current_stream().record_event()
    for _ in range(3):
        torch.randn(64, device=DEVICE).mul_(2)
    run.model.set_post_optim_event(event)
    run.train()


# ---------------------------------------------------------------- programs


class Reentrant(nn.Module):
    """Two modules that are gathered together. One runs in a checkpoint whose backward is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.last, self.first(x).tanh(), use_reentrant=True)


def list_of_which_one_is_recomputed(layout: str) -> Tensors:
    torch.manual_seed(0)
    model = Reentrant().to(DEVICE)
    mesh = init_device_mesh(DEVICE, (2,))
    fully_shard([model.first, model.last], mesh=mesh, layout=layout)
    fully_shard(model, mesh=mesh, layout=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            model(torch.randn(2, 4, device=DEVICE, requires_grad=True)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


class WithAWholeWeight(nn.Module):
    """A layer cut over ranks, which gathers its weight, and does not wait for the weight's gradient."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8, device=DEVICE), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.weight.redistribute(placements=[Replicate()], async_op=True)
        return x @ whole.to_local(grad_placements=[Partial()])


def gradients_on_their_way() -> Tensors:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("shard", "tensor"))
    model = WithAWholeWeight(mesh["tensor"])
    fully_shard(model, mesh=mesh["shard"])
    model(torch.randn(2, 8, device=DEVICE)).square().sum().backward()
    return [model.weight.grad]


def gradients_that_two_stages_have() -> Tensors:
    mine, theirs = torch.ones(8, device=DEVICE), torch.empty(8, device=DEVICE)
    swap([(mine, theirs)], init_device_mesh(DEVICE, (2,)).get_group(), 1)
    return [mine.add_(theirs)]


def doubled(local: Tensor, mesh: DeviceMesh) -> tuple[tuple[Tensor], None]:
    return (local * 2,), None


def tensors_that_a_hook_makes(ranks: int) -> Tensors:
    """Of a group with one parameter, whose hook gives one tensor: it is gathered from where it lies."""
    mesh, found = init_device_mesh(DEVICE, (ranks,)), []
    for async_op in (False, True):
        model = nn.Linear(8, 8, bias=False).to(DEVICE)
        fully_shard(model, mesh=mesh)
        local: Any = model.weight._local_tensor
        local.fsdp_pre_all_gather = partial(doubled, local)
        local.fsdp_post_all_gather = halved
        model._set_unshard_async_op(async_op)
        for _ in range(2):
            found.append(model(torch.randn(2, 8, device=DEVICE)))
            found[-1].sum().backward()
    return found


def halved(outputs: Any, metadata: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    if out is None:
        whole = outputs[0] / 2
        return whole, (whole, outputs[0])
    return torch.div(outputs[0], 2, out=out.data)


def compiled_step_after_an_evaluation() -> Tensors:
    """What comes before its graph, which the simulated device cannot have."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE)
    mesh, x = init_device_mesh(DEVICE, (2,)), torch.randn(2, 8, device=DEVICE)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_step(model, lambda model, x: model(x).sum(), optimizer, backend="eager")
    with torch.no_grad():
        model(x)
    model[0].unshard(async_op=True)
    step._prepared([state for module in model if (state := state_of(module)) is not None])
    return [x.mul_(1.1) for _ in range(40)]


def exchange_of_boxes() -> Tensors:
    group = dist.group.WORLD
    mine, theirs = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    have, want = torch.ones(2, 4, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    messages = [Message(0, 1, mine, 0, 0), Message(1, 0, theirs, 0, 0)]
    exchange(messages, source=[(mine, have)], target=[(theirs, want)], group=group)
    return [want * 2, have.add_(1)]


def collectives_of_graphs() -> Tensors:
    name, x = dist.group.WORLD.group_name, torch.ones(8, device=DEVICE)
    whole = _compat.traced_all_gather(x, 2, name) * 2
    part = _compat.traced_reduce_scatter(whole, "sum", 2, name) * 2
    return [whole, part, _compat.traced_all_reduce(part, "sum", name) * 2]


def derivatives_of_a_cut_program() -> Tensors:
    name, x = dist.group.WORLD.group_name, torch.ones(8, device=DEVICE, requires_grad=True)
    term = torch.ones(16, device=DEVICE, requires_grad=True)
    for made in (operators.replicated(x * 2, name), operators.scattered(term * 2, x * 2, 2, name)):
        (made * made).sum().backward()
    return [x.grad, term.grad]


# ---------------------------------------------------------------- two ranks over gloo


def late(rank: int) -> None:
    if rank:
        time.sleep(LATE_SECONDS)


def numbers(rank: int) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.float32) + rank


def collectives_over_gloo(rank: int) -> Tensors:
    group, found = dist.group.WORLD, []
    for gather, scatter in (
        (_compat.all_gather_single, _compat.reduce_scatter_single),
        (GlooAllGather(), GlooReduceScatter()),
    ):
        for with_graph in (False, True):
            x, whole = numbers(rank), torch.zeros(2 << 16)
            late(rank)
            if isinstance(gather, GlooAllGather):
                gather(whole, x, group)
            else:
                gather(whole, x, group, async_op=False)
            x.zero_()
            found.append(whole.clone())
            part = torch.zeros(1 << 16)
            late(rank)
            with torch.set_grad_enabled(with_graph):
                if isinstance(scatter, GlooReduceScatter):
                    scatter(part, whole, group, dist.ReduceOp.SUM)
                else:
                    scatter(part, whole, dist.ReduceOp.SUM, group, async_op=False)
            whole.zero_()
            found.append(part.clone())
    return found


def exchange_over_gloo(rank: int) -> Tensors:
    """Both ways; to the rank that is late; and in two pieces, which travel in memory of their own."""
    rows, found = 1 << 10, []
    boxes = [Box((0, 0), (rows, 64)), Box((rows, 0), (rows, 64))]
    upper, lower = Box((0, 0), (rows, 8)), Box((0, 8), (rows, 56))
    both = [Message(0, 1, boxes[0], 0, 0), Message(1, 0, boxes[1], 0, 0)]
    for messages in (both, both[:1], [Message(0, 1, box, 0, 0) for box in (upper, lower)]):
        have, want = numbers(rank).view(rows, 64), torch.zeros(rows, 64)
        source, target = [(boxes[rank], have)], [(boxes[1 - rank], want)]
        late(rank)
        exchange(messages, source=source, target=target, group=dist.group.WORLD)
        have.zero_()
        found.append(want)
    return found


def on_two_ranks(function: Callable[[int], Tensors]) -> Tensors:
    """What it returns on rank 0, which is this process, and on rank 1."""
    ours, theirs = get_context("fork").Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:

        def on_rank(rank: int) -> Tensors:
            with _compat.no_process_groups():
                store = dist.FileStore(os.path.join(folder, "store"), 2)
                dist.init_process_group(
                    "gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=10)
                )
                found = function(rank)
                dist.barrier()
            return found

        def other_rank() -> None:
            with suppress(RuntimeError):  # rank 0 has one too, or misses this one's results
                theirs.send([tensor.tolist() for tensor in on_rank(1)])

        other = get_context("fork").Process(target=other_rank)
        other.start()
        theirs.close()
        try:
            return [*on_rank(0), *map(torch.tensor, ours.recv())]
        finally:
            other.kill()
            other.join()


def redistribution_in_progress() -> Tensors:
    rows = distribute_tensor(torch.randn(4, 4, device=DEVICE), init_device_mesh(DEVICE, (2,)), [Shard(0)])
    whole = rows.redistribute(placements=[Replicate()], async_op=True)
    return [tensor * 2 for tensor in from_dtensor(whole).tensors]


ROWS = {"layout": "contiguous"}
CAST = {"mp": {"param": "bfloat16", "reduce": "bfloat16"}}
AHEAD = {"prefetch": "forward"}
KEPT = {"set": {"set_reshard_after_backward": False}}
OFFLOADS = {"offload": "pinned", "zero": "zeros"}
WRITTEN: dict[str, AnyCase] = {
    "gathers begun before the optimizer's step": CAST | {"after": "unshard_async"},
    "gathers begun before the optimizer's step, contiguous": ROWS | {"after": "unshard_async"},
    "a gather that is given up": Own(CAST, gather_that_is_given_up),
    "a gather that is given up, contiguous": Own(ROWS | KEPT, gather_that_is_given_up),
    "a model that is moved": Own(CAST, gather_that_is_given_up_when_moved),
    "parameters that are replaced": Own(CAST, gather_that_is_given_up_when_parameters_are_replaced),
    "parameters that are replaced, contiguous": Own(
        ROWS, gather_that_is_given_up_when_parameters_are_replaced
    ),
    "a forward that raises": Own(CAST | AHEAD, forward_that_raises_and_is_reset),
    "a forward that raises, contiguous": Own(ROWS | AHEAD, forward_that_raises_and_is_reset),
    "a forward that is tried again": Own(CAST | AHEAD, forward_that_raises_and_is_tried_again),
    "a forward that is tried again, contiguous": Own(ROWS | AHEAD, forward_that_raises_and_is_tried_again),
    "a backward that raises": Own(CAST | {"zero": "zeros"}, backward_that_raises_after_reductions),
    "a backward that raises, contiguous": Own(ROWS, backward_that_raises_after_reductions),
    "a backward that raises, offloading": Own(OFFLOADS, backward_that_raises_after_reductions),
    "weights that the user gathers": Own(CAST, weights_that_the_user_gathers),
    "weights that the user gathers, contiguous": Own(ROWS | KEPT, weights_that_the_user_gathers),
    "a gather ahead that the user waits for": Own(
        CAST | {"blocks": 4}, gather_that_forward_began_and_the_user_waits_for
    ),
    "a module that the user gathers while another runs": ROWS | {"amid": ["forward", 1, 0, "unshard"]},
    "kept memory that the user gathers into": ROWS
    | {"amid": ["forward", 0, 1, "unshard"], "set": {"set_keep_unsharded_storage": True}},
    "a gather ahead that the user gives up": CAST | {"blocks": 4, "amid": ["backward", 3, 2, "reshard"]},
    "one root's gathers ahead in another's forward": CAST | AHEAD | {"two_roots": "apart"},
    "one root's gathers ahead in another's forward, contiguous": ROWS | AHEAD | {"two_roots": "apart"},
    "a step of a pipeline stage": Own({}, step_of_a_pipeline_stage),
    "a gather ahead of what does not run": Own(
        CAST | {"skips": True}, backward_that_gathers_what_does_not_run
    ),
    "parameters cut over two ranks between forward and backward": {"reshard": 2},
    "an optimizer on a stream of its own": ROWS
    | {"strategy": "zero1", "stream": "optimizer", "post_optim_event": True},
    "an optimizer on a stream of the device's own kind": CAST
    | {"seed": 1, "stream": "optimizer", "post_optim_event": True},
    "an optimizer on a stream of its own, of gradients of computation's memory": {
        "stream": "optimizer",
        "post_optim_event": True,
    },
    "a buffer that is kept and was another stream's": ROWS
    | {"comm": "own", "between": "unshard_async", "forwards": 2, "two_roots": "apart", "reshard": 2}
    | {"zero": "zeros"},
    "a group in two collectives, gathered by hand": ROWS
    | {"frozen": "part", "amid": ["forward", 0, 1, "wait"]},
    "a frozen first block in smaller shards": ROWS | {"frozen": "first", "reshard": 2},
    "kept memory, contiguous": ROWS | {"blocks": 2, "set": {"set_keep_unsharded_storage": True}},
    "hooks of a gather that the user waits for": {"ranks": 1, "extension": True}
    | {"amid": ["forward", 2, 2, "wait"]},
    "a redistribution in progress": Program(redistribution_in_progress),
    "a stream of its own, then two ranks": Program(released_on_a_stream_of_its_own, ranks=4),
    "one shard and two replicas": {"mesh": "two", "ranks": 2, "micro": 3, "sync": "all_reduce"},
    "a first forward that follows an event": Own(
        ROWS | CAST | {"strategy": "hierarchical_fsdp", "mesh": "two"},
        first_forward_after_an_event_and_other_work,
    ),
    "gradients on their way to their ranks": Program(gradients_on_their_way, ranks=4),
    "gradients that two stages have": Program(gradients_that_two_stages_have, ranks=2),
    "tensors that a hook makes": Program(partial(tensors_that_a_hook_makes, 2)),
    "tensors that a hook makes, on a rank alone": Program(partial(tensors_that_a_hook_makes, 1), ranks=1),
    "hooks of an asynchronous gather": {"extension": True, "async_unshard": True},
    "a compiled step after an evaluation": Program(compiled_step_after_an_evaluation),
    "exchanges of an optimizer": {"optimizer": "muon", "order": 0},
    "a list of which one is recomputed": Program(partial(list_of_which_one_is_recomputed, "interleaved")),
    "a list of which one is recomputed, contiguous": Program(
        partial(list_of_which_one_is_recomputed, "contiguous")
    ),
    **{name: Program(run, ranks) for name, (run, ranks) in side_streams.PROGRAMS.items()},
    "an exchange of boxes": Program(exchange_of_boxes),
    "collectives of graphs": Program(collectives_of_graphs),
    "derivatives of a cut program": Program(derivatives_of_a_cut_program),
    "collectives over gloo": OnRanks(collectives_over_gloo),
    "an exchange over gloo": OnRanks(exchange_over_gloo),
}
# Those that need no other process.
DRAWN = {f"drawn {case['drawn']}": case for case in draw_cases("streams", *FIXED) if case["world"] == 1}
_kept = {path.stem: json.loads(path.read_text()) for path in sorted(REGRESSIONS.glob("streams_*.json"))}
KEPT_CASES = {name: case for name, case in _kept.items() if case["world"] == 1}
CASES: dict[str, AnyCase] = {**DRAWN, **KEPT_CASES, **WRITTEN}
