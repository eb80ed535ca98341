"""Draws cases of `fully_shard`."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

Spec = dict[str, Any]
WIDTHS = [1, 3, 7, 33]
KINDS = ["linear", "mlp", "norm", "conv", "embedding", "scale", "experts", "nest", "tied", "again"]
FORMS = ["tuple", "dict", "dataclass", "object", "attribute", "view"]
OPTIMIZERS = ["sgd", "momentum", "adam", "adamw_each", "adamw_fused", "adagrad", "rmsprop"]
ACTIONS = [
    "eval",
    "no_grad",
    "forward",
    "unshard:0",
    "unshard:1",
    "unshard:2",
    "unshard_async:1",
    "unshard_async:0",
    "reshard:1",
    "state_dict",
    "optimizer_state",
    "reshard_after_forward:0",
    "reshard_after_forward:1",
    "clear",
]
BETWEEN = [  # forward and backward
    "eval",
    "no_grad",
    "forward",
    "unshard:0",
    "unshard:1",
    "unshard_async:1",
    "reshard:0",
    "reshard:1",
    "reshard_after_backward:0",
    "reshard_after_backward:1",
]


def draw(rng: random.Random) -> Spec:
    """A case: plain data, in which what is absent is ordinary."""
    case: Spec = {"part": "fsdp", "world": rng.choice([1, 2, 2, 2, 3, 4, 4]), "seed": rng.randrange(1000)}
    case["width"] = rng.choice(WIDTHS)
    case["rows"] = rng.choice([1, 2, 3])
    case["blocks"] = [draw_block(rng, depth=0) for _ in range(rng.randint(1, 4))]
    names = ("tied", "again")
    if rng.random() < 0.9 or any(block["kind"] in names for block in case["blocks"]):
        case["root"] = draw_options(rng)
    else:
        for block in case["blocks"]:
            block.setdefault("shard", draw_options(rng))
    draw_settings(rng, case)
    case["steps"] = [draw_step(rng, case) for _ in range(rng.randint(1, 4))]
    for step in case["steps"]:  # last: the rest of each case is what it was before these were thought of
        draw_interruptions(rng, step)
    draw_some(rng, case, [("notes", 0.2, ["list", "dict", "dataclass", "object"])])
    return fixed(case)


def draw_some(rng: random.Random, spec: Spec, choices: Iterable[tuple[str, float, list[Any]]]) -> None:
    """Each of the named things, where it is drawn at its odds, is one of its values."""
    for name, odds, values in choices:
        if rng.random() < odds:
            spec[name] = rng.choice(values)


def draw_kind(rng: random.Random, *, depth: int) -> Spec:
    block: Spec = {"kind": rng.choice(KINDS if depth == 0 else KINDS[:7])}
    if block["kind"] in ("mlp", "conv"):
        block["hidden"] = rng.choice(WIDTHS)
    if block["kind"] == "norm":
        block["which"] = rng.choice(["layer", "rms", "group"])
    return block


def draw_block(rng: random.Random, *, depth: int) -> Spec:
    block = draw_kind(rng, depth=depth)
    kind = block["kind"]
    if kind == "linear" and rng.random() < 0.3:
        block["bias"] = False
    if kind == "scale":
        block["shape"] = rng.choice([[1], [2], [3, 1], [1, 2], [7]])
    if kind == "experts":
        block["count"] = rng.randint(1, 4)
        block["use"] = rng.choice([0, 1, 2, "rank"])
        if block["use"] != "rank" and rng.random() < 0.5:
            block["each"] = True
    if kind in ("tied", "again"):
        block["to"] = rng.randrange(4)
    if kind == "nest":
        block["inner"] = [draw_block(rng, depth=1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.6:
        block["shard"] = draw_options(rng)
    if rng.random() < 0.3:
        block["out"] = rng.choice(FORMS)
    choices: list[tuple[str, float, list[Any]]] = [
        ("frozen", 0.12, ["all", "bias"]),
        ("dtype", 0.06, ["float64", "bfloat16"]),
        ("calls", 0.12, [2, 3]),
        ("change", 0.12, [True]),
        ("around", 0.15, ["reentrant", "plain"]),
        ("inside", 0.1, [True]),
        ("ignored", 0.04, [True]),
    ]
    draw_some(rng, block, choices)
    return block


def draw_options(rng: random.Random) -> Spec:
    options: Spec = {}
    if rng.random() < 0.5:
        options["reshard"] = rng.choice([True, True, False, 1, 2])
    if rng.random() < 0.1:
        options["mp"] = draw_policy(rng)
    return options


def draw_policy(rng: random.Random) -> Spec:
    policy: Spec = {}
    choices: list[tuple[str, float, list[Any]]] = [
        ("param", 0.7, ["bfloat16", "bfloat16", "float16"]),
        ("reduce", 0.6, ["float32", "bfloat16", "float16"]),
        ("output", 0.3, ["float32", "bfloat16"]),
        ("cast", 0.2, [False]),
    ]
    draw_some(rng, policy, choices)
    return policy


def draw_settings(rng: random.Random, case: Spec) -> None:
    if rng.random() < 0.5:
        case["layout"] = "contiguous"
    if case["world"] == 4 and rng.random() < 0.4:
        case["mesh"] = "two"
    if case.get("layout") and rng.random() < 0.5:
        two = case.get("mesh") == "two"
        case["strategy"] = rng.choice(
            ["hsdp", "hierarchical_fsdp"] if two else ["ddp", "zero1", "zero2", "fsdp"]
        )
    if rng.random() < 0.25:
        case["mp"] = draw_policy(rng)
    if rng.random() < 0.12:
        case["offload"] = True
    if rng.random() < 0.1:
        case["factor"] = rng.choice([1, 3, 8])
    if rng.random() < 0.05:
        case["force_sum"] = True
    if rng.random() < 0.15:
        case["unused"] = True
    if rng.random() < 0.1:
        case["keep_after_backward"] = True
    if len(case["blocks"]) > 1 and rng.random() < 0.15:
        case["together"] = sorted(rng.sample(range(len(case["blocks"])), 2))
    for way in ("forward", "backward"):
        if rng.random() < 0.15:
            case[f"prefetch_{way}"] = [
                [rng.randrange(5), [rng.randrange(5) for _ in range(rng.randint(1, 2))]] for _ in range(2)
            ]
    case["optimizer"] = rng.choice(OPTIMIZERS)
    if rng.random() < 0.15:
        case["clip"] = rng.choice([0.1, 1.0])
    if rng.random() < 0.3:
        case["hooks"] = [
            {"what": rng.choice(["forward", "forward_pre", "post_accumulate"]), "block": rng.randrange(4)}
            for _ in range(rng.randint(1, 2))
        ]
    if rng.random() < 0.15:
        case["out"] = "dict"
    if rng.random() < 0.2:
        case["input_gradient"] = True


def draw_step(rng: random.Random, case: Spec) -> Spec:
    step: Spec = {}
    if rng.random() < 0.25:
        step["micro"] = rng.randint(2, 3)
        step["sync"] = rng.choice(["last", "last", "all", "all_reduce"])
        for name in ("hold", "is_last"):
            if rng.random() < 0.3:
                step[name] = True
    if rng.random() < 0.25:
        step["backward"] = rng.choice(["tap", "two", "sum"])
        step["tap"] = rng.randrange(4)
    if rng.random() < 0.4:
        step["before"] = [rng.choice(ACTIONS) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.12:
        where = rng.choice(["forward", "backward"])
        step["raises"] = {"where": where, "block": rng.randrange(len(case["blocks"]))}
    if rng.random() < 0.15:
        step["delay"] = {
            "rank": rng.randrange(case["world"]),
            "block": rng.randrange(len(case["blocks"])),
            "ms": rng.choice([1, 5, 20]),
        }
    if rng.random() < 0.15:
        step["zeros"] = True
    return step


def draw_interruptions(rng: random.Random, step: Spec) -> None:
    if rng.random() < 0.15:
        step["between"] = rng.choice(BETWEEN)
    if rng.random() < 0.15:
        what = rng.choice(["freeze", "freeze", "train", "reshard_after_backward"])
        which = rng.randrange(2 if what == "reshard_after_backward" else 8)
        step["before"] = [*step.get("before", []), f"{what}:{which}"]
    if "raises" in step and rng.random() < 0.5:
        step["raises"]["where"] = rng.choice(["autograd", "hook"])


def fixed(case: Spec) -> Spec:
    """Without what the libraries forbid: the remaining case is one that users may write."""
    blocks = case["blocks"]
    owners = [case, case.get("root") or {}, *(block.get("shard") or {} for block in walk(blocks))]
    uncast = any(own.get("mp", {}).get("cast") is False for own in owners)
    for block in walk(blocks):
        if uncast:  # a layer that is called with inputs of another dtype than its parameters'
            block.pop("each", None)
        if block.get("around") == "reentrant":
            case["input_gradient"] = True  # it passes no gradient to parameters otherwise
        if block.get("ignored"):
            block["frozen"] = "all"  # ignored parameters are not reduced
            block.pop("each", None)  # nor cast, as the inputs of a sharded expert are
        if block["kind"] == "experts" and block.get("use") == "rank":
            case["unused"] = True
        if not shards(case):
            for own in (block.get("shard"), case.get("root")):
                if own and own.get("reshard") in (1, 2) and not isinstance(own["reshard"], bool):
                    own["reshard"] = True
        elif (own := block.get("shard")) and not isinstance(own.get("reshard", True), bool):
            own["reshard"] = own["reshard"] if shards(case) % own["reshard"] == 0 else True
    own = case.get("root")
    if own and not isinstance(own.get("reshard", True), bool) and shards(case) % own["reshard"]:
        own["reshard"] = True
    shared = {b.get("to", 0) % max(1, i) for i, b in enumerate(blocks) if b["kind"] in ("tied", "again")}
    if any(b["kind"] in ("tied", "again") for b in blocks):
        for block in blocks:  # tied parameters belong to one call: the root's
            if block["kind"] in ("tied", "again", "linear"):
                block.pop("shard", None)
                block.pop("ignored", None)
        for i in shared:
            blocks[i].pop("ignored", None)
        case.pop("together", None)
    return case


def shards(case: Spec) -> int:
    return case["world"] // 2 if case.get("mesh") == "two" else case["world"]


def walk(blocks: list[Spec]) -> list[Spec]:
    return [one for block in blocks for one in (block, *walk(block.get("inner", [])))]


BLOCKS = ("frozen", "dtype", "around", "inside", "change", "calls", "ignored", "shard", "break")


def features_of_model(case: Spec) -> list[str]:
    blocks = walk(case.get("blocks", []))
    found = [f"{case['world']} ranks", case.get("layout", "interleaved")]
    found += [f"block {block['kind']}" for block in blocks]
    return found + [f"block {name}" for name in BLOCKS for block in blocks if name in block]


def features(case: Spec) -> list[str]:
    """What the summary counts."""
    found = [*features_of_model(case), case.get("optimizer", "sgd")]
    found += [f"output {block['out']}" for block in walk(case.get("blocks", [])) if "out" in block]
    found += [f"strategy {case['strategy']}"] if "strategy" in case else []
    found += [f"notes in a {case['notes']}"] if "notes" in case else []
    names = ("mp", "mesh", "offload", "factor", "unused", "together", "clip", "input_gradient", "force_sum")
    found += [name for name in (*names, "prefetch_forward", "prefetch_backward") if name in case]
    found += [f"hook {hook['what']}" for hook in case.get("hooks", [])]
    for step in case.get("steps", []):
        found += [f"before {action.partition(':')[0]}" for action in step.get("before", [])]
        found += [f"between {step['between'].partition(':')[0]}"] if "between" in step else []
        found += [f"raises in {step['raises']['where']}"] if "raises" in step else []
        found += [name for name in ("micro", "delay", "zeros", "hold", "is_last") if name in step]
        found += [f"backward {step['backward']}"] if "backward" in step else []
    return found
