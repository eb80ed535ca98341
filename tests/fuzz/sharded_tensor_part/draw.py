"""Draws cases of `ShardedTensor`: operands, how each is cut, an operation, and what follows."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

from fuzz.sharded_tensor_part.operations import FAMILIES

Spec = dict[str, Any]
SIZES = [0, 1, 1, 2, 3, 4, 5, 7]
WEIGHTS = {"unary": 1, "foreach": 1, "shape": 2, "along": 3, "linear": 4, "table": 4, "reduction": 4}


def draw(rng: random.Random) -> Spec:
    families = list(FAMILIES)
    family = rng.choices(families, [WEIGHTS.get(one, 2) for one in families])[0]
    case: Spec = {"part": "sharded_tensor", "world": rng.choice([1, 2, 2, 3, 4]), "kind": family}
    case["operation"] = rng.choice(list(FAMILIES[family]))
    case["dtype"] = rng.choice(["float64", "float64", "float32"])
    case["seed"] = rng.randrange(1000)
    case["arguments"] = arguments(rng, family, case["operation"])
    shapes = operand_shapes(rng, family)
    world = case["world"]
    case["operands"] = [operand(rng, shape, world) for shape in shapes]
    first = case["operands"][0]
    for i, other in enumerate(case["operands"][1:]):
        if other["shape"] == first["shape"] and "cut" in first and rng.random() < 0.5:
            case["operands"][i + 1] = {"shape": first["shape"], "cut": first["cut"]}
    if not any("cut" in one for one in case["operands"]):
        first["cut"] = cut(rng, first["shape"], world)
    if family == "integers":
        case["dtype"] = "int64"
    if family in ("unary", "reduction", "along", "shape", "binary") and rng.random() < 0.08:
        case["dtype"] = rng.choice(["int64", "bool", "bfloat16"])
    if rng.random() < 0.3:
        case["reshard"] = cut(rng, first["shape"], world)
    if rng.random() < 0.2:
        case["reshard_result"] = rng.randrange(100)
    if rng.random() < 0.15:
        case["delay"] = {"rank": rng.randrange(world), "ms": rng.choice([1, 5])}
    return case


def operand_shapes(rng: random.Random, family: str) -> list[list[int]]:
    def size() -> int:
        return rng.choice(SIZES)

    shape = [size() for _ in range(rng.choice([1, 1, 2, 2, 2, 3, 3, 4]))]
    if family in ("binary", "integers", "in place"):
        return [shape, narrowed(rng, shape)]
    if family in ("loss", "foreach"):
        return [shape, list(shape)]
    if family == "three":
        return [shape, list(shape), list(shape)]
    if family == "norm":
        last = shape[-rng.randint(1, len(shape)) :]
        return [shape, last, list(last)]
    if family == "linear":
        n, k, m = size(), size(), size()
        return [[n, k], [m, k], [m]]
    if family == "table":
        n, bags, each = max(1, size()), size(), size()
        return [[n, size()], [bags, each], [bags, each]]
    return [shape]


def narrowed(rng: random.Random, shape: list[int]) -> list[int]:
    """A shape that broadcasts to `shape`."""
    if rng.random() < 0.6:
        return list(shape)
    short = shape[rng.randint(0, len(shape)) :]
    return [1 if rng.random() < 0.3 else n for n in short]


def arguments(rng: random.Random, family: str, operation: str) -> Spec:
    chosen: Spec = {}
    if family == "reduction":
        if rng.random() < 0.7:
            chosen["dim"] = rng.choice([0, 1, -1, -2])
            if rng.random() < 0.4 and operation not in ("count_nonzero",):
                chosen["keepdim"] = True
        elif operation == "logsumexp":
            chosen["dim"] = 0
    if family == "along":
        chosen["dim"] = rng.choice([0, 1, -1, -2])
    if family == "loss":
        chosen["reduction"] = rng.choice(["mean", "sum", "none"])
    if operation == "embedding" and rng.random() < 0.3:
        chosen["padding_idx"] = 0
    if operation == "embedding_bag":
        chosen["mode"] = rng.choice(["sum", "mean", "max"])
        for name in ("weighted", "offsets"):
            if rng.random() < 0.4:
                chosen[name] = True
        if rng.random() < 0.2:
            chosen["padding_idx"] = 0
    if operation in ("div",) and rng.random() < 0.4:
        chosen["rounding_mode"] = rng.choice(["trunc", "floor"])
    return chosen


def operand(rng: random.Random, shape: list[int], world: int) -> Spec:
    one: Spec = {"shape": shape}
    if rng.random() < 0.6:
        one["cut"] = cut(rng, shape, world)
    return one


def cut(rng: random.Random, shape: Sequence[int], world: int) -> Spec:
    """Any of the specs; a rank may hold several shards, empty ones, or none."""

    def ranks(count: int) -> list[int]:
        return [rng.randrange(world) for _ in range(count)]

    kind = rng.choice(["rows", "rows", "chunk", "grid", "ragged", "boxes"]) if shape else "boxes"
    dim = rng.randrange(len(shape)) if shape else 0
    if kind == "rows":
        return {"chunk": dim, "ranks": list(range(world))}
    if kind == "chunk":
        return {"chunk": dim, "ranks": ranks(rng.randint(1, 5))}
    if kind == "grid":
        grid = [rng.randint(1, 3) if n else 1 for n in shape]
        return {"grid": grid, "ranks": ranks(math.prod(grid))}
    if kind == "ragged":
        cuts = sorted(rng.randint(0, shape[dim]) for _ in range(rng.randint(0, 4)))
        sizes = [end - start for start, end in itertools.pairwise([0, *cuts, shape[dim]])]
        return {"ragged": dim, "sizes": sizes, "ranks": ranks(len(sizes))}
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(rng.randint(0, 4) if shape else 0):
        offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
        along = rng.randrange(len(shape))
        at = rng.randint(0, sizes[along])
        high, rest = list(offsets), list(sizes)
        high[along] += at
        rest[along] -= at
        boxes += [(offsets, [at if i == along else n for i, n in enumerate(sizes)]), (high, rest)]
    return {"boxes": [[offsets, sizes, rng.randrange(world)] for offsets, sizes in boxes]}


def features(case: Spec) -> list[str]:
    kinds = [next(iter(one["cut"])) for one in case["operands"] if "cut" in one]
    found = [f"{case['world']} ranks", case["kind"], f"{case['operation']}()", case.get("dtype", "float64")]
    found += [f"cut {kind}" for kind in kinds]
    for one in case["operands"]:
        if 0 in one["shape"]:
            found.append("no elements")
        if 1 in one["shape"]:
            found.append("size 1")
    return found + [name for name in ("reshard", "reshard_result", "delay") if name in case]
