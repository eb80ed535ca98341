"""A profile of this machine, from measurements: the file that `hardware_of` reads.

    matmuls of growing size      seconds = (operations + half) / rate: the rate, and the size of half
    attention, one size          operations per second
    copies and sums              bytes per second
    a tiny operator, repeated    host time to issue one
    gathers and reductions       seconds = latency + bytes sent / rate, over a host's ranks and over all

All ranks measure at once, as in training; rank 0's times are written. The peak is the best measured rate, or
that of a data sheet: the profile given as `like`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise._compat import all_gather_single
from shardwise.comm.kinds import sent_bytes
from shardwise.errors import ShardingError
from shardwise.planner.cost import dtype_name
from shardwise.planner.devices import Hardware


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure: widths of matmuls, bytes of copies, bytes of collectives, tokens of attention."""

    matmuls: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    copied_bytes: int = 1 << 30
    sent_bytes: tuple[int, ...] = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
    tokens: int = 4096
    repeats: int = 10


SMALL = Sizes((64, 128, 256, 512), 1 << 24, (1 << 12, 1 << 16, 1 << 20), 128, 5)  # seconds on a CPU


def calibrate(*, like: Hardware | None = None, sizes: Sizes | None = None, name: str = "") -> Hardware:
    """Measure this machine; every rank of a torchrun must call it.

    Args:
        like: a profile that has the data sheet's peaks, and the links that these ranks cannot measure.
        sizes: by default, large ones on an accelerator and small ones on a CPU.
    """
    with _group() as device:
        sizes = sizes or (SMALL if device.type == "cpu" else Sizes())
        main = torch.float32 if device.type == "cpu" else torch.bfloat16
        dtypes = [torch.float32, torch.bfloat16, torch.float16][: 2 if device.type == "cpu" else 3]
        rates = {dtype: _matmuls(device, dtype, sizes) for dtype in dtypes}
        rate, best, half = rates[main]
        peak = (like.peak_flops[dtype_name(main)] if like else None) or best
        efficiency = rate / peak
        copied, summed = _memory(device, sizes)
        bandwidth = like.memory_bytes_per_s if like else max(copied, summed)
        peaks = {dtype_name(dtype): rate[0] / efficiency for dtype, rate in rates.items()}
        hardware = Hardware(
            name=name or _device_name(device),
            source=_source(like),
            memory_bytes=_memory_bytes(device),
            peak_flops=like.peak_flops if like else peaks,
            memory_bytes_per_s=bandwidth,
            devices_per_host=like.devices_per_host if like else _local_ranks(),
            host_link_bytes_per_s=like.host_link_bytes_per_s if like else bandwidth,
            network_bytes_per_s=like.network_bytes_per_s if like else bandwidth,
            host_latency_s=like.host_latency_s if like else 0.0,
            network_latency_s=like.network_latency_s if like else 0.0,
            matmul_efficiency=efficiency,
            matmul_half_flops=half,
            attention_efficiency=_attention(device, main, sizes) / peak,
            bandwidth_efficiency=min(1.0, summed / bandwidth),
            host_seconds=_host_seconds(device),
            context_bytes=0,
        )
        hardware = _links(hardware, device, sizes)
        return replace(hardware, context_bytes=_context_bytes(device))


def to_toml(hardware: Hardware) -> str:
    """Return the file that `hardware_of` reads."""
    fields = asdict(hardware)
    peaks = fields.pop("peak_flops")
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    return "\n".join([*lines, "", "[peak_flops]", *(f"{key} = {rate!r}" for key, rate in peaks.items()), ""])


@contextmanager
def _group() -> Iterator[torch.device]:
    """Join the ranks that a launcher started, or only this process; yields the rank's device."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if kind is not None:
        device = torch.device(kind.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device)
    begins = "RANK" in os.environ and not dist.is_initialized()
    if begins:
        dist.init_process_group("gloo" if kind is None else None, timeout=timedelta(minutes=5))
    try:
        yield device
    finally:
        if begins:
            dist.destroy_process_group()


def _seconds(run: Callable[[], object], device: torch.device, repeats: int, *, ends: bool = True) -> float:
    """Return the median seconds of one call, after warm-up; without `ends`, those to issue its work."""
    durations = []
    for turn in range(repeats + 2):
        _wait(device)
        begin = time.perf_counter()
        run()
        if ends:
            _wait(device)
        if turn > 1:
            durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _matmuls(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> tuple[float, float, float]:
    """Return the operations a second of a large matmul and of the best; operations at half the first."""
    flops, seconds = [], []
    for width in sizes.matmuls:
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        flops.append(2.0 * width**3)
        seconds.append(_seconds(partial(torch.matmul, a, b), device, sizes.repeats))
    latency, per_flop = line(flops, seconds)
    best = max(f / s for f, s in zip(flops, seconds, strict=True))
    return 1 / per_flop, max(best, 1 / per_flop), latency / per_flop


def line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit a line in relative error; return seconds at zero and seconds per unit, neither negative."""
    weights = 1 / np.asarray(seconds)
    slope, begin = np.polyfit(np.asarray(amounts), np.asarray(seconds), 1, w=weights)
    if begin < 0 or slope <= 0:
        begin, slope = 0.0, min(s / a for s, a in zip(seconds, amounts, strict=True))
    return float(begin), float(slope)


def _memory(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Measure the bytes per second, read and written, of a copy and of a sum."""
    a = torch.zeros(sizes.copied_bytes // 4, device=device)
    b = torch.zeros_like(a)
    copied = 2 * a.nbytes / _seconds(lambda: b.copy_(a), device, sizes.repeats)
    return copied, 3 * a.nbytes / _seconds(lambda: b.add_(a), device, sizes.repeats)


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Measure the operations a second of attention, none left out for being masked."""
    heads, width = 8, 64 if device.type == "cpu" else 128
    q = torch.randn(1, heads, sizes.tokens, width, device=device).to(dtype)
    run = partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    return 4 * heads * sizes.tokens**2 * width / _seconds(run, device, sizes.repeats)


def _host_seconds(device: torch.device) -> float:
    tensor, calls = torch.zeros(8, device=device), 200

    def run() -> None:
        for _ in range(calls):
            tensor.add_(1.0)

    return _seconds(run, device, 5, ends=False) / calls


def _links(hardware: Hardware, device: torch.device, sizes: Sizes) -> Hardware:
    """Return `hardware` with latency and rate between a host's ranks and, with several hosts, between all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return hardware
    world, local = dist.get_world_size(), _local_ranks()
    if world % local:
        raise ShardingError(f"hosts with different numbers of ranks: {world} in all, {local} on this one")
    hosts = [dist.new_group(range(first, first + local)) for first in range(0, world, local)]
    if local > 1:
        latency, per_byte = _collectives(hosts[dist.get_rank() // local], device, sizes)
        hardware = replace(hardware, host_latency_s=latency / (local - 1), host_link_bytes_per_s=1 / per_byte)
    if world > local:
        latency, per_byte = _collectives(cast(dist.ProcessGroup, dist.group.WORLD), device, sizes)
        count = world // local
        hops = min(count - 1, 2 * math.ceil(math.log2(count)))
        inside = (local - 1) * hardware.host_latency_s
        per_hop = max(0.0, latency - inside) / hops
        hardware = replace(hardware, network_latency_s=per_hop, network_bytes_per_s=1 / per_byte)
    return hardware


def _collectives(group: dist.ProcessGroup, device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Measure latency, and seconds per byte that a rank sends, of all-gathers and all-reduces."""
    ranks = dist.get_world_size(group)
    amounts, seconds = [], []
    for nbytes in sizes.sent_bytes:
        shard = torch.zeros(max(1, nbytes // 4 // ranks), device=device)
        buffer = torch.zeros(shard.numel() * ranks, device=device)
        gather = partial(all_gather_single, buffer, shard, group, async_op=False)
        reduce = partial(dist.all_reduce, buffer, group=group)
        for kind, run in (("all_gather", gather), ("all_reduce", reduce)):
            dist.barrier(group)
            amounts.append(float(sent_bytes(kind, buffer.nbytes, ranks=ranks)))
            seconds.append(_seconds(run, device, sizes.repeats))
    return line(amounts, seconds)


def _local_ranks() -> int:
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or torch.accelerator.device_count()
    return count or (dist.get_world_size() if dist.is_initialized() else 1)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads a rank"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _local_ranks()


def _context_bytes(device: torch.device) -> int:
    """Return the bytes in use outside the allocator: the driver's, the communicators'."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total - free - torch.cuda.memory_reserved(device)))


def _source(like: Hardware | None) -> str:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    local = _local_ranks()
    text = f"Measured by shardwise calibrate on {ranks} ranks ({local} a host), torch {torch.__version__}"
    missing = [*(["host link"] if local == 1 or ranks == 1 else []), *(["network"] if ranks <= local else [])]
    origin = "as fast as memory" if like is None else f"of {like.name}"
    text += f"; not measured: {' and '.join(missing)}, taken to be {origin}" if missing else ""
    return text + (f"; peaks of {like.name}" if like else "; peaks are the best that was measured")
