"""Styles by module: what may be written, what it does, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lockstep
import pytest
import torch
import torch.distributed.tensor.parallel as peer
from lockstep import parts
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.export import ExportedProgram, export
from torch.nn import functional as F

from shardwise.errors import ShardingError
from shardwise.tensor_parallel import styles
from shardwise.tensor_parallel.explain import counts, explain
from shardwise.tensor_parallel.state import placement_from_json, record_of
from shardwise.tensor_parallel.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, plan_of

# torch's own decompositions copy what it calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")

PARAMETERS = {
    "embed.weight": torch.empty(12, 8, device="meta"),
    "layers.0.up.weight": torch.empty(16, 8, device="meta"),
    "layers.0.up.bias": torch.empty(16, device="meta"),
    "layers.0.down.weight": torch.empty(8, 16, device="meta"),
    "layers.0.down.bias": torch.empty(8, device="meta"),
    "layers.0.norm.weight": torch.empty(8, device="meta"),
    "layers.0.scale": torch.empty((), device="meta"),
}
UP = {"layers.0.up.weight": "column", "layers.0.up.bias": "column"}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """An embedding whose table is the head's weight, and a projection stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.inner = nn.Module()
        self.inner.weight, self.inner.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(torch.addmm(self.inner.bias, x.view(-1, 8), self.inner.weight).view(x.shape))


def exported(model: nn.Module, *inputs: Tensor) -> ExportedProgram:
    return export(copy.deepcopy(model), inputs)


def check(model: nn.Module, plan: Any, *inputs: Tensor, **options: Any) -> list[ExportedProgram]:
    """Cut, run on all ranks, and compare; returns the programs."""
    programs = parts(exported(model, *inputs), plan, **options)
    expected = model(*inputs)
    for (result,) in lockstep.run(programs, *inputs):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    return programs


def placement_of(program: ExportedProgram, name: str) -> Any:
    return placement_from_json(record_of(program)["parameters"][name]["placement"])


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel,
        ColwiseParallel(),
        ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1)),
        peer.ColwiseParallel,
        peer.ColwiseParallel(),
        peer.ColwiseParallel(input_layouts=Shard(0)),
        type("Mine", (peer.ColwiseParallel,), {}),
        "colwise",
        "column",
    ],
    ids=styles.describe,
)
def test_a_class_an_instance_and_a_word_mean_the_same(style: Any) -> None:
    plan = plan_of({"layers.0.up": style}, PARAMETERS)
    assert plan.styles == UP
    assert plan.outputs == {}


def test_patterns_fit_modules_and_parameters_and_names_come_before_them() -> None:
    assert plan_of({"layers.*.up": "colwise"}, PARAMETERS).styles == UP
    assert plan_of({"*.up.weight": "colwise"}, PARAMETERS).styles == {"layers.0.up.weight": "column"}
    everything = {
        "layers.0.up": "colwise",
        "layers.0.up.bias": "replicate",
        "layers.*": "rowwise",
        "*.down": "rowwise",
        "layers.0.norm": "replicate",
        "layers.0.scale": styles.Replicate,
    }
    for entries in (everything, dict(reversed(everything.items()))):
        actual = plan_of(entries, PARAMETERS).styles
        assert actual == {
            "layers.0.up.weight": "column", "layers.0.down.weight": "row", "layers.0.down.bias": "row"
        }  # fmt: skip


def test_patterns_that_ask_for_different_things_are_refused_by_name() -> None:
    for plan, message in (
        (
            {"*.up": "colwise", "layers.*": "rowwise"},
            r"'\*.up' and 'layers.\*' both match 'layers.0.up.weight'",
        ),
        (
            {"*.up": "colwise", "*up": "colwise_rep"},
            r"'\*.up' and '\*up' both match .*\(column with any outputs, column with whole outputs\)",
        ),
        (
            {
                "layers.0.u*": ColwiseParallel(output_layouts=Replicate()),
                "*.up": peer.PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Shard(1)),
            },
            r"'\*.up' and 'layers.0.u\*' both match 'layers.0.up' but ask for different things",
        ),
    ):
        with pytest.raises(ShardingError, match=message):
            plan_of(plan, PARAMETERS)


def test_a_function_chooses_by_name_and_shape_and_may_leave_a_parameter_alone() -> None:
    seen = {}

    def choose(name: str, tensor: Tensor) -> Any:
        seen[name] = tuple(tensor.shape)
        return "colwise" if name.startswith("layers.0.up") else None

    plan = plan_of({"layers.0.down": peer.RowwiseParallel(), "*": choose}, PARAMETERS)
    assert seen == {name: tuple(tensor.shape) for name, tensor in PARAMETERS.items()}
    assert plan.styles == UP | {"layers.0.down.weight": "row", "layers.0.down.bias": "row"}
    assert plan.strategies["*"] == "choose"
    assert plan.strategies["layers.0.down"].startswith("RowwiseParallel(")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.0.upp": "colwise"}, r"'layers.0.upp' matches no parameter.*did you mean layers.0.up"),
        ({"zzz": "colwise"}, r"matches no parameter of the program; it has embed.weight"),
        ({"layers.0": "colwise"}, r"layers.0.scale of shape \(\) cannot be cut"),
        ({"layers": "colwise"}, r"has no parameters itself; name its submodules: layers.0.up"),
        ({"layers.0.norm": ColwiseParallel}, r"layers.0.norm.weight of shape \(8,\) cannot be cut by column"),
        ({"layers.0.up.bias": RowwiseParallel}, r"up.bias of shape \(16,\) cannot be cut"),
        ({"layers.0.up": "colwize"}, r"'colwize', which is not a style; did you mean colwise"),
        ({"layers.0.up": 3}, r"'layers.0.up' is 3; expected ColwiseParallel"),
        ({"layers.0.up": lambda name, tensor: 3}, r"'layers.0.up \(layers.0.up.weight\)' is 3"),
        ({"layers.0.up": peer.PrepareModuleOutput(
            output_layouts=(Shard(0), Shard(0)), desired_output_layouts=(Shard(1), Replicate()))},
            "has layouts for 2 outputs"),
        ({"layers.0.up": peer.PrepareModuleInput}, "is the class PrepareModuleInput; pass an instance"),
        ({"layers.0.up": ColwiseParallel(output_layouts=Partial())}, "has the layout Partial"),
        ({"layers.0.up": ColwiseParallel(input_layouts=3)}, "has the layout 3"),
        ({"layers.0": peer.PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Partial())}, "has the layout Partial"),
        ({"layer": peer.PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate())}, "matches no parameter"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(plan: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        plan_of(plan, PARAMETERS)


def test_output_layouts_are_done_where_the_module_returns() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(2, 4, 8)
    usual = check(model, {"up": ColwiseParallel, "down": RowwiseParallel}, x, strict=True)
    assert counts(usual[0]) == {"all_reduce": 1}
    assert [(row.kind, row.module) for row in explain(usual[0]).collectives] == [("all_reduce", "down")]
    gathered = check(model, {"up": peer.ColwiseParallel(output_layouts=Replicate())}, x, strict=True)
    assert counts(gathered[0]) == {"all_gather": 1}
    (row,) = explain(gathered[0]).collectives
    assert (row.module, row.bytes) == ("up", 2 * 4 * 16 * 4)
    assert [node.meta["val"].shape[-1] for node in gathered[0].graph.nodes if "gelu" in node.name] == [16]


def test_sequence_parallel_plans_cut_the_activations_between_layers() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(MLP(), MLP()), torch.randn(2, 5, 8)
    plan = {
        "*.norm": SequenceParallel(sequence_dim=1),
        "*.up": peer.ColwiseParallel(input_layouts=Shard(1)),
        "*.down": peer.RowwiseParallel(output_layouts=Shard(1)),
        "0": peer.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    }
    programs = check(model, plan, x)
    norms = [node for node in programs[0].graph.nodes if "layer_norm" in node.name]
    assert [tuple(node.meta["val"].shape) for node in norms][-1] == (2, 3, 8)
    variant = check(model, plan | {"*.norm": peer.SequenceParallel()}, x)
    assert counts(variant[0]) == counts(programs[0])
    from_the_end = plan | {"*.down": peer.RowwiseParallel(output_layouts=Shard(-2))}
    assert str(check(model, from_the_end, x)[0].graph) == str(programs[0].graph)


def shapes(program: ExportedProgram, op: str) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in program.graph.nodes if op in node.name]


def test_a_modules_input_and_output_are_moved_where_they_are_wanted() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(MLP(), MLP()), torch.randn(2, 6, 8)
    rows = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
    whole = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    variant = check(model, {"1.norm": peer.PrepareModuleInput(**rows)}, x, strict=True)
    assert shapes(variant[0], "layer_norm")[1:] == [(2, 3, 8)]
    assert counts(variant[0]) == {"all_gather": 1}
    both = peer.PrepareModuleInputOutput(**rows, **whole)
    two = check(model, {"1.norm": both, "1.up": ColwiseParallel, "1.down": RowwiseParallel}, x, strict=True)
    assert shapes(two[0], "layer_norm")[1:] == [(2, 3, 8)]
    assert counts(two[0]) == {"all_gather": 1, "all_reduce": 1}
    (gather, _) = explain(two[0]).collectives
    assert gather.module == "1.norm"
    by_name = peer.PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": Shard(0)}
    )
    three = check(model, {"1": by_name}, x, strict=True)
    assert shapes(three[1], "layer_norm")[-1] == (1, 6, 8)
    plan = {"0.down": RowwiseParallel, "0.up": ColwiseParallel, "1.norm": peer.PrepareModuleInput(**rows)}
    four = check(model, plan, x, strict=True)
    assert counts(four[0]) == {"all_reduce": 1, "all_gather": 1}


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Two(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.sum, self.act = Sum(), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(x, self.down(self.act(self.up(x))))


def test_modules_without_parameters_are_moved_too_and_two_inputs_are_refused() -> None:
    torch.manual_seed(0)
    model, x = Two(), torch.randn(2, 6, 8)
    out = peer.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    programs = check(model, {"act": out}, x, strict=True)
    assert shapes(programs[0], "linear") == [(2, 6, 16), (2, 3, 8)]
    rows = peer.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    with pytest.raises(
        ShardingError, match=r"cannot move the input of sum: it takes 2 tensors \(x, linear_1\)"
    ):
        parts(exported(model, x), {"sum": rows})
    with pytest.raises(ShardingError, match="matches no parameter"):
        parts(exported(model, x), {"summ": rows})


def test_output_layouts_that_no_program_can_have_are_refused() -> None:
    x = torch.randn(2, 4, 8)
    dynamic = export(MLP(), (x,), dynamic_shapes=({1: torch.export.Dim("s", min=2)},))
    for program, dim, message in (
        (dynamic, 1, "not known before"),
        (exported(MLP(), x), 5, r"Shard\(5\): it has 3 dims"),
    ):
        with pytest.raises(ShardingError, match=message):
            parts(program, {"down": RowwiseParallel(output_layouts=Shard(dim))})
    program = exported(MLP(), x)
    for node in program.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    with pytest.raises(ShardingError, match="cannot move the outputs of up: no operation"):
        parts(program, {"up": ColwiseParallel(output_layouts=Replicate())})


@pytest.mark.parametrize(
    ("plan", "dim", "collectives"),
    [
        ({"embed": RowwiseParallel}, 0, {"all_reduce": 1, "all_gather": 1}),
        ({"head": ColwiseParallel}, 0, {"all_reduce": 1, "all_gather": 1}),
        ({"embed": "rowwise", "head": "colwise"}, 0, {"all_reduce": 1, "all_gather": 1}),
        ({"embed": ColwiseParallel}, 1, {"all_gather": 1, "all_reduce": 1}),
        ({"head": RowwiseParallel}, 1, {"all_gather": 1, "all_reduce": 1}),
    ],
)
def test_tied_weights_are_one_shard_cut_by_either_name_also_where_the_graph_has_one(
    plan: Any, dim: int, collectives: dict[str, int]
) -> None:
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(12, (2, 3))
    names = []
    for strict in (False, True):  # of torch.export, which then keeps one name in the graph
        program = export(copy.deepcopy(model), (ids,), strict=strict)
        names.append(sum(spec.target == "head.weight" for spec in program.graph_signature.input_specs))
        programs = parts(program, plan, ranks=3)
        for (result,) in lockstep.run(programs, ids):
            torch.testing.assert_close(result, model(ids), rtol=1e-5, atol=1e-5)
        assert counts(programs[0]) == collectives
        assert programs[2].state_dict["embed.weight"] is programs[2].state_dict["head.weight"]
        assert placement_of(programs[0], "embed.weight") == placement_of(programs[0], "head.weight")
        assert placement_of(programs[0], "head.weight").dim == dim
        assert programs[0].state_dict["head.weight"].shape[dim] == (12, 8)[dim] // 3 + ((12, 8)[dim] % 3 > 0)
        assert explain(programs[0]).bytes_whole == (12 * 8 + 8 * 8 + 8) * 4
    assert names == [1, 0]


@pytest.mark.parametrize("strict", [False, True])
def test_tied_weights_to_be_cut_in_two_ways_are_refused(strict: bool) -> None:
    program = export(Tied(), (torch.randint(12, (2, 3)),), strict=strict)
    with pytest.raises(ShardingError, match=r"embed.weight and head.weight are one tensor, .*dim 0.*dim 1"):
        parts(program, {"embed": "rowwise", "head": "rowwise"})


@pytest.mark.parametrize(("style", "dim"), [("colwise", 1), ("rowwise", 0)])
def test_the_way_a_weight_lies_is_seen_from_its_use(style: str, dim: int) -> None:
    programs = check(Tied(), {"inner": style}, torch.randint(12, (2, 3)))
    assert placement_of(programs[0], "inner.weight").dim == dim
    assert programs[0].state_dict["inner.bias"].numel() == (4 if style == "colwise" else 8)


def test_more_ranks_than_elements_leave_some_with_nothing_unless_strict() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)), torch.randn(2, 4)
    plan = {"0": ColwiseParallel, "1": RowwiseParallel}
    programs = check(model, plan, x, ranks=5)
    assert [tuple(part.state_dict["0.weight"].shape) for part in programs][2:] == [(1, 4), (0, 4), (0, 4)]
    with pytest.raises(ShardingError, match=r"rank 3 of 5 would hold no part of 0.weight of shape \(3, 4\)"):
        parts(exported(model, x), plan, ranks=5, strict=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.flatten(0, 1).relu().view(h.shape),
        lambda h: h.view(-1, 2, 2).relu().view(h.shape[0], -1, 4),
        lambda h: h.view(h.shape[0], -1, 2, 2).relu().flatten(2),
        lambda h: torch.cat([h, h]).relu().view(2, -1, h.shape[1], 4).sum(0),
        lambda h: h.flatten(0, 1).relu().unflatten(0, (-1, h.shape[1])),
    ],
    ids=["merged", "view", "heads", "parted", "unflatten"],
)
@pytest.mark.parametrize("training", [False, True])
def test_ranks_without_elements_know_the_sizes_that_are_dynamic(
    change: Callable[[Tensor], Tensor], training: bool
) -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(change(self.up(x)))

    model = Changed()
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=64)}
    program = export(model, (torch.randn(3, 5, 4),), dynamic_shapes=(sizes,))
    programs = parts(program, {"up": "colwise", "down": "rowwise"}, ranks=5, training=training)
    for x in (torch.randn(3, 5, 4), torch.randn(4, 2, 4)):
        for (result,) in lockstep.run(programs, x):
            torch.testing.assert_close(result, model(x))


def test_a_style_that_changes_nothing_is_told() -> None:
    class Unused(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    program = exported(Unused(), torch.randn(2, 8))
    with pytest.warns(
        UserWarning, match=r"up.weight of shape \(16, 8\) has the style 'column' but stays whole"
    ):
        parts(program, {"up": "colwise"}, ranks=1)
    with pytest.raises(ShardingError, match="nothing uses it"):
        parts(program, {"up": "colwise"}, ranks=1, strict=True)


class Product(nn.Module):
    """A product with a weight that layers make."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(8, 16)
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 16, bias=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return F.linear(self.x(x), self.down(self.up(z)))


def test_a_weight_of_which_ranks_have_terms_is_cut_as_its_input_is() -> None:
    plan = {"x": "colwise", "up": "colwise", "down": "rowwise"}
    programs = check(Product(), plan, torch.randn(3, 8), torch.randn(8, 4))
    assert counts(programs[0]) == {"reduce_scatter": 1, "all_reduce": 1}


class Fused(nn.Module):
    """Attention whose queries, keys and values are one layer's, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(3, 5, 8))


def test_queries_keys_and_values_of_one_layer_are_cut_by_heads_where_they_are_permuted_first() -> None:
    programs = check(Fused(), {"qkv": "colwise", "out": "rowwise"}, torch.randn(3, 5, 8))
    assert counts(programs[0]) == {"all_reduce": 1}


class Normalized(nn.Module):
    """Every head of every row normalized by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.normalize(self.up(x).view(-1, 4), dim=-1).view(3, 5, 12))


def test_a_layer_is_cut_by_heads_where_those_of_all_rows_become_one_dim() -> None:
    programs = check(Normalized(), {"up": "colwise", "down": "rowwise"}, torch.randn(3, 5, 8))
    assert counts(programs[0]) == {"all_reduce": 1}


class Rows(nn.Module):
    """The sum of what two layers give, as one row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.a, self.b = (nn.Linear(16, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.a(y.unsqueeze(0)) + self.b(y).unsqueeze(0)


def test_terms_of_a_sum_stay_so_where_they_become_a_row() -> None:
    programs = check(Rows(), {"up": "colwise", "a": "rowwise", "b": "rowwise"}, torch.randn(3, 8))
    assert counts(programs[0]) == {"all_reduce": 1}
