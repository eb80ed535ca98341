"""Attention and dropout in a plan as CUDA has them, however a model calls them: bytes by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise._compat import FastFakeTensorMode
from shardwise.planner.kernels import kernels
from shardwise.planner.setup import Setup

held_attention, held_dropout = F.scaled_dot_product_attention, F.dropout  # as `from ... import` holds them
BATCH, HEADS, TOKENS, WIDTH = 2, 4, 64, 16
BF16, FLOAT, BOOL = 2, 4, 1
OF_TOKENS, SCORES = BATCH * HEADS * TOKENS, BATCH * HEADS * TOKENS * TOKENS


@contextmanager
def saving() -> Iterator[Callable[[Iterable[Any]], int]]:
    """Give a function: the bytes that backward keeps from the block, beside those of given tensors."""
    kept: list[Tensor] = []

    def nbytes_beside(given: Iterable[Any]) -> int:
        storages = {each._cdata: each.nbytes() for each in map(Tensor.untyped_storage, kept)}
        for tensor in given:
            if isinstance(tensor, Tensor):
                storages.pop(tensor.untyped_storage()._cdata, None)
        return sum(storages.values())

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield nbytes_beside


def saved(function: Callable[..., Tensor], *args: Any, device: str = "cuda", **kwargs: Any) -> int:
    """Bytes that backward keeps beside the inputs and the result, on fake tensors."""
    with kernels(Setup(device=device)), saving() as nbytes_beside:
        result = function(*args, **kwargs)
    return nbytes_beside((result, *args, *kwargs.values()))


def query(heads: int = HEADS, width: int = WIDTH) -> Tensor:
    return torch.empty(BATCH, heads, TOKENS, width, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize(
    "attention", [held_attention, lambda *a, **k: F.scaled_dot_product_attention(*a, **k)]
)
def test_attention_in_one_kernel_keeps_no_scores(attention: Callable[..., Tensor]) -> None:
    with FastFakeTensorMode():
        q, k, v = query(), query(), query()
        least = saved(attention, q, k, v)
        assert least <= OF_TOKENS * FLOAT  # a number a token
        for change in ({"dropout_p": 0.1}, {"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool)}):
            assert saved(attention, q, k, v, is_causal="attn_mask" not in change, **change) < SCORES
        assert saved(attention, q, k, query(width=24), dropout_p=0.1) < SCORES
        bias = torch.zeros(HEADS, TOKENS, TOKENS, dtype=torch.bfloat16, requires_grad=True)
        assert saved(attention, q, k, v, attn_mask=bias) < SCORES
        assert saved(attention, q, k, v, dropout_p=0.1, device="cpu") > SCORES


def test_where_no_kernel_is_taken_scores_are_in_memory_and_dropout_keeps_a_byte_of_each() -> None:
    scores = SCORES * (FLOAT + BOOL + FLOAT)  # softmax, what is dropped, what is left
    with FastFakeTensorMode():
        q, k, one = query(), query(), query(heads=1)
        of_inputs = 3 * OF_TOKENS * WIDTH * FLOAT
        with sdpa_kernel(SDPBackend.MATH):
            found = saved(held_attention, q, k, query(), dropout_p=0.1)
            assert scores <= found <= scores + of_inputs
        found = saved(held_attention, q, one, one, dropout_p=0.1)
        assert scores <= found <= scores + of_inputs
        grouped = saved(held_attention, q, query(heads=2), query(heads=2), dropout_p=0.1, enable_gqa=True)
        assert grouped < SCORES


@pytest.mark.parametrize("dropout", [held_dropout, torch.nn.Dropout(0.5)])
def test_dropout_keeps_a_byte_of_each_element(dropout: Callable[..., Tensor]) -> None:
    with FastFakeTensorMode():
        assert saved(dropout, query()) == OF_TOKENS * WIDTH * BOOL
        assert saved(dropout, query(), device="cpu") > OF_TOKENS * WIDTH * BOOL


def test_values_are_those_of_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 8, 16, generator=generator) for _ in range(3))
    for change in ({}, {"is_causal": True}, {"attn_mask": torch.randn(8, 8) > 0}, {"scale": 0.3}):
        with kernels(Setup()), sdpa_kernel(SDPBackend.MATH):
            found = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], dropout_p=1e-7, **change)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], **change))
