"""Runs each client on torch's FSDP2 and, unchanged, on shardwise in both layouts; compares their losses.

    python examples/clients/compare.py [CLIENT ...]

The interleaved layout must give FSDP2's losses to the last bit. The contiguous one adds the norm of gradients
in another order: a relative difference of 1e-5 is allowed in fp32, of 1e-2 where the client computes in bf16.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
NEEDS = {
    "accelerate_fsdp2": "accelerate",
    "trainer": "accelerate",
    "fabric": "lightning_fabric",
    "peft_lora": "peft",
    "optimizers": "torchao",
    "torchtitan_llama": "torchtitan",
}
ROUNDING = {"torchtitan_llama": 1e-2}
WAYS = {
    "FSDP2": [],
    "interleaved": ["-m", "shardwise.run", "--layout", "interleaved"],
    "contiguous": ["-m", "shardwise.run", "--layout", "contiguous"],
}


def losses(client: str, way: list[str]) -> dict[int, list[float]] | str:
    """Every rank's losses, or the last line of what went wrong."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([*launch, *way, f"{client}.py"], cwd=HERE, env=quiet, capture_output=True, text=True)
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "Error: " in line or "(SIG" in line]
        return (errors or [f"exit status {run.returncode}"])[0]
    found = [json.loads(part.split("\n")[0]) for part in run.stdout.split("LOSSES ")[1:]]
    return {one["rank"]: one["losses"] for one in found}


def verdict(client: str, way: str, ours: dict[int, list[float]] | str, theirs: dict[int, list[float]]) -> str:
    if isinstance(ours, str):
        return f"FAILED: {ours}"
    pairs = [pair for rank in theirs for pair in zip(ours[rank], theirs[rank], strict=True)]
    if all(a == b for a, b in pairs):
        return "equal to the bit"
    most = max(abs(a - b) / abs(b) for a, b in pairs)
    allowed = ROUNDING.get(client, 1e-5) if way == "contiguous" else 0.0
    return f"{'within' if most <= allowed else 'FAILED:'} {most:.1g}"


def main(clients: list[str]) -> int:
    table = Table("client", *WAYS)
    failed = False
    for client in clients:
        if importlib.util.find_spec(NEEDS[client]) is None:
            table.add_row(client, f"not run: {NEEDS[client]} is not installed")
            continue
        theirs = losses(client, WAYS["FSDP2"])
        row = ["runs" if not isinstance(theirs, str) else f"FAILED: {theirs}"]
        if not isinstance(theirs, str):
            row += [verdict(client, way, losses(client, WAYS[way]), theirs) for way in list(WAYS)[1:]]
        failed = failed or any(cell.startswith("FAILED") for cell in row)
        table.add_row(client, *row)
    Console(width=130).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(NEEDS)))
