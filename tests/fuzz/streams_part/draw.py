"""Draws how a small model trains on the simulated device."""

from __future__ import annotations

import random
from typing import Any

Case = dict[str, Any]

SCHEDULES = [
    "ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV",
]  # fmt: skip

# What may be drawn: by name, its odds and its values.
CHOICES: list[tuple[str, float, list[Any]]] = [
    ("mp", 0.4, [
        {"param": "bfloat16"}, {"param": "bfloat16", "reduce": "float32"}, {"reduce": "bfloat16"},
        {"param": "bfloat16", "reduce": "bfloat16"}, {"param": "float16", "reduce": "float16"},
    ]),
    ("reshard", 0.5, [True, False, 2]),
    ("blocks", 0.5, [1, 2, 4]),
    ("ranks", 0.4, [1, 2, 3, 8]),
    ("micro", 0.5, [2, 3]),
    ("sync", 0.5, ["no_sync", "all_reduce"]),
    ("is_last", 0.2, [True]),
    ("zero", 0.4, ["zeros", "kept"]),
    ("prefetch", 0.4, ["forward", "backward", "both"]),
    ("before", 0.25, ["unshard", "unshard_async", "eval", "inference", "state_dict"]),
    ("before", 0.15, ["save", "save_async", "host"]),
    ("between", 0.3, ["unshard", "unshard_async", "eval"]),
    ("offload", 0.2, ["pinned", "pageable"]),
    ("gradient_hook", 0.15, [True]),
    ("reduce_hook", 0.2, ["plain", "stream"]),
    ("post_optim_event", 0.2, [True]),
    ("comm", 0.3, ["own", "gather", "scatter"]),
    ("two_roots", 0.2, ["apart", "shared"]),
    ("checkpointing", 0.2, [True]),
    ("forwards", 0.15, [2]),
    ("async_unshard", 0.2, [True]),
    ("clip", 0.3, ["torch", "ours"]),
    ("frozen", 0.3, ["part", "first", "in turns"]),
    ("manual", 0.15, ["sync", "async"]),
    ("tensor_parallel", 0.1, [True]),
    ("gradients_read", 0.3, [True]),
    ("synchronizes", 0.1, [True]),
    ("stream", 0.2, ["all", "optimizer"]),
    ("after", 0.15, ["unshard", "unshard_async", "eval"]),
    ("skips", 0.15, [True, "in turns"]),
    ("again", 0.1, [True]),
    ("raises", 0.15, ["forward", "backward"]),
    ("extension", 0.1, [True]),
    ("optimizer", 0.7, ["sgd", "each", "fused", "in_backward", "muon", "8bit", "sharded", "flat"]),
]  # fmt: skip
SETTINGS: list[tuple[str, float, list[Any]]] = [
    ("set_reshard_after_backward", 0.15, [False]),
    ("set_unshard_in_backward", 0.05, [False]),
    ("set_reduce_scatter_max_input_buffers", 0.2, [2, 3]),
    ("set_keep_unsharded_storage", 0.15, [True]),
    ("set_separate_reduce_scatter_group", 0.1, [True]),
    ("set_reduce_scatter_unused_params", 0.1, [True]),
]


def draw(rng: random.Random) -> Case:
    """A case: plain data, in which what is absent is ordinary."""
    case: Case = {"part": "streams", "world": 1, "seed": rng.randrange(1000)}
    if rng.random() < 0.6:
        case["layout"] = "contiguous"
        if rng.random() < 0.5:
            case["strategy"] = rng.choice(["ddp", "zero1", "zero2", "fsdp"])
        if rng.random() < 0.3:
            case["slices"] = rng.choice([64, 256])
    if rng.random() < 0.3:
        case["mesh"] = "two"
        if "strategy" in case:
            case["strategy"] = rng.choice(["hsdp", "hierarchical_fsdp"])
    for name, odds, values in CHOICES:
        if rng.random() < odds:
            case[name] = rng.choice(values)
    settings = {name: rng.choice(values) for name, odds, values in SETTINGS if rng.random() < odds}
    if settings:
        case["set"] = settings
    if rng.random() < 0.4:
        case["order"] = rng.randrange(1000)
    if rng.random() < 0.2:
        case |= {"real": True, "ranks": rng.choice([2, 3, 4])}
        if rng.random() < 0.3:
            case["pipeline"] = rng.choice(SCHEDULES)
        elif rng.random() < 0.4:
            case["tables"] = True
    if rng.random() < 0.2:
        what = rng.choice(["unshard", "unshard_async", "wait", "reshard"])
        case["amid"] = [rng.choice(["forward", "backward"]), rng.randrange(4), rng.randrange(4), what]
    if rng.random() < 0.4:
        case["apart"] = 64
    return fixed(case)


def fixed(case: Case) -> Case:
    """Without what the library forbids."""
    if "pipeline" in case:
        kept = ("part", "seed", "layout", "mp", "reshard", "real", "pipeline", "order", "two_roots")
        case = {name: case[name] for name in kept if name in case}
        world = 4 if case.get("reshard") else 2  # so that one is with and one without shards
        return case | {"world": world, "ranks": world, "reshard": bool(case.get("reshard"))}
    if case.get("real"):
        case.pop("extension", None)  # whose hook does not pad
        if case.get("before") in ("save", "save_async", "host"):
            case.pop("before")
    rows = case.get("layout") == "contiguous"
    if case.get("before") in ("save", "save_async", "host"):  # ranks that do not exist tell nothing
        case["ranks"] = 1
        for name in ("mesh", "tensor_parallel"):
            case.pop(name, None)
        if case.get("strategy") in ("hsdp", "hierarchical_fsdp"):
            case.pop("strategy")
    world = case.get("ranks", 4)
    if (case.get("mesh") == "two" or case.get("tensor_parallel")) and world % 2:
        world = case["ranks"] = 4
    if case.get("tensor_parallel"):
        for name in ("mesh", "two_roots", "extension", "frozen"):
            case.pop(name, None)
        if case.get("strategy") in ("hsdp", "hierarchical_fsdp"):
            case.pop("strategy")
        case.pop("optimizer", None)
        case.pop("clip", None)
    _, at, other, what = case.get("amid", ("", 0, 1, ""))
    runs = (at - other) % case.get("blocks", 3) == 0 or "set_unshard_in_backward" in case.get("set", {})
    if (what == "reshard" and runs) or case.get("optimizer") == "in_backward":  # which steps on other streams
        case.pop("amid", None)
    if case.get("blocks") == 1 or case.get("two_roots"):
        case.pop("skips", None)
    if case.get("blocks") == 1:
        case.pop("frozen", None)
    if case.get("optimizer") == "in_backward":
        case.pop("manual", None)
    if case.get("extension"):
        case.pop("mp", None)  # whose inputs would not be cast as the hooks' results are
    if not rows:
        for name in ("strategy", "slices"):
            case.pop(name, None)
    else:
        for name in ("extension", "apart"):
            case.pop(name, None)
    if case.get("optimizer") == "flat" and (not rows or case.get("offload") or case.get("two_roots")):
        case.pop("optimizer")
    if case.get("optimizer") == "in_backward":
        for name in ("zero", "clip", "gradients_read", "gradient_hook", "forwards"):
            case.pop(name, None)
        if case.get("sync"):
            case.pop("sync")
    if case.get("mesh") != "two" and case.get("sync") == "all_reduce":
        case["sync"] = "no_sync"
    if case.get("mesh") == "two" and case.get("reduce_hook") == "stream":
        case["reduce_hook"] = "plain"
    if case.get("manual"):
        for name in ("two_roots", "is_last", "sync"):
            case.pop(name, None)
        case.setdefault("set", {})["set_manual_backward_finalization"] = True
        case["micro"] = 1
    if (
        case.get("strategy") in ("ddp", "zero1", "zero2")
        or case.get("tensor_parallel")
        or case.get("extension")
    ) and case.get("reshard") == 2:
        case["reshard"] = True
    if "set_unshard_in_backward" in case.get(
        "set", {}
    ):  # parameters stay, or there is nothing to compute with
        case["reshard"], case["set"]["set_reshard_after_backward"] = False, False
        case.pop("between", None)
    shards = world // (2 if case.get("mesh") == "two" else 1)
    if case.get("reshard") == 2 and shards % 2:
        case["reshard"] = True
    if case.get("sync") and case.get("micro", 1) == 1:
        case.pop("sync")
    if case.get("real"):
        case["world"] = world
    return case


def features(case: Case) -> list[str]:
    """What the summary counts."""
    found = [case.get("layout", "interleaved")]
    for name, value in case.items():
        if name in ("part", "world", "seed", "drawn", "layout"):
            continue
        if isinstance(value, dict):
            found += [f"{name} {key}" for key in value]
        else:
            found.append(f"{name} {value}")
    return found
