"""ARCHITECTURE.md's walks: what a step names is called, in that order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from architecture import ROOT
from fsdp.models import sharded_net, step
from ranks import on_ranks
from shardwise.sharded_tensor import ChunkShardingSpec, shard_tensor
from shardwise.tensor_parallel import tensor_parallel_transformation

NAMED = re.compile(r"`([A-Za-z_][\w.]*)`(?: \(`([\w/]+\.py)`)?")


def walk(title: str) -> list[tuple[str, str]]:
    """The function that each step begins with, and the file, which may be that of the step before."""
    lines = (ROOT.parents[1] / "ARCHITECTURE.md").read_text().split(f"{title}\n\n")[1].split("\n\n")[0]
    found: list[tuple[str, str]] = []
    for line in re.findall(r"^\d+\. (.*)", lines, re.MULTILINE):
        name, file = NAMED.search(line).groups()  # type: ignore[union-attr]
        found.append((name, file or found[-1][1]))
    return found


def codes(name: str, file: str) -> set[CodeType]:
    """What runs where `name` is called: a function, those of all subclasses, or the making of a class."""
    owner, _, attribute = name.rpartition(".")
    found: set[CodeType] = set()
    for path in ROOT.rglob("*.py"):
        inside = path.relative_to(ROOT).as_posix()
        if not f"/{inside}".endswith(f"/{file}"):
            continue
        module: Any = import_module("shardwise." + inside.removesuffix(".py").replace("/", "."))
        value = getattr(module, owner or name, None)
        holders = [*lineage(value)] if isinstance(value, type) else [module] if value else []
        made = attribute if owner or not isinstance(value, type) else "__init__"
        functions = (vars(holder).get(made) for holder in holders)
        found |= {function.__code__ for function in functions if hasattr(function, "__code__")}
    return found


def lineage(kind: type) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from lineage(below)


def check_walk(title: str, act: Callable[[], object]) -> None:
    """Raise unless `act` calls every function of the walk, first ones first."""
    steps = walk(title)
    place_of = {code: place for place, named in enumerate(steps) for code in codes(*named)}
    called: dict[int, None] = {}

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in place_of:
            called.setdefault(place_of[frame.f_code])

    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    assert len(steps) >= 8
    assert [steps[place] for place in called] == steps


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@on_ranks(2)
def test_a_batch_goes_through_the_steps_of_its_walk(layout: str) -> None:
    model = sharded_net(blocks=2, layout=layout)
    step(model)
    check_walk("A batch through `fully_shard`:", lambda: step(model))


@on_ranks(2)
def test_a_tensor_goes_through_the_steps_of_its_walk() -> None:
    rows, columns = (ChunkShardingSpec(dim, ["rank:0", "rank:1"]) for dim in (0, 1))
    sharded = shard_tensor(torch.rand(4, 4), rows)
    check_walk("A tensor through `reshard`:", lambda: sharded.reshard(columns))


def test_a_program_goes_through_the_steps_of_its_walk() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    program = torch.export.export(model, (torch.ones(2, 4),))
    styles = {"0.weight": "column", "2.weight": "row"}
    check_walk(
        "A program through the transformation:",
        lambda: tensor_parallel_transformation(program, 0, 2, "cpu", styles, training=True),
    )
