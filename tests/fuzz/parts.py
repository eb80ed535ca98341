"""The parts of the library that are drawn: for each how to draw a case, run it and describe it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fuzz.verdict import Verdict

Case = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """`run` is called on every rank, with what cases of a batch share.

    A case that takes longer than `limit` seconds on an idle machine is hung. One that breaks its process
    group is a batch by itself.
    """

    draw: Callable[[random.Random], Case]
    run: Callable[[Case, dict[Any, Any]], Verdict]
    features: Callable[[Case], list[str]]
    limit: float = 25.0
    batch: int = 40
    breaks_group: bool = False


def part_named(name: str) -> Part:
    """The part; modules are imported when they are needed."""
    package, settings = PARTS[name]
    draws = import_module(f"fuzz.{package}.draw")
    return Part(draws.draw, import_module(f"fuzz.{package}.check").run, draws.features, **settings)


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp_part", {}),
    "sharded_tensor": ("sharded_tensor_part", {"batch": 100}),
    "compiled": ("compiled_part", {"limit": 40.0, "batch": 10}),
    "streams": ("streams_part", {}),
    "meshes": ("meshes_part", {"limit": 60.0, "batch": 5}),
    "disagree": ("disagree_part", {"limit": 40.0, "batch": 1, "breaks_group": True}),
}
