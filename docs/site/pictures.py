"""The pictures of "How it works" and "Streams", drawn from the library's own objects.

    python docs/site/pictures.py FOLDER

lays a group of parameters out over ranks by both layouts, shards a small model and runs a step of it, on one
process of a group that communicates nothing, and draws what the layouts, the profile of the step, the
compiled graph and the sharded modules say; `stream_pictures.py` draws what streams are given. Where they
change, so do the pictures.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import stream_pictures
import torch
import torch.distributed as dist
from drawing import COLORS, Drawing
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import fully_shard, inspect_graph
from shardwise.fsdp.module_state import state_of
from shardwise.layout.contiguous import ContiguousLayout
from shardwise.layout.group_layout import InterleavedLayout, ParamSpec
from shardwise.layout.placement import EvenShard

RANKS = 4
NAMES = ("layouts.svg", "step.svg", "graph.svg", "tree.svg", *stream_pictures.NAMES)


# ---------------------------------------------------------------- a group over ranks


def layouts() -> str:
    """Where the elements of three parameters lie: in each rank's shard, as gathered, as used."""
    shapes = {"up.weight": (6, 4), "up.bias": (6,), "down.weight": (4, 6)}
    specs = [ParamSpec(n, s, torch.float32, torch.float32, EvenShard(0)) for n, s in shapes.items()]
    left, drawing = 190.0, Drawing("A group of three parameters over four ranks in both layouts")
    scale = (drawing.width - left - 16) / 72  # elements that the longest buffer has room for

    def buffer(name: str, pieces: list[tuple[int, int, int, str]], total: int, cuts: int = 0) -> None:
        drawing.text(left - 10, name, anchor="end")
        drawing.box(left, total * scale, tip="padding")
        for start, size, index, inside in pieces:
            drawing.box(left + start * scale, size * scale, fill=COLORS[index], inside=inside)
        places = [left + i * total * scale / cuts for i in range(1, cuts)]
        top = drawing.y
        drawing.y += 22
        drawing.rules(places, top)

    def piece_name(index: int, rows: tuple[int, int]) -> str:
        name = specs[index].name
        first, count = rows
        return f"{name}[{first}:{first + count}]"

    drawing.title('layout="interleaved": every parameter cut evenly')
    gathered = []
    for rank in range(RANKS):
        (segment,) = InterleavedLayout(specs, ranks=RANKS, rank=rank).segments
        pieces = []
        for slot in segment.slots:
            box = EvenShard(0).box(specs[slot.index].shape, rank=rank, ranks=RANKS)
            size = math.prod(slot.shard_shape)
            if size:
                named = piece_name(slot.index, (box.offsets[0], box.sizes[0]))
                pieces.append((slot.shard_offset, size, slot.index, named))
        buffer(f"shard of rank {rank}", pieces, segment.shard_numel)
        gathered += [(rank * segment.shard_numel + at, *rest) for at, *rest in pieces]
    buffer("all-gather gives", gathered, segment.unsharded_numel, RANKS)
    whole = [
        (s.unsharded_offset, math.prod(specs[s.index].shape), s.index, specs[s.index].name)
        for s in segment.slots
    ]
    buffer("copied out to", whole, segment.unsharded_numel)
    drawing.y += 16

    drawing.title('layout="contiguous": whole rows, end to end')
    for rank in range(RANKS):
        layout = ContiguousLayout(specs, ranks=RANKS, rank=rank, align_bytes=4)
        (segment,) = layout.segments
        pieces = []
        for place in segment.places:
            if place.box.numel:
                named = piece_name(place.index, (place.box.offsets[0], place.box.sizes[0]))
                pieces.append((place.shard_offset, place.box.numel, place.index, named))
        buffer(f"shard of rank {rank}", pieces, segment.shard_numel)
    whole = [(place.start, place.numel, place.index, specs[place.index].name) for place in segment.places]
    buffer("all-gather gives", whole, segment.unsharded_numel, RANKS)
    drawing.text(left, "which is the whole parameters already: nothing is copied. Grey is padding.")
    drawing.y += 22
    return drawing.svg()


# ---------------------------------------------------------------- a model


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(layout: str) -> Model:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, layout=layout)
    return fully_shard(model, layout=layout)


def step() -> str:
    """One eager step, by the ranges that the library leaves in a profile, in the order they began."""
    model, x = sharded("contiguous"), torch.randn(8, 32)
    model(x).mean().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(x).mean().backward()
    sent = [event.time_range.start for event in profiled.events() if "allgather" in event.name]

    def happened(event: FunctionEvent) -> bool:
        """A gather of what is gathered already sends nothing."""
        span = event.time_range
        gathers = event.name.startswith("shardwise: gather")
        return not gathers or any(span.start <= moment <= span.end for moment in sent)

    found = [event for event in profiled.events() if event.name.startswith("shardwise: ") and happened(event)]
    found.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    moments = sorted({t for event in found for t in (event.time_range.start, event.time_range.end)})
    place = {moment: index for index, moment in enumerate(moments)}  # what happens is drawn, not how long
    kinds = {"gather": COLORS[0], "wait for": COLORS[5], "forward": "#8a939e", "reduce": COLORS[1]}
    rows: dict[str, list[tuple[str, int, int]]] = {}
    for event in found:
        title = event.name.removeprefix("shardwise: ")
        kind = next(kind for kind in kinds if title.startswith(f"{kind} "))
        span = (place[event.time_range.start], place[event.time_range.end])
        rows.setdefault(title.removeprefix(f"{kind} "), []).append((kind, *span))
    left, drawing = 140.0, Drawing("One training step: gathers, forwards and reductions of each module")
    scale = (drawing.width - left - 16) / len(moments)
    drawing.title("One step from left to right, a line for each sharded module")
    for name, spans in rows.items():
        for lane in ((("forward",)), ("gather", "wait for", "reduce")):
            if lane[0] == "gather":
                drawing.text(left - 10, name, anchor="end", dy=2)
            for kind, first, last in spans:
                if kind in lane:
                    width = (last - first) * scale
                    drawing.box(left + first * scale, width, fill=kinds[kind], tip=f"{kind} {name}")
            drawing.y += 20
        drawing.y += 8
    x = left
    for kind, color in kinds.items():
        drawing.box(x, 18, fill=color, tip=kind)
        drawing.text(x + 24, kind)
        x += 110
    drawing.y += 24
    return drawing.svg()


def tree() -> str:
    """The modules of a model, the groups they make, and the rows of every parameter that each rank holds."""
    model = sharded("contiguous")
    model(torch.randn(8, 32))  # by which modules learn their names
    model.reshard()
    groups = {id(param): (state, group, index) for state, group, index, param in _parameters(model)}
    report = {one.module: one for one in model.shard_report().groups}
    drawing = Drawing("A model as a tree of sharded modules and the rows that each rank holds")
    left = 330.0
    scale = (drawing.width - left - 16) / 128  # rows of the tallest parameter
    drawing.title(f"{type(model).__name__} on {RANKS} ranks: who holds which rows")
    x = left
    for rank in range(RANKS):
        drawing.box(x, 18, fill=COLORS[rank], tip=f"rank {rank}")
        drawing.text(x + 24, f"rank {rank}")
        x += 90
    drawing.y += 26
    for name, module in model.named_modules():
        depth = name.count(".") + bool(name)
        state = state_of(module)
        note, kind = "", ""
        if state is not None:
            kind = "group"
            one = report[state.name or state.classes]
            note = f": a group of {one.gathered_bytes:,} bytes gathered, {one.shard_bytes:,} on each rank"
        drawing.text(8 + 18 * depth, (name.rpartition(".")[2] or type(model).__name__) + note, kind=kind)
        drawing.y += 20
        for own, param in module.named_parameters(recurse=False):
            drawing.text(26 + 18 * depth, f"{own} {list(param.shape)}")
            _, group, index = groups[id(param)]
            for rank in range(RANKS):
                box = group.layout.box(index, rank)
                if box.numel:
                    first, count = box.offsets[0], box.sizes[0]
                    rows = f"{first}:{first + count}"
                    drawing.box(left + first * scale, count * scale, fill=COLORS[rank], inside=rows)
            drawing.y += 20
    return drawing.svg()


def _parameters(model: nn.Module) -> Iterator[tuple[object, object, int, nn.Parameter]]:
    by_name = dict(model.named_parameters())
    for module in model.modules():
        state = state_of(module)
        for group in () if state is None else state.groups:
            for index, param in enumerate(group.params):
                yield state, group, index, by_name[param.name]


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layouts.svg").write_text(layouts(), encoding="utf-8")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    try:
        (folder / "step.svg").write_text(step(), encoding="utf-8")
        (folder / "tree.svg").write_text(tree(), encoding="utf-8")
        inspect_graph(sharded("contiguous"), torch.randn(8, 32)).timeline(folder / "graph.svg")
    finally:
        dist.destroy_process_group()
    for name, text in stream_pictures.draw().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
