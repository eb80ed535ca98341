"""Ratios to torch's FSDP2 as bars, from the figures that the benchmarks wrote: one SVG file.

    python benchmarks/plot.py runs/bench --out benchmarks/results.svg

A bar shorter than the line at 1 is cheaper than FSDP2. Figures that are not there are left out.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("results.svg")
NOT_OURS = ("bare", "unsharded", "floor, nothing ahead")
COLOURS = {
    "interleaved": "#7ba7ea",
    "contiguous": "#2563c9",
    "contiguous+flat": "#0f7b5f",
    "floor": "#b3b9c1",
    "DDP": "#b58900",
    "torch, no reshard": "#c98a6b",
}
OTHER_COLOUR = "#8a8f98"
WIDTH, LEFT, BAR, GAP, LONGEST = 760, 16, 14, 10, 1.5  # pixels, and the ratio at which bars are cut


@dataclass(frozen=True)
class Panel:
    """One measure; `ratios` to the peer by implementation."""

    title: str
    ratios: dict[str, float]


def _panel(
    title: str, found: dict[str, Any], peer: str, number: Callable[[Any], float], bare: str | None = None
) -> list[Panel]:
    """The panel of `number(found[name])`, of what it adds to `found[bare]` if that is given; or none."""
    base = 0.0 if bare is None else number(found[bare])
    reference = number(found[peer]) - base
    if reference <= 0:
        return []
    names = [name for name in found if name != peer and name not in NOT_OURS]
    return [Panel(title, {name: (number(found[name]) - base) / reference for name in names})]


def host_cost_panels(figures: Any) -> list[Panel]:
    peer, panels = figures["peer"], []
    world, phases = next(iter(figures["worlds"].items()))
    for phase, found in phases.items():
        if phase in ("zero_grad", "clip_grad_norm_ (torch.nn.utils)"):
            continue
        bare = "bare" if phase == "forward+backward" else None
        kind = "added CPU time" if bare else "CPU time"
        panels += _panel(f"{phase}: {kind}, {world} ranks", found, peer, lambda one: one["cpu_ms"][0], bare)
    for title, found in figures["startup"].items():
        panels += _panel(f"fully_shard, {title}: CPU time", found, peer, lambda one: one["cpu_ms"][0])
    return panels


def instruction_panels(figures: Any) -> list[Panel]:
    world, phases = next(iter(figures["worlds"].items()))
    found = phases["forward+backward"]
    title = f"forward+backward: added instructions, {world} ranks"
    return _panel(title, found, figures["peer"], lambda one: one[0], "bare")


def memory_panels(figures: Any) -> list[Panel]:
    panels = []
    for case in figures["cases"]:
        for phase in ("forward", "backward"):
            title = f"peak memory in {phase}, {case['world']} ranks, sequence {case['sequence']}"
            panels += _panel(title, case["bytes"], figures["peer"], lambda one, phase=phase: one[phase])
    return panels


def step_panels(figures: Any) -> list[Panel]:
    peer, panels = figures["peer"], []
    for world, found in figures["worlds"].items():
        title = f"step on {world} gloo ranks"
        panels += _panel(f"{title}: added CPU time", found, peer, lambda one: one["cpu_s"][0], "unsharded")
        panels += _panel(f"{title}: wall time", found, peer, lambda one: one["wall_s"][0])
        if figures["namespace"]:
            panels += _panel(f"{title}: bytes sent", found, peer, lambda one: one["wire_bytes"][0])
    return panels


PANELS: dict[str, Callable[[Any], list[Panel]]] = {  # by the name of the file of figures
    "instructions": instruction_panels,
    "host_cost": host_cost_panels,
    "memory": memory_panels,
    "steps": step_panels,
}


def panels_of(folder: Path) -> list[Panel]:
    """The panels of all figures in `folder`."""
    panels = []
    for name, make in PANELS.items():
        path = folder / f"{name}.json"
        if path.exists():
            panels += make(json.loads(path.read_text()))
    return panels


def svg(panels: Sequence[Panel]) -> str:
    """The panels from top to bottom; the file needs nothing else."""
    scale = (WIDTH - LEFT - 170) / LONGEST
    parts: list[str] = []
    at = 40
    for panel in panels:
        parts.append(f'<text x="{LEFT}" y="{at + 10}" font-weight="600">{escape(panel.title)}</text>')
        at += BAR + 2
        for name, value in panel.ratios.items():
            length = max(1.0, min(max(value, 0.0), LONGEST) * scale)
            colour = COLOURS.get(name, OTHER_COLOUR)
            parts.append(
                f'<rect x="{LEFT}" y="{at}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}"/>'
            )
            label = f"{value:.2f} {escape(name)}"
            parts.append(f'<text x="{LEFT + length + 5:.1f}" y="{at + BAR - 4}">{label}</text>')
            at += BAR
        at += GAP
    line = f"{LEFT + scale:.1f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at}" width="{WIDTH}"'
            ' font-family="system-ui, sans-serif" font-size="11" fill="#1d2126">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="20" font-size="14">Ratio to FSDP2 in the same run; less is cheaper</text>',
            f'<line x1="{line}" x2="{line}" y1="40" y2="{at}" stroke="#c2410c" stroke-dasharray="4 3"/>',
            *parts,
            f'<text x="{line}" y="36" text-anchor="middle">1</text>',
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the benchmarks' JSON figures")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    panels = panels_of(options.folder)
    if not panels:
        raise SystemExit(f"no figures in {options.folder}")
    options.out.write_text(svg(panels))
    print(f"{options.out}: {len(panels)} measures")


if __name__ == "__main__":
    main()
