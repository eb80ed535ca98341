"""The plot of ratios, and the list of benchmarks that `make bench` runs."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest


def test_ratios_are_of_what_is_added_to_the_unsharded_step() -> None:
    from plot import step_panels

    def cost(cpu: float) -> dict[str, list[float]]:
        return {"cpu_s": [cpu] * 3, "wall_s": [cpu] * 3, "wire_bytes": [0.0] * 3}

    found = {"unsharded": cost(1.0), "torch": cost(3.0), "contiguous": cost(2.0)}
    added, wall = step_panels({"peer": "torch", "namespace": True, "worlds": {"2": found}})
    assert added.ratios == {"contiguous": 0.5}
    assert wall.ratios == {"contiguous": pytest.approx(2 / 3)}  # and no panel divides by zero bytes


def test_only_figures_that_are_there_are_drawn_and_the_drawing_is_well_formed(tmp_path: Path) -> None:
    from plot import panels_of, svg

    assert panels_of(tmp_path) == []
    peaks = {"torch": 100, "contiguous": 80, "floor": 400}
    found = {name: {"forward": peak, "backward": peak} for name, peak in peaks.items()}
    case = {"world": 8, "sequence": 512, "bytes": found}
    (tmp_path / "memory.json").write_text(json.dumps({"peer": "torch", "cases": [case]}))
    panels = panels_of(tmp_path)
    assert [panel.ratios for panel in panels] == [{"contiguous": 0.8, "floor": 4.0}] * 2

    drawing = ElementTree.fromstring(svg(panels))
    bars = [one for one in drawing.iter("{http://www.w3.org/2000/svg}rect") if one.get("fill") != "#ffffff"]
    short, cut = (float(bar.get("width", "nan")) for bar in bars[:2])
    assert cut == pytest.approx(short * 1.5 / 0.8, abs=0.2)  # bars end at a ratio of 1.5
    assert "4.00 floor" in "".join(drawing.itertext())


def test_a_benchmark_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import run_all

    present = [name for name in run_all.BENCHMARKS if not run_all.why_not(name)]
    assert {"host_cost", "memory", "steps"} <= set(present)
    assert run_all.command("memory", figures=tmp_path)[-2:] == ["--json", str(tmp_path / "memory.json")]
    monkeypatch.setitem(run_all.BENCHMARKS, "later", ["not_written_yet.py"])
    assert "not_written_yet.py" in run_all.why_not("later")
    monkeypatch.setattr(run_all.shutil, "which", lambda name: None)
    assert "valgrind" in run_all.why_not("instructions")
