"""Factories: those that end the program, that build on the meta device; what the code says besides."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import shardwise
from planner.models import Even
from shardwise import planner
from shardwise.cli import app
from shardwise.errors import ShardingError
from shardwise.fsdp.strategy import NAMED
from shardwise.planner.setup import Setup, Strategy


class Tied(Even):
    def __init__(self, device: str = "cpu") -> None:
        with torch.device(device):
            super().__init__()
            self.register_buffer("scale", torch.ones(256))
        self.head.weight = self.embedding.weight


def test_a_factory_that_builds_on_meta_is_planned_as_one_that_does_not() -> None:
    setup = Setup(ranks=2, sequence=8)

    def half() -> nn.Module:
        model = Tied()
        with torch.device("meta"):
            model.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(2))
        return model

    usual = shardwise.plan(Tied, setup)
    for factory in (lambda: Tied("meta"), lambda: Tied("meta").to_empty(device="cpu"), half):
        made = shardwise.plan(factory, setup)
        assert (made.parameters, made.moments, made.sent) == (usual.parameters, usual.moments, usual.sent)


class ByToken(Even):
    """Blocks that take one token after another."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.stack([block(one) for one in x.unbind(1)], 1)
        return self.head(x)


def test_a_loop_over_tokens_that_would_take_minutes_is_refused_by_its_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("recorder", "unroll"):
        monkeypatch.setattr(f"shardwise.planner.{module}.MOST", 500)
    shardwise.plan(ByToken, ranks=2, sequence=8)
    refused = r"more than 500 operators, \d+ of them aten.mm in forward of block 0: a Python loop"
    with pytest.raises(ShardingError, match=refused):
        shardwise.plan(ByToken, ranks=2, sequence=128)
    # Of many blocks, before a step is recorded.
    monkeypatch.delattr(sys.modules["shardwise.planner.plan"], "record")
    with pytest.raises(ShardingError, match=refused.replace("mm", "(mm|t)")):
        shardwise.plan(lambda layers=10: ByToken(layers), ranks=2, sequence=128)


def ends(layers: int = 2) -> nn.Module:
    sys.exit(0)


def test_a_factory_that_ends_the_program_is_an_error_and_not_the_status_of_a_plan_that_fits() -> None:
    told = r"could not be planned: SystemExit: 0, raised at \S*test_factory.py:\d+. A factory has no command"
    result = CliRunner().invoke(app, ["plan", "test_factory:ends"])
    assert result.exit_code == 2
    assert re.match(f"Error: the model {told}", result.stderr)
    model = planner.Model("ends", 2, ends, lambda module: [], lambda module: [], lambda *_: torch.ones(()))
    for run in (shardwise.plan, planner.python, lambda *asked: planner.search(*asked, hardware="h100")):
        with pytest.raises(ShardingError, match=told):
            run(model, Setup())


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("reduce_once", "    # model.set_requires_gradient_sync(False) before"),
        (
            "clip_norm",
            "    # before the optimizer's step: shardwise.clip_grad_norm_(model.parameters(), 1.0)",
        ),
        ("expandable_segments", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ],
)
def test_what_the_loop_or_the_environment_must_do_is_said_in_the_code(field: str, said: str) -> None:
    assert said in planner.python(Even, Setup(ranks=2, accumulation=4, **{field: True}))
    assert said not in planner.python(Even, Setup(ranks=2, accumulation=4))


def test_a_loss_in_chunks_is_not_compiled_as_whole_logits_are() -> None:
    with pytest.raises(ShardingError, match="compile_loss needs whole logits, but loss='chunked' never"):
        Setup(loss="chunked", compile_loss=True)


def test_a_setup_knows_the_strategies_that_there_are() -> None:
    assert get_args(Strategy) == tuple(NAMED)


def test_the_interleaved_layout_has_fsdp_and_hsdp_by_name() -> None:
    assert Setup(ranks=4, strategy="fsdp") == Setup(ranks=4)
    assert Setup(ranks=4, replicas=2, strategy="hsdp") == Setup(ranks=4, replicas=2)
    for options, said in (
        ({"strategy": "fsdp", "replicas": 2}, "'fsdp' needs 1 replica, got 2"),
        ({"strategy": "hsdp"}, "'hsdp' needs more than 1 replica"),
        ({"strategy": "zero2"}, r"'zero2' needs the contiguous layout: .* \(--layout contiguous\)"),
        ({"optimizer": "AdamW flat"}, r"'AdamW flat' needs the contiguous layout: .* \(--layout contig"),
    ):
        with pytest.raises(ShardingError, match=said):
            Setup(ranks=4, **options)


class BatchNorms(Even):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return self.head(x)


def test_a_batch_norm_that_the_cpu_refuses_is_named() -> None:
    def build(track: bool = True) -> nn.Module:
        model = BatchNorms()
        model.norm = nn.BatchNorm1d(256, track_running_stats=track)
        return model

    (assumed,) = shardwise.plan(build, ranks=2, sequence=8, device="cpu").assumed
    assert assumed.startswith("BatchNorm1d computes in bfloat16 with running statistics of another dtype")
    for options in ({}, {"device": "cpu", "param_dtype": "float32"}):
        assert not shardwise.plan(build, ranks=2, sequence=8, **options).assumed
    assert not shardwise.plan(lambda: build(track=False), ranks=2, sequence=8, device="cpu").assumed


def test_an_option_that_another_one_needs_is_named_as_the_command_spells_it() -> None:
    for options in ({"float8": True}, {"nvfp4": True}):
        with pytest.raises(ShardingError, match=r"give compile=True \(--compile\)"):
            Setup(**options)
    with pytest.raises(ShardingError, match=r"give float8=True \(--float8\)"):
        Setup(float8_scales="row")
    with pytest.raises(
        ShardingError, match=r"compile=True \(--compile\) and tensor \(--tensor\) of more than 1"
    ):
        Setup(async_tensor=True)


class Shared(Even):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 2)


class Norms(Even):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(256)
        for number, block in enumerate(self.blocks):
            block.add_module(f"norm{number}", norm)


class Nested(Even):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks])


class Mean(Even):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).mean()


a_module = nn.Linear(2, 2)


def test_what_is_no_factory_is_told_what_one_is(tmp_path: Path) -> None:
    for source in (a_module, "planner.test_factory:a_module"):
        with pytest.raises(ShardingError, match=r"not a Linear: give a function"):
            shardwise.plan(source, sequence=8)
    with pytest.raises(ShardingError, match=r"'blocks\.0' and 'blocks\.1' are one module"):
        shardwise.plan(Shared, sequence=8)
    said = r"'blocks\.0' and 'blocks\.1' share the parameter 'norm0\.weight', there 'norm1\.weight', which"
    with pytest.raises(ShardingError, match=said):
        shardwise.plan(Norms, sequence=8)
    with pytest.raises(ShardingError, match=r"'blocks\.0' is a ModuleList, .* put its modules into 'blocks'"):
        shardwise.plan(Nested, sequence=8)
    with pytest.raises(ShardingError, match=r"must return its logits, .*one of shape \(\)"):
        shardwise.plan(Mean, ranks=2, sequence=8)
    with pytest.raises(ShardingError, match=r"'hsdp' needs more than 1 replica: give replicas"):
        shardwise.plan(Even, ranks=2, sequence=8, layout="contiguous", strategy="hsdp")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ShardingError, match=r"expected an object with model_type, found a list"):
        shardwise.plan(str(tmp_path / "list.json"))
    with pytest.raises(
        ShardingError, match=r"called without arguments, but needs width, depth: give a function"
    ):
        shardwise.plan(lambda width, /, *, depth, layers=2: Even(), sequence=8)
    for source in (":x", "./mine.py:build", "a/mine:build"):
        with pytest.raises(
            ShardingError, match=rf"unknown model '{source}': .* a function without arguments"
        ):
            shardwise.plan(source)
