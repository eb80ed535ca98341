"""AdamW with moments of 8 bits per element, the same however parameters are cut into rows.

    exp_avg, exp_avg_sq               uint8 codes, of the parameter's shape
    exp_avg_scale, exp_avg_sq_scale   fp32, of shape (rows, blocks in a row): the largest magnitude of each
                                      block of `block` elements inside a row

A step decodes one parameter's moments to fp32, updates them as AdamW does, updates the parameter, and encodes
them again. A block never leaves its row, so every rank holds whole blocks wherever rows are cut.

Sources. Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, arXiv 1711.05101; Dettmers
et al., "8-bit optimizers via block-wise quantization", 2022, arXiv 2110.02861 (blocks, code books, small
parameters in fp32); Li et al., "Memory efficient optimizers with 4-bit states", 2023, arXiv 2309.01507 (the
second moment must not round to zero: the step would divide by almost zero).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.kinds import holding_of
from shardwise.sharded_tensor.rows import cut_like

SMALL_NUMEL = 4096  # parameters of fewer elements keep fp32 moments
_MOMENTS = ("exp_avg", "exp_avg_sq")
ELEMENTS_AT_ONCE = {"cpu": 1 << 17}  # fp32 copies fit its caches
ELSEWHERE_AT_ONCE = 1 << 24  # enough to fill an accelerator


class AdamW8bit(Optimizer):
    """AdamW with moments in 8 bits: 2 + 8 / block bytes of state per element, where AdamW has 8.

    For plain tensors, DTensors and parameters of `fully_shard(layout="contiguous")`. Never communicates.
    Updates equal those of one process bit for bit: encoding depends only on a block, which lies in one row on
    one rank.

    Parameters keep fp32 moments, and the arithmetic of `torch.optim.AdamW`, if they have one dim, a single
    column or fewer than 4096 elements. So do parameters whose rows are split between ranks (cut along another
    dim than the first, as in row-wise tensor parallelism), since blocks would depend on the number of ranks,
    and `ShardedTensor`s, whose boxes have any shape.

    Args:
        params: parameters, named or not, or dicts of them with their own options.
        lr: learning rate.
        betas: the fraction of the first and of the second moment that a step keeps.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times `lr`.
        block: the number of elements that share a scale.

    Raises:
        ShardingError: an option out of range, or a loaded state that does not fit its parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        block: int = 256,
    ) -> None:
        in_range = lr >= 0 and eps >= 0 and weight_decay >= 0 and block >= 1
        if not in_range or not all(0 <= beta < 1 for beta in betas):
            raise ShardingError(
                f"{here()}: AdamW8bit needs lr, eps, weight_decay >= 0, betas in [0, 1), block >= 1; got"
                f" lr {lr}, eps {eps}, weight_decay {weight_decay}, betas {betas}, block {block}"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "block": block}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the closure's loss. No communication."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for options in self.param_groups:
            with_grad = [param for param in options["params"] if param.grad is not None]
            for param in with_grad:
                if not self.state[param]:
                    self.state[param] = _initial_state(param, block=options["block"])
            quantised = [param for param in with_grad if "exp_avg_scale" in self.state[param]]
            for param in quantised:
                _step_quantised(param, self.state[param], options)
            in_fp32 = [param for param in with_grad if "exp_avg_scale" not in self.state[param]]
            _step_in_fp32(in_fp32, [self.state[param] for param in in_fp32], options)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`; its tensors are copied.

        `Optimizer.load_state_dict` would cast state to the parameter's dtype, which codes and scales do not
        have. So it loads only the options; the state is added before any hook sees it.
        """
        loaded: dict[str, Any] = {}

        def hold_state(_: Optimizer, after_hooks: dict[str, Any]) -> dict[str, Any]:
            loaded.update(after_hooks)
            return {**after_hooks, "state": {}}

        def restore_state(_: Optimizer) -> None:
            ids = [key for options in loaded["param_groups"] for key in options["params"]]
            places = [(param, options) for options in self.param_groups for param in options["params"]]
            for key, (param, options) in zip(ids, places, strict=True):
                if key in loaded["state"]:
                    self.state[param] = _loaded(loaded["state"][key], param, key, block=options["block"])

        pre_hook = self.register_load_state_dict_pre_hook(hold_state)  # the last: sees other hooks' changes
        post_hook = self.register_load_state_dict_post_hook(restore_state, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            pre_hook.remove()
            post_hook.remove()


# ---------------------------------------------------------------- blocks of codes


class CodeBook(NamedTuple):
    """The numbers that codes 0 to 255 represent, and a table that finds the nearest code.

    The table replaces a binary search. The upper 16 bits of an fp32 number select an interval that holds at
    most one midpoint between neighbouring numbers, so the code is the interval's first or the next one.
    """

    numbers: Tensor  # (256,) fp32, ascending
    first_code: Tensor  # (65536,) uint8, by upper 16 bits
    midpoint: Tensor  # (65536,) fp32: numbers above it have the next code

    def codes(self, shares: Tensor) -> Tensor:
        """Return the codes of the numbers nearest to `shares` (fp32, in [-1, 1]), uint8 of the same shape."""
        interval = shares.reshape(-1).view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        codes = self.first_code.index_select(0, interval).view(shares.shape)
        return codes.add_(shares > self.midpoint.index_select(0, interval).view(shares.shape))


@functools.cache
def code_book(*, signed: bool, device: torch.device) -> CodeBook:
    """Return the code book of signed numbers, or of non-negative numbers.

    Dynamic tree quantisation (Dettmers et al., section 1.3): after the sign, the number of leading zero bits
    gives a negative power of ten, and a one bit ends it. The remaining bits divide [0.1, 1] times that power
    into equal cells, whose centres are the numbers. So magnitudes are exact to a few bits over seven decades.
    Zero and one are added. Without a sign, its bit halves the cells.
    """
    bits = 6 if signed else 7  # of the fraction in the largest decade
    magnitudes = []
    for zeros in range(7):
        cells = 2 ** (bits - zeros)
        magnitudes += [10.0**-zeros * (0.1 + 0.9 * (cell + 0.5) / cells) for cell in range(cells)]
    negatives = [-value for value in magnitudes] if signed else []
    numbers = torch.tensor(sorted([*negatives, 0.0, *magnitudes, 1.0]))
    midpoints = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32)  # of each interval
    first = torch.bucketize(ends.amin(dim=0), midpoints)
    midpoint = nn.functional.pad(midpoints, (0, 1), value=math.inf)[first]
    return CodeBook(numbers.to(device), first.to(torch.uint8).to(device), midpoint.to(device))


def quantise(values: Tensor, *, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of `values`: fp32 (rows, columns), none negative unless `signed`.

    Codes: uint8, of the same shape, each the nearest in its code book; without a sign, only zeros get the
    code of zero. Scales: fp32 (rows, ceil(columns / block)), the largest magnitude of each block in a row.
    """
    rows, columns = values.shape
    blocks = -(-columns // block)
    padded = nn.functional.pad(values, (0, blocks * block - columns)).view(rows, blocks, block)
    scales = padded.abs().amax(dim=-1)
    shares = padded / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    codes = code_book(signed=signed, device=values.device).codes(shares)
    if not signed:
        codes = torch.maximum(codes, (padded > 0).to(torch.uint8))
    return codes.view(rows, blocks * block)[:, :columns], scales


def dequantise(codes: Tensor, scales: Tensor, *, block: int, signed: bool) -> Tensor:
    """Return the fp32 values (rows, columns) of `codes` and `scales` from `quantise`."""
    rows, columns = codes.shape
    numbers = code_book(signed=signed, device=codes.device).numbers
    values = numbers.index_select(0, codes.reshape(-1).int()).view(rows, columns)
    if columns % block:
        return values.mul_(scales.repeat_interleave(block, dim=1)[:, :columns])
    values.view(rows, columns // block, block).mul_(scales.unsqueeze(-1))
    return values


# ---------------------------------------------------------------- one step


def _initial_state(param: Tensor, *, block: int) -> dict[str, Tensor]:
    """Return zero moments in the form of `param`: plain, DTensor or sharded rows."""
    state = {"step": torch.tensor(0.0)}
    if not has_8_bits(param):
        return state | {moment: torch.zeros_like(_wide(param)) for moment in _MOMENTS}
    local = _compat.local_of(param)
    for moment in _MOMENTS:  # all codes represent zero if the scale is zero
        scales = torch.zeros(_scale_shape(local.shape, block), device=local.device)
        codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
        state[moment] = cut_like(param, codes, tuple(param.shape))
        state[f"{moment}_scale"] = cut_like(param, scales, _scale_shape(param.shape, block))
    return state


def _loaded(saved: dict[str, Any], param: Tensor, name: object, *, block: int) -> dict[str, Tensor]:
    """Return a copy of the state `saved` for `param`, checked."""
    state = _initial_state(param, block=block)
    for key, target in state.items():
        value = saved.get(key)
        actual = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
        if actual != (target.dtype, tuple(target.shape)):
            raise ShardingError(
                f"{here()}: {key} of parameter {name} (shape {tuple(param.shape)}, block {block}) must be"
                f" {target.dtype} of shape {tuple(target.shape)}, but the state to load has {actual};"
                " load what AdamW8bit saved, with the same block"
            )
        with torch.no_grad():
            target.copy_(cast(Tensor, value))
    return state


def _scale_shape(shape: torch.Size, block: int) -> tuple[int, int]:
    return shape[0], -(-math.prod(shape[1:]) // block)


def has_8_bits(param: Tensor) -> bool:
    """Return whether `param` is large, of several columns, and cut into whole rows if at all."""
    if isinstance(param, ShardedTensor) or param.numel() < SMALL_NUMEL or math.prod(param.shape[1:]) < 2:
        return False
    return not holding_of(param).axes_along(range(1, param.ndim))


def _step_quantised(param: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> None:
    """Update a quantised parameter in runs of rows, so that a run's fp32 values need little memory."""
    local, grad = _compat.local_of(param), _compat.local_of(cast(Tensor, param.grad))
    rows, columns = local.shape[0], math.prod(local.shape[1:])
    at_once = max(1, ELEMENTS_AT_ONCE.get(local.device.type, ELSEWHERE_AT_ONCE) // columns)
    state["step"] += 1
    step = state["step"].item()
    codes = [_compat.local_of(state[moment]).view(rows, columns) for moment in _MOMENTS]
    scales = [_compat.local_of(state[f"{moment}_scale"]) for moment in _MOMENTS]
    param_rows = local.reshape(rows, columns)  # a copy if the memory has another order
    whole = [param_rows, grad.reshape(rows, columns), *codes, *scales]
    for begin in range(0, rows, at_once):
        run = [tensor[begin : begin + at_once] for tensor in whole]
        _step_rows(run, step, options)
    if not local.is_contiguous():
        local.copy_(param_rows.view(local.shape))


def _step_rows(run: Sequence[Tensor], step: float, options: dict[str, Any]) -> None:
    param, grad, codes, square_codes, scales, square_scales = run
    (beta1, beta2), lr, block = options["betas"], float(options["lr"]), options["block"]
    grad = grad.to(torch.float32)
    mean = dequantise(codes, scales, block=block, signed=True).lerp_(grad, 1 - beta1)
    square = dequantise(square_codes, square_scales, block=block, signed=False)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    for moment, target, target_scales in [(mean, codes, scales), (square, square_codes, square_scales)]:
        new_codes, new_scales = quantise(moment, block=block, signed=moment is mean)
        target.copy_(new_codes)
        target_scales.copy_(new_scales)
    root = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(options["eps"])
    wide = _wide(param)
    wide.mul_(1 - lr * options["weight_decay"]).add_(mean.div_(root), alpha=-lr / (1 - beta1**step))
    _write_back([param], [wide])


def _step_in_fp32(params: list[Tensor], states: list[dict[str, Tensor]], options: dict[str, Any]) -> None:
    beta1, beta2 = options["betas"]
    locals_ = [_compat.local_of(param) for param in params]
    wide = [_wide(local) for local in locals_]
    adamw(
        wide,
        [_wide(_compat.local_of(cast(Tensor, param.grad))) for param in params],
        [_compat.local_of(state["exp_avg"]) for state in states],
        [_compat.local_of(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )
    _write_back(locals_, wide)


def _wide(tensor: Tensor) -> Tensor:
    """Return `tensor` in fp32, or itself if fp32 would lose bits or change nothing."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _write_back(locals_: list[Tensor], wide: list[Tensor]) -> None:
    """Round fp32 copies of narrower parameters into them."""
    for local, value in zip(locals_, wide, strict=True):
        if value is not local:
            local.copy_(value)
