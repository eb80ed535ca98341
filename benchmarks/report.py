"""The host-cost figures as tables: totals, overhead over the bare model per block, ratios to a peer, goals.

Two ratios, because two questions: of overheads (what sharding adds to forward and backward) and of totals
(what a phase costs that works on fewer elements once sharded, such as the optimizer). A goal says which it
is about.
"""

from collections.abc import Callable, Sequence
from typing import Any

from results import Table, ratio, with_spread

_FLAT = "contiguous+flat"
_CLIP = {"interleaved": 0.20, "contiguous": 0.20, _FLAT: 0.20}
_FORWARD_BACKWARD = {"interleaved": 0.35, "contiguous": 0.08, _FLAT: 0.08}
_FUSED, _FOREACH = {"contiguous": 0.15, _FLAT: 0.06}, {"contiguous": 0.30, _FLAT: 0.12}
# {"phase/measure": (ratio the goal is about, {implementation: at most})}
_GOALS: dict[str, tuple[str, dict[str, float]]] = {
    "forward+backward/instructions": ("overhead", _FORWARD_BACKWARD),
    "clip_grad_norm_ (the library's own)/instructions": ("total", _CLIP),
    "clip_grad_norm_ (the library's own)/CPU ms": ("total", _CLIP),
    "AdamW fused/instructions": ("total", _FUSED),
    "AdamW fused/CPU ms": ("total", _FUSED),
    "AdamW foreach/instructions": ("total", _FOREACH),
    "AdamW foreach/CPU ms": ("total", _FOREACH),
}
_STARTUP_GOAL = "CPU time <= 0.20; heap <= 0.40"


def _counted(value: float) -> str:
    return f"{value:,.0f}"


def _header(names: Sequence[str], peer: str) -> list[str]:
    shown = [name for name in names if name not in ("bare", peer)]
    header = ["phase", "measure", *names]
    header += [f"{name}, over bare per block" for name in names if name != "bare"]
    for name in shown:
        header += [f"{name}/{peer} overhead", f"{name}/{peer} total"]
    return [*header, "goal"] if shown else header


def _row(
    phase: str, measure: str, shown: dict[str, str], values: dict[str, float], figures: Any
) -> list[str]:
    """`shown` is each implementation's total as text, `values` the same as a number."""
    peer, blocks, bare = figures["peer"], figures["blocks"], values["bare"]
    unit, scale = (" us", 1e3) if measure == "CPU ms" else ("", 1.0)
    over = {name: value - bare for name, value in values.items()}
    row = [phase, measure, *shown.values()]
    row += [f"{over[name] / blocks * scale:,.1f}{unit}" for name in values if name != "bare"]
    mine = [name for name in values if name not in ("bare", peer)]
    for name in mine:
        row += [ratio(over[name], over[peer]), ratio(values[name], values[peer])]
    kind, limits = _GOALS.get(f"{phase}/{measure}", ("", {}))
    goals = [f"{name} {kind} <= {limits[name]}" for name in mine if name in limits]
    return [*row, "; ".join(goals) or "-"] if mine else row


def step_tables(figures: Any) -> list[Table]:
    """One table per world size, from `host_cost.measure_steps`."""
    measures: dict[str, tuple[str, Callable[[Any], str], Callable[[Any], float]]] = {
        "CPU ms": ("cpu_ms", with_spread, lambda spread: spread[0]),
        "calls": ("calls", _counted, float),
        "ops": ("ops", _counted, float),
    }
    tables = []
    for world, phases in figures["worlds"].items():
        names = list(next(iter(phases.values())))
        rows = []
        for phase, by_name in phases.items():
            for measure, (key, show, number) in measures.items():
                shown = {name: show(by_name[name][key]) for name in names}
                values = {name: number(by_name[name][key]) for name in names}
                rows.append(_row(phase, measure, shown, values, figures))
        title = f"{world} ranks, {figures['blocks']} blocks of 12 parameters: median [min..max]"
        tables.append(Table(title, _header(names, figures["peer"]), rows))
    return tables


def instruction_tables(figures: Any) -> list[Table]:
    """One table per world size, from `host_cost.measure_instructions`."""
    tables = []
    for world, phases in figures["worlds"].items():
        names = list(next(iter(phases.values())))
        rows = []
        for phase, by_name in phases.items():
            values = {name: by_name[name][0] for name in names}
            shown = {name: _counted(value) for name, value in values.items()}
            rows.append(_row(phase, "instructions", shown, values, figures))
        title = f"{world} ranks, {figures['blocks']} blocks of 12 parameters: instructions of one step"
        tables.append(Table(title, _header(names, figures["peer"]), rows))
    return tables


def startup_tables(figures: Any) -> list[Table]:
    """One table a model, from `host_cost.measure_startup`."""
    peer = figures["peer"]
    header = ["implementation", "CPU ms", f"CPU time / {peer}", "calls", f"calls / {peer}"]
    header += ["Python heap MB", f"heap / {peer}", "goal"]
    tables = []
    for title, startup in figures["startup"].items():
        reference = startup[peer]
        rows = []
        for name, cost in startup.items():
            row = [name, with_spread(cost["cpu_ms"]), ratio(cost["cpu_ms"][0], reference["cpu_ms"][0])]
            row += [_counted(cost["calls"]), ratio(cost["calls"], reference["calls"])]
            row += [f"{cost['heap_bytes'] / 1e6:.2f}", ratio(cost["heap_bytes"], reference["heap_bytes"])]
            rows.append([*row, "-" if name == peer else _STARTUP_GOAL])
        tables.append(Table(f"fully_shard over {title}", header, rows))
    return tables
