"""The benchmark of compiled steps: what it measures is of the way that it names."""

from __future__ import annotations


def figures(cpu: float, *, peak: int, beside: float = 2.0) -> dict[str, object]:
    spread = [cpu, cpu, cpu]
    other = {"cpu_s": [beside] * 3, "losses": [1.0, 0.5]}
    counts = {"graphs": 1, "recompiled": 0, "breaks": 0, "compile_s": 3.0}
    return {"cpu_s": spread, "losses": [1.0, 0.5], "peak_bytes": peak, "beside": other, **counts}


def test_ratios_are_to_the_eager_peer_that_ran_beside() -> None:
    from compiled_step import EAGER, PEER_COMPILED, table

    found = {
        EAGER: figures(2.0, peak=100),
        PEER_COMPILED: figures(4.0, peak=200, beside=4.0),
        "contiguous, compiled": figures(1.0, peak=50),
    }
    made = table({"world": 2, "blocks": 4, "backend": "inductor", "found": found})
    row = dict(zip(made.header, made.rows[-1], strict=True))
    assert made.rows[-1][2:4] == ["0.50", "0.500"]
    assert row["compile CPU s"] == "3.0"
    assert made.rows[-1][9] == "0.500"
    assert made.rows[0][4:8] == ["-"] * 4  # eager: nothing to compile


def test_peaks_are_those_of_a_step() -> None:
    import torch
    from compiled_step import _peak_bytes

    kept: list[torch.Tensor] = []

    def work() -> None:
        passing = torch.zeros(1_000_000)
        kept.append(torch.zeros(250_000))
        del passing

    assert 5_000_000 <= _peak_bytes(work) < 5_100_000
