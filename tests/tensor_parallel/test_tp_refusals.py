"""Operations with a user's rule and without one, and what is refused of a program, ranks and groups."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lockstep
import pytest
import torch
import torch.distributed as dist
from lockstep import parts
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, export

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.tensor_parallel import (
    PARTIAL,
    REPLICATE,
    Partition,
    Split,
    bind,
    choose,
    counts,
    explain,
    load,
    materialize,
    rule,
    save,
    tensor_parallel_transformation,
)
from shardwise.tensor_parallel.rules.registry import RULES

# torch's own decompositions copy what it calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")


@torch.library.custom_op("shardwise_test::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Each row's elements times its first row's mean: no rule can be guessed for it."""
    return x * x[..., :1, :].mean()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("shardwise_test::contracted", mutates_args=())
def contracted(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] times weight [in, out]."""
    return x @ weight


@contracted.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(turned(y))


PLAN = {"up": "colwise", "down": "rowwise"}


@pytest.fixture
def rules() -> Iterator[None]:
    """Rules registered by a test are gone after it."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def test_an_operation_without_a_rule_is_named_with_its_line_and_the_bytes_it_gathers() -> None:
    torch.manual_seed(0)
    model, x = Turning(), torch.randn(3, 6)
    program = export(model, (x,))
    node = next(node for node in program.graph.nodes if "turned" in str(node.target))
    text = rf"shardwise_test::turned.default \({node.name}, .*return self.down\(turned\(y\)\)"
    with pytest.warns(
        UserWarning, match=rf"{text}.* has no tensor-parallel rule.*, {3 * 10 * 4} bytes per call"
    ):
        programs = parts(program, PLAN)
    for (result,) in lockstep.run(programs, x):
        torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert counts(programs[0]) == {"all_gather": 1, "all_reduce": 1}
    with pytest.raises(ShardingError, match=rf"{text}.* would gather {3 * 10 * 4} bytes; register a rule"):
        parts(program, PLAN, strict=True)


@pytest.mark.usefixtures("rules")
def test_a_rule_of_ones_own_builds_what_ranks_do_of_an_operation() -> None:
    @rule("shardwise_test::contracted")
    def contracted_rule(p: Partition, node: fx.Node) -> None:
        x, weight = node.all_input_nodes
        cut = p.cut_of(x)
        if cut is None or cut.dim != 1:
            return p.repeat(node)
        result = p.emit(node.target, p.take(x, cut), p.take(weight, cut.on(0)))
        return p.keep(node, result, PARTIAL)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.inner = nn.Linear(6, 10), nn.Module()
            self.inner.weight = nn.Parameter(torch.randn(10, 4))

        def forward(self, x: Tensor) -> Tensor:
            return contracted(self.up(x).relu(), self.inner.weight)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made = parts(export(model, (x,)), {"up": "colwise", "inner": "rowwise"}, ranks=3, strict=True)
    for (result,) in lockstep.run(made, x):
        torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert counts(made[0]) == {"all_reduce": 1}
    assert [row.bytes_here for row in explain(made[0]).parameters if "inner" in row.name] == [4 * 4 * 4]
    whole = parts(export(model, (x,)), {}, strict=True)
    assert counts(whole[0]) == {}


def test_placements_are_what_a_rule_says_of_values() -> None:
    assert Split(1, (((0, 4),), ((4, 10),))).size(1) == 6
    assert REPLICATE != PARTIAL


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.last = nn.Module()
        self.last.register_buffer("seen", torch.zeros(3, 10))

    def forward(self, x: Tensor) -> Tensor:
        self.last.seen.copy_(self.up(x))
        x.mul_(2)
        return self.up(x) + self.last.seen


def test_what_a_program_writes_stays_whole_and_a_style_for_it_is_told() -> None:
    torch.manual_seed(0)
    model, x = Writing(), torch.randn(3, 6)
    program = export(model, (x.clone(),))
    with pytest.warns(
        UserWarning, match=r"last.seen of shape \(3, 10\).* stays whole.*the program writes to it"
    ):
        programs = parts(program, {"up": "colwise", "last": "rowwise"})
    expected = model(x.clone())
    for (mutated, result), part in zip(lockstep.run(programs, x.clone()), programs, strict=True):
        torch.testing.assert_close((mutated, result), (2 * x, expected))
        torch.testing.assert_close(part.state_dict["last.seen"], model.last.seen)
    with pytest.raises(ShardingError, match="the program writes to it; remove its style"):
        parts(program, {"up": "colwise", "last": "rowwise"}, strict=True)


@on_ranks(2)
def test_ranks_and_groups_that_do_not_fit_are_refused() -> None:
    rank = dist.get_rank()
    program = export(nn.Sequential(nn.Linear(6, 4)), (torch.randn(2, 6),))
    for index, ranks, message in (
        (2, 2, "got rank 2 and world_size 2"),
        (-1, 2, "got rank -1 and world_size 2"),
        (0, 4, rf"rank {rank}.*world_size is 4, but the default process group has 2 ranks"),
    ):
        with pytest.raises(ShardingError, match=message):
            tensor_parallel_transformation(program, index, ranks, "cpu", {"0": "colwise"})
    part = tensor_parallel_transformation(program, 0, 4, "cpu", {"0": "colwise"}, group_name="later")
    with pytest.raises(ShardingError, match=f"rank 0 of 4, but this process is rank {rank} of 2"):
        bind(part)


class Devices(nn.Module):
    """Has tensors and names of devices wherever a program can."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu()) + self.shift + torch.arange(6, device=x.device)
        return torch.cond(y.sum() > 0, lambda y: y + torch.ones(6), lambda y: y.to("cpu").clone(), (y,))


def graphs_of(program: ExportedProgram) -> list[fx.Graph]:
    """Its graph, and those that this one calls."""
    return [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]


def test_programs_for_a_device_that_this_machine_lacks_can_be_made_saved_and_filled(tmp_path: Path) -> None:
    assert not torch.cuda.is_available()
    model, x = Devices(), torch.randn(3, 6)
    whole = export(model, (x,))
    before = [str(graph) for graph in graphs_of(whole)]
    programs = [tensor_parallel_transformation(whole, rank, 2, "cuda", PLAN) for rank in range(2)]
    assert [str(graph) for graph in graphs_of(whole)] == before
    programs[1].validate()
    graphs = graphs_of(programs[1])
    nodes = [node for graph in graphs for node in graph.nodes]
    values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), Tensor)]
    assert len(graphs) == 3
    assert {value.device.type for value in values} == {"cuda"}
    assert "'cpu'" not in "".join(map(str, graphs))
    save(programs, tmp_path / "parts")
    loaded = load(tmp_path / "parts", rank=1)
    torch.testing.assert_close(loaded.state_dict["up.weight"], model.up.weight[5:])
    materialize(loaded, {name: 2 * value for name, value in model.state_dict().items()})
    torch.testing.assert_close(loaded.state_dict["up.weight"], 2 * model.up.weight[5:])


def test_a_program_that_is_one_ranks_already_is_refused() -> None:
    cut = parts(export(nn.Sequential(nn.Linear(6, 10)), (torch.randn(3, 6),)), {"0": "colwise"})[1]
    for program in (cut, cut.run_decompositions()):
        with pytest.raises(ShardingError, match="is already cut for rank 1 of 2"):
            parts(program, {"0": "colwise"})
        with pytest.raises(ShardingError, match="is already cut for rank 1 of 2"):
            choose(program, 2)
    whole = export(nn.Sequential(nn.Linear(6, 10)), (torch.randn(3, 6),))
    with pytest.raises(ShardingError, match="rank 1 of 2, expected that of rank 0 of 2"):
        tensor_parallel_transformation(whole, 0, 2, "cpu", {"0": "colwise"}, sharing=cut)
    cut.graph_module.meta["custom"].clear()
    with pytest.raises(
        ShardingError, match=r"communicates, by _c10d_functional.all_gather_into_tensor.default \("
    ):
        parts(cut, {"up": "colwise"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: nn.Linear(6, 6)}, r"expected an ExportedProgram, got a module; export the model first"),
        ({0: None}, "expected an ExportedProgram, got NoneType"),
        ({1: "0"}, r"rank and world_size must be ints, got '0' and 2"),
        ({1: False}, "rank and world_size must be ints, got False and 2"),
        ({2: 0}, "got rank 0 and world_size 0"),
        ({3: "gpu"}, "torch does not know device_type 'gpu'"),
        ({3: None}, "device_type None"),
        ({4: ["up", "colwise"]}, r"strategies as a mapping .* got list \['up', 'colwise'\]"),
        ({4: None}, "got NoneType None"),
        ({4: "colwise"}, "a mapping .* or 'auto', got str 'colwise'"),
        ({4: {nn.Linear: "colwise"}}, "the strategies have the key .*Linear"),
    ],
)  # fmt: skip
def test_arguments_of_other_kinds_are_refused_by_name(changed: dict[int, Any], message: str) -> None:
    given = [export(Turning(), (torch.randn(3, 6),)), 0, 2, "cpu", PLAN]
    for place, value in changed.items():
        given[place] = value
    with pytest.raises(ShardingError, match=message):
        tensor_parallel_transformation(*given)
