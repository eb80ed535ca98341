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


def test_samples_of_a_step_count_for_what_they_are() -> None:
    from compiled_where import part_of, table

    samples = {
        ("gloo_tcp_loop", "[kernel.kallsyms]", "tcp_sendmsg"): "communication",
        ("python", "libtorch_cpu.so", "c10d::ProcessGroupGloo::runLoop"): "communication",
        ("python", "libtorch_cpu.so", "mkl_blas_avx512_sgemm_kernel_0"): "kernels",
        ("python", "c3fd7d724.main.so", "kernel"): "kernels",
        ("python", "libtorch_cpu.so", "torch::autograd::Engine::evaluate_function"): "dispatch",
        ("python", "libtorch_python.so", "GuardManager::check"): "Python",
        ("python", "[kernel.kallsyms]", "do_syscall_64"): "system",
    }
    assert {sample: part_of(*sample) for sample in samples} == samples
    shares = dict.fromkeys(("communication", "kernels", "dispatch", "Python", "system"), 0.2)
    found = {name: {"cpu_s": [cpu], "shares": shares} for name, cpu in (("eager", 0.01), ("compiled", 0.005))}
    made = table(found, world=2, blocks=4, backend="inductor")
    assert made.rows[1] == ["compiled", "5.00", "0.50", *["1.00"] * 5]
