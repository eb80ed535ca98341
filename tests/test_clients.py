"""`examples/clients/compare.py` takes no run for evidence whose model was not sharded as it should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp
from torch import nn

import shardwise
from clients import compare
from clients.common import check_sharded
from ranks import on_ranks


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@on_ranks(2)
def test_a_client_fails_unless_the_implementation_in_question_sharded_its_model() -> None:
    torchs = torch.distributed.fsdp.fully_shard
    by_torch, by_us, by_both = model(), model(), model()
    torchs(by_torch)
    torchs(by_both[0])
    for one in (by_us[0], by_us, by_both[1]):
        shardwise.fully_shard(one)
    assert check_sharded(by_torch) == {"by": "torch", "modules": 1, "layouts": {"interleaved": 4}}
    for wrong in (model(), by_us, by_both):
        with pytest.raises(AssertionError, match="to be sharded by torch"):
            check_sharded(wrong)
    shardwise.install(layout="contiguous")
    try:
        assert check_sharded(by_us) == {"by": "shardwise", "modules": 2, "layouts": {"interleaved": 4}}
        for wrong in (model(), by_torch, by_both):
            with pytest.raises(AssertionError, match="to be sharded by shardwise"):
                check_sharded(wrong)
        contiguous = model()
        torch.distributed.fsdp.fully_shard(contiguous)
        assert check_sharded(contiguous) == {"by": "shardwise", "modules": 1, "layouts": {"contiguous": 4}}
    finally:
        shardwise.uninstall()


def reports(way: str, **changed: Any) -> compare.Reports:
    """What two ranks of a client report, rank 1 with changes."""
    layout = "interleaved" if way == "FSDP2" else way
    sharded = {"by": "torch" if way == "FSDP2" else "shardwise", "modules": 3, "layouts": {layout: 9}}
    good = {"losses": [4.0, 2.0], "sharded": sharded}
    return {0: {"rank": 0} | good, 1: {"rank": 1} | good | {"sharded": sharded | changed}}


@pytest.mark.parametrize("way", list(compare.WAYS))
@pytest.mark.parametrize(
    "changed",
    [{"modules": 0}, {"by": "another"}, {"layouts": {}}, {"layouts": {"diagonal": 9}}],
    ids=["unsharded", "by another implementation", "no parameters", "in another layout"],
)
def test_a_run_is_refused_where_a_rank_lacks_evidence(way: str, changed: dict[str, Any]) -> None:
    assert compare.doubt(way, reports(way)) == ""
    assert compare.doubt(way, reports(way, **changed)).startswith("FAILED: rank 1 was to be sharded by")


def test_a_run_is_refused_where_a_rank_reports_nothing() -> None:
    assert compare.doubt("FSDP2", {0: reports("FSDP2")[0]}) == "FAILED: no losses of ranks [1]"
    empty = {rank: one | {"losses": []} for rank, one in reports("FSDP2").items()}
    assert compare.doubt("FSDP2", empty).startswith("FAILED: no losses")


def test_the_verdict_is_on_losses_and_on_how_many_modules_were_sharded() -> None:
    def judged(way: str, **changed: Any) -> str:
        return compare.verdict("fabric", way, reports(way, **changed), reports("FSDP2"))

    def off_by(way: str, difference: float) -> str:
        ours = {rank: one | {"losses": [4.0, 2.0 + difference]} for rank, one in reports(way).items()}
        return compare.verdict("fabric", way, ours, reports("FSDP2"))

    assert judged("interleaved") == "equal to the bit"
    assert judged("interleaved", modules=2) == "FAILED: 2 modules sharded on rank 1, 3 by FSDP2"
    assert off_by("contiguous", 2e-6) == "within 1e-06"
    assert off_by("contiguous", 2e-3) == "FAILED: 0.001"
    assert off_by("interleaved", 2e-6) == "FAILED: 1e-06"
    mixed = reports("contiguous")
    mixed[0]["sharded"]["layouts"]["interleaved"] = 1
    expected = "equal to the bit; 1 of 10 parameters interleaved"
    assert compare.verdict("fabric", "contiguous", mixed, reports("FSDP2")) == expected


def test_every_client_has_a_row() -> None:
    helpers = {"common", "compare", "accelerate_on_cpu", "torchvision_on_cpu"}
    assert {path.stem for path in compare.HERE.glob("*.py")} - helpers == set(compare.NEEDS)


def test_a_client_is_looked_for_in_a_folder_of_its_own_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "NEEDS", {"timm_vit": "needed"})
    monkeypatch.setattr(compare, "run", lambda client, way: "FAILED: it ran")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "without"))
    assert compare.row("timm_vit")[1:] == ["FAILED: needed is not installed"]
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "apart/needed/needed").mkdir(parents=True)
    (tmp_path / "apart/needed/needed/__init__.py").touch()
    assert compare.row("timm_vit")[1:] == ["FAILED: it ran"]


def test_a_client_runs_with_the_folder_of_its_own_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        paths.append(env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, 1, "", "")

    paths: list[str] = []
    monkeypatch.setattr(subprocess, "run", ran)
    for before in ("", "others"):
        monkeypatch.setenv("PYTHONPATH", before)
        assert compare.run("timm_vit", "FSDP2") == "FAILED: exit status 1"
    own = f"{sys.prefix}/apart/timm"
    assert paths == [own, f"{own}{os.pathsep}others"]


def test_make_installs_apart_what_some_client_needs() -> None:
    (line,) = [one for one in (compare.ROOT / "Makefile").read_text().splitlines() if "/apart/" in one]
    named = line.partition(" in ")[2].partition(";")[0].split()
    assert named
    assert set(named) <= set(compare.NEEDS.values())
    assert [name for name in named if not (compare.HERE / f"{name}.txt").is_file()] == []
