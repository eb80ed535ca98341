"""How far plans are from published figures, row by row, beside a textbook formula; and from real steps.

    python benchmarks/plan.py
    python benchmarks/plan.py --models llama3-8b --write
    python benchmarks/plan.py --real --write

`published.json` has the rows with their sources: torchtitan's Llama 3 8B on H100 (the most memory that the
allocator reserved, tokens/s), llm-foundry's MPT-7B on H100 and A100 (tokens/s). Left out is what is not
planned: compiled and float8 rows, pipeline parallelism. What the sources do not say is taken as follows.
torchtitan's embedding, norm and head are in the root's group, as they then were in its code; its tables are
of segments that do not grow and its commit #822 of those that do, which is what the figures fit.
llm-foundry's fused loss is planned as the chunked one. All these runs ended, so that all rows fit.

Efficiencies are those of the hardware's profiles, which no row was fitted to; the last table has one more
figure for each hardware, from three rows. The textbook is a formula of 20 lines (`textbook`).
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plan_real
from results import Table, write_section

from shardwise.planner import Hardware, Plan, Setup, hardware_of, plan
from shardwise.planner.decoder import PUBLISHED

GIB = 2**30
CALIBRATED = "Tokens/s of a device, calibrated on three rows of each hardware, which are left out"
TEXT = (
    "Published figures are of other machines; plans do not depend on this one. All these runs ended, so that"
    "\nall rows fit. The textbook's memory is 16 bytes a parameter over all ranks, 34 bytes of activations a"
    "\ntoken, layer and unit of width (half of them with selective checkpointing, 2 with full) and three"
    "\nfloat32 copies of the logits; its speed is 40% of the peak (`textbook` in `plan.py`)."
)
ROWS = Path(__file__).with_name("published.json")


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

    def error(self, *, textbook: bool = False) -> float:
        return (self.textbook if textbook else self.planned) / self.published - 1


def textbook(model: str, setup: Setup, hardware: Hardware, parameters: int) -> tuple[float, float]:
    """GiB, and tokens/s of a device, as one does it by hand.

    Memory: 16 bytes a parameter over all ranks (float32 parameter, gradient, two moments); 34 bytes of
    activations a token, layer and unit of width (Korthikanti et al., 2022, without attention's matrix), half
    of them with selective checkpointing, 2 with full; three float32 copies of the logits. Time: 6 operations
    a parameter and token, and attention's 12 x layers x width x sequence, a third more where forward is
    computed again, at 40% of the peak.
    """
    shape = PUBLISHED[model]
    tokens = setup.micro_batch * setup.sequence
    kept = {"none": 34, "selective": 17, "full": 2}[setup.checkpointing]
    memory = 16 * parameters / setup.ranks
    memory += kept * tokens * shape.width * shape.layers
    memory += 3 * 4 * tokens * shape.vocabulary
    flops = 6 * parameters + 12 * shape.layers * shape.width * setup.sequence
    flops *= 4 / 3 if setup.checkpointing == "full" else 1
    return memory / GIB, 0.4 * hardware.peak_flops["bfloat16"] / flops


def errors(title: str, rows: Sequence[Row]) -> Table:
    header = ["row", "published", "planned", "error", "fits", "textbook", "error", "fits"]
    body = []
    for row in rows:
        told = [f"{row.published:,.1f}", f"{row.planned:,.1f}", f"{row.error():+.1%}", _verdict(row.fits)]
        formula = [f"{row.textbook:,.1f}", f"{row.error(textbook=True):+.1%}", _verdict(row.textbook_fits)]
        body.append([row.name, *told, *formula])
    both = (False, True)
    for name, of in (("median of absolute errors", 0.5), ("90th percentile", 0.9)):
        found = [_percentile([abs(row.error(textbook=which)) for row in rows], of) for which in both]
        body.append([name, "", "", f"{found[0]:.1%}", "", "", f"{found[1]:.1%}", ""])
    published = [row.published for row in rows]
    ranks = [_rank_correlation(published, [row.textbook if t else row.planned for row in rows]) for t in both]
    body.append(["rank correlation", "", "", f"{ranks[0]:.3f}", "", "", f"{ranks[1]:.3f}", ""])
    wrong = [sum(not (row.textbook_fits if which else row.fits) for row in rows) for which in both]
    body.append(["wrong verdicts", "", "", "", str(wrong[0]), "", "", str(wrong[1])])
    return Table(title, header, body)


def _verdict(fits: bool) -> str:
    return "yes" if fits else "no"


def _percentile(values: Sequence[float], of: float) -> float:
    ordered = sorted(values)
    return statistics.median(ordered) if of == 0.5 else ordered[min(len(ordered) - 1, int(of * len(ordered)))]


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: equal values share their rank."""
    ranks = [[sum(v < w for v in of) + sum(v == w for v in of) / 2 for w in of] for of in (one, other)]
    return statistics.correlation(*ranks)


def calibrated(rows: Sequence[Row]) -> list[Row]:
    """Plans times the share of the profile's rates that the software reached: one figure for each hardware.

    It is the median of three rows: the first, the middle and the last, which are left out of the result.
    """
    result = []
    for hardware in dict.fromkeys(row.hardware for row in rows):
        mine = [row for row in rows if row.hardware == hardware]
        used = sorted({0, len(mine) // 2, len(mine) - 1})
        share = statistics.median(mine[i].published / mine[i].planned for i in used)
        print(f"{hardware}: share of the profile's rates {share:.2f}")
        result += [replace(one, planned=one.planned * share) for i, one in enumerate(mine) if i not in used]
    return result


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    memory, speed = [], []
    for row in rows:
        setup = Setup(**row["setup"])
        hardware = hardware_of(row["hardware"])
        made: Plan = plan(row["model"], setup, hardware=hardware)
        gib, rate = textbook(row["model"], setup, hardware, made.parameters)
        told = {
            name: value for name, value in row["setup"].items() if name not in ("clip_norm", "reduce_dtype")
        }
        name = f"{row['model']}, {row['hardware']}, " + ", ".join(f"{k} {v}" for k, v in told.items())
        print(name, flush=True)
        verdicts = (made.fits, gib * GIB <= hardware.usable_bytes, row["hardware"])
        if row["reserved_gib"]:
            memory.append(Row(name, row["reserved_gib"], made.reserved_bytes / GIB, gib, *verdicts))
        if row["tokens_per_s"]:
            speed.append(Row(name, row["tokens_per_s"], made.tokens_per_s, rate, *verdicts))
    found = [errors("Tokens/s of a device", speed), errors(CALIBRATED, calibrated(speed))]
    return [errors("Most memory reserved, GiB", memory), *found] if memory else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama3-8b", "mpt-7b"], help="rows of these models")
    parser.add_argument("--real", action="store_true", help="beside real steps on gloo ranks instead")
    parser.add_argument("--write", action="store_true", help="replace the section of TABLES.md")
    options = parser.parse_args()
    if options.real:
        section, text = "plan against real steps", "Of `examples/train_gpt.py`'s model and a tiny Llama."
        made = [Table("Bytes of a real step on gloo ranks", plan_real.HEADER, list(plan_real.rows()))]
    else:
        section, text = "plan", TEXT
        made = tables([row for row in json.loads(ROWS.read_text()) if row["model"] in options.models])
    for table in made:
        table.show()
    if options.write:
        write_section(section, "\n\n".join([f"## {section}", text, *(table.markdown() for table in made)]))


if __name__ == "__main__":
    main()
