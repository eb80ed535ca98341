"""Check whether all blocks of a model do the same, so that a few represent all: compares the whole model.

Compares the blocks' contents, and their operators in one forward and backward on fake tensors. A few blocks
at the beginning may differ, such as dense ones before mixtures of experts. Kinds of blocks may alternate.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise._compat import FakeTensor, FastFakeTensorMode
from shardwise.comm.count import tensors_in
from shardwise.errors import ShardwiseError
from shardwise.planner.kernels import kernels
from shardwise.planner.models import Model, chunked, no_packed_sequences, quiet_fakes
from shardwise.planner.recorder import MOST, refuse_loop
from shardwise.planner.setup import Setup
from shardwise.planner.sharding import build_module
from shardwise.planner.unroll import FEW, LEADING, LONGEST, NotRegular, Pattern, collector_paused

DEVICE = torch.ops.prim.device.default


def check(model: Model, setup: Setup) -> Pattern:
    """Return how blocks repeat.

    Raises:
        NotRegular: blocks do not repeat; names the first that differs.
    """
    relevant = ("micro_batch", "sequence", "param_dtype", "loss", "device", "fused_norms")
    return _pattern(model, Setup(**{name: getattr(setup, name) for name in relevant}))


@functools.lru_cache(maxsize=4)
def _pattern(model: Model, setup: Setup) -> Pattern:
    model = chunked(model) if setup.loss == "chunked" else model
    with quiet_fakes(), collector_paused(), _Watch(allow_non_fake_inputs=True) as watch:
        try:
            module, _ = build_module(model, model.layers, setup.param_dtype)
        except ShardwiseError:
            raise
        except Exception as error:  # of the user's model
            raise NotRegular(f"the model cannot be made: {error}") from error
        blocks = model.blocks(module)
        holders = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        patterns = [_compare("has", [list(_describe_block(block, holders)) for block in blocks])]
        tokens = torch.zeros(setup.micro_batch, setup.length, dtype=torch.int64)
        watch.follow(blocks)
        try:
            with no_packed_sequences(), kernels(setup):  # by now the model's code is imported
                loss = model.loss(module, tokens, tokens)
                patterns.append(_compare("does", watch.inside))
                watch.in_backward = True
                loss.backward()
        except (NotRegular, ShardwiseError):
            raise
        except Exception as error:  # of the user's model
            phase = "backward" if watch.in_backward else "forward"
            raise NotRegular(f"one {phase} of the model cannot be looked at: {error}") from error
    patterns.append(_compare("is followed by", watch.after[:-1]))
    # In backward, what precedes the blocks in forward follows block 0.
    patterns.append(_compare("does in backward", watch.backward, first=1))
    firsts = list(dict.fromkeys(watch.order))
    if firsts != sorted(firsts):
        raise NotRegular(f"blocks run in the order {firsts}")
    return Pattern(max(p.leading for p in patterns), math.lcm(*[p.period for p in patterns]))


def _compare(verb: str, items: list[list[Any]], first: int = 0) -> Pattern:
    """Return how `items` repeat, with the shortest period."""
    for period in range(1, LONGEST + 1):
        unlike = (i for i in range(len(items) - period, first, -1) if items[i - 1] != items[i - 1 + period])
        leading = next(unlike, 0)
        if leading <= LEADING and (period == 1 or leading + 2 * period <= len(items)):
            return Pattern(leading, period)
    index = next(i for i in range(first, len(items)) if items[i] != items[first])
    raise NotRegular(f"block {index} {verb} something else than block {first}")


def _describe_block(block: nn.Module, holders: Counter[int]) -> Iterator[Any]:
    for name, module in block.named_modules():
        flags = sorted((key, value) for key, value in vars(module).items() if isinstance(value, bool))
        hooks = sorted((key, len(value)) for key, value in vars(module).items() if key.endswith("_hooks"))
        yield name, type(module), flags, hooks
    for name, p in block.named_parameters():
        yield name, p.shape, p.dtype, p.requires_grad, holders[id(p)]
    for name, buffer in block.named_buffers():
        yield name, buffer.shape, buffer.dtype


class _Watch(FastFakeTensorMode):
    """Records operators on fake tensors with their shapes, by the block that they are in, or come after.

    In backward, a block begins with the gradient of what it returned, and ends where the next one begins.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order: list[int] = []
        self.in_backward = False
        self._current: list[Any] | None = None

    def follow(self, blocks: list[nn.Module]) -> None:
        self.inside, self.after, self.backward = ([list[Any]() for _ in blocks] for _ in range(3))
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, number=number: self._enter(number), prepend=True)
            block.register_forward_hook(lambda *call, number=number: self._leave(number, call[-1]))

    def _enter(self, number: int) -> None:
        if self.in_backward:  # which recomputes it
            return
        self.order.append(number)
        self._current = self.inside[number]
        self._current.append("call")

    def _leave(self, number: int, output: Any) -> None:
        if self.in_backward:
            return
        self._current = self.after[number]
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter_backward(number))

    def _enter_backward(self, number: int) -> None:
        self._current = self.backward[number]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # read twice per operator: avoids another dispatch
        current, self._current = self._current, None  # without what torch computes a new result by
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._current = current
        if current is not None:
            tensors = [tensor for tensor in (*args, result) if isinstance(tensor, torch.Tensor)]
            words = [(tensor.shape, tensor.dtype) for tensor in tensors]
            current.append((func, torch.is_grad_enabled(), words))
            # A recording has `FEW` blocks at least.
            if len(current) > MOST // FEW and current is self.inside[self.order[-1]]:
                names = (str(tensor[0].overloadpacket) for tensor in current if tensor != "call")
                refuse_loop(Counter((name, "forward", self.order[-1]) for name in names))
        return result
