"""The step benchmark: its theory by hand, and a whole run on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_theory_counts_each_gather_and_reduction_as_all_parameters_but_one_ranks_share() -> None:
    from steps import GPT, Sizes, theory_bytes

    sizes = Sizes(width=64, blocks=4, batch=1, length=16)
    model = GPT(width=64, blocks=4, length=16)
    total = 4 * sum(p.numel() for p in model.parameters())
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    assert theory_bytes("unsharded", world=4, sizes=sizes) == 0
    assert theory_bytes("DDP", world=4, sizes=sizes) == 2 * total * 3 / 4
    assert theory_bytes("torch, no reshard", world=2, sizes=sizes) == 2 * total / 2
    assert theory_bytes("torch", world=2, sizes=sizes) == pytest.approx((2 * total + 4 * block) / 2)
    assert theory_bytes("interleaved", world=2, sizes=sizes) == pytest.approx((2 * total + 3 * block) / 2)


def test_disagreement_is_the_largest_relative_difference() -> None:
    from steps import disagreement

    assert disagreement([1.0, 4.0], [1.0, 4.0]) == 0
    assert disagreement([1.0, 4.5], [1.1, 5.0]) == pytest.approx(0.1)


def test_windows_are_text_and_depend_on_the_seed_only() -> None:
    from steps import standard_library_text, windows

    text = standard_library_text()
    assert b"def " in bytes(text[:100_000].tolist())
    first = windows(text, count=3, length=8, seed=1)
    assert first.shape == (3, 9)
    assert torch.equal(first, windows(text, count=3, length=8, seed=1))
    assert not torch.equal(first, windows(text, count=3, length=8, seed=2))


def test_a_small_run_trains_every_way_to_the_same_losses(tmp_path: Path) -> None:
    figures_path, results_path = tmp_path / "figures.json", tmp_path / "RESULTS.md"
    command = [sys.executable, str(BENCHMARKS / "steps.py"), "--world", "2", "--width", "64", "--blocks", "2"]
    command += ["--batch", "1", "--length", "16", "--steps", "2"]
    command += ["--json", str(figures_path), "--results", str(results_path)]
    subprocess.run(command, check=True, timeout=240)

    figures = json.loads(figures_path.read_text())
    found = figures["worlds"]["2"]
    assert found.keys() >= {"unsharded", "DDP", "torch", "torch, no reshard", "interleaved", "contiguous"}
    assert found["torch"]["collectives"] == {"all_gather": 5, "reduce_scatter": 3}
    assert found["unsharded"]["collectives"] == {}
    for name, one in found.items():
        if name == "unsharded":
            continue
        # float32 sums in another order; AdamW's first steps divide by gradients and pass it on
        assert one["losses"] == pytest.approx(found["DDP"]["losses"], rel=1e-5)
        if figures["namespace"]:
            assert one["wire_bytes"][1] >= one["theory_bytes"] * 0.999
    assert "2 ranks, 0.1 M parameters" in results_path.read_text()
