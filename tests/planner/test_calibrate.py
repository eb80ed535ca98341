"""A profile from measurements: on real ranks, and the line through them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from ranks import on_ranks
from shardwise import launch, planner
from shardwise.cli import NOT_RUN, app
from shardwise.comm.count import Collective
from shardwise.errors import ShardingError
from shardwise.planner.calibrate import SMALL, Sizes, _group, _host_seconds, _links, line
from shardwise.planner.timing import send_seconds
from shardwise.verify.streams import DEVICE, simulated

TINY = Sizes((16, 32, 64), 1 << 16, (1 << 10, 1 << 14), 16, 2)


@on_ranks(2)
def test_a_measured_profile_is_a_file_that_plans_are_made_with(tmp_path: Path) -> None:
    for sizes in (Sizes(), SMALL, TINY):
        assert sorted(set(sizes.sent_bytes)) == [*sizes.sent_bytes]  # from small messages to large ones
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


def test_an_efficiency_that_no_device_has_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(planner.to_toml(replace(planner.hardware_of("h100"), attention_efficiency=1e-300)))
    with pytest.raises(ShardingError, match=r"attention_efficiency is .* at least 1e-06, got 1e-300"):
        planner.hardware_of(str(mine))


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


@pytest.mark.parametrize("hosts", [2, 3, 16])
def test_links_are_those_that_the_times_of_collectives_were_made_of(
    monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    of = replace(planner.hardware_of("h100"), host_latency_s=2e-6, network_latency_s=9e-6, devices_per_host=8)

    def times(ranks: int, *_: Any) -> tuple[float, float]:
        seconds = send_seconds(Collective("all_gather", ranks, torch.uint8, ranks), of)
        return seconds, 1 / (of.host_link_bytes_per_s if ranks == 8 else of.network_bytes_per_s)

    fake = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 8 * hosts,
        get_rank=lambda: 8,
        new_group=len,
        ProcessGroup=int,
        group=SimpleNamespace(WORLD=8 * hosts),
    )
    for name, value in {"dist": fake, "_local_ranks": lambda: 8, "_collectives": times}.items():
        monkeypatch.setitem(_links.__globals__, name, value)
    unknown = replace(of, host_latency_s=0.0, network_latency_s=0.0, host_link_bytes_per_s=1.0)
    found = _links(replace(unknown, network_bytes_per_s=1.0), torch.device("cpu"), TINY)
    assert found.host_latency_s == pytest.approx(of.host_latency_s, rel=1e-3)
    assert found.network_latency_s == pytest.approx(of.network_latency_s, rel=1e-3)
    assert found.host_link_bytes_per_s == pytest.approx(of.host_link_bytes_per_s)
    assert found.network_bytes_per_s == pytest.approx(of.network_bytes_per_s)


def test_a_line_through_measurements_has_no_negative_latency() -> None:
    assert line([1.0, 10.0, 100.0], [3.0, 12.0, 102.0]) == pytest.approx((2.0, 1.0))
    assert line([1.0, 10.0, 100.0], [2.5, 7.0, 52.0]) == pytest.approx((2.0, 0.5))
    assert line([1.0, 10.0, 100.0], [1.5, 10.5, 100.5]) == pytest.approx((0.5, 1.0))
    assert line([1.0, 10.0, 100.0], [0.5, 9.0, 99.0]) == (0.0, 0.5)


def test_a_process_without_a_launcher_measures_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    with simulated(), _group() as device:
        assert device == torch.device(DEVICE, 0)
