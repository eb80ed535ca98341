"""Every model of the zoo, cut over ranks, computes what the whole one does at the cost it should have.

Each is measured in one form of its program on one number of ranks, which go round from model to model;
`python tests/tensor_parallel/zoo.py --all` does all.
"""

from __future__ import annotations

import pytest
import torch
import zoo
import zoo_transformers
from torch import Tensor
from torch.utils import _pytree as pytree

from ranks import on_ranks

OWN = [name for name, case in zoo.CASES.items() if case.tolerance < 1e-6]
FAMILIES = [
    "Llama, grouped keys",
    "GPT-2, tied by vocabulary",
    "BERT",
    "ViT",
    "T5",
    "Qwen3",
    "GPT-NeoX",
    "OPT",
]
assert zoo_transformers.VOCABULARY


@pytest.mark.parametrize("name", OWN)
def test_the_ranks_together_compute_what_the_whole_model_does(name: str) -> None:
    index = OWN.index(name)
    form = zoo.FORMS[index % 4]
    exported = zoo.export(zoo.CASES[name], form)
    ranks = 2 + index % 3
    result = zoo.measure(zoo.CASES[name], ranks, form, exported)
    assert zoo.problems(zoo.CASES[name], result, ranks) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ranks_together_compute_what_a_transformer_of_a_known_family_does(name: str) -> None:
    form = (False, FAMILIES.index(name) % 2 == 1)
    result = zoo.measure(zoo.CASES[name], 3, form)
    assert zoo.problems(zoo.CASES[name], result, 3) == []


@on_ranks(2, 3)
def test_the_programs_run_on_real_ranks() -> None:
    for name in ("mlp", "conv net", "qkv by h3d, dynamic", "2 key heads for 6 by gqa", "language, tied"):
        case = zoo.CASES[name]
        program, model, args, kwargs = zoo.export(case, (False, False))
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        mine = zoo.tensor_parallel_transformation(program, rank, ranks, "cpu", case.plan).module()
        with torch.no_grad():
            found, expected = (pytree.tree_leaves(m(*args, **kwargs)) for m in (mine, model))
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, Tensor)
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_cutting_a_program_leaves_it_as_it_was() -> None:
    case = zoo.CASES["block, dynamic"]
    program, *_ = zoo.export(case, (False, True))
    before = str(program), dict(program.range_constraints)
    weights = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    zoo.cut(program, case.plan, 3)
    assert (str(program), dict(program.range_constraints)) == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in program.state_dict.items())
