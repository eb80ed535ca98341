"""A profile from measurements: on real ranks, and the line through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from ranks import on_ranks
from shardwise import launch, planner
from shardwise.cli import NOT_RUN, app
from shardwise.planner.calibrate import Sizes, _host_seconds, line

TINY = Sizes((16, 32, 64), 1 << 16, (1 << 10, 1 << 14), 16, 2)


@on_ranks(2)
def test_a_measured_profile_is_a_file_that_plans_are_made_with(tmp_path: Path) -> None:
    measured = planner.calibrate(sizes=TINY)
    assert dist.is_initialized()  # the ranks' own group is theirs still
    path = tmp_path / f"mine{dist.get_rank()}.toml"
    path.write_text(planner.to_toml(measured))
    assert planner.hardware_of(str(path)) == measured
    assert 0 < measured.matmul_efficiency <= 1
    assert 0 < measured.bandwidth_efficiency <= 1
    assert 0 < measured.host_seconds < 1
    assert 0 < measured.host_link_bytes_per_s < measured.network_bytes_per_s
    assert "not measured: network" in measured.source


def test_what_is_like_a_profile_has_its_peaks_and_the_links_that_no_rank_can_measure() -> None:
    h100 = planner.hardware_of("h100")
    measured = planner.calibrate(like=h100, sizes=TINY, name="mine")
    assert measured.name == "mine"
    assert measured.peak_flops == h100.peak_flops
    assert measured.host_link_bytes_per_s == h100.host_link_bytes_per_s
    assert measured.matmul_efficiency < 0.1
    assert f"not measured: host link and network, taken to be of {h100.name}" in measured.source


def test_a_build_for_an_accelerator_measures_the_cpu_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    measured = planner.calibrate(sizes=TINY)
    assert measured.host_link_bytes_per_s > 0
    assert "cuda" not in measured.source


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: str
) -> None:
    for module, name in ((planner, "calibrate"), (launch, "launch")):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: pytest.fail("it is measured"))
    for out in (tmp_path, tmp_path / "nowhere" / "mine.toml"):
        result = CliRunner().invoke(app, ["calibrate", str(out), "--small", "--ranks", ranks])
        assert result.exit_code == NOT_RUN
        assert result.stderr.startswith(f"Error: {out} cannot be written: give a file in a folder")
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "mine.txt"), "--ranks", ranks])
    assert result.exit_code == NOT_RUN
    assert "mine.txt: expected a name that ends in .toml" in result.stderr


def test_as_many_ranks_measure_as_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[tuple[list[str], int]] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "launch", lambda command, *, ranks: begun.append((command, ranks)) or 3)
    out = str(tmp_path / "mine.toml")
    result = CliRunner().invoke(app, ["calibrate", out, "--small", "--like", "h100", "--ranks", "2"])
    assert result.exit_code == 3  # that of the ranks
    assert begun == [(["-m", "shardwise", "calibrate", out, "--like", "h100", "--small"], 2)]


def test_what_the_host_takes_is_measured_on_operators() -> None:
    class Adds(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.add_.Scalar or func is torch.ops.aten.add_.Tensor
            return func(*args, **(kwargs or {}))

    with Adds() as adds:
        _host_seconds(torch.device("cpu"))
    assert adds.count == (2 + 5) * 200


def test_a_line_through_measurements_has_no_negative_latency() -> None:
    assert line([1.0, 10.0, 100.0], [3.0, 12.0, 102.0]) == pytest.approx((2.0, 1.0))
    assert line([1.0, 10.0, 100.0], [1.5, 10.5, 100.5]) == pytest.approx((0.5, 1.0))
    assert line([1.0, 10.0, 100.0], [0.5, 9.0, 99.0]) == (0.0, 0.5)
