"""Trains the model of a case: sharded by ours or by torch's, or alone in float64."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from fuzz.fsdp_part.model import Control, Planned, Spec, batch, build, loss_of, planned
from fuzz.fsdp_part.shard import full, piece, set_once, shard, sharded

Tensors = dict[str, Tensor | None]


@dataclass
class Record:
    """What a run left: on each rank, by step."""

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    gradient_pieces: list[Tensors] = field(default_factory=list)
    parameter_pieces: list[Tensors] = field(default_factory=list)
    gradients: dict[int, Tensors] = field(default_factory=dict)  # whole
    parameters: Tensors = field(default_factory=dict)  # whole, at the end
    log: list[tuple[Any, ...]] = field(default_factory=list)  # what hooks saw


def optimizer_of(case: Spec, model: nn.Module) -> torch.optim.Optimizer:
    """Without an eps near 0: there the last bit of a gradient would decide the sign of an update."""
    trained = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
    name = case.get("optimizer", "sgd")
    kinds: dict[str, Any] = {
        "sgd": partial(torch.optim.SGD, lr=0.05),
        "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adam": partial(torch.optim.Adam, lr=0.01, eps=0.1),
        "adamw_each": partial(torch.optim.AdamW, lr=0.01, eps=0.1, foreach=False),
        "adamw_fused": partial(torch.optim.AdamW, lr=0.01, eps=0.1, fused=True),
        "adagrad": partial(torch.optim.Adagrad, lr=0.01, eps=0.1),
        "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=0.1, foreach=True),
    }
    return kinds[name](trained)


class Run:
    """One training of a case. `alone` runs every rank's rows in turn, in float64, and divides."""

    def __init__(self, case: Spec, api: ModuleType | None, mesh: DeviceMesh | None) -> None:
        self.case, self.api = case, api
        self.alone = api is None
        self.world = dist.get_world_size()
        self.control = Control(rank=dist.get_rank())
        self.model = build(case, self.control)
        self.record = Record()
        self.roots: list[Any] = []
        if api is None:
            self.model.double()
        else:
            assert mesh is not None
            self.roots = shard(api, case, self.model, mesh)
            set_once(api, case, self.model)
        self.params = dict(self.model.named_parameters())  # the sharded ones, also while whole ones are shown
        self.optimizer = optimizer_of(case, self.model)
        self.hook()
        self.count = 0  # of micro-batches so far
        self.present: list[set[str]] = []  # alone: by step, who has a gradient where zeros are sent for none

    # ---------------------------------------------------------------- hooks

    def hook(self) -> None:
        blocks = self.model.blocks
        for hook in self.case.get("hooks", []):
            block = blocks[hook.get("block", 0) % len(blocks)] if len(blocks) else self.model
            what = hook.get("what", "forward")
            if what == "forward":
                block.register_forward_hook(partial(self.saw_forward, "forward"))
            elif what == "forward_pre":
                block.register_forward_pre_hook(partial(self.saw_forward, "forward_pre"))
            elif what == "post_accumulate":
                for name, param in self.model.named_parameters():
                    if param.requires_grad:
                        param.register_post_accumulate_grad_hook(partial(self.saw_gradient, name))

    def saw_forward(self, what: str, module: nn.Module, *_: Any) -> None:
        if not self.alone:
            self.record.log.append((what, [tuple(p.shape) for p in module.parameters(recurse=False)]))

    def saw_gradient(self, name: str, param: Tensor) -> None:
        if self.alone:
            return
        assert param.grad is not None
        norm = param.grad.norm()
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.record.log.append(("post_accumulate", name, round(float(whole), 4)))

    # ---------------------------------------------------------------- a step

    def ranks(self) -> list[int]:
        return list(range(self.world)) if self.alone else [dist.get_rank()]

    def train(self) -> Record:
        steps = self.case.get("steps", [{}])
        for number, step in enumerate(steps):
            for action in step.get("before", []):
                self.act(action, self.ranks())
            if step.get("raises"):
                self.failing(step)
            self.control.delay = {} if self.alone else step.get("delay", {})
            self.backward(step)
            self.control.delay = {}
            self.update(number, last=number == len(steps) - 1)
            if not self.alone:
                self.record.parameter_pieces.append(self.each(piece, gradient=False))
            self.optimizer.zero_grad(set_to_none=not step.get("zeros"))
        self.record.parameters = self.each(full, gradient=False)
        return self.record

    def update(self, number: int, *, last: bool) -> None:
        if self.present:
            self.fill(self.present[number])
        if self.case.get("clip"):
            torch.nn.utils.clip_grad_norm_(self.params.values(), self.case["clip"])
        self.keep(number, last=last)
        self.optimizer.step()

    def fill(self, names: set[str]) -> None:
        for name, param in self.params.items():
            if name in names and param.grad is None:
                param.grad = torch.zeros_like(param)

    def each(self, of: Any, *, gradient: bool) -> Tensors:
        return {n: of(p.grad if gradient else p) for n, p in self.params.items()}

    def keep(self, number: int, *, last: bool) -> None:
        if not self.alone:
            self.record.gradient_pieces.append(self.each(piece, gradient=True))
        if number == 0 or last:
            self.record.gradients[number] = self.each(full, gradient=True)

    def failing(self, step: Spec) -> None:
        """An iteration that raises, and what a user does then."""
        self.control.raises = step["raises"]
        hook = self.raising_hook(step["raises"])
        optimized = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        others = [param for param in self.params.values() if id(param) not in optimized]  # unfrozen since
        earlier = [None if param.grad is None else param.grad.clone() for param in others]
        try:
            if not self.alone:
                self.backward(step | {"micro": 1}, record=False)
        except Planned:
            pass
        except RuntimeError as error:  # autograd wraps what a hook raises in some versions
            if "in backward" not in str(error) and "block" not in str(error):
                raise
        finally:
            self.control.raises = {}
            if hook is not None:
                hook.remove()
        for root in self.roots:
            root.reset_iter_state()
        self.optimizer.zero_grad()
        for param, gradient in zip(others, earlier, strict=True):
            param.grad = gradient

    def raising_hook(self, raises: Spec) -> RemovableHandle | None:
        """Raises when the gradient of a parameter is there."""
        trained = [param for param in self.params.values() if param.requires_grad]
        if raises["where"] != "hook" or not trained:
            return None
        return trained[raises["block"] % len(trained)].register_post_accumulate_grad_hook(planned)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        x, tokens, targets = batch(self.case, rank, self.count)
        if not self.alone:
            x, targets = x.float(), targets.float()
        if self.case.get("input_gradient"):
            x.requires_grad_()
        return x, tokens, targets

    def backward(self, step: Spec, *, record: bool = True) -> None:
        micro = step.get("micro", 1)
        for i in range(micro):
            self.synchronise(step, last=i == micro - 1, micro=micro)
            for rank in self.ranks():
                self.one_pass(step, rank, record)
            self.count += record

    def synchronise(self, step: Spec, *, last: bool, micro: int) -> None:
        if self.alone or micro == 1:
            return
        for root in self.roots:
            if step.get("sync", "last") == "last":
                root.set_requires_gradient_sync(last)
            elif step["sync"] == "all_reduce":
                root.set_requires_all_reduce(last)
            if step.get("hold"):
                root.set_reshard_after_backward(last)
            if step.get("is_last"):
                root.set_is_last_backward(last)

    def one_pass(self, step: Spec, rank: int, record: bool) -> None:
        if self.alone:
            self.control.rank = rank
        x, tokens, targets = self.inputs(rank)
        losses = loss_of(self.case, step, self.model(x, tokens), targets)
        if record and "between" in step:
            self.act(step["between"], [rank])
        divisor = (self.case.get("factor") or self.world) if self.alone else 1
        for i, loss in enumerate(losses):
            if not loss.requires_grad:
                continue
            more = i < len(losses) - 1
            (loss / divisor).backward(retain_graph=more)
        if record:
            self.record.losses.append(torch.stack([loss.detach().double() for loss in losses]))
            self.record.input_gradients.append(None if x.grad is None else x.grad.detach() * divisor)

    # ---------------------------------------------------------------- between steps

    def act(self, action: str, ranks: list[int]) -> None:
        what, _, which = action.partition(":")
        if what in ("eval", "no_grad", "forward"):
            self.look(what, ranks)
        elif what in ("freeze", "train"):
            name, param = list(self.params.items())[int(which) % len(self.params)]
            parts = name.split(".")
            ignored = parts[0] == "blocks" and self.model.blocks[int(parts[1])].spec.get("ignored")
            if not ignored:  # whose gradients nobody reduces
                param.requires_grad_(what == "train")
        elif self.alone:
            return
        elif what == "unshard":
            modules = sharded(self.model)
            modules[int(which) % len(modules)].unshard()
        elif what == "unshard_async":
            modules = sharded(self.model)
            modules[int(which) % len(modules)].unshard(async_op=True)
        elif what == "reshard":
            modules = sharded(self.model)
            modules[int(which) % len(modules)].reshard()
        elif what == "state_dict":
            saved = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
            self.model.load_state_dict(saved)
        elif what == "optimizer_state":
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        elif what == "clear":
            self.optimizer.zero_grad(set_to_none=False)
        elif what == "sleep":
            time.sleep(float(which) / 1000)
        else:
            self.set(what, which)

    def set(self, what: str, which: str) -> None:
        """A setting changed between steps."""
        for one in sharded(self.model):
            if what == "reshard_after_forward":
                one.set_reshard_after_forward(which == "1", recurse=False)
            elif what == "reshard_after_backward":
                one.set_reshard_after_backward(which == "1", recurse=False)
            elif what == "gradient_sync":
                one.set_requires_gradient_sync(which == "1", recurse=False)
            elif what == "factor":
                one.set_gradient_divide_factor(float(which))
            elif what == "force_sum":
                one.set_force_sum_reduction_for_comms(which == "1")
            elif what == "unused":
                one.set_reduce_scatter_unused_params(which == "1", recurse=False)
            else:
                raise AssertionError(what)

    def look(self, what: str, ranks: list[int]) -> None:
        """A forward without a backward."""
        if what == "eval":
            self.model.eval()
        for rank in ranks:
            if self.alone:
                self.control.rank = rank
            x, tokens, _ = self.inputs(rank)
            with torch.set_grad_enabled(what == "forward"):
                output = self.model(x, tokens)
            out = output["out"] if isinstance(output, dict) else output[0]
            self.record.outputs.append(out.detach().double())
            del output, out
        self.model.train()
