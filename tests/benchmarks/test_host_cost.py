"""The host-cost benchmark runs, counts what it says, and keeps the results file in order."""

import json
import subprocess
import sys
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_small_run_reports_that_sharding_with_the_peer_costs_calls_and_ops(tmp_path: Path) -> None:
    figures_path, results_path = tmp_path / "figures.json", tmp_path / "RESULTS.md"
    command = [sys.executable, str(BENCHMARKS / "host_cost.py"), "--vs", "torch", "--world", "4"]
    command += ["--blocks", "1", "--steps", "1", "--modules", "2"]
    command += ["--json", str(figures_path), "--results", str(results_path)]
    subprocess.run(command, check=True, timeout=120)

    figures = json.loads(figures_path.read_text())
    phase = figures["worlds"]["4"]["forward+backward"]
    assert phase["torch"]["calls"] > phase["bare"]["calls"] > 0
    assert phase["torch"]["ops"] > phase["bare"]["ops"] > 0
    linear, llama = figures["startup"].values()
    assert llama["torch"]["calls"] > linear["torch"]["calls"] > 0
    assert llama["torch"]["heap_bytes"] > linear["torch"]["heap_bytes"] > 0
    assert "4 ranks, 1 blocks" in results_path.read_text()


def test_calls_made_by_python_code_inside_backward_are_counted() -> None:
    from host_cost import count_calls

    class ManyCalls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            for _ in range(500):
                abs(-1)
            return gradient

    x = torch.ones(2, requires_grad=True)
    assert count_calls(lambda: ManyCalls.apply(x).sum().backward()) >= 500
    assert count_calls(lambda: x.clone().sum().backward()) < 500


def test_a_section_is_replaced_where_it_stands_and_the_others_are_kept(tmp_path: Path) -> None:
    from results import write_section

    path = tmp_path / "RESULTS.md"
    write_section("first", "old", path=path)
    write_section("second", "kept", path=path)
    write_section("first", "new", path=path)

    text = path.read_text()
    assert "old" not in text
    assert text.index("new") < text.index("kept")


def test_the_heap_is_what_work_leaves_behind_and_not_what_it_freed() -> None:
    from host_cost import heap_bytes

    kept, freed = 1_000_000, 8_000_000

    def work() -> bytearray:
        bytearray(freed)
        return bytearray(kept)

    assert kept <= heap_bytes(work) < kept + 50_000
