"""Every model of the zoo, cut over ranks, computes what the whole one does at the cost it should have.

A model is met in several cases, or in one. Over these it is cut for 3 ranks, to uneven parts, and for 2 or 4,
for inference and for training, and every fourth one with strict, but not for each of these with each;
`zoo.py --all` does that. Torch's strict export takes as long as all the rest, and nearly always gives the
same operations: a few have it. Cases of which the others meet everything are left to `zoo.py --all` too.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import zoo
import zoo_blocks
import zoo_transformers

from shardwise.tensor_parallel import Prices, choose

assert zoo_blocks.Block
assert zoo_transformers.VOCABULARY

Point = tuple[int, bool]  # ranks, training
# It drops the second name of a tied weight, and has attention of torch by other operations.
EXPORTED_STRICTLY = {"language, tied", "attention of torch and its weights", "block, by hand", "mlp"}
if torch.__version__ < "2.13":  # torch exports these with dynamic sizes only strictly
    EXPORTED_STRICTLY.add("2 key heads for 6 by expand, dynamic")
# Every branch of the transformation that these take, and every operation with the placements of what it takes
# and gives, the others have too.
COVERED = {
    *("Qwen2", "Mistral", "GPT-NeoX", "Phi", "OPT", "BERT", "BART", "GPT-2, dynamic"),
    *("GPT-2, tied by vocabulary", "Llama, eager", "Llama, by vocabulary", "Llama, grouped keys"),
    *("block", "block, by hand", "block, by hand, dynamic", "block, dynamic", "block of 6 heads"),
    *("block of 6 heads, dynamic", "language", "language, head by rows", "mlp", "qkv by 3hd", "qkv by chunk"),
    *("mlp of 10, 3 and 2 features", "qkv by chunk, dynamic", "qkv by h3d", "qkv by h3d, dynamic"),
    *("qkv by heads chunk, dynamic", "qkv by slices", "2 key heads for 6 by expand, dynamic"),
    *(f"{n} key heads for 6 by {how}" for n in (2, 3) for how in ("by hand", "expand", "gqa", "interleave")),
    *("2 key heads for 6 in one qkv", "2 key heads for 6 in slices", "4 key heads for 8 by by hand"),
    *("1 key heads for 4 by by hand", "4 key heads for 8 by expand", "tables of one row and of one column"),
    *("column only", "a layer used twice", "a value times itself", "terms times themselves"),
}


def model_of(name: str) -> str:
    """The model that a case is one of."""
    name = re.sub(r"\d+ key heads for \d+", "key heads", name.partition(",")[0])
    name = re.sub(r"( of \d+ heads| ?\d+)$", "", name)
    return re.sub(r"^language by .*", "language", name)


def covering() -> list[tuple[str, zoo.Form, list[Point]]]:
    """Cases and their forms, each with the points at which to measure it."""
    cases: list[tuple[str, zoo.Form, list[Point]]] = []
    for number, (_, grouped) in enumerate(itertools.groupby(sorted(zoo.CASES, key=model_of), model_of)):
        names = list(grouped)
        # a case alone at two points, two cases once each with one of them at two, or each case at one point
        for index, name in enumerate(names):
            strict = (index + number) % 4 == 1
            training = (index + index // 2 + number // 2) % 2 == 1
            points = [(2 + (index + number) % 3, training)]
            if len(names) < 3 and index == 0:
                points.append((2 + (2 + number) % 3, not training))
            if len(names) == 1 and number % 3 == 0:  # rather than for 2 and 4
                uneven = number % 4 >= 2
                points = [(3, uneven), points[training == uneven]]
            precise = zoo.CASES[name].tolerance < 1e-6  # large models are slow to decompose
            decomposed = precise and (index + number) % 8 in (1, 4)
            if name not in COVERED:
                cases.append((name, (strict, decomposed), points))
    return cases


COVERING = covering()


@pytest.mark.parametrize(
    ("name", "form", "points"),
    COVERING,
    ids=[f"{name}{', strict' * form[0]}{', decomposed' * form[1]}" for name, form, _ in COVERING],
)
def test_the_ranks_together_compute_what_the_whole_model_does(
    name: str, form: zoo.Form, points: list[Point]
) -> None:
    strict, decomposed = form
    exported = zoo.export(zoo.CASES[name], (name in EXPORTED_STRICTLY, decomposed))
    for ranks, training in points:
        result = zoo.measure(exported, ranks, strict=strict, training=training)
        assert zoo.problems(zoo.CASES[name], result, ranks) == [], (ranks, training)


def test_every_model_is_cut_for_uneven_parts_and_both_ways() -> None:
    met: dict[str, set[tuple[str, int | bool]]] = {}
    pairs = set()
    for name, (strict, decomposed), points in COVERING:
        for ranks, training in points:
            settings = {"strict": strict, "decomposed": decomposed, "ranks": ranks, "training": training}
            met.setdefault(model_of(name), set()).update(settings.items())
            pairs.update(itertools.combinations(settings.items(), 2))
    for model in met.keys() - {model_of(name) for name in COVERED}:
        assert {("ranks", 3), ("training", False), ("training", True)} <= met[model], model
        assert met[model] & {("ranks", 2), ("ranks", 4)}, model
    assert {name for name, _, _ in COVERING} | COVERED == set(zoo.CASES)
    assert len(pairs) == 2 * 2 + 2 * 3 + 2 * 2 + 2 * 3 + 2 * 2 + 3 * 2


def test_decomposed_convolutions_are_cut_too() -> None:
    exported = zoo.export(zoo.CASES["conv net"], (False, True))
    assert zoo.problems(zoo.CASES["conv net"], zoo.measure(exported, 2, strict=False), 2) == []


def test_convolutions_and_experts_are_chosen_for_too() -> None:
    for name, expected in (
        ("conv net", {"a": "column", "b": "row", "c": "column", "top": "row"}),
        ("Mixtral, experts cut", {"experts.gate_up_proj": "column", "experts.down_proj": "row"}),
    ):
        program = zoo.export(zoo.CASES[name], (False, False)).program
        plan = choose(program, 2, prices=Prices(latency=1e-9))
        styles = {name.removesuffix(".weight"): style for name, style in plan.strategies.items()}
        for module, style in expected.items():
            kinds = {kind for key, kind in styles.items() if f".{key}".endswith(f".{module}")}
            assert kinds == {style}, module


def test_cutting_a_program_leaves_it_as_it_was() -> None:
    case = zoo.CASES["block, dynamic"]
    program = zoo.export(case, (False, True)).program
    before = str(program), dict(program.range_constraints)
    weights = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    zoo.cut(program, case.plan, 3)
    assert (str(program), dict(program.range_constraints)) == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in program.state_dict.items())
