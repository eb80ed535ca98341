"""Trains a small model on the simulated device, over a no-op group, as a case says."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwise
from fuzz.streams_part.beside import Pipelined, Tables
from shardwise import _compat, optim
from shardwise import checkpoint as checkpoints
from shardwise.comm import DefaultReduceScatter
from shardwise.comm.api import SymmetricAllGather
from shardwise.fsdp.module_state import state_of
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, Findings, Order, simulated

Case = dict[str, Any]
WIDTH, ROWS = 6, 2
SAVES = ("save", "save_async", "host")


class Planned(Exception):  # noqa: N818 - not an error of anything tested
    """What a case asks a pass to raise."""


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)
        self.again = case.get("checkpointing", False)

    def inside(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return x + checkpoint(self.inside, x, use_reentrant=False)
        return x + self.inside(x)


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.get("blocks", 3)))
        self.head = nn.Linear(WIDTH, 5)
        if case.get("frozen") == "first":
            self.freeze()
        elif case.get("frozen") in ("part", True):
            self.blocks[1].up.requires_grad_(False)
        if case.get("tied"):
            self.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.blocks[0].tied = self.first.weight  # registered twice under other modules
        self.skips = False

    def freeze(self, frozen: bool = True) -> None:
        """Freeze what comes first, which then has no backward."""
        for module in (self.first, self.blocks[0]):
            module.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:-1] if self.skips else self.blocks:
            x = block(x)
        return self.head(x)


class OwnAllGather(SymmetricAllGather):
    """Keeps buffers as symmetric memory is kept."""

    def __init__(self) -> None:
        self.buffers = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        def made(numel: int, *_: Any) -> Tensor:
            return torch.empty(numel, dtype=dtype, device=device)

        self.group = dist.group.WORLD
        with mock.patch.object(_compat, "symmetric_empty", made):
            return super().allocate(size, dtype=dtype, device=device)


class OwnReduceScatter(DefaultReduceScatter):
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


def halves_of(local: Tensor, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
    """A hook for the all-gather that sends two tensors which it makes."""
    return (local.mul(0.5), local.to(torch.bfloat16)), None


def joined(outputs: Any, metadata: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    half, whole = outputs
    if out is None:
        made = half + 0.5 * whole
        return made, (made, half, whole)
    rows = out.size(0)  # gathered are those of padding, too
    return torch.add(half[:rows], whole[:rows], alpha=0.5, out=out.data)


def options_of(case: Case, api: ModuleType) -> dict[str, Any]:
    """What `fully_shard` is asked for, but for the mesh."""
    policy = {"param": None, "reduce": None} | case.get("mp", {})
    dtypes = {f"{k}_dtype": None if v is None else getattr(torch, v) for k, v in policy.items()}
    options: dict[str, Any] = {"mp_policy": api.MixedPrecisionPolicy(**dtypes)}
    if "reshard" in case:
        options["reshard_after_forward"] = case["reshard"]
    if "offload" in case:
        options["offload_policy"] = api.CPUOffloadPolicy(pin_memory=case["offload"] == "pinned")
    if case.get("layout") == "contiguous":
        options["layout"] = "contiguous"
        if "strategy" in case:
            options["strategy"] = case["strategy"]
    return options


class Run:
    """One training; `api` is ours or torch's."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case = case
        self.folder = folder
        self.saving: Any = None
        module = torch.get_device_module(DEVICE)
        self.is_own = bool(case.get("seed", 0) % 2)  # of the device's own kind, as torch.cuda.Stream is
        self.kind = module.Stream if self.is_own else torch.Stream
        self.stream = self.kind(device=DEVICE)
        self.api: ModuleType = torch_fsdp if case.get("api") == "fsdp2" else shardwise
        self.ours = self.api is shardwise
        self.world = dist.get_world_size()
        torch.manual_seed(case.get("seed", 0))
        self.mesh = self.mesh_of()
        self.net = Net(case).to(DEVICE)
        self.model: Any = self.net
        if case.get("tensor_parallel"):
            self.cut_tensors()
        self.shard()
        self.settings()
        self.optimizers = self.optimizer()
        self.tables = Tables() if case.get("tables") else None
        if self.tables is not None:
            self.optimizers.append(self.tables.optimizer)
        self.hooks()

    def mesh_of(self) -> DeviceMesh:
        case = self.case
        if case.get("tensor_parallel"):
            self.whole = init_device_mesh(DEVICE, (self.world // 2, 2), mesh_dim_names=("shard", "tensor"))
            return self.whole["shard"]
        if case.get("mesh") == "two":
            shape = (2, self.world // 2)
            return init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(DEVICE, (self.world,), mesh_dim_names=("shard",))

    def cut_tensors(self) -> None:
        for block in self.model.blocks:
            block.up, block.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            block.to(DEVICE)
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, self.whole["tensor"], plan)

    def options(self) -> dict[str, Any]:
        return options_of(self.case, self.api) | {"mesh": self.mesh}

    def shard(self) -> None:
        options = self.options()
        self.model.requires_grad_  # noqa: B018
        for block in self.model.blocks:
            self.api.fully_shard(block, **options)
        if self.case.get("two_roots"):
            halves = [
                nn.Sequential(self.model.first, *self.model.blocks[:1]),
                nn.Sequential(*self.model.blocks[1:], self.model.head),
            ]
            for half in halves:
                self.api.fully_shard(half, **options)
            self.halves = halves
            if self.case["two_roots"] == "shared":
                self.api.share_comm_ctx(halves)
            self.model = nn.ModuleList(halves)
        else:
            self.api.fully_shard(self.model, **options)

    def each(self) -> Iterator[Any]:
        return (m for m in self.model.modules() if isinstance(m, self.api.FSDPModule))

    def settings(self) -> None:
        case = self.case
        each = list(self.each())
        for name, value in case.get("set", {}).items():
            for module in each if not self.case.get("two_roots") and "manual" not in name else self.roots():
                getattr(module, name)(value)
        blocks = [m for m in each if isinstance(m, Block)]
        if case.get("prefetch") in ("forward", "both"):
            for i, block in enumerate(blocks[:-1]):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        if case.get("prefetch") in ("backward", "both"):
            for i, block in enumerate(blocks[1:], 1):
                block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])
        for module in each:
            if case.get("comm") in ("own", "gather"):
                module.set_custom_all_gather(OwnAllGather())
            if case.get("comm") in ("own", "scatter"):
                module.set_custom_reduce_scatter(OwnReduceScatter())
            if "reduce_hook" in case:
                stream = self.kind(device=DEVICE) if case["reduce_hook"] == "stream" else None
                module.set_all_reduce_hook(lambda shard: shard.mul_(0.5), stream=stream)
            if "async_unshard" in case:
                module._set_unshard_async_op(True)
            if self.ours:
                state = state_of(module)
                assert state is not None
                for group in state.groups:
                    group.settings.staging_bytes = case.get("slices", group.settings.staging_bytes)
                    group.settings.separate_memory_min_bytes = case.get(
                        "apart", group.settings.separate_memory_min_bytes
                    )

        if case.get("extension"):
            for block in blocks:
                local = block.up.weight._local_tensor
                local.fsdp_pre_all_gather = partial(halves_of, local)
                local.fsdp_post_all_gather = joined

    def roots(self) -> list[Any]:
        return self.halves if self.case.get("two_roots") else [self.model]

    # ---------------------------------------------------------------- optimizers

    def optimizer(self) -> list[torch.optim.Optimizer]:
        params = [p for p in self.model.parameters() if p.requires_grad]
        name = self.case.get("optimizer", "adamw")
        device = "cpu" if "offload" in self.case else DEVICE
        kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
            "adamw": lambda: torch.optim.AdamW(params, lr=0.01, foreach=True),
            "each": lambda: torch.optim.AdamW(params, lr=0.01, foreach=False),
            "fused": lambda: torch.optim.AdamW(params, lr=0.01, fused=device == DEVICE),
            "flat": lambda: optim.flat(torch.optim.AdamW, self.model, lr=0.01),
            "muon": lambda: optim.Muon([p for p in params if p.ndim == 2], lr=0.01),
            "8bit": lambda: optim.AdamW8bit(params, lr=0.01),
            "sharded": lambda: optim.ShardedOptimizer(
                dict(self.model.named_parameters()), torch.optim.AdamW, lr=0.01
            ),
        }
        if name != "in_backward":
            return [kinds[name]()]
        each = {param: torch.optim.SGD([param], lr=0.1, foreach=False) for param in params}

        def step(param: Tensor) -> None:
            each[param].step()
            each[param].zero_grad()

        for param in params:
            param.register_post_accumulate_grad_hook(step)
        return []

    def hooks(self) -> None:
        blocks = [module for module in self.each() if isinstance(module, Block)]
        if "amid" in self.case:  # what a user does with another module while one runs
            when, at, other, what = self.case["amid"]
            module = blocks[other % len(blocks)]

            def act(*_: Any) -> None:
                if what == "reshard":
                    module.reshard()
                elif (handle := module.unshard(async_op=what != "unshard")) and what == "wait":
                    handle.wait()

            inner = blocks[at % len(blocks)].up
            if when == "forward":
                inner.register_forward_pre_hook(act)
            else:
                inner.register_full_backward_pre_hook(act)
        if self.case.get("gradient_hook"):
            for param in self.model.parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))

    # ---------------------------------------------------------------- steps

    def batch(self) -> Tensor:
        return torch.randn(ROWS, WIDTH, device=DEVICE)

    def forward(self) -> Tensor:
        x = self.batch()
        if self.tables is not None:
            x = x + self.tables(ROWS)
        for root in self.roots():
            x = root(x)
        return x

    def backward(self) -> None:
        case = self.case
        between = case.get("between")
        if case.get("forwards", 1) > 1:
            outputs = [self.forward() for _ in range(case["forwards"])]
            loss = sum((out.square().mean() for out in outputs), torch.zeros((), device=DEVICE))
        else:
            loss = self.forward().square().mean()
        if between == "eval":
            with torch.no_grad():
                self.forward()
        if between in ("unshard", "unshard_async"):
            block = next(m for m in self.each() if isinstance(m, Block))
            handle = block.unshard(async_op=between == "unshard_async")
            if handle is not None:
                handle.wait()
        assert isinstance(loss, Tensor)
        for again in (True, False) if case.get("again") else (False,):
            loss.backward(retain_graph=again)

    def step(self, number: int) -> None:
        case = self.case
        if case.get("frozen") == "in turns":
            self.net.freeze(number % 2 == 1)
        self.net.skips = case.get("skips") in (True, "in turns" if number % 2 == 0 else True)
        before = case.get("before")
        if before in ("unshard", "unshard_async"):
            for module in list(self.each())[:2]:
                handle = module.unshard(async_op=before == "unshard_async")
                if handle is not None and number % 2:
                    handle.wait()
        if before == "eval":
            with torch.no_grad():
                self.forward()
        if before == "inference":
            with torch.inference_mode():
                self.forward()
        if case.get("raises") and number == 1:
            self.fail(case["raises"])
        if before in ("save", "save_async", "host"):
            self.save(before, number)
        if before == "state_dict":
            state = self.model.state_dict()
            held = {
                name: value.full_tensor() for name, value in state.items() if hasattr(value, "full_tensor")
            }
            del held
        micro = case.get("micro", 1)
        for index in range(micro):
            last = index == micro - 1
            for root in self.roots():
                if case.get("sync") == "no_sync":
                    root.set_requires_gradient_sync(last)
                elif case.get("sync") == "all_reduce":
                    root.set_requires_all_reduce(last)
                if case.get("is_last"):
                    root.set_is_last_backward(last)
            self.backward()
        if "manual" in case:
            for root in self.roots():
                handle = root.finalize_backward(async_op=case["manual"] == "async")
                if handle is not None:
                    handle.wait()
        if case.get("clip") == "ours" and self.ours:
            optim.clip_grad_norm_(self.model.parameters(), 1.0)
        elif case.get("clip"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        if case.get("gradients_read"):
            self.seen = [
                p.grad.to_local().clone() if hasattr(p.grad, "to_local") else p.grad
                for p in self.model.parameters()
                if p.grad is not None
            ]
        if case.get("after") == "eval":
            with torch.no_grad():
                self.forward()
        elif case.get("after"):  # gathered for nothing, as the optimizer steps
            for module in list(self.each())[-2:]:
                module.unshard(async_op=case["after"] == "unshard_async")
        event = self.update()
        if case.get("post_optim_event"):
            for root in self.roots():
                root.set_post_optim_event(event)
        zero = case.get("zero", "none")
        for optimizer in self.optimizers:
            if zero != "kept":
                optimizer.zero_grad(set_to_none=zero == "none")

    def update(self) -> torch.Event:
        """Step on the current stream, or on another one, which the gathers then wait for."""
        current, stream = torch.accelerator.current_stream(), self.stream
        if self.is_own:
            current = torch.get_device_module(DEVICE).current_stream()
        if self.case.get("stream") != "optimizer":
            for optimizer in self.optimizers:
                optimizer.step()
            return current.record_event()
        stream.wait_stream(current)
        with stream:
            for optimizer in self.optimizers:
                optimizer.step()
        event = stream.record_event()
        others = {"zero", "before", "set", "tensor_parallel", "tables"} & set(
            self.case
        )  # who read on the current stream
        if others or not self.case.get("post_optim_event"):
            current.wait_event(event)
        return event

    def end(self) -> None:
        torch.accelerator.synchronize()
        if hasattr(self, "memory"):
            self.memory.clear()
        if self.saving is not None:
            self.saving.wait()

    def fail(self, where: str) -> None:
        """A pass that raises on its way, after which the next one goes on."""

        def raising(*_: Any) -> None:
            raise Planned

        block = next(m for m in self.each() if isinstance(m, Block)).down
        hook = block.register_forward_hook(raising) if where == "forward" else None
        try:
            out = self.forward()
            if where == "backward":
                out.register_hook(raising)
            out.sum().backward()
        except Planned:
            pass
        if hook is not None:
            hook.remove()
        for root in self.roots():
            root.reset_iter_state()

    def save(self, how: str, number: int) -> None:
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        if how == "host":
            self.memory = getattr(self, "memory", None) or checkpoints.HostMemory(self.folder)
            self.memory.save(state, step=number)
        else:
            save = checkpoints.save if how == "save" else checkpoints.save_async
            saved = save(self.folder, state, step=number)
            self.saving = saved if how == "save_async" else None

    def train(self) -> None:
        stream = torch.Stream(device=DEVICE)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream if self.case.get("stream") == "all" else contextlib.nullcontext():
            self.steps()

    def steps(self) -> None:
        for number in range(self.case.get("steps", 3)):
            self.step(number)
            if self.case.get("synchronizes"):
                torch.accelerator.synchronize()


@contextlib.contextmanager
def world_of(case: Case) -> Iterator[None]:
    """The ranks that run the case, or some that do not exist; one where ranks exchange on the host."""
    if case.get("real"):
        yield
        return
    if case.get("before") not in SAVES:
        with noop_world(case.get("ranks", 4)):
            yield
        return
    with _compat.no_process_groups():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        yield


@contextlib.contextmanager
def running(case: Case) -> Iterator[tuple[Findings, Run | Pipelined]]:
    """A run to train, on a simulated device, and what is found meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        order = Order.of(case["order"]) if "order" in case else None
        with simulated(order) as found, world_of(case), tempfile.TemporaryDirectory() as folder:
            run = Pipelined(case, options_of(case, shardwise)) if "pipeline" in case else Run(case, folder)
            found.models.append(run.model)
            yield found, run
            run.end()


def findings(case: Case) -> list[str]:
    """What races in a training, in words; and what is another number where it is to run in another order."""
    with running(case) as (found, run):
        run.train()
    return [str(one) for one in (*found.findings, *found.differences)]
