"""The operations that are drawn, by the shapes of their operands.

A family draws operands and arguments; an operation is called as `operation(*operands, **arguments)` on whole
tensors and on sharded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]


def named(*names: str) -> dict[str, Function]:
    return {name: getattr(torch, name, None) or getattr(F, name) for name in names}


UNARY = named(
    *("abs", "exp", "sin", "tanh", "sigmoid", "relu", "neg", "square", "sign", "floor", "round", "erf"),
    *("log1p", "gelu", "silu", "softplus", "leaky_relu", "elu", "hardtanh", "isnan", "nan_to_num", "frac"),
    *("trunc", "atan", "expm1", "sgn", "logsigmoid", "mish", "selu", "isfinite", "signbit", "positive"),
)
BINARY = named(
    *("add", "sub", "mul", "div", "maximum", "minimum", "atan2", "fmod", "remainder", "floor_divide"),
    *("eq", "lt", "ge", "copysign", "hypot", "logaddexp", "true_divide", "fmax", "dist", "allclose", "equal"),
)
INTEGERS = named("bitwise_and", "bitwise_or", "bitwise_xor", "add", "mul", "remainder", "floor_divide", "gcd")
LOSSES = named("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
LOSSES["cross_entropy"] = lambda a, b, **k: F.cross_entropy(a, b.softmax(min(1, b.ndim - 1)), **k)
LOSSES["binary_cross_entropy"] = lambda a, b, **k: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), **k)
REDUCTIONS = named(
    *("sum", "mean", "amax", "amin", "prod", "var", "std", "logsumexp", "argmax", "argmin", "nansum"),
    *("count_nonzero", "all", "any"),
)
REDUCTIONS |= {
    "max": lambda t, **k: torch.max(t, **k) if "dim" in k else torch.max(t),
    "min": lambda t, **k: torch.min(t, **k) if "dim" in k else torch.min(t),
    "norm": lambda t, **k: torch.linalg.vector_norm(t, **k),
    "norm1": lambda t, **k: torch.linalg.vector_norm(t, 1, **k),
    "norm_inf": lambda t, **k: torch.linalg.vector_norm(t, torch.inf, **k),
    "norm3": lambda t, **k: torch.linalg.vector_norm(t, 3, **k),
}
ALONG = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "normalize": lambda t, dim: F.normalize(t, dim=dim),
    "flip": lambda t, dim: torch.flip(t, (dim,)),
    "roll": lambda t, dim: torch.roll(t, 1, dim),
    "unbind": torch.unbind,
    "squeeze": torch.squeeze,
    "unsqueeze": torch.unsqueeze,
    "chunk": lambda t, dim: torch.chunk(t, 2, dim),
    "split": lambda t, dim: torch.split(t, 2, dim),
    "tensor_split": lambda t, dim: torch.tensor_split(t, 3, dim),
    "narrow": lambda t, dim: torch.narrow(t, dim, t.shape[dim] // 2, t.shape[dim] - t.shape[dim] // 2),
    "select": lambda t, dim: torch.select(t, dim, -1),
    "first": lambda t, dim: t.movedim(dim, 0)[:1],
    "transpose": lambda t, dim: torch.transpose(t, dim, 0),
    "sort": lambda t, dim: torch.sort(t, dim),
    "glu": lambda t, dim: F.glu(t, dim),
}
SHAPES = {
    "flatten": torch.flatten,
    "reshape": lambda t: t.reshape(-1),
    "view": lambda t: t.view(t.shape[0], -1),
    "permute": lambda t: t.permute(*reversed(range(t.ndim))),
    "expand": lambda t: t.unsqueeze(0).expand(2, *t.shape),
    "broadcast_to": lambda t: torch.broadcast_to(t, (2, *t.shape)),
    "tile": lambda t: torch.tile(t, (2,)),
    "index": lambda t: t[1:, ...],
    "ellipsis": lambda t: t[..., :2],
    "none": lambda t: t[None],
    "clone": torch.clone,
    "double": lambda t: t.double(),
    "zeros_like": torch.zeros_like,
    "tolist": lambda t: torch.tensor(t.shape),
    "contiguous": lambda t: t.contiguous(),
    "new_like": torch.ones_like,
}
IN_PLACE = {
    "add_": lambda t, other: t.clone().add_(other),
    "sub_": lambda t, other: t.clone().sub_(other),
    "mul_": lambda t, other: t.clone().mul_(other),
    "div_": lambda t, other: t.clone().div_(other),
    "copy_": lambda t, other: t.clone().copy_(other),
    "fmod_": lambda t, other: t.clone().fmod_(other),
    "lerp_": lambda t, other: t.clone().lerp_(other, 0.3),
    "clamp_": lambda t, other: t.clone().clamp_(min=other),
    "masked_fill_": lambda t, other: t.clone().masked_fill_(other > 0, 2.0),
    "addcmul_": lambda t, other: t.clone().addcmul_(other, other, value=0.5),
}
FOREACH = {
    "foreach_add": lambda a, b: torch._foreach_add([a, b], [b, a]),
    "foreach_mul": lambda a, b: torch._foreach_mul([a, b], 0.5),
    "foreach_norm": lambda a, b: torch._foreach_norm([a, b]),
    "foreach_lerp": lambda a, b: torch._foreach_lerp([a], [b], 0.3),
    "foreach_sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_abs([a, b])),
}
THREE = {
    "where": lambda a, b, c: torch.where(a > 0, b, c),
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.3),
    "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c.abs() + 1),
    "lerp": lambda a, b, c: torch.lerp(a, b, c.sigmoid()),
    "clamp": lambda a, b, c: torch.clamp(a, min=torch.minimum(b, c)),
    "cat": lambda a, b, c: torch.cat([a, b, c]),
    "cat_last": lambda a, b, c: torch.cat([a, b, c], -1),
    "stack": lambda a, b, c: torch.stack([a, b, c]),
}


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, weight.shape, weight, bias)


def rms_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.rms_norm(x, weight.shape, weight, 1e-5) + bias


NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}
LINEAR = {  # operands: [n, k], [m, k], [m]
    "linear": F.linear,
    "linear_no_bias": lambda x, w, b: F.linear(x, w) + b,
    "matmul": lambda x, w, b: x @ w.t() + b,
    "mm": lambda x, w, b: torch.mm(x, w.t()),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "mv": lambda x, w, b: torch.mv(x, w[0]) if w.shape[0] else x,
    "bmm": lambda x, w, b: torch.bmm(x.unsqueeze(0), w.t().unsqueeze(0)),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x.unsqueeze(0), w.t().unsqueeze(0)),
    "addmv": lambda x, w, b: torch.addmv(b, w, x[0]) if x.shape[0] else x,
}


def bag(table: Any, ids: Any, weights: Any, **arguments: Any) -> Any:
    if arguments.get("mode") != "sum" or not arguments.pop("weighted", False):
        weights = None
    arguments.pop("weighted", None)
    if arguments.pop("offsets", False):
        flat = ids.flatten()
        offsets = torch.tensor([0, 1, 1, flat.numel()])
        flat_weights = None if weights is None else weights.flatten()
        return F.embedding_bag(
            flat, table, offsets, per_sample_weights=flat_weights, include_last_offset=True, **arguments
        )
    return F.embedding_bag(ids, table, per_sample_weights=weights, **arguments)


TABLE = {
    "embedding": lambda table, ids, weights, **k: F.embedding(ids, table, **k),
    "embedding_bag": bag,
}
FAMILIES: dict[str, dict[str, Function]] = {
    "unary": UNARY,
    "binary": BINARY,
    "integers": INTEGERS,
    "loss": LOSSES,
    "reduction": REDUCTIONS,
    "along": ALONG,
    "shape": SHAPES,
    "in place": IN_PLACE,
    "foreach": FOREACH,
    "three": THREE,
    "norm": NORMS,
    "linear": LINEAR,
    "table": TABLE,
}
