"""The benchmarks are programs, not a package: tests import them from their folder."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Program = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def run_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """`run_program(module, *arguments)` runs it in this process; its figures and the page it writes."""

    def run(module: ModuleType, *arguments: str) -> tuple[dict[str, Any], str]:
        figures, results = tmp_path / "figures.json", tmp_path / "RESULTS.md"
        outputs = ["--json", str(figures), "--results", str(results)]
        monkeypatch.setattr(sys, "argv", [module.__name__, *arguments, *outputs])
        threads = torch.get_num_threads()
        try:
            module.main()
        finally:  # what a program may set for itself
            gc.enable()
            torch.set_flush_denormal(False)
            torch.set_num_threads(threads)
        return json.loads(figures.read_text()), results.read_text()

    return run
