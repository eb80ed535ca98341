"""What a run keeps of itself: over resumes, while it goes on, and for other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import run_log
from run_log import RunLog, memory_bytes, profiled, surroundings
from training_report import read_run


def test_a_resumed_log_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.begin(ranks=2)
    log.note(baseline=3.0)
    for step in (1, 2, 3):
        log.step(step, loss=5.0 - step)
    log.close()
    log = RunLog(tmp_path, done=2)
    log.begin(ranks=4)
    log.step(3, loss=9.0)
    log.close()
    run = read_run(tmp_path)
    assert [(row["step"], row["loss"]) for row in run.steps] == [(1, 4.0), (2, 3.0), (3, 9.0)]
    assert [(sitting["begins"], sitting["ranks"]) for sitting in run.sittings] == [(0, 2), (2, 4)]
    assert run.notes == {"baseline": 3.0}
    assert run.now["ranks"] == 4
    RunLog(tmp_path).close()
    assert read_run(tmp_path).steps == []


def test_the_page_is_there_while_the_run_goes_on_and_never_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(run_log.time, "monotonic", lambda: clock[0])
    page = tmp_path / "report.html"
    log = RunLog(tmp_path, steps=9)
    log.step(1, loss=5.0)
    first = page.read_text()
    assert "1 of 9 steps" in first
    log.step(2, loss=4.0)
    assert page.read_text() == first
    clock[0] += run_log.PAGE_EVERY_S + 1
    opened = page.open()  # as a browser that reads while the next is written
    log.step(3, loss=3.0)
    assert opened.read() == first
    opened.close()
    assert "3 of 9 steps" in page.read_text()
    assert len(read_run(tmp_path).steps) == 3
    assert "Running;" not in log.close().read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


def test_scalars_go_to_tensorboard_and_a_resume_takes_back_what_it_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            said.append((Path(folder).name, purge_step))

        def add_scalar(self, *scalar: Any) -> None:
            said.append(scalar)

        def close(self) -> None:
            said.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = RunLog(tmp_path, done=4, tensorboard=True)
    log.step(5, loss=2.0, seconds=0.25)
    log.close()
    assert said == [("tensorboard", 5), ("loss", 2.0, 5), ("seconds", 0.25, 5), "closed"]


def test_a_trace_is_left_of_the_steps_asked_for(tmp_path: Path) -> None:
    with profiled(tmp_path / "none", 0) as step:
        step()
    assert not (tmp_path / "none").exists()
    with profiled(tmp_path / "trace", 2) as step:
        for number in range(6):
            with torch.profiler.record_function(f"step {number}"):
                torch.ones(2).sum()
            step()
    trace = (tmp_path / "trace" / "rank-0.json").read_text()
    assert [number for number in range(6) if f'"step {number}"' in trace] == [2, 3]


def test_a_run_knows_its_device_versions_and_memory() -> None:
    about = surroundings(torch.device("cpu"))
    assert about["torch"] == torch.__version__
    assert about["device"].startswith("cpu (")
    now, peak = memory_bytes(torch.device("cpu"))
    assert 10 * 2**20 < now <= peak
