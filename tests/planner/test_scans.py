"""Kernels that a plan stands for: shapes of results and gradients as reference code's, memory by hand."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from planner.test_configs import written
from shardwise.planner import kernels
from shardwise.planner.scans import FUNCTIONS

BATCH, TOKENS, CHANNELS, WIDTH, HEADS, HEAD = 2, 128, 24, 4, 6, 8
BF16, FLOAT = 2, 4


def made(*size: int, dtype: torch.dtype = torch.bfloat16, last: int = -1) -> Tensor:
    """A leaf whose dim `last` lies together."""
    order = [*(dim for dim in range(len(size)) if dim != last % len(size)), last % len(size)]
    tensor = torch.zeros([size[dim] for dim in order], dtype=dtype).permute(
        [order.index(dim) for dim in range(len(size))]
    )
    return tensor.requires_grad_()


def convolution() -> tuple[list[Any], dict[str, Any]]:
    return [made(BATCH, CHANNELS, TOKENS, last=1), made(CHANNELS, 4), made(CHANNELS)], {"activation": "silu"}


def selective_scan() -> tuple[list[Any], dict[str, Any]]:
    rows, states = (BATCH, CHANNELS, TOKENS), (BATCH, WIDTH, TOKENS)
    inputs = [made(*rows), made(*rows), made(CHANNELS, WIDTH, dtype=torch.float32)]
    more = {"D": made(CHANNELS, dtype=torch.float32), "z": made(*rows)}
    return [*inputs, made(*states), made(*states)], more | {
        "delta_bias": made(CHANNELS),
        "delta_softplus": True,
    }


def chunk_scan() -> tuple[list[Any], dict[str, Any]]:
    inputs = [made(BATCH, TOKENS, HEADS, HEAD), made(BATCH, TOKENS, HEADS), made(HEADS, dtype=torch.float32)]
    states = [made(BATCH, TOKENS, 2, WIDTH) for _ in "BC"]
    return [*inputs, *states], {
        "chunk_size": 32,
        "D": made(HEADS),
        "dt_bias": made(HEADS),
        "dt_softplus": True,
    }


def delta_rule(*g: int) -> tuple[list[Any], dict[str, Any]]:
    inputs = [made(BATCH, TOKENS, HEADS, HEAD) for _ in "qk"]
    return [*inputs, made(BATCH, TOKENS, HEADS, 2 * HEAD)], {
        "g": made(BATCH, TOKENS, HEADS, *g, dtype=torch.float32),
        "beta": made(BATCH, TOKENS, HEADS),
        "use_qk_l2norm_in_kernel": True,
    }


KERNELS: dict[str, tuple[str, str, Callable[[], tuple[list[Any], dict[str, Any]]]]] = {
    "causal_conv1d_fn": ("mamba", "causal_conv1d_fn", convolution),
    "selective_scan_fn": ("mamba", "mamba_selective_scan", selective_scan),
    "mamba_chunk_scan_combined": ("mamba2", "mamba2_chunk_scan", chunk_scan),
    "chunk_gated_delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule", delta_rule),
    "chunk_kda": ("kimi_linear", "chunk_kimi_delta_attention", lambda: delta_rule(HEAD)),
}


def stand_in(function: str) -> Callable[..., Any]:
    pytest.importorskip("transformers")
    family = next((family for family, name, _ in KERNELS.values() if name == function), "")
    family = family or ("mamba2" if "mamba2" in function else "mamba")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return kernels.stand_in(getattr(module, function), *FUNCTIONS[function], set())


def ran(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Shapes and dtypes of the result and of every input's gradient."""
    found = function(*args, **kwargs)
    result = found[0] if isinstance(found, tuple) else found
    result.sum().backward()
    inputs = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    assert all(one.grad is not None for one in inputs)
    return [(one.shape, one.dtype) for one in (result, *(one.grad for one in inputs))]


@pytest.mark.parametrize("name", KERNELS)
def test_results_and_gradients_are_shaped_as_those_of_reference_code(name: str) -> None:
    pytest.importorskip("transformers")
    family, function, inputs = KERNELS[name]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    by_reference, *gradients = ran(getattr(module, function), *inputs())
    # Reference code may return fp32, where kernels return what they are given.
    assert ran(stand_in(function), *inputs()) == [(by_reference[0], torch.bfloat16), *gradients]


@pytest.mark.parametrize(
    ("name", "asked", "state"),
    [
        ("selective_scan_fn", "return_last_state", (BATCH, CHANNELS, WIDTH)),
        ("mamba_chunk_scan_combined", "return_final_states", (BATCH, HEADS, HEAD, WIDTH)),
        ("chunk_gated_delta_rule", "output_final_state", (BATCH, HEADS, HEAD, 2 * HEAD)),
    ],
)
def test_a_cache_gets_the_last_state(name: str, asked: str, state: tuple[int, ...]) -> None:
    _, function, inputs = KERNELS[name]
    args, kwargs = inputs()
    _, last = stand_in(function)(*args, **kwargs, **{asked: True})
    assert (last.shape, last.dtype) == (state, torch.float32)


def saved_bytes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Bytes that the function saves for backward, each storage once."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*args, **kwargs)
    return sum(storages.values())


def given_bytes(args: list[Any], kwargs: dict[str, Any]) -> int:
    return sum(one.nbytes for one in (*args, *kwargs.values()) if isinstance(one, Tensor))


# Of each: what its package saves beside its inputs, in bytes by hand.
BESIDE = {
    "causal_conv1d_fn": 0,
    # The last state of 2,048 tokens, twice as wide; the result before the gate.
    "selective_scan_fn": BATCH * CHANNELS * (1 * 2 * WIDTH * FLOAT + TOKENS * BF16),
    # The decay of each step, and the result.
    "mamba_chunk_scan_combined": BATCH * TOKENS * HEADS * (FLOAT + HEAD * BF16),
    # Queries and keys are saved normed, in place of the inputs, with their norms; the decay summed up, in
    # place of what it was; and products of 64 keys.
    "chunk_gated_delta_rule": BATCH * TOKENS * HEADS * (2 * FLOAT + 64 * BF16),
    # Kimi's decay has a width, is saved as it was too, and there are products with queries.
    "chunk_kda": BATCH * TOKENS * HEADS * (2 * FLOAT + HEAD * FLOAT + 2 * 64 * BF16),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_saved_for_backward_is_what_the_package_saves(name: str) -> None:
    _, function, inputs = KERNELS[name]
    args, kwargs = inputs()
    assert saved_bytes(stand_in(function), *args, **kwargs) == given_bytes(args, kwargs) + BESIDE[name]


def test_a_whole_block_of_mamba_saves_its_scan_and_neither_its_convolution_nor_its_steps() -> None:
    rank, hidden = 3, 16
    xz = made(BATCH, 2 * CHANNELS, TOKENS)
    weights = [made(CHANNELS, 1, 4), made(CHANNELS), made(rank + 2 * WIDTH, CHANNELS), made(CHANNELS, rank)]
    floats = [
        made(CHANNELS, WIDTH, dtype=torch.float32),
        *(made(CHANNELS, dtype=torch.float32) for _ in "Db"),
    ]
    args = [xz, *weights, made(hidden, CHANNELS), None, floats[0], None, None, floats[1]]
    kwargs = {"delta_bias": floats[2], "delta_softplus": True}
    projected = BATCH * TOKENS * (rank + 2 * WIDTH) + 2 * BATCH * TOKENS * WIDTH  # B and C once more, turned
    scanned = BATCH * CHANNELS * (TOKENS * BF16 + 2 * WIDTH * FLOAT)
    saved = saved_bytes(stand_in("mamba_inner_fn"), *args, **kwargs)
    assert saved == given_bytes(args, kwargs) + projected * BF16 + scanned
    result, *_ = ran(stand_in("mamba_inner_fn"), args, kwargs)
    assert result == (torch.Size([BATCH, TOKENS, hidden]), torch.bfloat16)


def test_a_whole_block_of_mamba_2_saves_its_scan_and_what_norms_it() -> None:
    inner, groups, hidden = HEADS * HEAD, 2, 16
    convolved = inner + 2 * groups * WIDTH
    zxbcdt = made(BATCH, TOKENS, inner + convolved + HEADS)
    args = [zxbcdt, made(convolved, 4), made(convolved), made(HEADS), made(HEADS, dtype=torch.float32)]
    args += [made(HEADS), 32]
    kwargs = {"rmsnorm_weight": made(inner), "outproj_weight": made(hidden, inner)}
    how = {"headdim": HEAD, "ngroups": groups}
    saved = saved_bytes(stand_in("mamba2_split_conv1d_scan_combined"), *args, **kwargs, **how)
    assert saved == given_bytes(args, kwargs) + BATCH * TOKENS * (inner * BF16 + groups * FLOAT)
    result, *_ = ran(stand_in("mamba2_split_conv1d_scan_combined"), args, kwargs | how)
    assert result == (torch.Size([BATCH, TOKENS, hidden]), torch.bfloat16)


def test_kernels_of_transformers_are_planned_on_an_accelerator_and_named(tmp_path: Any) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 96}
    config = written(tmp_path, "mamba", **sizes)
    tokens = 16  # reference code takes one after another
    on_cuda = shardwise.plan(config, ranks=2, sequence=tokens)
    (said,) = on_cuda.assumed
    assert said.startswith("mamba_inner_fn are planned as the kernels of mamba-ssm, causal-conv1d and")
    for _ in range(2):  # transformers says it once in a process
        on_cpu = shardwise.plan(config, ranks=2, sequence=tokens, device="cpu")
        (said,) = on_cpu.assumed
        assert (
            "causal_conv1d_fn, mamba_inner_fn, selective_scan_fn ran as transformers' reference code" in said
        )
    # Reference code has every state of every token.
    assert on_cpu.peak_bytes > on_cuda.peak_bytes + tokens * 32 * 4 * FLOAT


@pytest.mark.parametrize(
    "setup", [{}, {"checkpointing": "full"}, {"checkpointing": "selective"}, {"compile": True}], ids=str
)
def test_operations_of_a_scan_are_the_same_however_a_block_is_run(
    tmp_path: Any, setup: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 96}
    sizes |= {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 32, "expand": 2}
    found = shardwise.plan(written(tmp_path, "mamba2", **sizes), ranks=2, sequence=TOKENS, **setup)
    inner, states = 64, 8
    linear = 32 * (2 * inner + 2 * states + 8) + inner * 32  # before the scan, and after it
    # By chunks: products of B and C, of them and the heads; states from tokens, and tokens from states.
    scan = 32 * (states + inner) + 2 * inner * states
    assert found.model_flops == 3 * 2 * TOKENS * (2 * (linear + scan) + 32 * 96)
    assert found.whole == ""
