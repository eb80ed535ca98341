"""How much of the contiguous layout's gathered buffer is padding, on the layers of real models.

    python benchmarks/padding.py
    python benchmarks/padding.py --ranks 8 4096 --rows 1 128 --write

For each model, number of ranks and block of rows that must stay together: the padding of a group of one
layer over its elements; the padding that no packing can avoid, whatever its order (`least_shard_numel`); and
how many layers must travel together for less than 3%, with the padding of such a group. Nothing is run: this
is what the layout computes, for buffers gathered as bfloat16 and aligned to 16 bytes. Only the times of the
last table depend on the machine.
"""

import argparse
import math
import time
from collections.abc import Sequence

from results import Table, machine_facts, write_section

from shardwise.layout import least_shard_numel, pack

Shapes = list[tuple[int, ...]]
ALIGN = 8  # elements of bfloat16 in 16 bytes
GOAL = 0.03
TIMED = [(100, 8), (300, 100_000), (1000, 8), (1000, 64), (1000, 4096), (1000, 100_000)]  # parameters, ranks


def llama(width: int, hidden: int) -> Shapes:
    attention = [(width, width), (1024, width), (1024, width), (width, width)]  # 8 key-value heads of 128
    return [*attention, (hidden, width), (hidden, width), (width, hidden), (width,), (width,)]


def mixtral(width: int = 4096, hidden: int = 14336, experts: int = 8) -> Shapes:
    attention = [(width, width), (1024, width), (1024, width), (width, width)]
    expert = [(hidden, width), (width, hidden), (hidden, width)]
    return [*attention, (experts, width), *expert * experts, (width,), (width,)]


MODELS: dict[str, tuple[int, Shapes]] = {  # layers, shapes of one
    "Llama-3 8B": (32, llama(4096, 14336)),
    "Llama-3 70B": (80, llama(8192, 28672)),
    "Llama-3 405B": (126, llama(16384, 53248)),
    "Mixtral 8x7B": (32, mixtral()),
}


def padding(shapes: Shapes, *, rows: int, ranks: int) -> tuple[float, float]:
    """Padding over elements of a group of these parameters: as packed, and what no packing can be below."""
    numels = tuple(math.prod(shape) for shape in shapes)
    blocks = tuple(rows * math.prod(shape[1:]) for shape in shapes)
    packed = ranks * pack(numels, blocks, ranks=ranks, align=ALIGN).shard_numel - sum(numels)
    least = ranks * least_shard_numel(numels, blocks, ranks=ranks, align=ALIGN) - sum(numels)
    return packed / sum(numels), least / sum(numels)


def layers_per_group(model: str, *, rows: int, ranks: int) -> tuple[int, float] | None:
    """The least number of layers in a group padded by less than the goal, and its padding."""
    layers, layer = MODELS[model]
    for count in range(1, layers + 1):
        packed, _ = padding(layer * count, rows=rows, ranks=ranks)
        if packed < GOAL:
            return count, packed
    return None


def padding_table(worlds: Sequence[int], blocks: Sequence[int]) -> Table:
    result = []
    for model, (layers, layer) in MODELS.items():
        for ranks in worlds:
            for rows in blocks:
                packed, least = padding(layer, rows=rows, ranks=ranks)
                count, reached = layers_per_group(model, rows=rows, ranks=ranks) or (None, None)
                row = [model, f"{ranks:,}", str(rows), f"{packed:.2%}", f"{least:.2%}"]
                result.append(
                    [*row, *(["-", "-"] if count is None else [f"{count} of {layers}", f"{reached:.2%}"])]
                )
    header = ["model", "ranks", "rows in a block", "padding, 1 layer", "unavoidable, 1 layer"]
    return Table("Padding", [*header, f"layers in a group for < {GOAL:.0%}", "padding there"], result)


def time_table() -> Table:
    """CPU time of packing one group of many parameters, and of its lower bound, nothing remembered."""
    result = []
    layer = MODELS["Llama-3 405B"][1]
    subjects = {
        "layers of Llama-3 405B": lambda count: (layer * (count // len(layer) + 1))[:count],
        "matrices, no two alike": lambda count: [
            (i * 7919 % 3989 + 1, i * 104729 % 3989 + 1) for i in range(1, count + 1)
        ],
    }
    for name, shapes_of in subjects.items():
        for parameters, ranks in TIMED:
            pack.cache_clear()
            begin = time.process_time()
            packed, least = padding(shapes_of(parameters), rows=1, ranks=ranks)
            spent = time.process_time() - begin
            row = [name, f"{parameters:,}", f"{ranks:,}", f"{spent * 1e3:.1f}"]
            result.append([*row, f"{packed:.2%}", f"{least:.2%}"])
    header = ["group", "parameters", "ranks", "CPU ms", "padding", "unavoidable"]
    return Table("Time to pack one group", header, result)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024, 4096], help="shard ranks")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="rows in a block")
    parser.add_argument("--write", action="store_true", help="rewrite the section of TABLES.md too")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    tables = [padding_table(options.ranks, options.rows), time_table()]
    for table in tables:
        table.show()
    if options.write:
        facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
        write_section("padding", "\n\n".join(["## padding", facts, *(table.markdown() for table in tables)]))


if __name__ == "__main__":
    main()
