"""What a rank pays as ranks grow: host time of a step, Python's heap, and start-up.

    python benchmarks/scale.py                        # 8 to 4,096 ranks: about 3 minutes
    python benchmarks/scale.py --write                # and replace the section of TABLES.md, and scale.svg

One rank in one process, under a no-op process group of any size (`shardwise.planner.noop_group`): what is
left is the library. The model is blocks of 8 parameters of 4,096 rows each, so that up to 4,096 ranks cut
them without padding, and all ranks together always have as much memory. A step is forward, backward, clipping
and fused AdamW; its CPU time is interleaved step by step between the implementations. Start-up is
`fully_shard` of every block and the root, and the first step, where libraries do what they put off. The heap
is Python's own objects that both leave behind. Calls do not depend on the machine's load.
"""

import argparse
import gc
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
from host_cost import count_calls, cpu_ms, heap_bytes
from plot import COLOURS, OTHER_COLOUR
from results import RESULTS, Table, machine_facts, spread, with_spread, write_section
from subjects import PEER, available, shard
from torch import nn

from shardwise.planner.noop_group import noop_world

SECTION = "scale"
NAMES = [PEER, "interleaved", "contiguous"]
ROWS, WIDTH, LAYERS = 4096, 8, 4
MEASURES = {  # by key of the figures: title, digits
    "step_ms": ("CPU ms of a step", 1),
    "startup_ms": ("CPU ms to shard and to take the first step", 0),
    "heap_kb": ("Python heap, kB", 0),
    "step_calls": ("Python calls of a step", 0),
}


class Block(nn.Module):
    """Layers of as many rows as there may be ranks, each averaged back to the block's width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, ROWS) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, WIDTH), in and out
        for layer in self.layers:
            x = x + layer(x).view(len(x), WIDTH, -1).mean(-1)
        return x


class Subject:
    """A model sharded by one implementation. A step is all that training does."""

    def __init__(self, name: str, mesh: Any, blocks: int) -> None:
        self.model = nn.Sequential(*(Block() for _ in range(blocks)))
        self.library = shard(name, self.model, list(self.model), mesh=mesh)
        self.optimizer = self.library.adamw(self.model, fused=True)

    def step(self) -> None:
        self.model(torch.ones(1, WIDTH)).sum().backward()
        self.library.clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @staticmethod
    def started(name: str, mesh: Any, blocks: int) -> "Subject":
        subject = Subject(name, mesh, blocks)
        subject.step()
        return subject


def measure(names: list[str], world: int, *, blocks: int, steps: int) -> dict[str, Any]:
    """`{implementation: {measure: [median, least, most]}}` on `world` ranks."""
    with noop_world(world) as mesh:
        found: dict[str, Any] = {}
        for name in names:
            Subject.started(name, mesh, 1)  # imports, and what is found once
            startup = [cpu_ms(partial(Subject.started, name, mesh, blocks)) for _ in range(3)]
            heap = heap_bytes(partial(Subject.started, name, mesh, blocks)) / 1e3
            found[name] = {"startup_ms": spread(startup), "heap_kb": spread([heap])}
        subjects = {name: Subject.started(name, mesh, blocks) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(steps):
            gc.collect()
            for name, subject in subjects.items():
                times[name].append(cpu_ms(subject.step))
        for name, subject in subjects.items():
            found[name]["step_ms"] = spread(times[name][2:])
            found[name]["step_calls"] = spread([count_calls(subject.step)])
    return found


def tables(figures: dict[str, Any]) -> list[Table]:
    made = []
    worlds = figures["worlds"]
    for key, (title, digits) in MEASURES.items():
        rows = []
        for name in figures["names"]:
            cells = [worlds[world][name][key] for world in worlds]
            shown = [
                with_spread(one, digits=digits) if one[1] != one[2] else f"{one[0]:,.{digits}f}"
                for one in cells
            ]
            rows.append([name, *shown, f"{cells[-1][0] / cells[0][0]:.2f}"])
        made.append(Table(title, ["", *(f"{int(w):,} ranks" for w in worlds), "last / first"], rows))
    return made


def picture(figures: dict[str, Any]) -> str:
    """A panel for each measure, a line for each implementation, ranks growing to the right."""
    worlds, names = list(figures["worlds"]), figures["names"]
    width, height, left, gap = 250, 150, 60, 30
    parts = []
    shown = list(MEASURES.items())[:3]
    for index, (key, (title, _)) in enumerate(shown):
        x0, y0 = left + index * (width + left), 60
        most = max(figures["worlds"][w][name][key][0] for w in worlds for name in names)
        parts.append(f'<text x="{x0}" y="{y0 - 14}" font-weight="600">{escape(title)}</text>')
        for share in (0.0, 0.5, 1.0):
            y = y0 + height * (1 - share)
            parts.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y}" y2="{y}" stroke="#e3e6ea"/>')
            parts.append(f'<text x="{x0 - 6}" y="{y + 4}" text-anchor="end">{most * share:,.0f}</text>')
        places = [x0 + width * at / max(1, len(worlds) - 1) for at in range(len(worlds))]
        for place, world in zip(places, worlds, strict=True):
            parts.append(
                f'<text x="{place}" y="{y0 + height + 16}" text-anchor="middle">{int(world):,}</text>'
            )
        for name in names:
            values = [figures["worlds"][w][name][key][0] for w in worlds]
            points = [
                f"{x:.1f},{y0 + height * (1 - v / most):.1f}" for x, v in zip(places, values, strict=True)
            ]
            colour = COLOURS.get(name, OTHER_COLOUR)
            parts.append(
                f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
    for index, name in enumerate(names):
        x, y = left + index * 130, 60 + height + 44
        colour = COLOURS.get(name, OTHER_COLOUR)
        parts.append(f'<line x1="{x}" x2="{x + 20}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 26}" y="{y + 4}">{"FSDP2" if name == PEER else escape(name)}</text>')
    across, down = left + len(shown) * (width + left) - gap, 60 + height + 60
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" width="{across}"'
        ' font-family="system-ui, sans-serif" font-size="11" fill="#1d2126">'
    )
    title = f"What a rank pays, by number of ranks: {figures['blocks']} blocks"
    parts.insert(0, f'<text x="16" y="20" font-size="14">{title}</text>')
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="replace the section of the results file, draw")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the Markdown file to update")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # the no-op group leaves rubbish in parameters, and denormals are slow
    gc.disable()
    facts, names = machine_facts(), available(NAMES)
    how = {"blocks": options.blocks, "steps": options.steps}
    worlds = {str(world): measure(names, world, **how) for world in options.world}
    figures = {"names": names, "blocks": options.blocks, "worlds": worlds}
    for shown in tables(figures):
        shown.show()
    if options.write:
        described = "; ".join(f"{name} {value}" for name, value in facts.items())
        body = [f"## {SECTION}", described, "![what a rank pays as ranks grow](scale.svg)"]
        write_section(
            SECTION, "\n\n".join([*body, *(one.markdown() for one in tables(figures))]), path=options.results
        )
        options.results.with_name("scale.svg").write_text(picture(figures))


if __name__ == "__main__":
    main()
