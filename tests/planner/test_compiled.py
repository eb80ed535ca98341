"""Compiled blocks in a plan: what a compiler would fuse, leave out and free, from what operators touch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.plan_real import SEQUENCE, decoder
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import planner
from shardwise.comm.count import Collective
from shardwise.errors import ShardingError
from shardwise.planner.devices import hardware_of
from shardwise.planner.events import (
    COMPUTATION,
    TENSOR_PARALLEL,
    Compute,
    Mark,
    Place,
    Record,
    Recording,
    Segment,
    Send,
    Wait,
)
from shardwise.planner.measure import last_step, moments
from shardwise.planner.models import model_of
from shardwise.planner.record import record
from shardwise.planner.setup import Setup
from shardwise.planner.timing import compute_seconds, send_seconds, time_of

WIDTH, TOKENS = 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(self.mid(F.silu(self.up(x)) * 2))


class Chain(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def recorded(**setup: Any) -> Recording:
    asked = Setup(ranks=2, sequence=TOKENS, **setup)
    return record(model_of(Chain, sequence=TOKENS), asked, layers=2)


def kernels(recording: Recording, phase: str) -> list[Compute]:
    """Of the first block's own work."""
    found = [(place, event) for place, event, _ in last_step(recording, 1) if isinstance(event, Compute)]
    return [
        event
        for place, event in found
        if place.layer == 0 and place.phase == phase and (event.flops or event.name.startswith("prims."))
    ]


def test_operators_between_matmuls_are_one_kernel_that_reads_and_writes_once() -> None:
    one = TOKENS * WIDTH * 2  # bytes of an activation in bfloat16
    names = ["aten.mm", "prims.fused", "aten.mm", "aten.mm", "prims.fused"]
    forward = kernels(recorded(compile=True), "forward")
    assert [event.name for event in forward] == names
    # 2 silu(x) for the second matmul: x is read, 2 silu(x) written; the residual: two are read, one written
    assert [event.nbytes for event in forward if not event.flops] == [2 * one, 3 * one]
    backward = kernels(recorded(compile=True, checkpointing="full"), "backward")
    # computed again are two matmuls, as nobody reads the third one's result; then six for gradients
    assert sum(event.name == "aten.mm" for event in backward) == 8


def test_what_checkpointing_keeps_and_backward_does_not_read_is_not_kept() -> None:
    """Of three matmuls selective checkpointing keeps the first and the third; of that nobody asks again."""
    eager, compiled = (
        shardwise.plan(
            Chain, ranks=2, sequence=TOKENS, checkpointing="selective", compile=on, hardware="h100"
        )
        for on in (False, True)
    )
    ends = [next(one for one in plan.moments if one.phase == "backward").alive for plan in (eager, compiled)]
    assert ends[0]["activations"] - ends[1]["activations"] == 2 * TOKENS * WIDTH * 2
    assert compiled.step_times.computation < eager.step_times.computation
    assert "checkpointing selective, compiled, AdamW" in str(compiled)
    assert compiled.sent == eager.sent
    assert compiled.model_flops == eager.model_flops


@pytest.mark.parametrize(("tensor", "more"), [(1, 0), (2, 2 * 32 * 32)])
def test_what_an_operator_makes_beside_its_result_is_freed_where_it_was(tensor: int, more: int) -> None:
    """Attention's sums, which nobody reads where backward runs it again.

    On torch 2.15 DTensor frees an activation between two operators, which are one kernel when compiled.
    """
    asked: dict[str, Any] = {"ranks": 4, "tensor": tensor, "sequence": 32, "checkpointing": "full"}
    eager, made = (shardwise.plan(decoder, **asked, compile=one) for one in (False, True))
    assert made.peak_bytes <= eager.peak_bytes + more * (
        torch.torch_version.TorchVersion(torch.__version__) >= "2.15"
    )
    assert made.sent == eager.sent


def test_float8_halves_what_blocks_gather_and_casts_each_input_once_a_phase() -> None:
    wide, narrow = (recorded(compile=True, float8=on) for on in (False, True))
    (gathers, halves) = (
        {event.collective.bytes for _, event, _ in last_step(one, 1) if getattr(event, "group", None) == 0}
        for one in (wide, narrow)
    )
    block = 3 * WIDTH * WIDTH
    assert gathers == {2 * block, 4 * block}  # gathered in bfloat16, reduced in float32
    assert halves == {block, 4 * block}
    forward = [event.name for event in kernels(narrow, "forward")]
    multiply = ["prims.cast", "aten.mm"]
    assert forward == [*multiply, "prims.fused", *multiply, *multiply, "prims.fused"]
    matmuls = [event for event in kernels(narrow, "forward") if event.flops]
    assert {event.dtype for event in matmuls} == {"float8_e4m3fn"}
    with pytest.raises(ShardingError, match="float8 and nvfp4 need compiled blocks"):
        Setup(float8=True)


def test_float8_by_rows_gathers_as_it_computes_and_casts_both_factors_with_a_scale_for_each_row() -> None:
    wide, rows = recorded(compile=True), recorded(compile=True, float8=True, float8_scales="row")

    def sent(of: Recording) -> list[Any]:
        return [event.collective for _, event, _ in last_step(of, 1) if hasattr(event, "collective")]

    assert sent(rows) == sent(wide)
    forward = kernels(rows, "forward")
    multiply = ["prims.cast", "prims.cast", "aten.mm"]
    assert [one.name for one in forward] == [*multiply, "prims.fused", *multiply * 2, "prims.fused"]
    casts = {one.nbytes for one in forward if one.name == "prims.cast"}
    scaled = [3 * TOKENS * WIDTH + 4 * TOKENS, 3 * WIDTH * WIDTH + 4 * WIDTH]  # read at 2 bytes, written at 1
    assert casts == set(scaled)
    transposed = 5 * (2 * TOKENS * WIDTH + 3 * TOKENS * WIDTH + 4 * WIDTH)  # for the weight's gradient
    backward = [one.nbytes for one in kernels(rows, "backward") if one.name == "prims.cast"]
    assert backward.count(transposed) == 2 * 3  # factors of three weights
    assert max(backward) == transposed
    (nbytes,) = {one.nbytes for one in forward if one.flops}
    assert nbytes == TOKENS * WIDTH + WIDTH * WIDTH + 4 * (TOKENS + WIDTH) + 2 * TOKENS * WIDTH
    held = [
        max(one.alive.get("temporary", 0) for one in moments(of) if one.layer == 0) for of in (wide, rows)
    ]
    assert held[1] > held[0]
    assert moments(rows)[-1].alive == moments(wide)[-1].alive


def test_nvfp4_casts_both_factors_of_each_matmul_to_4_bits_and_a_byte_for_16() -> None:
    wide, narrow = recorded(compile=True), recorded(compile=True, nvfp4=True)
    forward = kernels(narrow, "forward")
    multiply = ["prims.cast", "prims.cast", "aten.mm"]
    assert [one.name for one in forward] == [*multiply, "prims.fused", *multiply * 2, "prims.fused"]
    matmuls = [one for of in ("forward", "backward") for one in kernels(narrow, of) if one.flops]
    assert {one.dtype for one in matmuls} == {"float4_e2m1fn_x2"}
    assert sum(one.flops for one in matmuls) == sum(
        one.flops for of in ("forward", "backward") for one in kernels(wide, of)
    )

    def cast(values: int) -> int:
        return values // 2 + values // 16

    both = TOKENS * WIDTH, WIDTH * WIDTH
    assert {one.nbytes for one in forward if one.name == "prims.cast"} == {2 * n + cast(n) for n in both}
    (nbytes,) = {one.nbytes for one in forward if one.flops}
    assert nbytes == sum(map(cast, both)) + 2 * TOKENS * WIDTH


def test_a_plan_in_nvfp4_takes_less_time_than_in_float8_where_matmuls_do() -> None:
    asked: dict[str, Any] = {"ranks": 2, "hardware": "b200", "compile": True, "sequence": 8192}
    with mock.patch(f"{__name__}.WIDTH", 8192):
        steps = [
            shardwise.plan(Chain, **asked, **how)
            for how in ({}, {"float8": True, "float8_scales": "row"}, {"nvfp4": True})
        ]
    times = [one.step_times.step for one in steps]
    assert times == sorted(times, reverse=True)
    assert len({*times}) == 3
    assert steps[2].computed_flops == steps[0].computed_flops
    assert steps[2].sent == steps[0].sent
    assert "NVFP4" in str(steps[2])


def test_float8_on_hardware_without_it_is_refused_by_name() -> None:
    asked: dict[str, Any] = {"compile": True, "float8": True, "ranks": 2, "sequence": TOKENS}
    with pytest.raises(ShardingError, match=r"A100 40GB.* has no peak_flops of float8_e4m3fn"):
        shardwise.plan(Chain, hardware="a100-40gb", **asked)
    with pytest.raises(ShardingError, match=r"H100 80GB.* has no peak_flops of float4_.* nvfp4=True"):
        shardwise.plan(Chain, hardware="h100", **(asked | {"float8": False, "nvfp4": True}))
    with pytest.raises(ShardingError, match="both asked for"):
        Setup(compile=True, float8=True, nvfp4=True)
    made = shardwise.plan(lambda layers=10: Chain(layers), hardware="h100", float8_scales="row", **asked)
    assert "float8 by rows" in str(made)
    assert not made.whole


class Waves(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.sin(torch.cos(self.up(x))))


class WavyChain(Chain):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Waves() for _ in range(layers))


@pytest.mark.filterwarnings("error:Your compiler for AOTAutograd")
def test_what_is_cheap_is_computed_again_where_nothing_is_checkpointed() -> None:
    """Eager keeps the inputs of cosine, sine and the second matmul; a compiler the first, or the last too."""
    eager, compiled = (
        shardwise.plan(WavyChain, ranks=2, sequence=TOKENS, compile=on) for on in (False, True)
    )
    ends = [next(one for one in plan.moments if one.phase == "backward").alive for plan in (eager, compiled)]
    saved = (ends[0]["activations"] - ends[1]["activations"]) / (2 * TOKENS * WIDTH * 2)
    assert saved in (1, 2)
    assert compiled.sent == eager.sent


@pytest.mark.filterwarnings("error:Your compiler for AOTAutograd")
def test_a_compiled_loss_keeps_logits_as_they_are() -> None:
    """Eager keeps their float32 logarithms; what else there is in backward is a part of neither."""
    eager, compiled = (shardwise.plan(Chain, ranks=2, sequence=256, compile_loss=on) for on in (False, True))
    whole, kept = (
        max(one.alive.get("logits and loss", 0) for one in plan.moments) for plan in (eager, compiled)
    )
    assert kept < 0.6 * whole
    assert compiled.sent == eager.sent


def test_reductions_in_pieces_hide_beside_their_matmul_and_are_added_up_after() -> None:
    hardware = hardware_of("h100")
    call = Collective("reduce_scatter", 2**30, torch.bfloat16, 8)
    multiplies = Compute("aten.mm", 10**13, 2**30, "bfloat16", COMPUTATION)
    before, after = Mark(0), Mark(0)
    events: list[Any] = [multiplies, Record(before, COMPUTATION), Wait(before, TENSOR_PARALLEL)]
    events += [Send(call, TENSOR_PARALLEL, TENSOR_PARALLEL), Record(after, TENSOR_PARALLEL)]
    events += [Wait(after, COMPUTATION)]
    seconds = {}
    for layer in (0, None):  # a block's, which is compiled, and what is around them
        recording = Recording(1, [Segment(Place(0, 0, "forward", layer), events)], 0, 0, ())
        seconds[layer] = [time_of(recording, hardware, 1, pieces=n).step for n in (1, 8)]
    takes, sends = compute_seconds(multiplies, hardware), send_seconds(call, hardware)
    adds = (2**30 + 2**27) / (hardware.memory_bytes_per_s * hardware.bandwidth_efficiency)
    host = hardware.host_seconds
    assert seconds[0] == pytest.approx([host + takes + sends, host + takes + sends / 8 + adds])
    assert seconds[None] == pytest.approx([host + takes + sends] * 2)


def test_every_second_block_that_is_checkpointed_takes_half_of_what_all_take() -> None:
    kept = {
        kind: shardwise.plan(lambda layers=8: Chain(layers), ranks=2, sequence=SEQUENCE, checkpointing=kind)
        for kind in ("none", "alternate", "full")
    }
    none, half, full = (
        max(moment.alive.get("activations", 0) for moment in one.moments) for one in kept.values()
    )
    assert half == pytest.approx((none + full) / 2, rel=0.1)
    flops = [one.computed_flops for one in kept.values()]
    assert flops[1] == pytest.approx((flops[0] + flops[2]) / 2, rel=0.01)
    assert "for block in blocks[1::2]:" in planner.python("gpt2", Setup(checkpointing="alternate"))
