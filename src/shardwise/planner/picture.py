"""A plan as one picture for slides: memory over the step by category, and each stream's work over time."""

from __future__ import annotations

import io
from typing import Any

from shardwise.errors import from_extra
from shardwise.planner.events import CATEGORIES, EXPERTS, LANES, PIPELINE, TENSOR_PARALLEL, ULYSSES
from shardwise.planner.page import categories, colour_of, levels, streams, top_bytes, windows
from shardwise.planner.plan import Plan, sized, unit_of

_SHADES = ("#2563c9", "#7ba7ea", "#0f7b5f", "#e0a526", "#8f6fc4", "#c2548b", "#6b7f99", "#b9c0c9")
COLOURS = dict(zip(CATEGORIES, _SHADES, strict=True))
PHASES = {"forward": "#2b8ca3", "backward": "#c46a32", "optimizer": "#7d5fb0"}
PHASES |= {TENSOR_PARALLEL: "#b8872b", ULYSSES: "#a03d6b", EXPERTS: "#4d7a2f", PIPELINE: "#3d5a80"}
OTHER, RULE = "#6b7f99", "#b3261e"


def picture(made: Plan) -> bytes:
    """Draw a PNG, 16 to 9.

    Raises:
        ShardwiseError: matplotlib is missing.
    """
    matplotlib = from_extra("plan", "matplotlib.figure", feature="a PNG of a plan")
    figure: Any = matplotlib.Figure(figsize=(12.8, 7.2), dpi=150, layout="constrained")
    lanes = streams(made)
    rows = figure.subplots(2 if lanes else 1, 1, squeeze=False, height_ratios=[3, 1] if lanes else [1])
    figure.suptitle(_title(made), x=0.02, ha="left", fontsize=17, fontweight="bold")
    _memory(rows[0][0], made)
    if lanes:
        _lanes(rows[1][0], made, lanes)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _title(plan: Plan) -> str:
    text = f"{plan.model} on {plan.setup.ranks:,} ranks"
    if plan.hardware is None:
        return text
    verdict = "to spare" if plan.fits else "too much"
    return (
        f"{text}: {sized(abs(plan.free_bytes))} {verdict}, {plan.tokens_per_s:,.0f} tokens/s a device,"
        f" MFU {plan.mfu:.0%}"
    )


def _memory(axes: Any, plan: Plan) -> None:
    moments, (name_of_unit, unit) = windows(plan), unit_of(top_bytes(plan))
    edges = [*(window.begin for window in moments), moments[-1].end]
    base = [0.0] * len(moments)
    for name in categories(plan):
        top = [
            low + window.moment.alive.get(name, 0) / unit for low, window in zip(base, moments, strict=True)
        ]
        axes.stairs(top, edges, baseline=base, fill=True, color=COLOURS[name], label=name)
        base = top
    for size, name in levels(plan):
        axes.axhline(size / unit, color=RULE, linestyle="--", linewidth=1.2)
        axes.text(edges[-1], size / unit, f"{name} {sized(size)} ", ha="right", va="bottom", color=RULE)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, top_bytes(plan) / unit), ylabel=f"{name_of_unit} of a rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=8, frameon=False, columnspacing=1.2)
    if plan.times is None:
        axes.set_xticks([])


def _lanes(axes: Any, plan: Plan, lanes: list[str]) -> None:
    for span in plan.step_times.spans:
        box = [(span.begin, max(span.end - span.begin, plan.step_times.step / 2000))]
        colour = PHASES.get(colour_of(span), OTHER)
        axes.broken_barh(box, (lanes.index(span.stream) - 0.38, 0.76), color=colour, linewidth=0)
    axes.set(xlim=(0, plan.step_times.step), ylim=(len(lanes) - 0.5, -0.5), xlabel="seconds")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.spines[["top", "right"]].set_visible(False)
    for name, colour in ((name, PHASES[name]) for name in PHASES if name in lanes or name not in LANES):
        axes.plot([], [], color=colour, linewidth=6, label=name)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
