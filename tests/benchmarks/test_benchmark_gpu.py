"""`make gpu` on the simulated device: it comes to a verdict, and to another where something is wrong."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ranks import on_ranks
from shardwise.comm import foreach
from shardwise.verify.streams import DEVICE

WRONG = """<testsuites><testsuite>
<testcase name="test_a_b"/><testcase name="c"><failure message="no"/></testcase>
<testcase name="d"><skipped message="needs an accelerator"/></testcase>
</testsuite></testsuites>"""


def place() -> Any:
    from gpu_place import Place

    return Place(torch.device(DEVICE, 0), until=0.0)


def checked(case: str) -> tuple[list[Any], Any]:
    """The checks of one case, and that of the streams."""
    import gpu
    import gpu_checks

    here = place()
    return list(gpu_checks.all_checks(here, [case])), gpu.waits(here)


@on_ranks(2)
def test_a_slice_of_it_passes_on_two_simulated_devices_with_every_figure(tmp_path: Path) -> None:
    import gpu
    from gpu_place import Shape

    with mock.patch("gpu_figures.TINY", Shape(blocks=1)), mock.patch("gpu_checks.SIMULATED", Shape(blocks=1)):
        gpu.everything(place(), tmp_path, ["bf16, gradients reduced in fp32"])
    torch.distributed.barrier()
    told = gpu.told_by(tmp_path)
    page = gpu.page(told["checks"], told["figures"], "2 x simulated device", means_nothing=True)
    assert page.splitlines()[-1] == "verdict: all 7 checks passed on 2 x simulated device", page
    for title in (
        "A step of a transformer",
        "GB/s, of whole buffers",
        "Checkpoints of a model",
        gpu.NO_MEANING,
    ):
        assert title in page
    assert all(one["repeats"] == 1 for one in told["figures"]["steps"].values())


@on_ranks(1)
def test_numbers_that_are_wrong_fail() -> None:
    def wrong(shard: torch.Tensor, how: Any) -> torch.Tensor:
        return divide(shard, how) * 1.001

    divide = foreach._divide
    with mock.patch.object(foreach, "_divide", wrong):
        checks, waits = checked("plain")
    assert not any(check.passed for check in checks)
    assert "not bit-equal" in checks[0].found
    assert waits.passed


@on_ranks(1)
def test_a_wait_that_is_missing_fails_though_the_numbers_are_right() -> None:
    with mock.patch("shardwise.comm.streams.CommStreams.wait", return_value=None):
        checks, waits = checked("bf16, gradients reduced in fp32")
    assert all(check.passed for check in checks)
    assert not waits.passed
    assert "do not, the first of them in" in waits.found


def test_the_verdict_names_what_failed_and_ends_the_page() -> None:
    import gpu
    from gpu_place import Check

    right, wrong = Check("one", True, "bit-equal"), Check("two", False, "off | by 1")
    assert gpu.verdict([right], "1 x A") == "verdict: all 1 checks passed on 1 x A"
    assert gpu.verdict([], "1 x A") == "verdict: nothing was checked on 1 x A"
    page = gpu.page([right, wrong], {}, "1 x A", means_nothing=False)
    assert page.endswith("\n\nverdict: 1 of 2 checks failed on 1 x A: two\n")
    assert "| **FAILED** | two | off \\| by 1 |" in page


def test_tests_that_fail_are_skipped_or_are_not_there_have_not_passed(tmp_path: Path) -> None:
    import gpu

    report = tmp_path / "tests.xml"
    assert [check.passed for check in gpu.checks_of(report)] == [False]
    report.write_text(WRONG)
    found = gpu.checks_of(report)
    assert [(check.name, check.passed) for check in found] == [
        ("test: a b", True),
        ("test: c", False),
        ("test: d", False),
    ]
    report.write_text("<testsuites/>")
    assert [check.passed for check in gpu.checks_of(report)] == [False]


def test_ranks_that_end_in_the_middle_have_failed(tmp_path: Path) -> None:
    import gpu

    options = argparse.Namespace(out=tmp_path, seconds=1.0, cases=[], figures=True)
    with mock.patch.object(sys, "executable", "false"):
        found = gpu.ranks(options, "sim", 1, limit=30.0)
    assert [(check.passed, check.found) for check in found["checks"]] == [
        (False, "ended with status 1, in: the start")
    ]


def test_without_an_accelerator_it_says_so_and_how_to_simulate_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "make gpu DEVICE=sim" in capsys.readouterr().err
