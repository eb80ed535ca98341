"""What recurrent layers make beside their result, which torch's fake kernels leave out, or lack altogether.

oneDNN's LSTM, on the CPU, keeps a workspace for backward: parts that begin at pages, with rows of whole cache
lines (oneDNN's `rnn_utils.cpp`: `set_offsets`, `get_good_ld`). cuDNN's layers keep a reserve, whose size only
cuDNN tells: here it is the gates and the states of every token, which backward cannot do without. They also
keep their weights in one buffer, into which cuDNN copies those that are elsewhere, as gathered ones are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PAGE, _LINE = 4096, 64  # bytes
_aten: Any = torch.ops.aten


def _row(length: int, itemsize: int) -> int:
    """Count a row's bytes: whole cache lines, and one more if rows would else share the same ones."""
    nbytes = -(-length * itemsize // _LINE) * _LINE
    return nbytes + (_LINE if nbytes // itemsize % 256 == 0 else 0)


def _mkldnn(x: Tensor, *args: Any) -> Any:
    """Make what one layer of oneDNN's LSTM makes in one direction."""
    hx, cx, hidden = args[4], args[5], args[9]
    tokens, size, widest = x.shape[0] * x.shape[1], x.itemsize, max(x.shape[2], hidden)
    states = 2 * (tokens + x.shape[1])  # of the layer's input and of its result; also before the first token
    parts = [tokens * _row(4 * hidden, size), tokens * _row(hidden, size)]  # gates, and a result's parts
    parts += [states * _row(widest, itemsize) for itemsize in (size, 4, 4)]  # states, and their gradients
    parts += [states * hidden * itemsize for itemsize in (size, 4)]  # the cell's, and its gradients
    workspace = sum(-(-part // _PAGE) * _PAGE for part in parts)
    result = x.new_empty((*x.shape[:2], hidden))
    return result, torch.empty_like(hx), torch.empty_like(cx), x.new_empty(workspace, dtype=torch.uint8)


class _Kind(NamedTuple):
    """A kind of recurrent layer: cuDNN's number of it, and what its reserve has of each token."""

    mode: int
    kept: int  # vectors of the hidden size, beside the state


_KINDS = {
    "rnn_relu": _Kind(0, 1),  # the gate
    "rnn_tanh": _Kind(1, 1),
    "lstm": _Kind(2, 5),  # 4 gates, the cell
    "gru": _Kind(3, 4),  # 3 gates, the product that the reset gate multiplies
}


def _cudnn(
    x: Tensor, weight: list[Tensor], stride: int, _: Any, hx: Tensor, cx: Tensor | None, *args: Any
) -> Any:
    """Make what `_cudnn_rnn` makes of tokens in rows."""
    mode, hidden, projected, layers, _, dropout, train, bidirectional = args[:8]
    tokens, width = x.shape[0] * x.shape[1], hx.shape[2] * (1 + bidirectional)
    kept = next(kind.kept for kind in _KINDS.values() if kind.mode == mode)
    numel = hx.shape[2] + hidden * (kept + (projected > 0))  # also the state before its projection
    nbytes = tokens * hx.shape[0] * numel * x.itemsize
    nbytes += tokens * width * (layers - 1) if dropout else 0  # a byte of each element that may be dropped
    return (
        x.new_empty((*x.shape[:2], width)),
        torch.empty_like(hx),
        x.new_empty(0) if cx is None else torch.empty_like(cx),
        x.new_empty(nbytes if train else 0, dtype=torch.uint8),
        x.new_empty(sum(tensor.numel() for tensor in weight)),
    )


def _cudnn_backward(x: Tensor, weight: list[Tensor], *args: Any) -> Any:
    """Make the gradients of `_cudnn_rnn`: those of weights are parts of one buffer."""
    hx, cx, needed = args[2], args[3], args[-1]
    gradients = [
        torch.empty_like(tensor) if needs and tensor is not None else None
        for tensor, needs in zip((x, hx, cx), needed[:3], strict=True)
    ]
    buffer = x.new_empty(sum(tensor.numel() for tensor in weight))
    parts = buffer.split([tensor.numel() for tensor in weight]) if needed[3] else ()
    return *gradients, [part.view_as(tensor) for part, tensor in zip(parts, weight, strict=bool(parts))]


FAKES: dict[Any, Callable[..., Any]] = {
    _aten.mkldnn_rnn_layer.default: _mkldnn,
    _aten._cudnn_rnn.default: _cudnn,
    _aten._cudnn_rnn_backward.default: _cudnn_backward,
}


def _on_cuda(kind: _Kind) -> Callable[..., Any]:
    def layers(
        x: Tensor,
        states: Any,
        weight: list[Tensor],
        biases: bool,
        number: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        """Compute recurrent layers by cuDNN's operator, which has tokens in rows."""
        hx, cx = states if kind.mode == 2 else (states, None)
        hidden = hx.shape[2] if cx is None else cx.shape[2]
        projected = hx.shape[2] if hx.shape[2] != hidden else 0
        stride = 4 if biases else 2
        stride += projected > 0
        rows = x.transpose(0, 1) if batch_first else x
        sizes: Any = (kind.mode, hidden, projected, number, False, dropout, train, bidirectional, [], None)
        y, hy, cy, *_ = _aten._cudnn_rnn(rows, weight, stride, None, hx, cx, *sizes)
        y = y.transpose(0, 1) if batch_first else y
        return (y, hy) if cx is None else (y, hy, cy)

    return layers


# planner.kernels: torch's recurrent layers, which on CUDA are one operator of cuDNN
cudnn_layers = {f"{name}.input": _on_cuda(kind) for name, kind in _KINDS.items()}
