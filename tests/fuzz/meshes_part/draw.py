"""Draws a mesh of one to four dimensions, what trains on it, and maybe a mesh on which it goes on."""

from __future__ import annotations

import itertools
import random
from typing import Any

from shardwise.dimensions import NAMES, Dimensions

Spec = dict[str, Any]
WORLDS = [1, 2, 2, 4, 4, 4, 8]
SINGLE = ["GPipe", "1F1B"]
HALVING = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]  # backward, which compiled blocks do not
SEVERAL = ["Interleaved1F1B", "LoopedBFS", *HALVING]
BATCH, DEPTH = 16, 4


def draw(rng: random.Random) -> Spec:
    world = rng.choice(WORLDS)
    case: Spec = {
        "part": "meshes",
        "world": world,
        "mesh": draw_mesh(rng, world),
        "seed": rng.randrange(1000),
    }
    case["layout"] = rng.choice(["interleaved", "contiguous"])
    case["optimizer"] = rng.choice(["adamw", "sgd"])
    case["experts"] = rng.choice([0, 4, 4, 8])
    case["seq"] = rng.choice([3, 7, 8])
    case["heads"] = rng.choice([4, 8])
    if case["layout"] == "contiguous" and rng.random() < 0.2:
        case["flat"] = True
    if rng.random() < 0.3:
        case["goes_on"] = draw_mesh(rng, world)
        if rng.random() < 0.3:
            case["then"] = "contiguous" if case["layout"] == "interleaved" else "interleaved"
    both = [Dimensions(mesh).sizes for mesh in (case["mesh"], case.get("goes_on", "dp1"))]
    if stages := max(sizes.get("pp", 0) for sizes in both):
        case["schedule"] = rng.choice(SINGLE if stages > 2 else SINGLE + SEVERAL)
        least = 4 if case["schedule"] in SEVERAL else stages
        most = min(
            BATCH // (sizes.get("replicate", 1) * sizes["dp"] * sizes.get("ep", 1))
            for sizes in both
            if "pp" in sizes
        )
        case["micro_batches"] = rng.choice([count for count in (2, 4, 8) if least <= count <= most])
        if rng.random() < 0.4:
            case["reshards"] = True  # after each micro-batch's forward
    if not case["experts"] and rng.random() < 0.2 and case.get("schedule") not in HALVING:
        case["compiled"] = True
    return case


def draw_mesh(rng: random.Random, world: int) -> str:
    """Dims whose sizes have this product; sizes of 1 are not named."""
    factors = {1: [[]], 2: [[2]], 4: [[4], [2, 2], [2, 2]], 8: [[2, 2, 2], [2, 2, 2], [4, 2], [2, 4]]}
    sizes = rng.choice(factors[world])
    names = rng.sample(NAMES, len(sizes))
    return ",".join(f"{name}{size}" for name, size in zip(names, sizes, strict=True)) or "dp1"


def features(case: Spec) -> list[str]:
    named = [name for name, size in Dimensions(case["mesh"]).sizes.items() if size > 1]
    pairs = [" x ".join(pair) for pair in itertools.combinations(named, 2)]
    known = ("layout", "optimizer", "schedule")
    return [*named, *pairs, *(case[name] for name in known if name in case)] + [
        name for name in ("goes_on", "flat", "compiled", "reshards") if name in case
    ]
