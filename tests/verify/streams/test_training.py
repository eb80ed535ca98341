"""A script's case on the simulated device, through the command."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli import app

CASE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import torch
from torch import nn
from shardwise import fully_shard
from shardwise.verify import Case

def shard(model, mesh, layout="interleaved"):
    for layer in model:
        fully_shard(layer, mesh=mesh, layout=layout)
    fully_shard(model, mesh=mesh, layout=layout)

def races(model, mesh):
    shard(model, mesh)
    stream = torch.Stream(device=mesh.device_type)
    def halve(param):
        with stream:
            param.grad.to_local().mul_(0.5)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(halve)

def steps_late(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def too_early(*_):
        model.set_post_optim_event(torch.accelerator.current_stream().record_event())
    optimizer.register_step_pre_hook(too_early)
    return optimizer

class BiasesApart(torch.optim.Optimizer):
    def __init__(self, model):
        weights, biases = ([p for p in model.parameters() if (p.ndim == 2) is two] for two in (True, False))
        super().__init__(weights + biases, {})
        self.parts = [torch.optim.SGD(weights, lr=0.1), torch.optim.Adam(biases)]
        self.stream = torch.Stream(device="cuda")
    def step(self, closure=None):
        self.stream.wait_stream(torch.accelerator.current_stream())
        self.parts[0].step()
        with self.stream:
            self.parts[1].step()

class Aside(torch.optim.AdamW):
    def step(self, closure=None):
        with torch.Stream(device="cuda"):
            return super().step()

def fails(model, mesh):
    shard(model, mesh)
    raise KeyError("mine")

def loss(model, batch):
    return model(*batch).square().mean()

def elsewhere(model, batch):
    return batch[0].sum().cpu().requires_grad_()

def case(shard, samples=8, loss=loss, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)):
    return Case(
        build=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        shard=shard,
        optimizer=optimizer,
        batch=lambda step: (torch.randn(samples, 4),),
        loss=loss,
    )

class OnAStream(nn.Module):
    def __init__(self, model, device):
        super().__init__()
        self.model, self.stream = model, torch.Stream(device=device)
    def forward(self, x):
        with self.stream:
            return self.model(x)

def wraps(model, mesh):
    shard(model, mesh)
    return OnAStream(model, mesh.device_type)

def halves_early(model, batch):
    loss(model, batch).backward()
    with torch.Stream(device=batch[0].device):
        for param in model.parameters():
            param.grad.to_local().mul_(0.5)

def reads_in_a_thread(model, batch):
    loss(model, batch).backward()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model[0].weight.to_local().sum)

def waits_for_a_stage(model, batch):
    torch.distributed.recv_object_list([None], src=1)

right = lambda: case(shard)
racing_in_what_shard_returns = lambda: case(wraps)
racing_in_its_backward = lambda: replace(case(shard), backward=halves_early)
threaded = lambda: replace(case(shard), backward=reads_in_a_thread)
replicated = lambda: case(lambda model, mesh: nn.parallel.DistributedDataParallel(model))
a_stage = lambda: replace(case(shard), backward=waits_for_a_stage)
racing = lambda: case(races)
racing_with_biases = lambda: case(shard, optimizer=BiasesApart)
racing_step = lambda: case(shard, optimizer=lambda model: Aside(model.parameters()))
leaving = lambda: case(lambda model, mesh: sys.exit(0))
racing_over_steps = lambda: case(shard, optimizer=steps_late)
failing = lambda: case(fails)
uneven = lambda: case(shard, samples=7)
on_cpu = lambda: case(lambda model, mesh: model.cpu(), loss=lambda model, batch: model(batch[0].cpu()).sum())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(CASE)
    return path


def check(script: Path, name: str, *more: str) -> tuple[int, str]:
    asked = ["verify", f"{script}:{name}", "--streams", "--steps", "2", *more]
    result = CliRunner().invoke(app, asked)
    return result.exit_code, result.output


def test_a_case_without_a_missing_wait_ends_with_0_and_its_result_is_written(script: Path) -> None:
    path = script.with_suffix(".json")
    status, text = check(script, "right", "--layout", "both", "--json", str(path))
    assert status == 0, text
    assert text.count("No missing waits among ") == 2
    written = json.loads(path.read_text())
    assert written["verdict"] == "ordered"
    assert [one["layout"] for one in written["results"]] == ["interleaved", "contiguous"]


def test_a_missing_wait_ends_with_1_and_is_written(script: Path) -> None:
    path = script.with_suffix(".json")
    status, text = check(script, "racing", "--json", str(path))
    assert status == 1
    assert "are not ordered" in text
    written = json.loads(path.read_text())
    assert written["verdict"] == "waits are missing"
    assert written["findings"][0]["text"] in text


@pytest.mark.parametrize("name", ["racing_in_what_shard_returns", "racing_in_its_backward"])
def test_a_step_of_the_cases_own_is_followed(script: Path, name: str) -> None:
    status, text = check(script, name)
    assert status == 1
    assert "the stream made at" in text


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_a_race_on_parameters_that_the_first_rank_has_nothing_of_is_found(script: Path, layout: str) -> None:
    status, text = check(script, "racing_with_biases", "--layout", layout)
    assert status == 1
    assert "parameter '0.bias'" in text
    assert ", step)" in text


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_a_race_in_a_users_step_is_placed_there(script: Path, layout: str) -> None:
    status, text = check(script, "racing_step", "--layout", layout)
    assert status == 1
    assert re.search(r"train.py:\d+, step\)", text)
    assert "sharded_tensor/" not in text


def test_a_script_that_exits_is_not_taken_for_one_without_findings(tmp_path: Path) -> None:
    path = tmp_path / "exits.py"
    path.write_text("import sys\nsys.exit(0)\n")
    status, text = check(path, "verify_case")
    assert (status, "raised SystemExit when it was loaded: 0" in text) == (2, True)


def test_a_race_from_one_step_to_the_next_is_found_as_the_host_runs_ahead(script: Path) -> None:
    arguments = list(sys.argv)
    status, text = check(script, "racing_over_steps")
    assert status == 1
    assert "the all-gather stream wait for the computing stream" in text
    assert "torch/optim/sgd.py:" in text
    assert "shardwise/cli" not in text
    assert sys.argv == arguments


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a_stage", "the simulation has only this rank. Run it on real ranks"),
        ("threaded", "on the simulated device in another thread"),
        ("replicated", 'Use shardwise.fully_shard(model, layout="contiguous", strategy="ddp")'),
        ("failing", "raised KeyError on the simulated device: 'mine'"),
        ("leaving", "raised SystemExit on the simulated device: 0"),
        ("uneven", "batch(0) has 7 samples, which cannot be split evenly over 2 ranks"),
        ("on_cpu", "no operation of the case ran on the simulated device"),
    ],
)
def test_what_cannot_be_checked_ends_with_2(script: Path, name: str, words: str) -> None:
    status, text = check(script, name)
    assert status == 2
    assert words in text
