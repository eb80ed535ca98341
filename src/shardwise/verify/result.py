"""The result of a verification, as data, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from .compare import KINDS, START, Difference, Kind, Tolerance, first_beyond, worst


@dataclass(frozen=True)
class VerifyResult:
    """The differences of one verification, in the order in which they were found."""

    spec: str
    ranks: int
    replicas: int  # ranks are (replicas, ranks / replicas)
    steps: int
    seed: int
    layout: str | None  # None: the case's own choice
    tolerance: Tolerance
    differences: tuple[Difference, ...]
    mesh: str | None = None  # a spec of `Dimensions`
    alone: dict[str, str] = field(default_factory=dict)  # by dimension: the first difference beyond tolerance

    @property
    def ok(self) -> bool:
        """Whether everything is within tolerance."""
        return self.first is None

    @property
    def first(self) -> Difference | None:
        """The first difference beyond tolerance: start, then each step's loss, gradients, parameters."""
        return first_beyond(self.differences)

    @property
    def first_parameter(self) -> Difference | None:
        """The first gradient or parameter beyond tolerance."""
        return first_beyond(d for d in self.differences if d.kind != "loss")

    def worst(self, kind: Kind, step: int) -> Difference | None:
        """Return the most severe difference of a kind in a step; None if nothing was compared."""
        return worst(d for d in self.differences if d.kind == kind and d.step == step)

    def largest(self, kind: Kind, step: int) -> tuple[float, float]:
        """Return the largest (absolute, relative) difference of a kind in a step, over all its tensors."""
        diffs = [d for d in self.differences if d.kind == kind and d.step == step]
        return max((d.absolute for d in diffs), default=0.0), max((d.relative for d in diffs), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite become the strings "inf" and "nan"."""
        first, parameter = self.first, self.first_parameter
        as_they_are = ("ranks", "replicas", "steps", "seed", "layout", "mesh", "alone")
        return {
            "verdict": "within tolerance" if self.ok else "beyond tolerance",
            "case": self.spec,
            **{name: getattr(self, name) for name in as_they_are},
            "tolerance": asdict(self.tolerance),
            "first": _plain(first) if first else None,
            "first_parameter": _plain(parameter) if parameter else None,
            "differences": [_plain(difference) for difference in self.differences],
        }


def write_json(path: str | Path, results: Sequence[Any]) -> None:
    """Write a result's `to_dict()` as JSON; several results become a list under the worst verdict."""
    entries = [result.to_dict() for result in sorted(results, key=lambda result: result.ok)]
    content = entries[0]
    if len(results) > 1:
        content = {"verdict": entries[0]["verdict"], "results": [result.to_dict() for result in results]}
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def step_name(step: int) -> str:
    """Return a step's name in reports."""
    return "start" if step == START else str(step)


def table(result: VerifyResult) -> Table:
    """Return a table with a row per step: each kind's largest difference, the tensor closest to its limit."""
    ranks = f"{result.replicas} x {result.ranks // result.replicas}" if result.replicas > 1 else result.ranks
    layout = f", {result.layout} layout" if result.layout else ""
    rendered = Table(title=f"{result.spec}: {result.mesh or ranks} ranks{layout} against one process")
    rendered.add_column("step", justify="right")
    for kind in KINDS:
        rendered.add_column(f"{kind}\nabsolute\nrelative", justify="right", no_wrap=True)
    rendered.add_column("tolerance\n\nrelative", justify="right", no_wrap=True)
    rendered.add_column("closest to its limit", overflow="fold")
    for step in range(START, result.steps):
        cells: list[str] = []
        for kind in KINDS:
            tightest = result.worst(kind, step)
            style = "[red]{}[/red]" if tightest is not None and tightest.beyond else "{}"
            numbers = result.largest(kind, step) if tightest is not None else ()
            cells.append("\n".join(style.format(f"{n:.1e}") for n in numbers))
        nearest = worst(d for d in result.differences if d.step == step)
        rendered.add_row(
            step_name(step), *cells, f"\n{result.tolerance.at(step):.1e}", _share(nearest) if nearest else ""
        )
    return rendered


def verdict(result: VerifyResult) -> str:
    """Return one or two lines: that the runs agree, or the first difference and the first parameter."""
    first, parameter = result.first, result.first_parameter
    layout = f" ({result.layout} layout)" if result.layout else ""
    if first is None:
        return f"Within tolerance: {result.steps} steps on {result.ranks} ranks{layout} match one process."
    lines = [f"Beyond tolerance{layout}. First difference: {describe(first)}"]
    if parameter is not None and parameter is not first:
        lines.append(f"First parameter beyond tolerance: {describe(parameter)}")
    beyond = {d.name for d in result.differences if d.beyond and d.kind != "loss"}
    if len(beyond) > 1:
        lines.append(f"{len(beyond)} parameters are beyond tolerance in at least one step.")
    guilty = {name: text for name, text in result.alone.items() if text}
    if result.alone and not guilty:
        lines.append(f"Each of {', '.join(result.alone)} is within tolerance alone, but not together.")
    lines += [f"At fault: {name} is beyond tolerance alone: {text}" for name, text in guilty.items()]
    return "\n".join(lines)


def describe(difference: Difference) -> str:
    """Describe a difference and its place in one line."""
    subject = "the loss" if difference.kind == "loss" else f"the {difference.kind} {difference.name}"
    if difference.kind == "gradient":
        subject = f"the gradient of {difference.name}"
    moment = "before the first step" if difference.step == START else f"step {difference.step}"
    on = f" (rank {difference.rank})" if difference.rank else ""
    if difference.problem:
        return f"{moment}: {subject}{on}: {difference.problem}"
    return (
        f"{moment}: {subject}{on} differs by {difference.absolute:.3g} ({difference.relative:.3g} times its"
        f" scale, {difference.used:.3g} times the allowed difference)"
    )


def _share(difference: Difference) -> str:
    label = "loss" if difference.kind == "loss" else f"{difference.kind} {difference.name}"
    if difference.problem:
        return f"[red]{label}: {difference.problem}[/red]"
    share = f"{100 * difference.used:.2g}%" if difference.used <= 1 else f"{difference.used:.3g} times"
    return f"[red]{label}: {share}[/red]" if difference.beyond else f"{label}: {share}"


def _plain(difference: Difference) -> dict[str, Any]:
    values = asdict(difference) | {"step": step_name(difference.step), "beyond": difference.beyond}
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
