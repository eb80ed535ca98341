"""Tensor-parallel plans of a model: which names fit, what each module is cut by, which blocks are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from planner.models import Even, TwoLists
from shardwise import planner
from shardwise.errors import ShardingError
from shardwise.planner.setup import Setup
from shardwise.planner.tensor import check_names, cuts, styles_of, words_of


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"layers.*.up": "colwise", "blocks.*": "colwise"},
            r"tensor_plan of Even has .* match no module: 'layers.\*.up'; .* embedding, head, blocks.\*$",
        ),
        ({"blocks.2": "colwise"}, r"tensor_plan of Even has .* match no module: 'blocks.2';"),
        ({"blocks.*": nn.Linear}, r"tensor_plan of Even must map names of modules to styles.*Linear"),
        (["blocks.*"], r"must map names .* got \['blocks.\*'\]; styles are colwise, "),
        ({"blocks": "colwise"}, r"has 'blocks': 'colwise', but 'blocks' is of class ModuleList, expected nn"),
        ({"embedding": "rowwise"}, r"'embedding' is of class Embedding, .*; give it embedding_rowwise$"),
        (
            {"head": "colwise"},
            r"'head' is of class Linear, as wide as the vocabulary.*; give it colwise_rep$",
        ),
        ({"blocks.*": "rowwise"}, r"RuntimeError: [^\n]* cuts by rowwise with no colwise before[^\n]*$"),
        (
            {"blocks.0": "colwise"},
            r"likely cause is how tensor=2 cuts it.* With tensor=1 it is planned uncut$",
        ),
    ],
)
def test_a_tensor_plan_that_does_not_fit_the_model_is_named(asked: Any, told: str) -> None:
    def factory() -> nn.Module:
        model = Even()
        model.tensor_plan = asked
        return model

    with pytest.raises(ShardingError, match=told):
        shardwise.plan(factory, ranks=2, tensor=2, sequence=8)


@pytest.mark.parametrize("name", ["blocks.*.1", "blocks.0.1", "blocks.12.0", "vision.10"])
def test_a_number_that_no_module_has_is_refused_wherever_it_is_in_a_name(name: str) -> None:
    with torch.device("meta"):
        model = TwoLists()
    model.tensor_plan = {"blocks.11.0": "colwise_rep", "vision.9": "colwise_rep"}
    check_names(model)
    model.tensor_plan = model.tensor_plan | {name: "colwise_rep"}
    with pytest.raises(ShardingError) as raised:
        check_names(model)
    known = "embedding, head, blocks.*.0, vision.*"
    assert str(raised.value).endswith(f" match no module: '{name}'; modules with parameters are {known}")


def test_a_block_that_is_cut_unlike_the_others_is_run_and_is_in_the_code() -> None:
    def factory() -> nn.Module:
        model = TwoLists()
        model.tensor_plan = {"blocks.11.0": "colwise_rep"}
        return model

    made = shardwise.plan(factory, ranks=2, tensor=2, sequence=8)
    assert made.whole == "block 11 is cut by something else than block 0"
    assert {one.kind for one in made.sent} == {"all_gather", "all_reduce"}  # outputs; gradients of inputs
    assert '"blocks.11.0": ColwiseParallel(' in planner.python(factory, made.setup)


@pytest.mark.parametrize(("rows", "told"), [(512, 0), (513, 1)])
def test_what_every_tensor_parallel_rank_holds_whole_is_not_called_uneven(rows: int, told: int) -> None:
    def factory() -> nn.Module:
        model = Even()
        model.embedding = nn.Embedding(rows, 256)
        model.tensor_plan = {"blocks.*": "colwise_rep"}
        return model

    made = shardwise.plan(factory, ranks=512, tensor=2, sequence=8)
    assert sum("1.40 times an even share" in line for line in made.assumed) == len(made.assumed) == told


class Halves(Even):
    """Its blocks have numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(256, 256), nn.Linear(256, 256)
        block = nn.Sequential(nn.LayerNorm(256), nn.Sequential(up, nn.GELU(), down))
        self.blocks = nn.ModuleList([block])
        self.tensor_plan = {"embedding": "embedding_rowwise", "head": "colwise_rep"}
        self.tensor_plan |= {"blocks.*.1.0": "colwise", "blocks.*.1.2": "rowwise"}


def test_a_module_as_wide_as_the_vocabulary_is_no_head_inside_a_block() -> None:
    with torch.device("meta"):
        model = Halves()
    model.blocks[0][1][0] = nn.Linear(256, 512)
    check_names(model)


def test_numbers_inside_a_block_are_not_those_of_other_modules() -> None:
    with torch.device("meta"):
        model = Halves()
    words = words_of(model, Setup(tensor=2, sequence_parallel=True))
    assert {name: word for name, word in words.items() if name.startswith("blocks")} == {
        "blocks.*.0": "sequence_parallel",
        "blocks.*.1": "gather_sequence",
        "blocks.*.1.0": "colwise",
        "blocks.*.1.2": "rowwise_to_sequence",
    }


def test_a_stage_without_the_head_takes_the_plan_of_the_whole_model() -> None:
    with torch.device("meta"):
        stage = Halves()
    del stage.head
    assert "head" not in styles_of(stage)


def test_single_blocks_are_refused_where_stages_number_their_own() -> None:
    with torch.device("meta"):
        model = TwoLists()
    model.tensor_plan = {"blocks.*.0": "colwise_rep", "blocks.1[01].0": "colwise_rep"}
    check_names(model)
    with pytest.raises(ShardingError, match=r"a single block \('blocks.1\[01\].0'\), but each of 2 stages"):
        check_names(model, stages=2)
    model.tensor_plan.popitem()
    check_names(model, stages=2)


def test_a_sequence_is_cut_in_all_blocks_or_none() -> None:
    with torch.device("meta"):
        model = Halves()
        model.blocks.append(nn.Sequential(nn.LayerNorm(256), nn.Sequential(nn.Linear(256, 256))))
    model.tensor_plan = {name.replace("*", "0"): word for name, word in model.tensor_plan.items()}
    with pytest.raises(ShardingError, match=r"has blocks.\*.1.0, not 'blocks.1.1.0'"):
        words_of(model, Setup(tensor=2, sequence_parallel=True))


def test_logits_are_cut_only_with_a_head() -> None:
    with torch.device("meta"):
        model = Halves()
    model.auto_tensor_plan = "torchtitan"
    assert cuts(model, Setup(tensor=2)) == (True, True)
    del model.tensor_plan["head"]
    assert cuts(model, Setup(tensor=2)) == (True, False)
    with pytest.raises(ShardingError, match=r"has no head of the style colwise_rep\. Give it that"):
        cuts(model, Setup(tensor=2, loss_parallel=True))


def test_modules_whose_names_are_no_python_are_found_in_the_code() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def factory() -> nn.Module:
        model = nn.Sequential(nn.Embedding(16, 8), Body(), nn.Linear(8, 16, bias=False))
        model[2].weight = model[0].weight
        model.tensor_plan = {"0": "embedding_rowwise", "1.blocks.*": "colwise_rep", "2": "colwise_rep"}
        return model

    code = planner.python(factory, Setup(ranks=4, tensor=2, device="cpu", sequence=8))
    compile(code, "printed", "exec")
    assert 'blocks = model.get_submodule("1.blocks")' in code
    assert 'model.get_submodule("2").weight = model.get_submodule("0").weight' in code
