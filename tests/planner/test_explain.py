"""Models that cannot be run: what the error lays it to, and advises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shardwise
from planner.models import Even
from planner.test_configs import written
from shardwise import planner
from shardwise.errors import ShardingError
from shardwise.planner.advice import advise
from shardwise.planner.setup import Setup


class ReadsOneValue(Even):
    tensor_plan: ClassVar = {"blocks.*": "colwise_rep"}

    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(tokens) * (tokens.max().item() > 1)


class Shares(Even):
    tensor_plan: ClassVar = {"blocks.*.0": "colwise_rep"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(self.blocks[0]) for _ in range(2))


@pytest.mark.parametrize("run", [shardwise.plan, lambda *asked: planner.search(*asked, hardware="h100")])
@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (ReadsOneValue, r"DataDependentOutputException.*\. A plan needs shapes that follow from shapes, "),
        (Shares, "share the parameter"),
    ],
)
def test_what_is_wrong_with_a_model_uncut_too_is_not_laid_to_its_cut(
    run: Any, factory: Any, told: str
) -> None:
    with pytest.raises(ShardingError, match=told):
        run(factory, Setup(ranks=2, tensor=2, sequence=8))


def lacking(tried: list[Setup], worse: Callable[[Setup], bool]) -> Callable[..., Any]:
    """A plan that never fits, and lacks less with each change, but for those that are worse."""

    def plan(model: Any, setup: Setup, *, hardware: Any) -> Any:
        tried.append(setup)
        free = -200 if worse(setup) else len(tried) - 100
        peak = SimpleNamespace(alive={"logits and loss": 30})
        return SimpleNamespace(fits=False, free_bytes=free, setup=setup, peak=peak, peak_bytes=100)

    return plan


def test_what_does_not_fit_is_changed_one_thing_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Setup] = []
    monkeypatch.setitem(advise.__globals__, "plan", lacking(tried, lambda setup: setup.experts > 1))
    asked = Setup(ranks=16, replicas=2, micro_batch=4, accumulation=3, reshard_after_forward=False)
    assert len(list(advise("gpt2", asked, hardware="h100"))) == len(tried) - 1  # the first is what is asked
    assert [setup.ranks for setup in tried[-3:]] == [16, 32, 64]
    last = tried[-1]
    assert (last.replicas, last.micro_batch, last.accumulation) == (1, 1, 12)
    assert (last.layout, last.checkpointing, last.reshard_after_forward) == ("contiguous", "full", True)
    assert last.loss == "chunked"
    most = advise.__globals__["MOST"]
    list(advise("gpt2", replace(asked, ranks=most // 2), hardware="h100"))
    assert tried[-1].ranks == most


def test_a_change_that_leaves_no_less_to_lack_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Setup] = []
    worse = lambda setup: setup.layout == "contiguous" or setup.loss == "chunked"  # noqa: E731
    monkeypatch.setitem(advise.__globals__, "plan", lacking(tried, worse))
    list(advise("gpt2", Setup(ranks=4), hardware="h100"))
    assert sum(setup.layout == "contiguous" for setup in tried) == 1
    assert sum(setup.loss == "chunked" for setup in tried) == 1
    assert (tried[-1].checkpointing, tried[-1].ranks) == ("full", 16)


class LongRows(Even):
    """Has 3 rows that 2 ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(3, 1 << 22, device="meta"))

    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(tokens) + self.rows[0, 0]


def test_what_is_only_tried_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    small = replace(planner.hardware_of("h100"), memory_bytes=1)
    asked: dict[str, Any] = {"ranks": 2, "sequence": 8, "hardware": small}
    warnings.simplefilter("always")
    made = shardwise.plan(LongRows, layout="contiguous", **asked)
    (told,) = recwarn
    assert "is padded by" in str(told.message)
    interleaved = replace(made, setup=replace(made.setup, layout="interleaved"))
    changes = advise(LongRows, interleaved.setup, hardware=small, planned=interleaved)
    assert "contiguous" in [changed.setup.layout for _, changed in changes]
    planner.search(LongRows, micro_batches=(1,), **asked)
    assert [str(one.message) for one in recwarn] == [str(told.message)]


def test_logits_that_are_most_are_advised_away_and_experts_shared_out(tmp_path: Path) -> None:
    long = Setup(ranks=8, sequence=1024, checkpointing="full", layout="contiguous", compile_loss=True)
    small = replace(planner.hardware_of("h100"), memory_bytes=1)
    gpt2 = written(tmp_path, "gpt2", n_layer=1)
    made = shardwise.plan(gpt2, long, hardware=small)
    first, changed = next(advise(gpt2, long, hardware=small, planned=made))
    assert first == "compute the loss in chunks (loss='chunked')"
    assert changed.peak_bytes < made.peak_bytes
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 96, "num_local_experts": 8}
    mixture = Setup(ranks=8, sequence=16, layout="contiguous", checkpointing="full")
    shared_out = "share experts out over 8 ranks (experts=8)"
    assert any(
        line == shared_out
        for line, _ in advise(written(tmp_path, "mixtral", **sizes), mixture, hardware=small)
    )
    assert shared_out not in [line for line, _ in advise(Even, mixture, hardware=small)]


@pytest.mark.parametrize(
    ("sequence", "told"), [(96, "With sequence=3 it does not run either"), (3, "A plan")]
)
def test_a_shorter_sequence_is_not_advised_where_none_helps(sequence: int, told: str) -> None:
    def factory() -> nn.Module:
        model = Even()
        model.head = nn.Linear(255, 512)
        return model

    with pytest.raises(ShardingError, match=rf"255\D.*\. {told}.*fake kernel for each operator$") as refused:
        shardwise.plan(factory, ranks=1, micro_batch=2, sequence=sequence)
    if sequence == 96:
        assert "the module itself takes tokens of shape (2, 96)" in str(refused.value)


class Mixes(Even):
    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(tokens).bmm(torch.ones(len(tokens), 512, 512))  # in float32


def test_a_shorter_sequence_is_not_advised_where_the_model_runs_in_float32_alone() -> None:
    told = "With param_dtype='float32' it runs, with 'bfloat16' it does not"
    with pytest.raises(ShardingError, match=told):
        shardwise.plan(Mixes, ranks=2, sequence=96)
    assert shardwise.plan(Mixes, ranks=2, sequence=96, param_dtype="float32").peak_bytes


def test_a_model_that_compiles_itself_is_planned_as_it_is_written() -> None:
    """Its kernels would read memory, which fake tensors do not have."""

    @torch.compile
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    class Inside(Even):
        def forward(self, tokens: torch.Tensor) -> Any:
            return twice(super().forward(tokens))

    class Plain(Even):
        def forward(self, tokens: torch.Tensor) -> Any:
            x = super().forward(tokens)
            return x + x

    def whole() -> nn.Module:
        model = Plain()
        model.compile()
        return model

    asked: dict[str, Any] = {"ranks": 2, "sequence": 16}
    plain, *made = (
        shardwise.plan(one, **asked) for one in (Plain, Inside, whole, lambda: torch.compile(Plain()))
    )
    assert [one.moments for one in made] == [plain.moments] * 3


def test_a_setup_of_another_type_is_refused_by_it() -> None:
    with pytest.raises(ShardingError, match=r"setup must be a shardwise.planner.Setup, got a dict: give"):
        shardwise.plan("gpt2", {"ranks": 8})  # type: ignore[arg-type]
