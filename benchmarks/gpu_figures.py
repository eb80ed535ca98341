"""What training on this device takes, beside FSDP2: time, memory, bandwidth; and checkpoints of it."""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import difference
from gpu_place import Check, Place, Shape, make, tokens
from results import spread
from subjects import IMPLEMENTATIONS, PEER, shard
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardwise import checkpoint
from shardwise.comm import DefaultAllGather, DefaultReduceScatter

TINY = Shape(blocks=2)
MOST_REPEATS, WARM_UP = 20, 3
SHARE = 0.08  # of the device's memory, for parameters, gradients and AdamW's moments
Figures = dict[str, Any]


def sized(place: Place) -> Shape:
    """A transformer that takes some of the device's memory, in blocks of a few hundred MB at most."""
    if place.is_simulated:
        return TINY
    _, total = torch.accelerator.get_memory_info(place.device)
    for width, heads in ((2048, 16), (1024, 16), (512, 8), (256, 4)):
        shape = Shape(width=width, heads=heads, vocabulary=32_000, length=1024, batch=2)
        blocks = int((SHARE * total / 16 - 2 * shape.vocabulary * width) / (12 * width**2))
        if blocks >= 4:
            return Shape(width, min(blocks, 24), heads, shape.vocabulary, shape.length, shape.batch)
    return Shape(width=128, blocks=4, heads=4, vocabulary=8_000, length=256)


def implementations(place: Place) -> list[str]:
    return [name for name in IMPLEMENTATIONS if name != "bare" or place.ranks == 1]


class Subject:
    """A model of one implementation, in bf16 with gradients reduced in fp32, and what a step of it is."""

    def __init__(self, name: str, shape: Shape, place: Place, *, low: bool = True) -> None:
        self.model: Any = make(shape, place, exact=place.is_simulated)
        policy = IMPLEMENTATIONS[name].load().policy
        how: dict[str, Any] = {"mesh": place.mesh}
        if policy is not None and low:
            how["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        autocasts = policy is None and low and not place.is_simulated  # which has no autocast
        self.context = (
            partial(torch.autocast, place.device.type, torch.bfloat16)
            if autocasts
            else contextlib.nullcontext
        )
        library = shard(name, self.model, self.model.blocks, **how)
        self.optimizer = library.adamw(self.model, lr=1e-4, fused=True)
        self.place = place
        self.batches = [tokens(shape, place, rank=place.rank, number=number) for number in range(2)]
        self.steps = 0

    def step(self) -> torch.Tensor:
        batch = self.batches[self.steps % len(self.batches)]
        with self.context():
            loss: torch.Tensor = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss


def steps(place: Place, shape: Shape, until: float) -> Figures:
    """Time and memory of a step, by implementation."""
    found: Figures = {}
    names = implementations(place)
    for index, name in enumerate(names):
        left = until - time.monotonic()
        with place.running(f"a step, {name}", ours=name != PEER):
            found[name] = _steps(name, place, shape, time.monotonic() + left / (len(names) - index))
    return found


def _steps(name: str, place: Place, shape: Shape, end: float) -> Figures:
    device = torch.get_device_module(place.device)
    gc.collect()  # of the one before, whose memory would count
    device.empty_cache()
    if not place.is_simulated:
        device.reset_peak_memory_stats()
    subject = Subject(name, shape, place)
    for _ in range(1 if place.is_simulated else WARM_UP):
        subject.step()
    wall, host = [], []
    while len(wall) < 2 or (len(wall) < MOST_REPEATS and place.is_time_left(end)):
        if place.is_simulated and wall:
            break
        place.meet()
        begin = time.perf_counter()
        subject.step()
        host.append(1e3 * (time.perf_counter() - begin))
        place.wait()
        wall.append(1e3 * (time.perf_counter() - begin))
    return {
        "wall_ms": spread(wall),
        "host_ms": spread(host),
        "repeats": len(wall),
        "allocated": place.greatest(device.max_memory_allocated()),
        "reserved": 0 if place.is_simulated else place.greatest(device.max_memory_reserved()),
    }


def bandwidth(place: Place, until: float) -> list[Figures]:
    """GB/s of collectives, and of gathering a group of as many bytes."""
    sizes = [1 << 12, 1 << 14] if place.is_simulated else [1 << 20, 16 << 20, 256 << 20]
    names = [name for name in implementations(place) if name not in ("bare", "contiguous+flat")]
    gather, scatter = DefaultAllGather(), DefaultReduceScatter()
    rows = []
    for index, nbytes in enumerate(sizes):
        share = (until - time.monotonic()) / (len(sizes) - index)
        end = time.monotonic() + share
        row: Figures = {"bytes": nbytes}
        count = nbytes // 4 // place.ranks * place.ranks
        with place.running("collectives"):
            whole = torch.ones(count, device=place.device)
            part = torch.ones(count // place.ranks, device=place.device)
            row["all-gather"] = _rate(place, nbytes, end, partial(gather, whole, part, dist.group.WORLD))
            row["reduce-scatter"] = _rate(
                place, nbytes, end, partial(scatter, part, whole, dist.group.WORLD, dist.ReduceOp.SUM)
            )
        for name in names:
            with place.running(f"gathering, {name}", ours=name != PEER):
                row[name] = _group_rate(name, place, nbytes, end)
        rows.append(row)
    return rows


def _group_rate(name: str, place: Place, nbytes: int, end: float) -> float:
    width = max(8, int((nbytes / 4 / 8) ** 0.5))  # of 8 matrices
    group: Any = nn.Sequential(*(nn.Linear(width, width, bias=False, device=place.device) for _ in range(8)))
    shard(name, group, (), mesh=place.mesh)

    def gather() -> None:
        group.unshard()
        group.reshard()

    group(torch.zeros(1, width, device=place.device))
    return _rate(place, 8 * 4 * width**2, end, gather)


def _rate(place: Place, nbytes: int, end: float, work: Callable[[], Any]) -> float:
    """GB/s: the whole buffer's bytes over the time that it takes, the median."""
    work()
    times: list[float] = []
    while not times or (len(times) < MOST_REPEATS and not place.is_simulated and place.is_time_left(end)):
        place.meet()
        begin = time.perf_counter()
        for _ in range(1 if place.is_simulated else 5):
            work()
        place.wait()
        times.append((time.perf_counter() - begin) / (1 if place.is_simulated else 5))
    return nbytes / spread(times)[0] / 1e9


def checkpoints(place: Place, folder: Path, figures: Figures) -> Iterator[Check]:
    """Save, load and train on as if nothing had been; and save while the training goes on."""
    shape = TINY if place.is_simulated else Shape(width=512, blocks=8, heads=8, vocabulary=8_000, length=64)
    for layout in ("interleaved", "contiguous"):
        if layout in implementations(place):
            with place.running(f"checkpoints, {layout}"):
                yield from _checkpoints(place, folder / layout, figures, shape, layout)


def _checkpoints(place: Place, folder: Path, figures: Figures, shape: Shape, layout: str) -> Iterator[Check]:
    if place.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    place.meet()
    steps = 1 if place.is_simulated else 3
    first = Subject(layout, shape, place, low=False)
    first.step()
    state = _state(first)
    seconds = {"save": _seconds(place, lambda: checkpoint.save(folder / "a", state, step=1))}
    saved = _copy(first)
    begin = time.perf_counter()
    saving = checkpoint.save_async(folder / "b", _state(first), step=1)
    seconds["save_async returns"] = time.perf_counter() - begin
    after = [first.step().detach().cpu() for _ in range(steps)]
    begin = time.perf_counter()
    saving.wait()
    seconds["still to write after training on"] = time.perf_counter() - begin
    trained = _copy(first)
    for name, title in (
        ("a", "saved, loaded, trained on"),
        ("b", "saved while training went on, loaded, trained on"),
    ):
        other = Subject(layout, shape, place, low=False)
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.zero_()
        into = _state(other)
        seconds[f"load {name}"] = _seconds(place, lambda: checkpoint.load(folder / name, into))  # noqa: B023
        set_model_state_dict(other.model, into["model"])
        set_optimizer_state_dict(other.model, other.optimizer, into["optimizer"])
        other.steps = 1
        far = {"loaded": difference(_copy(other), saved)}
        again = [other.step().detach().cpu() for _ in range(steps)]
        far["trained on"] = max(difference(_copy(other), trained), float(again != after))
        far = {what: place.greatest(value) for what, value in far.items()}
        words = "; ".join(
            f"{what}: {'bit-equal' if not value else f'{value:.1e} apart'}" for what, value in far.items()
        )
        yield Check(f"{title}, {layout}", not any(far.values()), words)
    nbytes = sum(p.numel() * p.element_size() for p in first.model.parameters()) * 3
    figures[layout] = {"bytes": nbytes, "seconds": {n: place.greatest(s) for n, s in seconds.items()}}


def _state(subject: Subject) -> dict[str, Any]:
    model, optimizer = subject.model, subject.optimizer
    return {"model": get_model_state_dict(model), "optimizer": checkpoint.optimizer_state(model, optimizer)}


def _copy(subject: Subject) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().full_tensor().cpu().clone()
        for name, parameter in subject.model.named_parameters()
    }


def _seconds(place: Place, work: Callable[[], Any]) -> float:
    place.meet()
    begin = time.perf_counter()
    work()
    place.wait()
    return time.perf_counter() - begin
