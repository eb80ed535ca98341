"""Draws cases in which one rank differs: a small model, and what that rank does otherwise."""

from __future__ import annotations

import copy
import random
from typing import Any

Spec = dict[str, Any]
STEPS = 3
WHATS = [
    *("reduce_dtype", "param_dtype", "divide factor", "reshard_after_forward", "reshard_after_backward"),
    *("strategy", "layout", "gradient sync", "frozen later", "frozen", "force sum", "unused"),
    *("order of fully_shard", "order of modules", "shape", "group", "skips a module", "calls twice"),
    *("raises in forward", "raises in backward", "late", "late"),
]


def draw(rng: random.Random) -> Spec:
    """`differs` names a rank and which keys of the case that rank has otherwise."""
    world = rng.choice([2, 2, 3, 4])
    count = rng.randint(2, 3)
    kind = rng.choice(["linear", "linear", "mlp"])
    case: Spec = {"part": "disagree", "world": world, "width": rng.choice([3, 7]), "root": {}, "rows": 2}
    case["blocks"] = [{"kind": kind, "shard": {}} for _ in range(count)]
    if rng.random() < 0.5:
        case["layout"] = "contiguous"
    if world == 4 and rng.random() < 0.3:
        case["mesh"] = "two"
    if rng.random() < 0.3:
        for block in case["blocks"]:
            block["shard"] = {"reshard": rng.choice([True, False])}
    case["steps"] = [{} for _ in range(STEPS)]
    what = rng.choice(WHATS)
    if what == "strategy":
        case["layout"] = "contiguous"
        case.pop("mesh", None)
    other = copy.deepcopy(case)
    change(rng, other, what, rng.randrange(count), rng.randint(0, 2))
    patch = {key: value for key, value in other.items() if case.get(key) != value}
    return case | {"differs": {"rank": rng.randrange(world), "what": what, "patch": patch}}


def change(rng: random.Random, case: Spec, what: str, block: int, step: int) -> None:
    """Makes `case` what the one rank has; `block` and `step` are where it differs."""
    later = 1  # so that whole steps come before and after
    settings = {
        "divide factor": "factor:3",
        "reshard_after_forward": f"reshard_after_forward:{rng.randint(0, 1)}",
        "reshard_after_backward": "reshard_after_backward:0",
        "gradient sync": "gradient_sync:0",
        "frozen later": f"freeze:{2 * block}",
        "force sum": "force_sum:1",
        "unused": "unused:1",
    }
    if what in settings:
        case["steps"][later]["before"] = [settings[what]]
    elif what == "reduce_dtype":
        case["mp"] = {"reduce": "bfloat16"}
    elif what == "param_dtype":
        case["mp"] = {"param": "bfloat16"}
    elif what == "strategy":
        case["strategy"] = rng.choice(["zero1", "zero2", "ddp"])
    elif what == "layout":
        case["layout"] = "interleaved" if case.get("layout") == "contiguous" else "contiguous"
    elif what == "frozen":
        case["blocks"][block]["frozen"] = "all"
    elif what == "order of fully_shard":
        case["last_first"] = True
    elif what == "order of modules":
        case["backwards"] = True
    elif what == "shape":
        case["blocks"][block] = {"kind": "mlp", "hidden": 5, "shard": {}}
    elif what == "group":
        del case["blocks"][block]["shard"]
    elif what == "skips a module":
        case["blocks"][block]["skip"] = True
    elif what == "calls twice":
        case["blocks"][block]["calls"] = 2
    elif what.startswith("raises"):
        case["steps"][step]["fails"] = {"block": block, "where": what.removeprefix("raises in ")}
    elif what == "late":
        case["steps"][step]["delay"] = {"block": block, "ms": rng.choice([200, 1000, 2500])}
        case["late"] = True


def features(case: Spec) -> list[str]:
    return [case["differs"]["what"], f"{case['world']} ranks", case.get("layout", "interleaved")]
