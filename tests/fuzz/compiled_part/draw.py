"""Draws compiled training: a model of the kinds a compiler can trace, and how it is compiled."""

from __future__ import annotations

import random
from typing import Any

from fuzz.fsdp_part.draw import (
    OPTIMIZERS,
    WIDTHS,
    draw_kind,
    draw_options,
    draw_some,
    features_of_model,
    fixed,
    walk,
)

Spec = dict[str, Any]
HOWS = ["torch", "torch", "inplace", "blocks", "shardwise", "regional", "step", "inside"]
EXACT = ["eager", "aot_eager", "aot_eager", "aot_eager_decomp_partition"]


def draw(rng: random.Random) -> Spec:
    """A case whose compiled training is compared with the uncompiled one."""
    case: Spec = {"part": "compiled", "world": rng.choice([1, 2, 2, 2, 3]), "seed": rng.randrange(1000)}
    case["width"] = rng.choice(WIDTHS)
    case["rows"] = rng.choice([2, 3])
    case["blocks"] = [draw_block(rng, depth=0) for _ in range(rng.randint(1, 3))]
    case["root"] = draw_options(rng)
    if rng.random() < 0.5:
        case["layout"] = "contiguous"
    if case["world"] == 2 and rng.random() < 0.15:
        case["mesh"] = "two"
    if rng.random() < 0.25:
        case["mp"] = rng.choice([{"param": "bfloat16"}, {"param": "bfloat16", "reduce": "float32"}])
    case["optimizer"] = rng.choice(OPTIMIZERS)
    case["how"] = rng.choice(HOWS)
    case["backend"] = "inductor" if rng.random() < 0.02 else rng.choice(EXACT)
    if case["how"] == "step" and rng.random() < 0.3:
        case["clip"] = 0.5
    if rng.random() < 0.3:
        case["fullgraph"] = True
    if case["how"] in ("shardwise", "step"):
        case["prefetch"] = rng.choice([None, 1, 2])
    if case["how"] != "step" and rng.random() < 0.15:  # which gives its batch no gradients
        case["input_gradient"] = True
    for block in walk(case["blocks"]):
        if case.get("fullgraph") or case["how"] == "step":
            block.pop("break", None)
        if block["kind"] == "again" and "around" in block:
            block.pop("inside", None)  # torch fails to trace backward of a nested checkpoint's own input
        if case["how"] == "step":  # whose optimizer sees zeros where a parameter was not used
            block.pop("count", None)
            if block["kind"] == "experts":
                block["count"] = 1
    case["steps"] = [draw_step(rng, case) for _ in range(rng.randint(2, 3))]
    draw_some(rng, case, [("notes", 0.15, ["list", "dict"])])
    return fixed(case)


def draw_block(rng: random.Random, *, depth: int) -> Spec:
    block = draw_kind(rng, depth=depth)
    kind = block["kind"]
    if kind == "experts":
        block |= {"count": rng.randint(1, 3), "use": rng.choice([0, 1])}
    if kind in ("tied", "again"):
        block["to"] = rng.randrange(4)
    if kind == "nest":
        block["inner"] = [draw_block(rng, depth=1) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.6:
        block["shard"] = draw_options(rng)
    choices: list[tuple[str, float, list[Any]]] = [
        ("out", 0.25, ["tuple", "dict", "dataclass"]),
        ("frozen", 0.12, ["all", "bias"]),
        ("calls", 0.12, [2]),
        ("around", 0.12, ["plain"]),
        ("inside", 0.1, [True]),
        ("break", 0.08, [True]),
    ]
    draw_some(rng, block, choices)
    return block


def draw_step(rng: random.Random, case: Spec) -> Spec:
    step: Spec = {}
    if rng.random() < 0.2 and case["how"] not in ("step", "inside"):
        step |= {"micro": 2, "sync": "last"}
    if rng.random() < 0.2:
        step["before"] = [rng.choice(["eval", "no_grad", "state_dict", "unshard:0", "unshard:1"])]
    if rng.random() < 0.2:  # graphs are compiled anew
        step["before"] = [
            *step.get("before", []),
            f"{rng.choice(['freeze', 'freeze', 'train'])}:{rng.randrange(8)}",
        ]
    if rng.random() < 0.15 and case["how"] in ("torch", "shardwise"):
        step["eagerly"] = True
    if rng.random() < 0.1 and case["how"] not in ("step", "inside"):
        step["backward"] = "sum"
    return step


def features(case: Spec) -> list[str]:
    found = [*features_of_model(case), case["how"], case["backend"]]
    found += ["block out" for block in walk(case.get("blocks", [])) if "out" in block]
    found += [name for name in ("mp", "mesh", "clip", "input_gradient", "fullgraph", "notes") if name in case]
    return found + [
        name for step in case.get("steps", []) for name in ("micro", "before", "eagerly") if name in step
    ]
