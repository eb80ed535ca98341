"""Muon for matrices that are cut over ranks: one of its holders orthogonalises each whole matrix.

    momentum          every rank, on its own rows
    to the worker     the other holders' rows of a cut matrix              one all-to-all for all matrices
    orthogonalise     the worker only; whole matrices during the first all-to-all
    from the worker   the rows back to their holders                       one all-to-all for all matrices

A matrix that one rank holds whole (`Owned`, or a plain tensor) is never sent. Rows are sent in the dtype of
the Newton-Schulz iteration, which begins by rounding to it, so sending them loses nothing.

Sources. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon/ (momentum, iteration, coefficients, "original" learning rate);
Liu et al., "Muon is scalable for LLM training", 2025, arXiv 2502.16982 ("match_rms_adamw").
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwise import _compat
from shardwise.comm.exchange import AllToAll, part
from shardwise.comm.watch import announced
from shardwise.errors import ShardingError, here
from shardwise.layout import Box, Message
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.kinds import holding_of, sharding_of

LR_FACTORS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(Optimizer):
    """Orthogonalised momentum, for the matrices of hidden layers; results do not depend on how they are cut.

    Takes the arguments of `torch.optim.Muon` and does the same arithmetic, on plain tensors, DTensors and
    parameters of `fully_shard(layout="contiguous")`. Use AdamW for embeddings, heads, biases and norms.

    `step` is collective over each process group that cuts a matrix over two or more ranks: ranks must hold
    the same parameters in the same order, and have gradients for the same ones. It issues two all-to-alls for
    each such group, and none if every matrix has one holder. The rank that holds most of a cut matrix works
    on it; among equals, the one with the least work so far.

    Args:
        params: matrices, named or not, or dicts of them with their own options.
        lr: learning rate, before the factor that `adjust_lr_fn` selects.
        weight_decay: decoupled, as in AdamW: times `lr`, without that factor.
        momentum: the fraction of the old momentum that a step keeps.
        nesterov: look ahead by one step of momentum.
        ns_coefficients: a, b, c of the iteration X <- aX + (bA + cA^2)X, where A = XX^T.
        ns_steps: number of iterations.
        eps: added to the norm by which a matrix is divided before the first iteration.
        adjust_lr_fn: "original" (also None), sqrt(max(1, rows / columns)); or "match_rms_adamw",
            0.2 sqrt(max(rows, columns)), which suits AdamW's learning rates.
        ns_dtype: the dtype of the iteration and of messages. Momentum has the parameter's dtype.

    Raises:
        ShardingError: a parameter that is not a matrix, or that is cut over several mesh axes; an option
            out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and 0 <= momentum < 1 and ns_steps >= 1):
            raise ShardingError(
                f"{here()}: Muon needs lr >= 0, weight_decay >= 0, 0 <= momentum < 1 and ns_steps >= 1, got"
                f" lr {lr}, weight_decay {weight_decay}, momentum {momentum}, ns_steps {ns_steps}"
            )
        if adjust_lr_fn is not None and adjust_lr_fn not in LR_FACTORS:
            raise ShardingError(
                f"{here()}: adjust_lr_fn must be None or one of {list(LR_FACTORS)}, got {adjust_lr_fn!r}"
            )
        self._forget_cuts()
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": str(ns_dtype).removeprefix("torch."),  # checkpoints hold plain values
        }
        super().__init__(params, options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_cuts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices with their own options. Raises ShardingError as the constructor does."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        names = added.get("param_names", range(len(added["params"])))
        try:
            for name, param in zip(names, added["params"], strict=True):
                self._cut(param, name)
        except ShardingError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every matrix that has a gradient. Collective, see the class. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_group: dict[tuple[dist.ProcessGroup | None, str], list[_Matrix]] = {}
        for options in self.param_groups:
            for param in options["params"]:
                if param.grad is not None:
                    state, cut = self.state[param], self._cut(param)
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(param)
                    tensors = param, param.grad, state["momentum_buffer"]
                    local, grad, buffer = map(_compat.local_of, tensors)
                    matrix = _Matrix(param, cut, local, grad, buffer, options)
                    by_group.setdefault((cut.group, options["ns_dtype"]), []).append(matrix)
        exchanges = [
            _Exchange(matrices, plan, dtype=getattr(torch, key[1]))
            for key, matrices in by_group.items()
            if (plan := self._plan(key, matrices)).is_needed
        ]
        for matrices in by_group.values():
            for matrix in matrices:
                if matrix.cut.is_whole_here:
                    matrix.apply(matrix.orthogonalised(matrix.direction()))
        for exchange in exchanges:
            exchange.finish()
        return loss

    def _forget_cuts(self) -> None:
        self._cuts: dict[Tensor, tuple[Any, _Cut]] = {}
        self._plans: dict[Any, _Plan] = {}

    def _cut(self, param: Tensor, name: object = "?") -> _Cut:
        form = sharding_of(param)
        cached = self._cuts.get(param)
        if cached is None or cached[0] is not form:
            cached = self._cuts[param] = (form, _cut_of(param, name))
        return cached[1]

    def _plan(self, key: Any, matrices: list[_Matrix]) -> _Plan:
        """Return the plan of the ranks' work, made anew if other matrices have gradients than last time."""
        cuts = [matrix.cut for matrix in matrices]
        plan = self._plans.get(key)
        if plan is None or plan.cuts != cuts:
            names = [getattr(m.param, "shardwise_name", m.cut.name) for m in matrices]
            plan = self._plans[key] = _Plan.of(cuts, names)
        return plan


def newton_schulz(
    matrix: Tensor,
    *,
    coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Approximate the closest semi-orthogonal matrix: the same singular vectors, singular values near 1.

    A tall matrix is transposed first, so that products are smallest.

    Args:
        matrix: of shape (rows, columns), any floating dtype.

    Returns:
        A matrix of the same shape, in `dtype`. With the default coefficients, in exact arithmetic, singular
        values of at least 0.01 of the norm end between 0.68 and 1.14.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.mT if tall else x
    x = x / (x.norm() + eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


@dataclass(frozen=True, eq=False)
class _Cut:
    """The cut of a matrix over ranks."""

    shape: tuple[int, int]
    holders: Mapping[int, Box]  # by rank of `group`; ranks without elements are left out
    group: dist.ProcessGroup | None = None
    rank: int = 0  # this process's in `group`
    name: str = "?"  # under which the optimizer got it

    @property
    def is_whole_here(self) -> bool:
        return len(self.holders) == 1 and self.rank in self.holders


def _cut_of(param: Tensor, name: object) -> _Cut:
    if param.ndim != 2:
        raise ShardingError(
            f"{here()}: Muon orthogonalises matrices, but parameter {name} has shape {tuple(param.shape)};"
            " give parameters of other than 2 dims to AdamW"
        )
    try:
        cut = None if isinstance(param, ShardedTensor) else holding_of(param).over_one_group()
    except ShardingError:  # of partial sums
        cut = None
    if cut is None:
        raise ShardingError(
            f"{here()}: Muon needs matrices that are whole or cut over one mesh axis, but parameter"
            f" {getattr(sharding_of(param), 'name', '') or name} of shape {tuple(param.shape)} is"
            f" {getattr(param, 'placements', 'a ShardedTensor')}; give it to AdamW, or shard it over one"
            " axis (no tensor parallelism, a strategy other than hierarchical_fsdp)"
        )
    group, boxes = cut
    rows, columns = param.shape
    holders = {rank: box for rank, box in enumerate(boxes) if not box.is_empty}
    return _Cut((rows, columns), holders, group, 0 if group is None else group.rank(), str(name))


def assign(cuts: Sequence[_Cut]) -> list[int]:
    """Choose the rank that works on each matrix: among those that hold most of it, the one with least work.

    Depends only on the cuts, so all ranks agree. Matrices with one holder are counted first; the others are
    assigned from the most expensive on. Matrices without elements get -1.
    """
    work: dict[int, int] = defaultdict(int)  # multiplications of one Newton-Schulz step
    workers = [-1] * len(cuts)

    def cost(cut: _Cut) -> int:
        return math.prod(cut.shape) * min(cut.shape)

    for i in sorted(range(len(cuts)), key=lambda i: (len(cuts[i].holders) > 1, -cost(cuts[i]), i)):
        holders = cuts[i].holders
        largest = max((box.numel for box in holders.values()), default=0)
        equals = [rank for rank, box in holders.items() if box.numel == largest]
        if equals:
            workers[i] = min(equals, key=lambda rank: (work[rank], rank))
            work[workers[i]] += cost(cuts[i])
    return workers


@dataclass(frozen=True)
class _Plan:
    """The rows that go to each worker, and back."""

    cuts: Sequence[_Cut]
    messages: list[Message]  # those that this rank sends or gets; source and target are the matrix
    assigned: list[int]  # the cut matrices that this rank works on
    is_needed: bool  # whether any rank sends anything
    operation: str  # in words, equal on ranks that do the same

    @classmethod
    def of(cls, cuts: Sequence[_Cut], names: Sequence[str]) -> _Plan:
        workers, rank = assign(cuts), cuts[0].rank
        cut = [i for i in range(len(cuts)) if len(cuts[i].holders) > 1]
        messages = [
            Message(holder, workers[i], box, i, i)
            for i in cut
            for holder, box in cuts[i].holders.items()
            if holder != workers[i] and rank in (holder, workers[i])
        ]
        listed = [f"{names[i]} {list(cuts[i].shape)}" for i in cut]
        operation = "\n".join([f"orthogonalise {len(cut)} matrices that ranks have parts of", *listed])
        return cls(cuts, messages, [i for i in cut if workers[i] == rank], bool(cut), operation)


@dataclass(frozen=True)
class _Matrix:
    """One parameter in one step."""

    param: Tensor
    cut: _Cut
    local: Tensor  # this rank's part of the parameter, updated in place
    grad: Tensor  # this rank's part of the gradient
    buffer: Tensor  # this rank's part of the momentum, updated in place
    options: dict[str, Any]

    def direction(self) -> Tensor:
        """Return this rank's part of the matrix to orthogonalise; advances the momentum."""
        momentum = self.options["momentum"]
        self.buffer.lerp_(self.grad, 1 - momentum)
        return torch.lerp(self.grad, self.buffer, momentum) if self.options["nesterov"] else self.buffer

    def orthogonalised(self, whole: Tensor) -> Tensor:
        options = self.options
        return newton_schulz(
            whole,
            coefficients=options["ns_coefficients"],
            steps=options["ns_steps"],
            eps=options["eps"],
            dtype=getattr(torch, options["ns_dtype"]),
        )

    def apply(self, result: Tensor) -> None:
        """Decay this rank's part, and update it by its part of the orthogonalised matrix."""
        lr = float(self.options["lr"])
        factor = LR_FACTORS[self.options["adjust_lr_fn"] or "original"](*self.cut.shape)
        self.local.mul_(1 - lr * self.options["weight_decay"])
        self.local.add_(result, alpha=-lr * factor)


class _Exchange:
    """The cut matrices of one process group and step. Making it sends rows; `finish` works and sends back.

    Both directions use the same memory: results overwrite the rows that came.
    """

    def __init__(self, matrices: list[_Matrix], plan: _Plan, *, dtype: torch.dtype) -> None:
        self.matrices, self.plan = matrices, plan
        group = cast(dist.ProcessGroup, matrices[0].cut.group)
        self.exchange = AllToAll(plan.messages, group=group, dtype=dtype, device=matrices[0].local.device)
        for message, rows in self.exchange.outgoing:
            rows.copy_(matrices[message.source].direction())
        self.group = group
        with announced(group, plan.operation):
            self.work = self.exchange.send()

    def finish(self) -> None:
        with announced(self.group, "get matrices to orthogonalise"):
            self.work.wait()
        borrowed: dict[int, list[tuple[Box, Tensor]]] = defaultdict(list)
        for message, rows in self.exchange.incoming:
            borrowed[message.target].append((message.box, rows))
        for i in self.plan.assigned:
            self._orthogonalise(self.matrices[i], borrowed[i])
        with announced(self.group, "send back orthogonalised matrices"):
            self.exchange.send(back=True).wait()
        for message, rows in self.exchange.outgoing:
            self.matrices[message.source].apply(rows)

    def _orthogonalise(self, matrix: _Matrix, borrowed: list[tuple[Box, Tensor]]) -> None:
        box, own = Box.whole(matrix.cut.shape), matrix.cut.holders[matrix.cut.rank]
        whole = borrowed[0][1].new_empty(matrix.cut.shape)
        part(box, whole, own).copy_(matrix.direction())
        for peer_box, rows in borrowed:
            part(box, whole, peer_box).copy_(rows)
        result = matrix.orthogonalised(whole)
        for peer_box, rows in borrowed:
            rows.copy_(part(box, result, peer_box))
        matrix.apply(part(box, result, own))
