"""Ranks that stand still write where, and the files say together who waits for whom."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from ranks import RankFailure, RankPool
from shardwise import ShardwiseError, fully_shard
from shardwise.cli import FOUND, NOT_RUN, app
from shardwise.comm import order, watch
from shardwise.comm.report import check_folder, read_reports, verdict
from shardwise.files.stores import location, write_whole


def wait(folder: Path) -> None:
    """Rank 1 stands still after its second backward until every rank has written."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_NEARLY", 0.01)  # 1.2 s of the tests' timeout
        patch.setenv("SHARDWISE_REPORTS", str(folder))
        if dist.get_rank() == 1:
            stand_still(folder)
        model(torch.ones(2, 4))


def stand_still(folder: Path) -> None:
    while len(list(folder.glob("rank-*"))) < dist.get_world_size():
        time.sleep(0.05)


def test_a_rank_that_stands_still_is_named_by_the_files_with_its_line(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks(wait, tmp_path, world_size=3, timeout=60.0)
    said = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert said.exit_code == FOUND
    first, second, *rest = said.output.splitlines()
    assert first == "Ranks 0, 2 wait at pass 3, event 1: about to gather '0'", said.output
    assert second.startswith("Waited for: rank 1, at pass 2, event "), said.output
    assert f"{__file__}:" in second
    assert "in stand_still" in second
    assert any("reduce the gradients of '0'" in line for line in rest)
    record = read_reports(tmp_path)[0][0]["record"]
    assert any(re.match(r"gather '1'\n\d+ torch.float32 from 3 ranks\n", event["what"]) for event in record)


def go_different_ways(folder: Path) -> None:
    """Rank 2 is ended by a signal, rank 1 is stuck and too slow to say that it lives, rank 0 goes on."""
    model = nn.Linear(4, 4)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    os.environ["SHARDWISE_REPORTS"] = str(folder)  # for good: a thread may write it once the step has raised
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if dist.get_rank() == 1:
        order.Order.post = lambda _: None  # type: ignore[method-assign]
        watch._RAISE_GRACE_SECONDS = 0.2
        be_stuck()
    model(torch.ones(2, 4))


def be_stuck() -> None:
    while True:
        time.sleep(0.05)


def test_a_rank_that_is_stuck_outside_of_a_collective_is_ended_once_the_others_gave_up(
    mortal_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.GRACE_SECONDS", 15.0)
    with pytest.raises(RankFailure) as failure:
        mortal_ranks(go_different_ways, tmp_path, world_size=3, timeout=60.0)
    said = str(failure.value)
    assert "rank 0 of 3: raised RankMismatchError" in said
    assert f"rank 1 of 3: died with exit code {watch.STUCK}" in said
    assert f"rank 2 of 3: died with exit code {-signal.SIGTERM}" in said
    found, _ = read_reports(tmp_path)
    assert "ended by shardwise" in found[1]["why"]
    assert any("in be_stuck" in call for call in found[1]["stacks"]["MainThread"])
    assert all("no sign of life from rank 2" in found[rank]["verdict"] for rank in (0, 1))


def report(rank: int, *, event: int, doing: str = "gather 'x'", digest: str = "a") -> dict[str, Any]:
    return {
        "rank": rank,
        "ranks": [0, 1, 2],
        "pass": 4,
        "event": event,
        "doing": doing,
        "digest": digest,
        "left": None,
        "verdict": None,
        "stacks": {"MainThread": ["train.py:5, in step"]},
        "record": [],
    }


def test_a_rank_without_a_file_is_waited_for() -> None:
    lines = verdict({rank: report(rank, event=7) for rank in (0, 2)})
    assert lines[0] == "Ranks 0, 2 wait at pass 4, event 7: about to gather 'x'"
    assert lines[1].startswith("Waited for: rank 1, without a report: ended, killed, stopped")


def test_ranks_that_mean_different_things_are_told_apart() -> None:
    others = report(1, event=7, doing="gather 'y'", digest="b")
    lines = verdict({0: report(0, event=7), 1: others, 2: report(2, event=7)})
    assert lines[0] == "Ranks mean different things at pass 4, event 7:"
    assert "  rank 1 was about to gather 'y'" in lines


def test_ranks_that_are_all_there_wait_outside_of_shardwise() -> None:
    lines = verdict({rank: report(rank, event=7) for rank in range(3)})
    assert "in a collective outside of shardwise" in lines[1]
    assert "  rank 2: train.py:5, in step" in lines


def test_ranks_of_a_mesh_are_compared_within_their_groups_and_named_with_their_places() -> None:
    stages = {"ranks": [0, 2], "placed": ["0 (pp 0)", "2 (pp 1)"]}
    shards = {"ranks": [1, 3], "placed": ["1 (pp 0)", "3 (pp 1)"], "pass": 90}
    found = {rank: report(rank, event=7) | stages for rank in (0, 2)} | {3: report(3, event=2) | shards}
    found[2] |= {"event": 6, "left": "raised ValueError"}
    lines = verdict(found)
    assert lines[:6] == [
        "Of ranks 0 (pp 0), 2 (pp 1):",
        "Rank 0 (pp 0) waits at pass 4, event 7: about to gather 'x'",
        "Waited for: rank 2 (pp 1), at pass 4, event 6: it raised ValueError, at train.py:5, in step",
        "Of ranks 1 (pp 0), 3 (pp 1):",
        "Rank 3 (pp 1) waits at pass 90, event 2: about to gather 'x'",
        "Waited for: rank 1 (pp 0), without a report: ended, killed, stopped, or its host is gone",
    ]


def test_a_report_that_cannot_be_used_is_named_and_the_rest_is_told(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text(json.dumps(report(0, event=7)))
    (tmp_path / "rank-1.json").write_text("")
    said = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert said.exit_code == FOUND
    first, second, third, *_ = said.output.splitlines()
    assert first == "Rank 0 waits at pass 4, event 7: about to gather 'x'"
    assert second.startswith("Waited for: rank 2, without a report")
    assert third.startswith("rank-1.json cannot be used, so its rank may be anywhere: Expecting value")
    (tmp_path / "rank-0.json").write_text(json.dumps({"rank": 0}))
    said = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert said.exit_code == NOT_RUN
    assert "rank-0.json cannot be used: pass is missing, event is missing" in said.output


def test_a_folder_without_reports_is_an_error(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert said.exit_code == NOT_RUN


def test_reports_copied_to_a_store_are_read_there_and_none_are_written_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = location("memory://reports")
    for rank in range(2):
        write_whole(folder / f"rank-{rank}.json", json.dumps(report(rank, event=7)).encode())
    write_whole(folder / ".rank-2.json.17", b"half")
    said = CliRunner().invoke(app, ["doctor", "memory://reports"])
    assert said.exit_code == FOUND
    assert said.output.startswith("Ranks 0, 1 wait at pass 4, event 7")
    monkeypatch.setenv("SHARDWISE_REPORTS", "s3://bucket/reports")
    with pytest.raises(ShardwiseError, match="expected a folder in SHARDWISE_REPORTS, found s3://bucket/rep"):
        check_folder()
