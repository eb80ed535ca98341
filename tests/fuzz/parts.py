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
    """`run` is called on every rank, with what cases of a batch share; `seconds` is what a case may take.

    A case that breaks its process group is a batch by itself.
    """

    draw: Callable[[random.Random], Case]
    run: Callable[[Case, dict[Any, Any]], Verdict]
    features: Callable[[Case], list[str]]
    seconds: float = 3.0
    batch: int = 40
    breaks_group: bool = False


def part_named(name: str) -> Part:
    """The part; modules are imported when they are needed."""
    package, settings = PARTS[name]
    draws = import_module(f"fuzz.{package}.draw")
    return Part(draws.draw, import_module(f"fuzz.{package}.check").run, draws.features, **settings)


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp_part", {}),
    "sharded_tensor": ("sharded_tensor_part", {"seconds": 1.0, "batch": 100}),
    "compiled": ("compiled_part", {"seconds": 60.0, "batch": 20}),
    "disagree": ("disagree_part", {"seconds": 20.0, "batch": 1, "breaks_group": True}),
}
