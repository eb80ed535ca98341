"""Run each client on torch's FSDP2 and, unchanged, on shardwise in both layouts; compare the losses.

    python examples/clients/compare.py [CLIENT ...]
    python examples/clients/compare.py --write     and replace their rows in the documentation

The interleaved layout must match FSDP2's losses bit for bit. The contiguous layout sums gradient norms in
another order, so a relative difference of 1e-5 is allowed in fp32, and 1e-2 if the client computes in bf16.
A run fails unless all ranks show that the expected implementation sharded their model.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NEEDS = {
    "accelerate_fsdp2": "accelerate",
    "trainer": "accelerate",
    "seq2seq_trainer": "accelerate",
    "trl_trainers": "trl",
    "sentence_embeddings": "sentence_transformers",
    "fabric": "lightning_fabric",
    "litgpt_fabric": "litgpt",
    "peft_lora": "peft",
    "optimizers": "torchao",
    "torchao_float8": "torchao",
    "torchtitan_llama": "torchtitan",
    "torchtitan_experts": "torchtitan",
    "torchtune_llama": "torchtune",
    "timm_vit": "timm",
}
ROUNDING = {"torchtitan_llama": 1e-2, "torchtitan_experts": 1e-2}
RANKS = 2
WAYS = {
    "FSDP2": [],
    "interleaved": ["-m", "shardwise.run", "--layout", "interleaved"],
    "contiguous": ["-m", "shardwise.run", "--layout", "contiguous"],
}
TABLES = (ROOT / "README.md", ROOT / "docs/tasks/other_code.md")
HEADER = ("client", "modules sharded", "interleaved", "contiguous")
Reports = dict[int, dict[str, Any]]  # by rank, what `common.report` printed


def apart(client: str) -> str:
    """Return the folder of the client's packages that would conflict with those of other clients."""
    return f"{sys.prefix}/apart/{NEEDS[client]}"


def run(client: str, way: str) -> Reports | str:
    """Return every rank's report, or a line that says what failed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    path = os.pathsep.join([apart(client), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    command = [*launch, *WAYS[way], f"{client}.py"]
    try:
        ended = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return "FAILED: not ended after 10 minutes"
    if ended.returncode:
        errors = [line for line in ended.stderr.splitlines() if "Error: " in line or "(SIG" in line]
        return f"FAILED: {(errors or [f'exit status {ended.returncode}'])[0]}"
    found = [json.loads(part.split("\n")[0]) for part in ended.stdout.split("REPORT ")[1:]]
    reports = {one["rank"]: one for one in found}
    return doubt(way, reports) or reports


def doubt(way: str, reports: Reports) -> str:
    """Return why these reports do not prove training sharded in this way; empty if they do."""
    if (missing := set(range(RANKS)) - set(reports)) or not all(one["losses"] for one in reports.values()):
        return f"FAILED: no losses of ranks {sorted(missing) or list(reports)}"
    by = "torch" if way == "FSDP2" else "shardwise"
    layout = "contiguous" if way == "contiguous" else "interleaved"
    for rank, one in reports.items():
        found = one["sharded"]
        if found["by"] != by or not found["modules"] or not found["layouts"].get(layout):
            return f"FAILED: rank {rank} was to be sharded by {by}, {layout}, and reports {found}"
    return ""


def verdict(client: str, way: str, ours: Reports | str, theirs: Reports) -> str:
    if isinstance(ours, str):
        return ours
    for rank, one in theirs.items():
        if (mine := ours[rank]["sharded"]["modules"]) != one["sharded"]["modules"]:
            return f"FAILED: {mine} modules sharded on rank {rank}, {one['sharded']['modules']} by FSDP2"
    numbers = (zip(ours[rank]["losses"], one["losses"], strict=True) for rank, one in theirs.items())
    pairs = list(chain.from_iterable(numbers))
    layouts = ours[0]["sharded"]["layouts"]
    total, others = sum(layouts.values()), layouts.keys() - {way}
    mixed = "".join(f"; {layouts[other]} of {total} parameters {other}" for other in sorted(others))
    if all(a == b for a, b in pairs):
        return f"equal to the bit{mixed}"
    most = max(abs(a - b) / (abs(b) or 1.0) for a, b in pairs)
    allowed = ROUNDING.get(client, 1e-5) if way == "contiguous" else 0.0
    return f"{'within' if most <= allowed else 'FAILED:'} {most:.1g}{mixed}"


def row(client: str) -> list[str]:
    """Return the client's name, purpose, number of modules FSDP2 sharded, and verdicts on both layouts."""
    purpose = (ast.get_docstring(ast.parse((HERE / f"{client}.py").read_text())) or "").split("\n")[0]
    cells = [f"`{client}`: {purpose.rstrip('.')}"]
    if PathFinder.find_spec(NEEDS[client], [apart(client), *sys.path]) is None:
        return [*cells, f"FAILED: {NEEDS[client]} is not installed"]
    theirs = run(client, "FSDP2")
    if isinstance(theirs, str):
        return [*cells, theirs]
    modules = str(theirs[0]["sharded"]["modules"])
    return [*cells, modules, *(verdict(client, way, run(client, way), theirs) for way in list(WAYS)[1:])]


def failed(row: list[str]) -> bool:
    return any(cell.startswith("FAILED") for cell in row)


def write(row: list[str]) -> None:
    """Replace the row of this client in the tables of the documentation."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from results import write_section

    for path in TABLES:
        section = path.read_text().partition("<!-- begin clients -->")[2].partition("<!-- end clients -->")[0]
        lines = {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}
        lines[row[0].split("`")[1]] = f"| {' | '.join(row)} |"
        head = [f"| {' | '.join(HEADER)} |", f"| {' | '.join(['---'] * len(HEADER))} |"]
        body = [lines[client] for client in NEEDS if client in lines]
        write_section("clients", "\n".join([*head, *body]), path=path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", nargs="*", default=list(NEEDS), metavar="CLIENT")
    parser.add_argument("--write", action="store_true", help="replace their rows in the documentation")
    options = parser.parse_args()
    rows = []
    for client in options.clients:
        rows.append(row(client))
        print(*rows[-1], sep=" | ", file=sys.stderr)
        if options.write and not failed(rows[-1]):
            write(rows[-1])
    table = Table(*HEADER)
    for cells in rows:
        table.add_row(*cells)
    Console(width=150).print(table)
    return int(any(map(failed, rows)))


if __name__ == "__main__":
    sys.exit(main())
