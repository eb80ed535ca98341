"""Stand-ins in a plan for kernels that the CPU lacks, torch's own and scans, and for experts' routing."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise import _compat
from shardwise._compat import FakeTensor
from shardwise.layout.placement import even_intervals
from shardwise.nn import ExpertCut
from shardwise.planner.scans import FUNCTIONS
from shardwise.planner.setup import Setup


@contextmanager
def kernels(setup: Setup) -> Iterator[tuple[set[str], set[str]]]:
    """Make models compute on fake tensors as they would on the setup's device.

    Yields functions of transformers that run: as their kernels do, and by reference code that has none.
    """
    as_kernels, by_reference = set[str](), set[str]()
    with ExitStack() as stack:
        warn: Any = getattr(logging.Logger, "warning_once", None)  # transformers reports the second by it

        def listen(logger: logging.Logger, message: Any, *args: Any, **kwargs: Any) -> None:
            if "reference PyTorch implementation" in str(message):
                by_reference.add(str(message).split("`")[1])
            else:
                warn(logger, message, *args, **kwargs)

        if warn is not None:
            stack.enter_context(mock.patch.object(logging.Logger, "warning_once", listen))
        if setup.device == "cuda":
            patches: dict[str, Any] = {"scaled_dot_product_attention": _attention, "dropout": _dropout}
            patches |= {"rms_norm": _rms_norm} if setup.fused_norms else {}
            patches |= _compat.cudnn_layers if torch.backends.cudnn.enabled else {}
            stack.enter_context(_compat.operators_on_cpu(patches))
            modules = [m for path, m in sys.modules.items() if path.startswith("transformers.models.")]
            for module, name in itertools.product(modules, FUNCTIONS):
                if name in vars(module):
                    noting = stand_in(getattr(module, name), *FUNCTIONS[name], as_kernels)
                    stack.enter_context(mock.patch.object(module, name, noting))
        yield as_kernels, by_reference


def stand_in(
    function: Callable[..., Any], name: str, kernel: Callable[[Any], Any], names: set[str]
) -> Callable[..., Any]:
    """Return `kernel` with the parameters of `function`, which notes its name when it is called."""
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        names.add(name)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return kernel(SimpleNamespace(**given.arguments))

    return call


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute RMSNorm in one kernel, as on CUDA, by LayerNorm's, which keeps one more number per token."""
    return F.layer_norm(x, shape, weight, None, eps or 1e-6)


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    """Compute dropout in one kernel, as on CUDA, which keeps one byte per element."""
    if not train or not 0 < p < 1:
        return torch.ops.aten.dropout.default.decompose(x, p, train)
    return torch.native_dropout(x, p, True)[0]


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """Compute attention as on CUDA: in one kernel, also with dropout, a learned mask or wider values.

    The CPU has no such kernels, and would hold all scores in memory.
    """
    defaults: list[Any] = [None, 0.0, False]
    mask, dropout, is_causal = [*rest, *defaults[len(rest) :]]
    same_heads = query.ndim == 4 and (options.get("enable_gqa") or query.shape[:2] == key.shape[:2])
    cuda: Any = torch.backends.cuda
    enabled = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    has_kernel = same_heads and query.dtype != torch.float64 and enabled
    learned = mask is not None and mask.requires_grad
    usual = query.shape[-1] == value.shape[-1] and not learned
    if not has_kernel or usual or query.shape[1] != key.shape[1]:
        args = (query, key, value, mask, 0.0 if has_kernel else dropout, is_causal)
        attention = torch.ops.aten.scaled_dot_product_attention.default
        return attention.decompose(*args, **options)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
        mask = mask.expand(*query.shape[:3], key.shape[2])
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    rest = (mask, learns, 0.0, is_causal)
    return _compat.efficient_attention(query, key, value, *rest, scale=options.get("scale"))[0]


@contextmanager
def route_evenly(load: float) -> Iterator[None]:
    """Make `ExpertCut` distribute tokens evenly: fake tensors have no values by which to route.

    Each rank sends an even share to every rank, and receives that share times `load`, the busiest rank's.
    Only the counts that the library's own mixture reads are replaced.
    """
    lists: list[list[int]] = []  # tokens to each rank, and from each
    rows = 0  # that arrive

    def counts(cut: ExpertCut, experts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal lists, rows
        sent_tokens = [end - begin for begin, end in even_intervals(len(experts), cut.ranks)]
        received_tokens = [round(load * count) for count in sent_tokens]
        lists, rows = [sent_tokens, received_tokens], sum(received_tokens)
        table = experts.new_empty(cut.ranks, cut.count // cut.ranks + 2)
        if cut.mesh is not None:
            dist.all_to_all_single(table, table.clone(), group=cut.mesh.get_group())
        return table[:, :-2], table[:, :-2]

    values, repeat = FakeTensor.tolist, Tensor.repeat_interleave

    def tolist(tensor: FakeTensor) -> Any:
        return lists.pop(0) if lists else values(tensor)

    def repeated(tensor: Tensor, repeats: Tensor | int, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(repeats, Tensor):
            kwargs["output_size"] = rows
        return repeat(tensor, repeats, *args, **kwargs)

    # Patches methods, since a torch-function mode is off while backward recomputes.
    patched = mock.patch.object
    with (
        patched(ExpertCut, "_count_tokens", counts),
        patched(FakeTensor, "tolist", tolist),
        patched(Tensor, "repeat_interleave", repeated),
    ):
        yield
