"""The host-cost figures as tables: totals, overhead over the bare model per block, ratios to a peer, goals.

Two ratios, because two questions: of overheads (what sharding adds to forward and backward) and of totals
(what a phase costs that works on fewer elements once sharded, such as the optimizer). A goal says which it
is about.
"""

from collections.abc import Callable, Sequence
from typing import Any

from results import Table

# {phase: {measure: (ratio the goal is about, {implementation: at most})}}
_CLIP, _ADAMW = {"shardwise": 0.20, "contiguous": 0.20}, {"contiguous": 0.15}
_GOALS: dict[str, tuple[str, dict[str, float]]] = {
    "forward+backward/instructions": ("overhead", {"shardwise": 0.35, "contiguous": 0.08}),
    "clip_grad_norm_ (the library's own)/instructions": ("total", _CLIP),
    "clip_grad_norm_ (the library's own)/CPU ms": ("total", _CLIP),
    "AdamW fused/instructions": ("total", _ADAMW),
    "AdamW fused/CPU ms": ("total", _ADAMW),
}
_STARTUP_GOAL = 0.20


def _timed(value: Sequence[float]) -> str:
    return f"{value[0]:.2f} [{value[1]:.2f}..{value[2]:.2f}]"


def _counted(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.3f}" if reference > 0 else "-"


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
        row += [_ratio(over[name], over[peer]), _ratio(values[name], values[peer])]
    kind, limits = _GOALS.get(f"{phase}/{measure}", ("", {}))
    goals = [f"{name} {kind} <= {limits[name]}" for name in mine if name in limits]
    return [*row, "; ".join(goals) or "-"] if mine else row


def step_tables(figures: Any) -> list[Table]:
    """One table per world size, from `host_cost.measure_steps`."""
    measures: dict[str, tuple[str, Callable[[Any], str], Callable[[Any], float]]] = {
        "CPU ms": ("cpu_ms", _timed, lambda spread: spread[0]),
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


def startup_table(figures: Any) -> Table:
    """Sharding many small modules, from `host_cost.measure_startup`."""
    peer, startup = figures["peer"], figures["startup"]
    rows = []
    for name, cost in startup.items():
        ratio = _ratio(cost["cpu_ms"][0], startup[peer]["cpu_ms"][0])
        calls = _ratio(cost["calls"], startup[peer]["calls"])
        goal = "-" if name == peer else f"<= {_STARTUP_GOAL:.2f}"
        rows.append([name, _timed(cost["cpu_ms"]), ratio, _counted(cost["calls"]), calls, goal])
    header = ["implementation", "CPU ms", f"CPU time / {peer}", "calls", f"calls / {peer}", "goal (CPU time)"]
    return Table(f"fully_shard over {figures['modules']:,} linear layers and their root", header, rows)
