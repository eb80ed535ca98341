"""Plans chosen by price: that they are the cheapest, and do what is said of them."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import lockstep
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardwise.errors import ShardingError
from shardwise.tensor_parallel import tensor_parallel_transformation
from shardwise.tensor_parallel.auto import ChosenPlan, Prices, best_plan, choose
from shardwise.tensor_parallel.explain import counts
from shardwise.tensor_parallel.exploring import STYLES, Space, State, Use, _flops, explore, find_repeats
from shardwise.tensor_parallel.program import read_program

CHEAP = Prices(latency=1e-9)  # for tiny models, which are not worth a collective otherwise


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, bias: bool) -> None:
        super().__init__()
        self.each = width // heads
        self.q, self.o = nn.Linear(width, width, bias), nn.Linear(width, width, bias)
        self.k, self.v = (nn.Linear(width, key_heads * self.each, bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            make(x).view(*x.shape[:2], -1, self.each).transpose(1, 2) for make in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(mixed.transpose(1, 2).reshape(x.shape))


class GPTBlock(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads, True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, heads // 2, False)
        self.gate, self.up = (nn.Linear(width, inner, False) for _ in range(2))
        self.down = nn.Linear(inner, width, False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, words: int, width: int, heads: int, inner: int, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, inner) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


LLAMA_STYLES = {
    "attention.q": "column",
    "attention.k": "column",
    "attention.v": "column",
    "attention.o": "row",
    "gate": "column",
    "up": "column",
    "down": "row",
}


@functools.cache
def program(name: str) -> ExportedProgram:
    """Large ones have no weights, so that they cost no memory."""
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (2, 6))
    if name == "llama":
        with torch.device("meta"):
            model = Llama(32000, 2048, 16, 5632).bfloat16()
            return export(model, (torch.zeros(1, 2048, dtype=torch.long),))
    if name == "gpt":
        with torch.device("meta"):
            return export(GPTBlock(4096, 32).bfloat16(), (torch.empty(2, 1024, 4096).bfloat16(),))
    if name == "tiny gpt":
        return export(GPTBlock(), (torch.randn(2, 6, 32),))
    return export(Llama(30, 32, 4, 24, tied=name == "tied llama"), (ids,))


@functools.cache
def space_of(name: str, ranks: int) -> Space:
    return explore(read_program(program(name)), ranks)


def uses_of(space: Space, styles: tuple[str, ...]) -> list[Use]:
    """What every step does, given a style for each decision, one after another."""
    states: dict[Any, State] = {}
    for group, style in zip(space.decisions, styles, strict=True):
        states.update(zip(group.step.values, group.step.uses[STYLES.index(style)].after, strict=True))
    uses = []
    for step in space.steps:
        (use,) = (
            use
            for use in step.uses
            if all(states.setdefault(x, at) == at for x, at in zip(step.inputs, use.before, strict=True))
        )
        states.update(zip(step.values, use.after, strict=True))
        uses.append(use)
    return uses


def price(space: Space, prices: Prices, styles: tuple[str, ...]) -> float:
    return prices.of_all(space, uses_of(space, styles))


def layer_styles(plan: ChosenPlan, prefix: str) -> dict[str, str]:
    names = (name for name in plan.strategies if name.startswith(prefix) and name.endswith(".weight"))
    return {name[len(prefix) : -len(".weight")]: plan.strategies[name] for name in names}


def check_prediction(space: Space, whole: ExportedProgram, styles: tuple[str, ...]) -> None:
    uses = uses_of(space, styles)
    expected = dict(Counter(kind for use in uses for kind, _ in use.collectives))
    for rank in (0, space.ranks - 1):
        program = tensor_parallel_transformation(whole, rank, space.ranks, "cpu", space.strategies(styles))
        assert counts(program) == expected, (styles, rank)
        sizes = {id(tensor): tensor.nbytes for tensor in program.state_dict.values()}
        assert sum(sizes.values()) == space.bytes_held(uses)[rank], (styles, rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_llama_gets_column_and_row_pairs_with_two_all_reduces_a_layer(ranks: int) -> None:
    plan = best_plan(space_of("llama", ranks))
    for layer in ("layers.0.", "layers.1."):
        assert layer_styles(plan, layer) == LLAMA_STYLES
    assert plan.strategies["head.weight"] == "column"
    assert plan.strategies["embed.weight"] in ("row", "column")
    assert plan.collectives["all_reduce"] + plan.collectives["all_gather"] == 2 * 2 + 2
    assert plan.gap == 0
    norms = 5 * 2048 * 2
    assert plan.bytes_held == ((plan.space.total() - norms) // ranks + norms,) * ranks


def test_a_gpt_block_gets_the_same_with_its_biases() -> None:
    plan = best_plan(space_of("gpt", 4))
    columns = {
        f"{name}.{kind}"
        for name in ("attention.q", "attention.k", "attention.v", "up")
        for kind in ("weight", "bias")
    }
    rows = {f"{name}.{kind}" for name in ("attention.o", "down") for kind in ("weight", "bias")}
    assert plan.strategies == dict.fromkeys(columns, "column") | dict.fromkeys(rows, "row")
    assert plan.collectives == {"all_reduce": 2}


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("changed", [each.name for each in fields(Prices)])
def test_layers_keep_their_plan_when_a_price_halves_or_doubles(changed: str, factor: float) -> None:
    prices = replace(Prices(), **{changed: getattr(Prices(), changed) * factor})
    assert layer_styles(best_plan(space_of("llama", 4), prices=prices), "layers.0.") == LLAMA_STYLES
    assert best_plan(space_of("gpt", 4), prices=prices).strategies == best_plan(space_of("gpt", 4)).strategies


def test_the_plan_is_the_cheapest_of_all_by_any_prices() -> None:
    random.seed(0)
    space = space_of("tiny gpt", 3)
    everything = list(itertools.product(STYLES, repeat=len(space.decisions)))
    assert len(everything) == 3**6
    plans = set()
    for _ in range(8):
        exponents = (random.uniform(-9, -6), random.uniform(-12, -9), random.uniform(-12, -9), -13.0)
        prices = Prices(*(10**exponent for exponent in exponents))
        plan = best_plan(space, prices=prices)
        assert plan.seconds == pytest.approx(
            min(price(space, prices, styles) for styles in everything), rel=1e-9
        )
        plans.add(tuple(plan.strategies.items()))
    assert len(plans) > 2


@pytest.mark.parametrize(("name", "ranks"), [("tiny gpt", 2), ("tiny llama", 3), ("tied llama", 2)])
def test_what_is_said_of_any_plan_is_what_the_transformation_does(name: str, ranks: int) -> None:
    random.seed(1)
    space = space_of(name, ranks)
    for _ in range(4):
        check_prediction(space, program(name), tuple(random.choices(STYLES, k=len(space.decisions))))
    check_prediction(space, program(name), tuple(d.style for d in best_plan(space, prices=CHEAP).decisions))


def test_a_table_that_is_embedding_and_head_is_one_decision() -> None:
    untied, tied = space_of("tiny llama", 2), space_of("tied llama", 2)
    assert [group.names[0] for group in tied.decisions] == [
        group.names[0] for group in untied.decisions if group.names != ("head.weight",)
    ]


def test_programs_cut_by_the_plan_compute_the_same() -> None:
    whole = program("tiny llama")
    plan = choose(whole, 2, prices=CHEAP)
    assert plan.strategies
    ids = torch.randint(0, 30, (2, 6))
    parts = [tensor_parallel_transformation(whole, rank, 2, "cpu", plan.strategies) for rank in range(2)]
    for (result,) in lockstep.run(parts, ids):
        torch.testing.assert_close(result, whole.module()(ids), rtol=1e-4, atol=1e-5)


def test_two_choices_are_one() -> None:
    first, second = (choose(program("tiny gpt"), 2, prices=CHEAP) for _ in range(2))
    assert first == second
    assert list(first.strategies) == list(second.strategies)
    assert first.table().partition("solved in")[0] == second.table().partition("solved in")[0]


def test_a_memory_budget_is_met_at_the_least_price() -> None:
    space = space_of("tiny gpt", 2)
    dear = Prices(latency=1.0)
    assert best_plan(space, prices=dear).strategies == {}
    whole = space.total()
    plan = best_plan(space, prices=dear, memory_budget=whole * 7 // 10)
    assert max(plan.bytes_held) <= whole * 7 // 10
    costs = (
        price(space, dear, styles)
        for styles in itertools.product(STYLES, repeat=len(space.decisions))
        if max(space.bytes_held(uses_of(space, styles))) <= whole * 7 // 10
    )
    assert plan.seconds == pytest.approx(min(costs))
    assert f"of {whole * 7 // 10:,} allowed" in str(plan)
    with pytest.raises(ShardingError, match=r"into 1,000 bytes per rank: the smallest plan needs [\d,]+ of"):
        best_plan(space, memory_budget=1000)


def test_nothing_is_cut_where_only_communication_costs_or_there_is_one_rank() -> None:
    free = Prices(seconds_per_byte_held=0, seconds_per_flop=0)
    assert best_plan(space_of("tiny gpt", 2), prices=free).strategies == {}
    assert choose(program("tiny gpt"), 1, prices=CHEAP).strategies == {}
    with pytest.raises(ShardingError, match="at least one rank"):
        choose(program("tiny gpt"), 0)


def test_a_table_says_what_other_styles_would_cost() -> None:
    space = space_of("tiny gpt", 2)
    plan = best_plan(space, prices=CHEAP)
    everything = {x: price(space, CHEAP, x) for x in itertools.product(STYLES, repeat=len(space.decisions))}
    for index, (decision, extras) in enumerate(zip(plan.decisions, plan.alternatives, strict=True)):
        assert set(extras) == set(STYLES) - {decision.style}
        for style, extra in extras.items():
            least = min(cost for styles, cost in everything.items() if styles[index] == style)
            assert extra == pytest.approx(least - plan.seconds, rel=1e-6, abs=1e-15)
        assert decision.names[0] in plan.table()
        assert "bytes per rank" in plan.table()
    assert "2 all_reduce" in str(plan)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.mix = nn.Conv2d(3, 8, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.cut(x))
        return F.scaled_dot_product_attention(x, x, x.flip(-2)) + torch.baddbmm(x[0], x[0], x[0, :, :5])


def test_computation_is_counted_as_torch_counts_it() -> None:
    batch = torch.randn(2, 3, 8, 8)
    nodes = export(Products(), (batch,)).graph.nodes
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        Products()(batch)
    counted = sum(_flops(node) for node in nodes if node.op == "call_function")
    assert counted == counter.get_total_flops()


def test_layers_that_repeat_are_decided_once() -> None:
    with torch.device("meta"):
        whole = export(Deep(32), (torch.empty(4, 8),))
    plan = choose(whole, 2, prices=CHEAP)
    assert [len(decision.names) for decision in plan.decisions] == [32, 32]
    assert layer_styles(plan, "layers.31.") == {"0": "column", "1": "row"}
    assert plan.collectives == {"all_reduce": 32}


def test_only_numbered_modules_of_several_weights_that_are_alike_repeat() -> None:
    def kinds(**shapes: Any) -> dict[str, tuple[Any, ...]]:
        return {name.replace("_", "."): shape for name, shape in shapes.items()}

    assert find_repeats(kinds(h_0_a=(1,), h_0_b=(2,), h_1_a=(1,), h_1_b=(2,))) == {
        "h.0.a": "h.0.a",
        "h.0.b": "h.0.b",
        "h.1.a": "h.0.a",
        "h.1.b": "h.0.b",
    }
    groups = (
        kinds(h_0_a=(1,), h_1_a=(1,)),
        kinds(h_0_a=(1,), h_0_b=(2,), h_1_a=(1,), h_1_b=(3,)),
        kinds(h_0_a=(1,), h_0_b=(2,), g_0_a=(1,), g_0_b=(2,)),
    )
    for group in groups:
        assert find_repeats(group) == {name: name for name in group}
    nested = {f"stage.{s}.block.{b}.{kind}": (s, kind) for s in range(2) for b in range(3) for kind in "qk"}
    assert set(find_repeats(nested).values()) == {f"stage.{s}.block.0.{x}" for s in range(2) for x in "qk"}
    shapeless = {name: kind[1:] for name, kind in nested.items()}
    assert set(find_repeats(shapeless).values()) == {"stage.0.block.0.q", "stage.0.block.0.k"}
