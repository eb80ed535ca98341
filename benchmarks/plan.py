"""How far plans are from published figures, row by row, beside a textbook formula; and from real steps.

    python benchmarks/plan.py
    python benchmarks/plan.py --models llama3-8b --write
    python benchmarks/plan.py --real --write

`published.json` has every row of the sources, by family: torchtitan's Llamas and Qwen3 on H100 and A100
(the most memory reserved or alive, tokens/s, what did not fit), llm-foundry's MPTs (tokens/s), Megatron-LM's
GPTs (operations a second; `convention`). Each is compared, or says why it is not. What a source does not say
is assumed; such a row says what, and is planned with the other choice too. torchtitan's embedding, norm and
head are in the root's group where they then were in its code.

Efficiencies are those of the hardware's profiles, which no row was fitted to. Calibration is one more figure
for each hardware, the share of these rates that the software reached, from three rows; in the table by
family, from all rows of the hardware's other families: from three of them it was what these happened to be.
The textbook is a formula of 20 lines (`textbook`).
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import plan_real
from results import Table, machine_facts, write_section
from torch import nn

from shardwise.fsdp import FSDPModule, fully_shard
from shardwise.fsdp.policy import GroupSettings
from shardwise.fsdp.reduction import GradReducer
from shardwise.planner import Hardware, Setup, hardware_of, plan, sharding
from shardwise.planner.measure import RECORDED_MICRO_BATCHES
from shardwise.planner.models import Stage
from shardwise.planner.plan import SURE
from shardwise.planner.shapes import PUBLISHED

GIB = 2**30
MEMORY, SPEED, PARAMETERS = "Most memory reserved, GiB", "Tokens/s of a device", "GiB of parameters"
ALIVE = "Most memory alive, GiB"
CALIBRATED = "Tokens/s of a device, calibrated on three rows of each hardware"
TEXT = (
    "Published figures are of other machines; plans do not depend on this one. Memory is planned as"
    "\nPyTorch's FSDP and Megatron-LM's pipelines allocate it, which were measured (`as_measured`); this"
    "\nlibrary reserves less than the one, and torch's stages, which it plans, more than the other."
    "\nThe textbook's memory is 16 bytes a parameter over all ranks, 34 bytes of activations a"
    "\ntoken, layer and unit of width (half of them with selective checkpointing, 2 with full) and three"
    "\nfloat32 copies of the logits; its speed is 40% of the peak (`textbook` in `plan.py`). Megatron-LM's"
    "\nfigures are operations a second, forward again counted, by its paper's formula (`convention`): here"
    "\ntokens/s. Its models are planned with attention in kernels apart, as it then was. Its ZeRO-3 rows are"
    "\nDeepSpeed's of 2021, which gathers each linear layer on its own, as planned here; gathers and"
    "\nreductions that computation waits for, and one 200 Gb/s link of a host's eight carries, would fit"
    "\ntheir time within a fifth (of the four tried), which is not how this library sends."
)
ERROR_FILE = Path(__file__).parents[1] / "src" / "shardwise" / "planner" / "memory_error.py"
ROWS = Path(__file__).with_name("published.json")
DRAWS = 20  # of three rows for each hardware


@dataclass(frozen=True)
class Row:
    """One figure: GiB or tokens/s; and whether that setup is said to fit."""

    name: str
    published: float
    planned: float
    textbook: float
    fits: bool
    textbook_fits: bool
    hardware: str
    family: str = ""
    really: bool = True  # it did fit
    room: float = 0.0  # that the device has beside what is needed, as a logarithm
    seen: bool = False  # by the calibration

    def error(self, *, textbook: bool = False) -> float:
        return (self.textbook if textbook else self.planned) / self.published - 1


def textbook(model: str, setup: Setup, hardware: Hardware, parameters: int) -> tuple[float, float]:
    """GiB, and tokens/s of a device, as one does it by hand.

    Memory: 16 bytes a parameter over all ranks (float32 parameter, gradient, two moments); 34 bytes of
    activations a token, layer and unit of width (Korthikanti et al., 2022, without attention's matrix), half
    of them with selective checkpointing, 2 with full, their mean with every second block's; three float32
    copies of the logits. Time: 6 operations a parameter and token, and attention's 12 x layers x width x
    sequence, a third more where forward is computed again, at 40% of the peak.
    """
    shape = PUBLISHED[model]
    tokens = setup.micro_batch * setup.sequence
    kept = {"none": 34, "selective": 17, "alternate": 18, "full": 2}[setup.checkpointing]
    memory = 16 * parameters / setup.ranks
    memory += kept * tokens * shape.width * shape.layers
    memory += 3 * 4 * tokens * shape.vocabulary
    flops = 6 * parameters + 12 * shape.layers * shape.width * setup.sequence
    flops *= {"alternate": 7 / 6, "full": 4 / 3}.get(setup.checkpointing, 1)
    return memory / GIB, 0.4 * hardware.peak_flops["bfloat16"] / flops


def convention(model: str, sequence: int) -> float:
    """Operations of a token as Megatron-LM counts them, forward again too (arXiv 2104.04473, section 5.1)."""
    shape = PUBLISHED[model]
    layers, width = shape.layers, shape.width
    return 96 * layers * width**2 * (1 + sequence / (6 * width) + shape.vocabulary / (16 * layers * width))


def errors(title: str, rows: Sequence[Row]) -> Table:
    header = ["row", "published", "planned", "error", "fits", "textbook", "error", "fits"]
    body = []
    for row in rows:
        told = [f"{row.published:,.1f}", f"{row.planned:,.1f}", f"{row.error():+.1%}", _verdict(row.fits)]
        formula = [f"{row.textbook:,.1f}", f"{row.error(textbook=True):+.1%}", _verdict(row.textbook_fits)]
        body.append([f"{row.name}{' (calibrated on)' * row.seen}", *told, *formula])
    unseen = [row for row in rows if not row.seen]
    summed = [("", rows)]
    if 0 < len(unseen) < len(rows):
        summed.append((", of rows not calibrated on", unseen))
    for words, some in summed:
        body += [[f"{name}{words}", *figures] for name, *figures in _summary(some)]
    return Table(title, header, body)


def _summary(rows: Sequence[Row]) -> Iterator[list[str]]:
    both = (False, True)
    for name, of in (("median of absolute errors", 0.5), ("90th percentile", 0.9)):
        found = [percentile([abs(row.error(textbook=which)) for row in rows], of) for which in both]
        yield [name, "", "", f"{found[0]:.1%}", "", "", f"{found[1]:.1%}", ""]
    published = [row.published for row in rows]
    if len(set(published)) > 1:
        ranks = [
            rank_correlation(published, [row.textbook if t else row.planned for row in rows]) for t in both
        ]
        yield ["rank correlation", "", "", f"{ranks[0]:.3f}", "", "", f"{ranks[1]:.3f}", ""]
    wrong = [sum((row.textbook_fits if which else row.fits) != row.really for row in rows) for which in both]
    yield ["wrong verdicts", "", "", "", str(wrong[0]), "", "", str(wrong[1])]


def _verdict(fits: bool) -> str:
    return "yes" if fits else "no"


def percentile(values: Sequence[float], of: float) -> float:
    ordered = sorted(values)
    return statistics.median(ordered) if of == 0.5 else ordered[min(len(ordered) - 1, int(of * len(ordered)))]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: equal values share their rank. Not a number where all of one list are equal."""
    ranks = [[sum(v < w for v in of) + sum(v == w for v in of) / 2 for w in of] for of in (one, other)]
    if any(len(set(of)) == 1 for of in ranks):
        return math.nan
    return statistics.correlation(*ranks)


def calibrated(rows: Sequence[Row], draw: random.Random | None = None) -> list[Row]:
    """Plans times the share of the profile's rates that the software reached: one figure for each hardware.

    It is the median of three rows: those that are drawn, else the first, the middle and the last.
    """
    result = []
    for hardware in dict.fromkeys(row.hardware for row in rows):
        mine = [row for row in rows if row.hardware == hardware]
        numbers = range(len(mine))
        used = {0, len(mine) // 2, len(mine) - 1}
        if draw is not None:
            used = set(draw.sample(numbers, min(3, len(mine))))
        share = statistics.median(mine[i].published / mine[i].planned for i in sorted(used))
        result += [replace(mine[i], planned=mine[i].planned * share, seen=i in used) for i in numbers]
    return result


def by_family(compared: dict[str, list[Row]], verdicts: Sequence[Row], refused: Sequence[str]) -> Table:
    """Errors by family, time with the share that the hardware's other families reached."""
    body, all_memory, all_speed, all_sure = [], list[float](), list[Row](), 0
    for family in dict.fromkeys([row.family for row in verdicts] + [*refused]):
        memory = [abs(row.error()) for row in compared[MEMORY] if row.family == family]
        speed = unseen(compared[SPEED], family)
        mine = [row for row in verdicts if row.family == family]
        wrong = [row for row in mine if row.fits != row.really]
        told = [
            str(len(mine)),
            str(refused.count(family)),
            *_errors(memory),
            *_errors([r.error() for r in speed]),
        ]
        margin = memory_error([row for row in compared[MEMORY] if row.family != family])
        sure = sum(is_sure(row, margin) for row in wrong)
        body.append([family, *told, str(len(wrong)), str(sure), f"{margin:.1%}"])
        all_sure += sure
        all_memory += memory
        all_speed += speed
    wrong = [row for row in verdicts if row.fits != row.really]
    told = [
        str(len(verdicts)),
        str(len(refused)),
        *_errors(all_memory),
        *_errors([r.error() for r in all_speed]),
    ]
    body.append(["all", *told, str(len(wrong)), str(all_sure), f"{memory_error(compared[MEMORY]):.1%}"])
    if len(all_speed) > 1:
        rank = rank_correlation([r.published for r in all_speed], [r.planned for r in all_speed])
        body.append(["rank correlation of tokens/s", *[""] * 4, f"{rank:.3f}", "", "", "", ""])
    header = [
        "family",
        "runs",
        "not planned",
        "memory: median error",
        "90th",
        "tokens/s: median error",
        "90th",
    ]
    title = (
        "By family; time calibrated on all rows of the hardware's other families (their share of the"
        " profile's rates, the median; computed from the rows below)"
    )
    return Table(title, [*header, "wrong verdicts", "of these sure", "margin, of other families"], body)


def memory_error(rows: Sequence[Row]) -> float:
    """What memory errs by, one standard deviation; a family's rows, which are alike, weigh as one."""
    families: dict[str, list[float]] = {}
    for row in rows:
        if PARAMETERS not in row.name:
            families.setdefault(row.family, []).append(math.log(row.planned / row.published) ** 2)
    return math.sqrt(statistics.mean(map(statistics.mean, families.values()))) if families else 0.0


def is_sure(row: Row, error: float) -> bool:
    """Whether the verdict is beyond the margin where memory errs by so much."""
    return error > 0 and abs(statistics.NormalDist(0, error).cdf(row.room) - 0.5) > SURE - 0.5


def write_error(rows: Sequence[Row]) -> None:
    """Write what memory errs by for the planner."""
    kinds = [row for row in rows if PARAMETERS not in row.name]
    count, families = len(kinds), len({row.family for row in kinds})
    text = ERROR_FILE.read_text().partition("MEMORY_ERROR")[0]
    text += f"MEMORY_ERROR = {memory_error(rows):.4f}\n"
    told = f"{count} published figures of {families} families, each of one weight: benchmarks/TABLES.md, plan"
    ERROR_FILE.write_text(f'{text}SOURCE = "{told}"\n')


def _errors(of: Sequence[float]) -> list[str]:
    return [f"{percentile([abs(one) for one in of], at):.1%}" if of else "" for at in (0.5, 0.9)]


def unseen(rows: Sequence[Row], family: str) -> list[Row]:
    """A family's rows times the share that the hardware's other families reached: their rows' median."""
    found = []
    for row in [row for row in rows if row.family == family]:
        others = [one for one in rows if one.hardware == row.hardware and one.family != family]
        share = statistics.median([one.published / one.planned for one in others] or [1.0])
        found.append(replace(row, planned=row.planned * share))
    return found


def left_out(rows: Sequence[Row]) -> Table:
    """The calibration on other rows: errors of those that it did not see."""
    found = []
    for seed in range(DRAWS):
        unseen = [row for row in calibrated(rows, random.Random(seed)) if not row.seen]
        absolute = [abs(row.error()) for row in unseen]
        published, planned = [row.published for row in unseen], [row.planned for row in unseen]
        middle, high = (percentile(absolute, of) for of in (0.5, 0.9))
        found.append((middle, high, rank_correlation(published, planned)))
    body = []
    for (name, digits), values in zip(
        (("median of absolute errors", ".1%"), ("90th percentile", ".1%"), ("rank correlation", ".3f")),
        zip(*found, strict=True),
        strict=True,
    ):
        body.append([name, *(format(of(values), digits) for of in (min, statistics.median, max))])
    title = f"Calibrated on {DRAWS} random draws of three rows for each hardware: of the rows not drawn"
    return Table(title, ["", "lowest", "median", "highest"], body)


@contextmanager
def as_measured(by: str = "") -> Iterator[None]:
    """Have memory as the runs that were measured had it, with PyTorch's FSDP and Megatron-LM's pipelines.

    FSDP's reduced gradients are memory of the stream that reduces, and each gathered parameter has its own.
    Megatron-LM's stages have buffers to receive into for as many micro-batches as are under way. DeepSpeed
    gathers and reduces each linear layer of a block on its own.
    """
    settings = partial(GroupSettings, separate_memory_min_bytes=0)
    with (
        mock.patch.object(GradReducer, "shard_becomes_grads", return_value=False),
        mock.patch("shardwise.fsdp.group.GroupSettings", settings),
        mock.patch("shardwise.planner.pipeline.buffer_count", _under_way),
        mock.patch.object(sharding, "fully_shard", _by_linear if by == "DeepSpeed" else fully_shard),
    ):
        yield


def _by_linear(unit: nn.Module, **options: Any) -> None:
    inside = list(unit.modules())[1:]
    if not any(isinstance(one, FSDPModule) for one in inside):  # a block, not the whole model
        for linear in (one for one in inside if isinstance(one, nn.Linear)):
            fully_shard(linear, **options)
            linear.register_forward_hook(lambda module, *_: module.reshard())  # recomputation's, too
    fully_shard(unit, **options)


def _under_way(at: Stage) -> int:
    return min(at.micro_batches, max(RECORDED_MICRO_BATCHES, at.count - at.number))


def planned(model: str, setup: Setup, hardware: Hardware, by: str) -> dict[str, Any]:
    """What a row needs of a plan."""
    print(model, setup.ranks, hardware.name, flush=True)
    with as_measured(by):
        made = plan(model, setup, hardware=hardware)
    reserved, speed = made.reserved_bytes / GIB, made.tokens_per_s
    shards = made.moments[-1].alive["parameters"] / GIB
    figures = {MEMORY: reserved, SPEED: speed, PARAMETERS: shards, ALIVE: made.peak_bytes / GIB}
    room = math.log(hardware.usable_bytes / made.needed_bytes)
    return {"figures": figures, "parameters": made.parameters, "fits": made.fits, "room": room}


def published(row: dict[str, Any]) -> dict[str, float]:
    """Figures of a row, by their kind."""
    found = {MEMORY: row.get("reserved_gib"), SPEED: row.get("tokens_per_s")}
    found[PARAMETERS], found[ALIVE] = row.get("parameters_gib"), row.get("alive_gib")
    if "tflops" in row:
        found[SPEED] = row["tflops"] * 1e12 / convention(row["model"], row["setup"]["sequence"])
    return {kind: value for kind, value in found.items() if value is not None}


def _name(row: dict[str, Any]) -> str:
    untold = ("clip_norm", "reduce_dtype", "param_dtype", "ends_apart", "reduce_once")
    told = [f"{key} {value}" for key, value in row["setup"].items() if key not in untold]
    return ", ".join([row["model"], row["hardware"], *told])


def all_planned(rows: Sequence[dict[str, Any]], jobs: int) -> list[dict[str, Any]]:
    """Plans of the rows, each followed by that of its other choice, if it has one."""
    asked = []
    for row in rows:
        setup, hardware = Setup(**row["setup"]), hardware_of(row["hardware"])
        setups = [setup, *([replace(setup, **row["otherwise"])] if "otherwise" in row else [])]
        asked += [(row["model"], one, hardware, row.get("by", "")) for one in setups]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(planned, *zip(*asked, strict=True)))


def tables(rows: Sequence[dict[str, Any]], *, jobs: int, write: bool = False) -> list[Table]:
    compared: dict[str, list[Row]] = {MEMORY: [], SPEED: [], PARAMETERS: [], ALIVE: []}
    others, runs = [], []
    asked = [row for row in rows if "setup" in row]
    plans = iter(all_planned(asked, jobs))
    for row in asked:
        setup, hardware, name = Setup(**row["setup"]), hardware_of(row["hardware"]), _name(row)
        made = next(plans)
        gib, rate = textbook(row["model"], setup, hardware, made["parameters"])
        by_hand = {MEMORY: gib, ALIVE: gib, SPEED: rate}
        by_hand[PARAMETERS] = 4 * made["parameters"] / setup.ranks / GIB
        verdicts = (made["fits"], gib * GIB <= hardware.usable_bytes, row["hardware"])
        verdicts += (row["family"], row.get("fits", True), made["room"])
        runs.append(Row(name, 0, 0, 0, *verdicts))
        for kind, value in published(row).items():
            figures = (value, made["figures"][kind], by_hand[kind])
            what = name + {PARAMETERS: f" ({PARAMETERS} alone)", ALIVE: " (alive)"}.get(kind, "")
            compared[kind].append(Row(what, *figures, *verdicts))
        if "otherwise" in row:
            other = next(plans)
            others += [_otherwise(name, row, kind, made, other) for kind in published(row)]
    compared[MEMORY] += [*compared.pop(PARAMETERS), *compared.pop(ALIVE)]
    if write:
        write_error(compared[MEMORY])
    found = [by_family(compared, runs, [row["family"] for row in rows if "why" in row])]
    found += [errors(MEMORY, compared[MEMORY])] if compared[MEMORY] else []
    if speed := compared[SPEED]:
        found += [errors(SPEED, speed), errors(CALIBRATED, calibrated(speed))]
        found += [left_out(speed)] if len(speed) > 3 * len({row.hardware for row in speed}) else []
    header = ["row", "assumed", "published", "planned", "error", "otherwise", "planned", "error", "fits"]
    found.append(Table("What is assumed, and plans otherwise", header, others))
    return [*found, uncompared(rows)]


def _otherwise(
    name: str, row: dict[str, Any], kind: str, made: dict[str, Any], other: dict[str, Any]
) -> list[str]:
    value = published(row)[kind]
    unit = "tokens/s" if kind == SPEED else "GiB"
    both = [
        [f"{one['figures'][kind]:,.1f}", f"{one['figures'][kind] / value - 1:+.1%}"] for one in (made, other)
    ]
    choice = ", ".join(f"{key} {now}" for key, now in row["otherwise"].items())
    told = [name, row["assumed"], f"{value:,.1f} {unit}", *both[0], choice, *both[1]]
    return [*told, _verdict(other["fits"])]


def uncompared(rows: Sequence[dict[str, Any]]) -> Table:
    body = [[row["model"], row["source"], row["published"], row["why"]] for row in rows if "why" in row]
    return Table("Published and not compared", ["model", "source", "figure", "why"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="rows of these models alone")
    parser.add_argument("--real", action="store_true", help="beside real steps on gloo ranks instead")
    parser.add_argument("--jobs", type=int, default=2, help="plans made at a time")
    parser.add_argument("--write", action="store_true", help="replace the section of TABLES.md")
    options = parser.parse_args()
    if options.real:
        section, text = "plan against real steps", "Of `examples/train_gpt.py`'s model and a tiny Llama."
        made = [Table("Bytes of a real step on gloo ranks", plan_real.HEADER, list(plan_real.rows()))]
    else:
        rows = json.loads(ROWS.read_text())
        compared = sum(len(row["ids"]) for row in rows if "setup" in row)
        count = sum(len(row["ids"]) for row in rows)
        section, text = "plan", f"{TEXT}\nOf {count} published figures {compared} are compared."
        asked = [row for row in rows if not options.models or row["model"] in options.models]
        made = tables(asked, jobs=options.jobs, write=options.write and not options.models)
    for table in made:
        table.show()
    if options.write:
        facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
        parts = [f"## {section}", facts, text, *(table.markdown() for table in made)]
        write_section(section, "\n\n".join(parts))


if __name__ == "__main__":
    main()
