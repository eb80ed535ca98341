"""`shardwise.verify`: what counts as a difference, and which one is named."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.verify import Case, CaseError, VerifyResult, load_case, verdict, verify, write_json
from shardwise.verify.case import apply_shard, split_spec
from shardwise.verify.compare import (
    CHUNK_NUMEL,
    SCALE_FLOOR,
    START,
    Difference,
    coarsest,
    compare_losses,
    compare_tensors,
    derived_tolerance,
    first_beyond,
    fixed_tolerance,
    floored_scales,
    merge_ranks,
    optimizer_slack,
    scale_of,
)
from shardwise.verify.processes import RankError, run_ranks
from shardwise.verify.reference import parameters_by_name, take_batch, take_loss
from shardwise.verify.sharded import EMPTY, PRESENT, _name_problems, _presence_problem

CASES = Path(__file__).parent / "cases"
RIGHT, WRONG, UNRUNNABLE = (str(CASES / f"{name}.py") for name in ("right", "wrong", "unrunnable"))
GUILTY = "blocks.1.output.weight"


def compared(found, expected, **changes) -> Difference:
    at, allowed = Difference("gradient", 0, "w"), {"scale": 1.0, "tolerance": 0.1} | changes
    return compare_tensors(torch.as_tensor(found), torch.as_tensor(expected), at, **allowed)


# ---------------------------------------------------------------- differences of two tensors


def test_a_difference_is_measured_against_the_scale_of_the_tensor():
    difference = compared([1.0, 2.0, 4.5], [1.0, 2.0, 4.0], scale=4.0)
    assert difference.absolute == 0.5
    assert difference.relative == 0.125
    assert difference.used == pytest.approx(1.25)
    assert difference.beyond


def test_a_difference_of_exactly_the_tolerance_is_within_it():
    assert not compared([1.5], [1.0], tolerance=0.5).beyond
    assert compared([1.5000002], [1.0], tolerance=0.5).beyond


def test_tolerance_zero_asks_for_equal_values():
    assert not compared([1.0, 0.0], [1.0, 0.0], tolerance=0.0).beyond
    assert compared([1.0, 1e-30], [1.0, 0.0], tolerance=0.0).used == math.inf


def test_a_difference_in_the_last_element_of_a_large_tensor_is_found():
    expected = torch.zeros(CHUNK_NUMEL + 3)
    found = expected.clone()
    found[-1] = 0.25
    assert compared(found, expected).absolute == 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_beyond_every_tolerance_and_says_where(value):
    on_ranks = compared([1.0, value], [1.0, 1.0], tolerance=1e9)
    on_both = compared([value], [value], tolerance=1e9)
    assert on_ranks.beyond
    assert on_ranks.problem == "1 non-finite value on the ranks"
    assert on_both.beyond
    assert on_both.problem == "1 non-finite value on the ranks and 1 non-finite value in the reference"


def test_another_shape_is_named_and_not_compared():
    difference = compared(torch.zeros(2, 3), torch.zeros(3, 2))
    assert difference.beyond
    assert difference.problem == "shape (2, 3), expected (3, 2)"


def test_tensors_without_elements_are_equal():
    assert not compared(torch.zeros(0, 4), torch.zeros(0, 4), tolerance=0.0).beyond


def test_complex_and_low_precision_tensors_are_compared_exactly():
    assert compared([1 + 2j], [1 + 2.5j]).absolute == 0.5
    assert compared(torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([258.0])).absolute == 2.0


def test_losses_are_compared_relative_to_the_reference():
    assert compare_losses(4.04, 4.0, step=1, tolerance=0.1).relative == pytest.approx(0.01)
    assert compare_losses(math.nan, 4.0, step=1, tolerance=0.1).beyond


def test_slack_widens_only_the_elements_it_names():
    slack = torch.tensor([1.0, 0.0])
    assert not compared([1.9, 1.0], [1.0, 1.0], tolerance=1e-3, slack=slack).beyond
    assert compared([1.0, 1.9], [1.0, 1.0], tolerance=1e-3, slack=slack).beyond


# ---------------------------------------------------------------- scale, tolerance, slack


def test_a_gradient_that_cancels_is_measured_against_the_largest_of_its_step():
    cancelled = torch.full((4,), 1e-9)
    scales = floored_scales({"cancelled": cancelled, "other": torch.tensor([-3.0])})
    assert scales == {"cancelled": 3.0 * SCALE_FLOOR, "other": 3.0}


def test_the_scale_leaves_out_what_is_not_finite():
    assert scale_of(torch.tensor([1.0, math.inf, math.nan, -2.0])) == 2.0
    assert scale_of(torch.zeros(0)) == 0.0


def test_the_derived_tolerance_follows_the_dtype_and_the_number_of_terms():
    single = derived_tolerance(torch.float32, terms=100, layers=9)
    assert single.base == pytest.approx(8 * 2.0**-24 * (3 + 10))
    assert derived_tolerance(torch.bfloat16, terms=100, layers=9).base == pytest.approx(
        8 * (2.0**-8 * 3 + 2.0**-24 * 10)
    )
    assert derived_tolerance(torch.float64, terms=100, layers=9).base == pytest.approx(8 * 2.0**-53 * 13)
    assert [single.at(step) / single.base for step in (START, 0, 1, 4)] == [1, 1, 2, 5]


def test_a_given_tolerance_is_the_same_at_every_step():
    assert [fixed_tolerance(0.01).at(step) for step in (START, 0, 7)] == [0.01] * 3


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_tolerance_that_is_no_bound_is_refused(value):
    with pytest.raises(ValueError, match="finite number >= 0"):
        fixed_tolerance(value)


def test_the_coarsest_dtype_decides():
    assert coarsest([torch.float64, torch.bfloat16, torch.float16, torch.int64]) is torch.bfloat16
    assert coarsest([torch.int64]) is torch.float32


def test_an_element_whose_gradient_is_noise_may_turn_its_update_around_and_no_other():
    before, gradient = torch.zeros(3), torch.tensor([1.0, 1e-3, 1e-12])
    after = -0.1 * gradient.sign()  # Adam's first step
    slack = optimizer_slack(before, after, gradient, allowed_gradient=1e-6)
    torch.testing.assert_close(slack, torch.tensor([2e-7, 2e-4, 0.2]))


def test_a_parameter_without_gradient_or_with_an_exact_one_has_no_slack():
    before, after = torch.zeros(2), torch.ones(2)
    assert optimizer_slack(before, after, None, allowed_gradient=1.0).eq(0).all()
    assert optimizer_slack(before, after, torch.zeros(2), allowed_gradient=0.0).eq(0).all()


def test_the_slack_covers_what_adam_makes_of_rounding_over_several_steps():
    torch.manual_seed(0)
    exact, noisy = (nn.Parameter(torch.zeros(200, dtype=torch.float64)) for _ in range(2))
    optimizers = [torch.optim.Adam([p], lr=0.01) for p in (exact, noisy)]
    magnitudes = 10.0 ** -torch.linspace(0, 12, 200, dtype=torch.float64)
    slack, allowed = torch.zeros_like(magnitudes), 1e-6
    for _ in range(6):
        exact.grad = magnitudes * torch.randn(200, dtype=torch.float64)
        noisy.grad = exact.grad + allowed * (2 * torch.rand(200, dtype=torch.float64) - 1)
        before = exact.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        slack += optimizer_slack(before, exact.detach(), exact.grad, allowed_gradient=allowed)
    difference = (exact - noisy).abs().detach()
    assert (difference <= slack).all()
    assert difference.max() > 0.005  # a flat tolerance would have to be this wide


# ---------------------------------------------------------------- which difference is named


def test_the_first_difference_beyond_tolerance_is_named_not_the_worst():
    small, large = (Difference(kind="gradient", step=s, name="w", used=u) for s, u in ((1, 1.5), (2, 90.0)))
    fine = Difference(kind="loss", step=0, name="loss", used=0.9)
    assert first_beyond([fine, small, large]) is small
    assert first_beyond([fine]) is None


def test_ranks_that_disagree_are_merged_to_the_worst_in_the_order_of_the_first():
    def difference(name: str, used: float, rank: int) -> Difference:
        return Difference(kind="parameter", step=0, name=name, used=used, rank=rank)

    merged = merge_ranks([[difference("a", 0.1, 0), difference("b", 0.5, 0)], [difference("a", 3.0, 1)]])
    assert [(d.name, d.rank) for d in merged] == [("a", 1), ("b", 0)]


def test_a_gradient_on_one_side_only_is_a_problem_and_on_neither_is_not():
    assert _presence_problem({0: EMPTY, 1: EMPTY}, EMPTY) == ""
    assert _presence_problem({0: PRESENT, 1: PRESENT}, EMPTY) == "present on the ranks, none in the reference"
    assert (
        _presence_problem({0: PRESENT, 1: EMPTY, 2: PRESENT}, PRESENT)
        == "none on rank 1; present on ranks 0, 2; present in the reference"
    )


def test_a_tie_lost_or_made_by_sharding_is_a_problem():
    weight = nn.Parameter(torch.zeros(1))
    lost = _name_problems({"a": weight, "b": weight}, {}, ["a"], {"b": "a"})
    made = _name_problems({"a": weight}, {"b": "a"}, ["a", "b"], {})
    assert [(d.name, d.problem) for d in lost] == [("b", "tied to a in the reference, separate on the ranks")]
    assert [(d.name, d.problem) for d in made] == [("b", "tied to a on the ranks, separate in the reference")]


def test_tied_parameters_are_named_once():
    module = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)})
    module["second"].weight = module["first"].weight
    parameters, tied = parameters_by_name(module)
    assert list(parameters) == ["first.weight"]
    assert tied == {"second.weight": "first.weight"}


# ---------------------------------------------------------------- finding a case


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a/train.py", ("a/train.py", "verify_case")),
        ("a/train.py:small", ("a/train.py", "small")),
        ("package.module:small", ("package.module", "small")),
        ("package.module", ("package.module", "verify_case")),
    ],
)
def test_a_spec_names_a_script_or_module_and_a_function(spec, expected):
    assert split_spec(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere/train.py", "No such file: nowhere/train.py"),
        ("no_such_package.train", "No module named 'no_such_package'"),
        ("json", r"json has no function `verify_case\(\)`"),
        ("json:dumps_nothing", "no function `dumps_nothing"),
        ("os:getcwd", "returned str; expected a shardwise.verify.Case"),
    ],
)
def test_a_spec_that_leads_to_no_case_says_what_is_missing(spec, message):
    with pytest.raises(CaseError, match=message):
        load_case(spec)


def plain_case(**changes) -> Case:
    pieces = {
        "build": lambda: nn.Linear(2, 2),
        "shard": lambda module, mesh: None,
        "optimizer": lambda module: torch.optim.SGD(module.parameters()),
        "batch": lambda step: (torch.zeros(4, 2),),
        "loss": lambda module, batch: module(*batch).mean(),
    }
    return Case(**(pieces | changes))


def test_a_layout_is_passed_to_a_shard_function_that_takes_one():
    seen = []
    case = plain_case(shard=lambda module, mesh, layout="interleaved": seen.append(layout))
    apply_shard(case, nn.Linear(1, 1), None, layout="contiguous")
    apply_shard(case, nn.Linear(1, 1), None, layout=None)
    assert seen == ["contiguous", "interleaved"]


def test_a_layout_is_refused_where_the_case_takes_none():
    with pytest.raises(CaseError, match="takes no `layout`"):
        apply_shard(plain_case(), nn.Linear(1, 1), None, layout="contiguous")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4), "text"), "expected a tensor whose dim 0 is the batch"),
        ((torch.tensor(1.0),), r"is a tensor of shape \(\); expected a tensor whose dim 0 is the batch"),
        ((torch.zeros(4), torch.zeros(3)), r"lengths \[4, 3\]"),
        ((), r"lengths \[\]"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, message):
    with pytest.raises(CaseError, match=message):
        take_batch(plain_case(batch=lambda step: batch), 0)


def test_a_loss_of_many_elements_is_refused_by_its_shape():
    with pytest.raises(CaseError, match=r"^loss\(\) returned a tensor of shape \(12,\); expected a tensor"):
        take_loss(plain_case(loss=lambda module, batch: torch.rand(12)), nn.Linear(1, 1), ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 4, "replicas": 3}, "4 ranks cannot be divided into 3 replicas"),
        ({"ranks": 0}, "at least 1"),
        ({"steps": 0}, "at least 1"),
        ({"mesh": "dp2,cp2"}, "'cp2' in the mesh"),
        ({"mesh": "dp2", "replicas": 2}, "mesh='dp2' replaces replicas=2; in a mesh, write replicate2"),
    ],
)
def test_a_mesh_that_does_not_exist_is_refused_before_anything_starts(arguments, message):
    with pytest.raises(CaseError, match=message):
        verify(RIGHT, **arguments)


# ---------------------------------------------------------------- whole verifications


@pytest.mark.usefixtures("pooled")
def test_a_right_case_is_within_tolerance_on_three_ranks():
    result = verify(RIGHT, ranks=3, steps=3)
    assert result.ok
    assert result.first is None
    names = {d.name for d in result.differences if d.kind == "gradient" and d.step == 2}
    assert "embedding.weight" in names
    assert not {"head.weight", "unused"} & names  # tied to the embedding; without gradient on both sides
    compared_kinds = [(d.kind, d.step) for d in result.differences if d.kind == "loss" or d.name == GUILTY]
    assert compared_kinds == [
        ("parameter", START),
        *[(kind, step) for step in range(3) for kind in ("loss", "gradient", "parameter")],
    ]
    assert all(result.largest("parameter", step)[0] > 0 for step in range(3))  # the runs are two


@pytest.mark.usefixtures("pooled")
def test_a_right_case_is_within_tolerance_on_replicas_of_shards():
    assert verify(f"{RIGHT}:with_sgd", ranks=4, replicas=2, steps=2).ok


def test_the_layout_reaches_the_case_through_every_process():
    assert verify(f"{RIGHT}:with_layout", ranks=2, steps=1, layout="contiguous").ok


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (4, 2)])
@pytest.mark.usefixtures("pooled")
def test_a_right_case_is_within_tolerance_in_the_contiguous_layout(world, replicas):
    result = verify(RIGHT, ranks=world, replicas=replicas, steps=3, layout="contiguous")
    assert result.ok, verdict(result)
    assert all(result.largest("parameter", step)[0] > 0 for step in range(3))  # the runs are two
    assert f"{world} ranks (contiguous layout) match one process" in verdict(result)


@pytest.mark.usefixtures("pooled")
def test_a_case_that_is_wrong_in_the_contiguous_layout_only_is_found_there():
    case = f"{WRONG}:normed_by_rows"
    assert verify(case, ranks=2, steps=1, layout="interleaved").ok
    result = verify(case, ranks=2, steps=1, layout="contiguous")
    assert result.first is not None
    assert (result.first.kind, result.first.step) == ("parameter", 0)
    assert "embedding.weight" in {d.name for d in result.differences if d.beyond}  # rows on both ranks
    assert "Beyond tolerance (contiguous layout). First difference: step 0" in verdict(result)


@pytest.mark.usefixtures("pooled")
def test_a_gradient_scaled_on_one_parameter_from_one_step_on_is_named_by_both(tmp_path):
    result = verify(f"{WRONG}:scaled_gradient", ranks=2, steps=3)
    assert result.first is not None
    assert (result.first.kind, result.first.step, result.first.name) == ("gradient", 1, GUILTY)
    assert result.first.relative == pytest.approx(0.5, rel=0.01)
    assert [d.name for d in result.differences if d.beyond and d.step < 2 and d.kind == "gradient"] == [
        GUILTY
    ]
    assert f"step 1: the gradient of {GUILTY} differs" in verdict(result)

    write_json(tmp_path / "report.json", [result])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "beyond tolerance"
    assert report["first"]["name"] == GUILTY
    assert report["first"]["step"] == "1"
    assert len(report["differences"]) == len(result.differences)


@pytest.mark.usefixtures("pooled")
def test_a_parameter_that_is_not_updated_is_named_with_its_gradients_right():
    result = verify(f"{WRONG}:forgotten_by_the_optimizer", ranks=2, steps=1)
    assert [(d.kind, d.step, d.name) for d in result.differences if d.beyond] == [("parameter", 0, GUILTY)]


@pytest.mark.usefixtures("pooled")
def test_a_parameter_changed_by_sharding_is_named_before_the_first_step():
    result = verify(f"{WRONG}:changed_before_the_first_step", ranks=2, steps=1)
    assert result.first is not None
    assert (result.first.kind, result.first.step, result.first.name) == ("parameter", START, GUILTY)
    assert result.first_parameter is result.first


@pytest.mark.usefixtures("pooled")
def test_a_lost_tie_and_a_lost_gradient_are_named_as_such():
    result = verify(f"{WRONG}:untied_and_frozen", ranks=2, steps=1)
    problems = {(d.kind, d.name): d.problem for d in result.differences if d.problem}
    assert problems == {
        ("parameter", "head.weight"): "tied to embedding.weight in the reference, separate on the ranks",
        ("gradient", GUILTY): "none on the ranks, present in the reference",
    }


@pytest.mark.usefixtures("pooled")
def test_replicas_that_never_exchange_gradients_are_found():
    result = verify(f"{WRONG}:replicas_apart", ranks=2, replicas=2, steps=1)
    assert result.first is not None
    assert (result.first.kind, result.first.step) == ("gradient", 0)


@pytest.mark.usefixtures("pooled")
def test_the_tolerance_given_decides():
    strict = verify(f"{RIGHT}:with_sgd", ranks=2, steps=1, tolerance=0.0)
    loose = verify(f"{WRONG}:scaled_gradient", ranks=2, steps=2, tolerance=0.6)
    assert strict.first is not None
    assert loose.ok


# ---------------------------------------------------------------- cases that cannot be run


def test_a_rank_that_raises_is_named_with_its_traceback_and_leaves_no_lock_behind(monkeypatch):
    monkeypatch.setattr("shardwise.verify.processes.GRACE_S", 0.2)
    with pytest.raises(CaseError, match="rank 1: RuntimeError: rank 1 has had enough") as caught:
        verify(f"{UNRUNNABLE}:raises_on_rank_1", ranks=2, steps=1)
    assert "in _raise" in caught.value.traceback
    lock = str(caught.value).rpartition("/")[2]
    assert lock.startswith("mp-")
    assert not Path(f"/dev/shm/sem.{lock}").exists()


def test_a_rank_that_dies_is_named_rather_than_those_that_lost_it():
    with pytest.raises(CaseError, match=r"rank 1: died \(exit status 3\)"):
        verify(f"{UNRUNNABLE}:dies_on_rank_1", ranks=2, steps=1)


def test_a_rank_that_hangs_is_shown_by_its_stack():
    for timeout in (2, 8):  # a busy machine may take longer than the shorter to come so far
        with pytest.raises(CaseError) as caught:
            verify(f"{UNRUNNABLE}:hangs_on_rank_1", ranks=2, steps=1, timeout=timeout)
        if "unrunnable.py" in caught.value.traceback.partition("rank 1:")[2]:
            break
    assert f"no process made progress for {timeout} s; still running: rank 0, rank 1" in str(caught.value)
    waiting, stuck = caught.value.traceback.split("rank 1:")
    assert "in run_sharded" in waiting
    assert "unrunnable.py" in stuck
    assert "in <lambda>" in stuck


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (f"{UNRUNNABLE}:odd_batch", "5 samples, which cannot be split evenly over 2 ranks"),
        (f"{UNRUNNABLE}:loss_of_nothing", "all gradients of the first step are zero"),
        (f"{UNRUNNABLE}:returns_no_case", "reference: CaseError: `returns_no_case.*returned dict"),
    ],
)
def test_a_case_that_does_not_fit_says_what_was_expected(case, message):
    with pytest.raises(CaseError, match=message):
        verify(case, ranks=2, steps=1)


def test_gradients_of_which_none_is_finite_are_differences_and_not_zeros():
    result = verify(f"{WRONG}:infinite_loss", ranks=2, steps=1)
    assert result.first.name == "loss"
    assert result.first_parameter.kind == "gradient"
    assert " non-finite values on the ranks and " in result.first_parameter.problem


def leave_a_trace(alive, folder: str) -> int:
    rank = int(os.environ["RANK"])
    Path(folder, str(os.getpid())).touch()
    print("something to say", flush=True)
    if rank == 1 and Path(folder, "fail").exists():
        os.abort()
    return rank


def test_no_process_outlives_the_call_and_what_it_printed_is_quoted_when_it_dies(tmp_path, capfd):
    assert run_ranks(leave_a_trace, str(tmp_path), world_size=2, timeout=60) == [0, 1]
    (tmp_path / "fail").touch()
    with pytest.raises(RankError, match="SIGABRT") as caught:
        run_ranks(leave_a_trace, str(tmp_path), world_size=2, timeout=60)
    assert "something to say" in caught.value.traceback
    assert capfd.readouterr().out == ""
    started = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(started) >= 3  # one may die before the other begins
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_a_result_without_differences_has_nothing_to_name():
    asked = {"spec": "case.py", "ranks": 2, "replicas": 1, "steps": 1, "seed": 0, "layout": None}
    result = VerifyResult(**asked, tolerance=fixed_tolerance(0.1), differences=())
    assert result.ok
    assert result.worst("loss", 0) is None
    assert result.largest("loss", 0) == (0.0, 0.0)
