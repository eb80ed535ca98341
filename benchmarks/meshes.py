"""Meshes of several dimensions beside one process and FSDP2, and their checkpoints on one another.

    python benchmarks/meshes.py              show the table
    python benchmarks/meshes.py --write      and replace its section of TABLES.md

Every pair of dimensions on 4 ranks and every triple on 8 trains examples/train_dimensions.py, tiny, for five
steps in fp64, in both layouts. A cell is the largest difference in losses, norms, gradients of the first step
and parameters, relative to the largest number of each tensor.
"""

import argparse
import itertools
import sys
from pathlib import Path

from results import RESULTS, Table, machine_facts, write_section

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "examples", "")]

from fuzz.meshes_part import beside  # noqa: E402
from ranks import RankPool  # noqa: E402
from shardwise.dimensions import NAMES, Dimensions  # noqa: E402

SECTION = "meshes"
COLUMNS = (*beside.LAYOUTS, "FSDP2")


def meshes(dims: int) -> list[str]:
    return [",".join(f"{name}2" for name in names) for names in itertools.combinations(NAMES, dims)]


def tables(pool: RankPool, names: list[str], most: int = 99) -> list[Table]:
    rows = []
    for name in names:
        ranks = Dimensions(name).ranks
        found = pool(beside.apart, name, world_size=ranks, timeout=300.0)[0]
        rows.append([name, str(ranks), *(found[column] for column in COLUMNS)])
        print(*rows[-1], file=sys.stderr, flush=True)
    header = [
        "mesh",
        "ranks",
        "interleaved and one process",
        "contiguous and one process",
        "interleaved and FSDP2",
    ]
    shown = [Table("Five steps in fp64: largest relative difference", header, rows)]
    for ranks in sorted({Dimensions(name).ranks for name in names}):
        alike = [name for name in names if Dimensions(name).ranks == ranks]
        found = pool(beside.checkpoints, alike, most, world_size=ranks, timeout=9000.0)[0]
        wrong = [f"{source} on {target}" for (source, target), right in found.items() if not right]
        row = [
            str(ranks),
            str(len(alike)),
            str(len(found)),
            str(len(found) - len(wrong)),
            ", ".join(wrong) or "-",
        ]
        header = ["ranks", "meshes", "loads", "equal bits", "others"]
        print(*row, file=sys.stderr, flush=True)
        shown.append(Table(f"Checkpoints on the meshes that follow, {ranks} ranks", header, [row]))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", nargs="+", default=[*meshes(2), *meshes(3)])
    parser.add_argument("--loads", type=int, default=99, help="meshes to load each checkpoint on, at most")
    parser.add_argument("--write", action="store_true", help="replace the section of TABLES.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results file to update")
    options = parser.parse_args()
    pool = RankPool()
    try:
        found = tables(pool, options.meshes, options.loads)
    finally:
        pool.close()
    for table in found:
        table.show()
    if options.write:
        facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
        body = [f"## {SECTION}", facts, *(table.markdown() for table in found)]
        write_section(SECTION, "\n\n".join(body), path=options.results)


if __name__ == "__main__":
    main()
