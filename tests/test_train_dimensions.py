"""The example on meshes of several dimensions: steps in fp64 are those of one process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from examples import train_dimensions as example

import shardwise
from fuzz.meshes_part import beside
from fuzz.meshes_part.train import (
    OnMesh,
    Record,
    batch,
    differences,
    in_one_process,
    known_to_pipelines,
    settings,
)
from ranks import on_ranks
from shardwise import launch
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError

MESHES = {"interleaved": ["pp2,ep2", "sp2,tp2"], "contiguous": ["pp2,dp2", "ep2,tp2", "replicate2,sp2"]}


@on_ranks(4)
def test_steps_are_those_of_one_process() -> None:
    expected = in_one_process(settings(depth=2), 2)
    for layout in MESHES:
        for mesh in MESHES[layout]:
            found = Record()
            OnMesh(settings(mesh=mesh, layout=layout, depth=2), {}).train(2, found)
            assert not differences(found, expected), (mesh, layout)


@on_ranks(4)
def test_a_checkpoint_of_each_mesh_is_that_of_each_other_bit_for_bit() -> None:
    found = beside.checkpoints(["pp2,dp2", "ep2,tp2", "replicate2,sp2"], most=1, depth=2)
    assert [both for both, right in found.items() if not right] == []


@on_ranks(2)
def test_blocks_compiled_by_region_beside_tp_train_as_one_process() -> None:
    run = OnMesh(settings(mesh="tp2", depth=2, experts=0), {})
    # Torch's tracer ends in a RecursionError on these DTensors with sizes that are dynamic.
    shardwise.compile(run.step.model, mode="regional", backend="aot_eager", dynamic=False)
    found = Record()
    run.train(2, found)
    assert not differences(found, in_one_process(settings(depth=2, experts=0), 2))


@pytest.mark.parametrize(("schedule", "micro_batches"), [("1F1B", 2), ("ZBVZeroBubble", 4)])
@on_ranks(4)
def test_a_step_of_a_pipeline_gathers_and_reduces_each_group_once(schedule: str, micro_batches: int) -> None:
    for layout in MESHES:
        args = settings(mesh="pp2,dp2", layout=layout, schedule=schedule, micro_batches=micro_batches)
        run = OnMesh(args, {})
        with known_to_pipelines():
            for step in range(2):  # the first also asks stages for their shapes
                with CommCounter() as counter:
                    run.step.backward(batch(args, step))
        names = {name.partition(".mlp.experts")[0] for name, _ in run.named()}
        groups = {name.split(".")[0] for name in names if not name.startswith("blocks")}
        groups |= {".".join(name.split(".")[:2]) for name in names if name.startswith("blocks")}
        experts = sum(isinstance(module, example.Experts) for module in run.step.model.modules())
        assert counter.count("all_gather") == counter.count("reduce_scatter") == len(groups) + experts


@on_ranks(2)
def test_the_script_prints_one_curve_on_any_mesh_and_draws_it(tmp_path: Path) -> None:
    text_folder = tmp_path / f"text-{dist.get_rank()}"  # one would read what another has begun
    text_folder.mkdir()
    (text_folder / "one.txt").write_text("six dimensions on one page; " * 40)
    small = "--width 16 --heads 2 --seq 8 --steps 4 --log-every 1 --save-every 2 --dtype float64"
    common = [*small.split(), "--data", str(text_folder)]
    printed = []
    for number, (mesh, *more) in enumerate([("dp2",), ("pp2", "--steps", "2"), ("ep2",)]):
        out = tmp_path / ("once" if number == 0 else "goes_on")  # stopped on one mesh, and on to another
        args = example.parse_arguments([*common, "--mesh", mesh, "--out", str(out), *more])
        text = io.StringIO()
        with contextlib.redirect_stdout(text), known_to_pipelines():
            example.run(args, torch.device("cpu"))
        printed.append([line for line in text.getvalue().splitlines() if line.startswith("step")])
    if dist.get_rank() == 0:
        assert len(printed[0]) == 4
        assert printed[1] + printed[2] == printed[0]
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        drawn = next(line["note"]["mesh"] for line in reversed(lines) if "note" in line)
        assert "ep 0   ep 1" in drawn
        assert "rank 1: dp 0  ep 1: embedding, head, blocks 0, 1, 2, 3; " in drawn
        assert "tokens, to their experts and back" in (out / "report.html").read_text()


@on_ranks(2)
def test_rows_and_blocks_that_do_not_fill_the_mesh_are_refused() -> None:
    for chosen, told in (
        ({"mesh": "dp2", "batch": 5}, "--batch 5 is no multiple of 2"),
        ({"mesh": "pp2", "batch": 5}, "--batch 5 is no multiple of 2"),
        ({"mesh": "pp2", "depth": 1}, "--depth 1 does not fill 2 stages"),
    ):
        with pytest.raises(ShardingError, match=told):
            OnMesh(settings(**chosen), {})


def test_a_mesh_that_cannot_be_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(launch.TRACEBACK, raising=False)
    monkeypatch.setattr(sys, "argv", ["train_dimensions.py", "--mesh", "pp2,pp2"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ShardingError) as raised:
        example.main()
    sys.excepthook(raised.type, raised.value, raised.tb)
    told = capfd.readouterr().err
    assert "ShardingError: invalid 'pp2' in the mesh 'pp2,pp2'; expected each of pp, replicate" in told
    assert "Traceback" not in told
