"""How far plans are from published figures, row by row, beside a textbook formula.

    python benchmarks/plan.py
    python benchmarks/plan.py --models llama3-8b --write

`published.json` has the rows with their sources: torchtitan's Llama 3 8B on H100 (the most memory that the
allocator reserved, tokens/s), llm-foundry's MPT-7B on H100 and A100 (tokens/s). Left out is what is not
planned: compiled and float8 rows, tensor and pipeline parallelism. Efficiencies are those of the hardware's
profiles, which no row was fitted to; the last table has one more figure for each hardware, from three rows.
The textbook has 16 bytes a parameter over all ranks, 34 bytes of activations a token, layer and unit of
width (half of them with selective checkpointing, 2 with full), three float32 copies of the logits, and 40%
of the peak.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import Table, write_section

from shardwise.planner import Plan, Setup, hardware_of, plan
from shardwise.planner.decoder import PUBLISHED

GIB = 2**30
CALIBRATED = "Tokens/s of a device, calibrated on three rows of each hardware, which are left out"
Row = tuple[str, float, float, float]  # name, published, ours, textbook
ROWS = Path(__file__).with_name("published.json")


def textbook(model: str, setup: Setup, hardware: str, parameters: int) -> tuple[float, float]:
    """GiB, and tokens/s of a device."""
    shape = PUBLISHED[model]
    tokens = setup.micro_batch * setup.sequence
    kept = {"none": 34, "selective": 17, "full": 2}[setup.checkpointing]
    memory = 16 * parameters / setup.ranks + kept * tokens * shape.width * shape.layers
    memory += 3 * 4 * tokens * shape.vocabulary
    flops = 6 * parameters + 12 * shape.layers * shape.width * setup.sequence
    flops *= 4 / 3 if setup.checkpointing == "full" else 1
    return memory / GIB, 0.4 * hardware_of(hardware).peak_flops["bfloat16"] / flops


def errors(title: str, rows: Sequence[Row]) -> Table:
    header = ["row", "published", "planned", "error", "textbook", "error"]
    body = []
    for name, published, ours, formula in rows:
        told = [f"{published:,.1f}", f"{ours:,.1f}", f"{ours / published - 1:+.1%}"]
        body.append([name, *told, f"{formula:,.1f}", f"{formula / published - 1:+.1%}"])
    for name, of in (("median of absolute errors", 0.5), ("90th percentile", 0.9)):
        found = [_percentile([abs(row[i] / row[1] - 1) for row in rows], of) for i in (2, 3)]
        body.append([name, "", "", f"{found[0]:.1%}", "", f"{found[1]:.1%}"])
    return Table(title, header, body)


def _percentile(values: Sequence[float], of: float) -> float:
    ordered = sorted(values)
    return statistics.median(ordered) if of == 0.5 else ordered[min(len(ordered) - 1, int(of * len(ordered)))]


def calibrated(rows: Sequence[dict[str, Any]], speed: Sequence[Row]) -> list[Row]:
    """Plans times the share of the profile's rates that the software reached: one figure for each hardware.

    It is the median of three rows: the first, the middle and the last, which are left out of the result.
    """
    result = []
    for hardware in dict.fromkeys(row["hardware"] for row in rows):
        mine = [one for row, one in zip(rows, speed, strict=True) if row["hardware"] == hardware]
        used = sorted({0, len(mine) // 2, len(mine) - 1})
        share = statistics.median(mine[i][1] / mine[i][2] for i in used)
        print(f"{hardware}: share of the profile's rates {share:.2f}")
        result += [(n, p, ours * share, f) for i, (n, p, ours, f) in enumerate(mine) if i not in used]
    return result


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    memory, speed = [], []
    for row in rows:
        setup = Setup(**row["setup"])
        made: Plan = plan(row["model"], setup, hardware=row["hardware"])
        gib, rate = textbook(row["model"], setup, row["hardware"], made.parameters)
        told = {
            name: value for name, value in row["setup"].items() if name not in ("clip_norm", "reduce_dtype")
        }
        name = f"{row['model']}, {row['hardware']}, " + ", ".join(f"{k} {v}" for k, v in told.items())
        print(name, flush=True)
        if row["reserved_gib"]:
            memory.append((name, row["reserved_gib"], made.reserved_bytes / GIB, gib))
        if row["tokens_per_s"]:
            speed.append((name, row["tokens_per_s"], made.tokens_per_s, rate))
    found = [errors("Tokens/s of a device", speed), errors(CALIBRATED, calibrated(rows, speed))]
    return [errors("Most memory reserved, GiB", memory), *found] if memory else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama3-8b", "mpt-7b"], help="rows of these models")
    parser.add_argument("--write", action="store_true", help="replace the section of TABLES.md")
    options = parser.parse_args()
    made = tables([row for row in json.loads(ROWS.read_text()) if row["model"] in options.models])
    for table in made:
        table.show()
    if options.write:
        text = "Published figures are of other machines; plans do not depend on this one."
        write_section("plan", "\n\n".join(["## plan", text, *(table.markdown() for table in made)]))


if __name__ == "__main__":
    main()
