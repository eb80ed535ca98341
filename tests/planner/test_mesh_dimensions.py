"""Plans of pipelines, sequences and experts over ranks: known facts, real runs, what is refused, in a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.plan_real import SEQUENCE, compare, decoder, mixtures, setup_of, stages, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import shardwise
from fake_ranks import as_one_of
from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.planner.events import LANES
from shardwise.planner.models import model_of, of_shape
from shardwise.planner.pipeline import BUFFERS_STAY, bubble, in_flight
from shardwise.planner.setup import Setup
from shardwise.planner.shapes import Shape


def planned(model: Any, **changes: Any) -> shardwise.planner.Plan:
    return shardwise.plan(model, hardware="h100", **{"sequence": SEQUENCE, "ranks": 8} | changes)


def sent(made: shardwise.planner.Plan, kind: str) -> dict[int, int]:
    """How many of each size."""
    return {one.nbytes: one.count for one in made.sent if one.kind == kind}


# ---------------------------------------------------------------- facts


@pytest.mark.parametrize(
    ("pipeline", "stages", "micro_batches", "share"),
    [(4, 1, 8, 3 / 11), (4, 2, 8, 3 / 19), (8, 1, 8, 7 / 15)],
)
def test_a_pipelines_bubble_is_that_of_the_paper(
    pipeline: int, stages: int, micro_batches: int, share: float
) -> None:
    """Narayanan et al., 2021: (p - 1) / (v m) of the ideal time."""
    schedule: Any = "1F1B" if stages == 1 else "Interleaved1F1B"
    asked = Setup(ranks=8, pipeline=pipeline, stages=stages, schedule=schedule, accumulation=micro_batches)
    assert bubble(asked) == pytest.approx(share)


def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_ahead_and_gpipe_all() -> None:
    asked: dict[str, Any] = {"ranks": 8, "pipeline": 4, "accumulation": 16}
    assert [in_flight(Setup(**asked), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight(Setup(schedule="GPipe", **asked), rank) for rank in range(4)] == [16] * 4
    two = Setup(schedule="Interleaved1F1B", stages=2, **asked)
    assert [in_flight(two, rank) for rank in range(4)] == [6, 5, 4, 3]  # 11, 9, 7 and 5 halves


def test_a_step_waits_for_its_pipeline_as_long_as_the_bubble_says() -> None:
    made = planned(stages, pipeline=4, accumulation=8)
    waits = made.step_times.step - max(span.end for span in made.step_times.spans)
    longer = planned(stages, pipeline=4, accumulation=9)
    steady = longer.step_times.step - made.step_times.step
    assert waits / (8 * steady + waits) == pytest.approx(bubble(made.setup), rel=0.05)
    assert [one.micro_batches for one in made.stages] == [4, 3, 2, 1]
    handed = SEQUENCE * 32 * 2 * 8  # tokens, width, bytes, micro-batches
    assert [one.sent_bytes for one in made.stages] == [handed, 2 * handed, 2 * handed, handed]


def test_every_micro_batch_in_flight_keeps_as_much_at_the_peak() -> None:
    made = [planned(stages, pipeline=4, accumulation=n, schedule="GPipe") for n in (4, 8, 12)]
    alive = [one.peak.alive["activations"] for one in made]
    assert alive[2] - alive[1] == alive[1] - alive[0] > alive[0]
    first, second = made[0].stages[:2]  # which moves twice as much
    assert second.activations_bytes - first.activations_bytes == first.sent_bytes * BUFFERS_STAY


@pytest.mark.parametrize(("cuts_sequence", "parts"), [(True, 2), (False, 1)])
def test_stages_hand_on_the_part_of_a_sequence_that_tensor_parallelism_leaves_a_rank(
    cuts_sequence: bool, parts: int
) -> None:
    two = model_of(stages, sequence=SEQUENCE)
    made = planned(
        replace(two, layers=2), pipeline=2, tensor=2, accumulation=2, sequence_parallel=cuts_sequence
    )
    handed = SEQUENCE * 32 * 2 * 2 // parts  # tokens, width, bytes, micro-batches
    assert [one.sent_bytes for one in made.stages] == [handed, handed]


def test_zero_3_sends_three_times_its_parameters() -> None:
    """Rajbhandari et al., 2020: two gathers and a reduction of each."""
    made = planned("llama3-8b", reduce_dtype="bfloat16")
    assert made.wire_bytes == pytest.approx(3 * 2 * made.parameters * 7 / 8, rel=1e-3)


def test_tensor_parallelism_adds_up_activations_four_times_a_block() -> None:
    """Shoeybi et al., 2019: twice forward, twice backward; here by a reduction and a gather each."""
    made = planned(decoder, tensor=2, tensor_plan="torchtitan")
    size = SEQUENCE * 32 * 2
    halves = {one.kind: one.count for one in made.sent if (one.ranks, one.nbytes) == (2, size)}
    reduced = 4 * made.layers + 2  # embedding and head
    assert halves == {"reduce_scatter": reduced, "all_gather": reduced}


def test_ulysses_exchanges_tokens_for_heads_four_times_a_block() -> None:
    """Jacobs et al., 2023: queries, keys and values there, results back, and both again in backward."""
    made = planned(tiny(), ulysses=2)
    piece = SEQUENCE // 2 * 2  # tokens, bytes
    assert sent(made, "all_to_all") == {
        piece * 32 * 2: 2 * made.layers,  # queries of 4 heads, keys and values of 2, of width 8
        piece * 32: 2 * made.layers,
    }
    assert made.tokens_per_s == pytest.approx(SEQUENCE / 2 / made.step_times.step)
    assert {span.stream for span in made.step_times.spans} & {*LANES} == {"sequences"}


@pytest.mark.parametrize("heads", [4, 8])
def test_more_ranks_than_heads_of_keys_share_a_sequences_operations(heads: int) -> None:
    model = of_shape("grouped", Shape(96, 32, 1, heads=heads, kv_heads=2, ffn=64), SEQUENCE)
    assert 4 * planned(model, ulysses=4).model_flops == planned(model).model_flops


def test_a_mixture_exchanges_tokens_twice_each_way() -> None:
    made = planned(mixtures, experts=2)
    rows = SEQUENCE * 32 * 2
    assert sent(made, "all_to_all")[rows] == 4 * made.layers
    uneven = planned(mixtures, experts=2, expert_load=1.5)
    assert uneven.computed_flops > made.computed_flops
    assert uneven.model_flops == made.model_flops  # whichever rank's experts get the tokens
    again = planned(mixtures, experts=2, expert_load=1.5, checkpointing="full")
    assert again.model_flops == made.model_flops < uneven.computed_flops < again.computed_flops
    assert uneven.peak_bytes >= made.peak_bytes


def test_experts_too_few_for_the_ranks_that_shard_them_are_named() -> None:
    even, uneven = (planned(mixtures, ranks=ranks, experts=4, sequence=16) for ranks in (4, 8))
    assert not even.assumed
    (said,) = uneven.assumed
    assert said.startswith("This rank holds 1.")
    assert said in str(uneven)
    assert uneven.peak.alive["parameters"] > 0.6 * even.peak.alive["parameters"]


@pytest.mark.parametrize(("checkpointing", "again"), [("selective", 3), ("alternate", 1)])
def test_a_mixture_exchanges_tokens_again_where_backward_computes_its_block_again(
    checkpointing: Any, again: int
) -> None:
    made = planned(mixtures, experts=2, checkpointing=checkpointing)
    assert sent(made, "all_to_all")[SEQUENCE * 32 * 2] == 4 * made.layers + 2 * again


# ---------------------------------------------------------------- real runs


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": 2, "accumulation": 4},
        {"pipeline": 2, "accumulation": 3, "schedule": "GPipe", "tensor": 2, "layout": "contiguous"},
    ],
    ids=["1F1B", "GPipe"],
)
@pytest.mark.filterwarnings("ignore:Parallelize plan key")  # of another stage
@on_ranks(4)
def test_the_python_of_a_plan_of_stages_allocates_and_sends_what_was_planned(changes: dict[str, Any]) -> None:
    found = compare(stages, setup_of(4, **changes))
    if dist.get_rank() % 2 == 0:  # others may hold another share
        held = 2 * SEQUENCE * 32 * 4  # what gloo's first send keeps
        assert 0 <= found.measured_alive - found.planned_alive <= held
    assert found.measured_sent == found.planned_sent
    assert found.same_order


@pytest.mark.parametrize(("model", "dimension"), [(tiny, "ulysses"), (mixtures, "experts")])
@as_one_of(4, rank=0)
def test_that_of_one_over_sequences_or_experts_does_too(model: Any, dimension: str) -> None:
    found = compare(model, setup_of(4, **{dimension: 2}))
    if dist.get_rank() == 0:
        assert found.measured_alive == found.planned_alive
    assert found.measured_sent == found.planned_sent
    assert found.same_order


@on_ranks(2)
def test_ranks_of_several_stages_send_what_was_planned_and_keep_no_more() -> None:
    setup = setup_of(2, pipeline=2, accumulation=4, stages=2, schedule="Interleaved1F1B")
    found = compare(stages, setup)
    assert found.measured_sent == found.planned_sent
    # Planned in whole micro-batches, of which torch keeps halves: less than one of activations more.
    assert found.measured_alive <= found.planned_alive <= 1.2 * found.measured_alive


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("model", "changes", "told"),
    [
        (
            decoder,
            {"pipeline": 2, "accumulation": 2},
            "decoder does not say how to make a stage.*first and last",
        ),
        (stages, {"pipeline": 8, "accumulation": 8}, "stages has 4 blocks, which do not fill the 8 stages"),
        (stages, {"pipeline": 4, "accumulation": 2}, "accumulation=2 micro-batches do not fill pipeline=4"),
        (decoder, {"ulysses": 2}, "decoder does not say how its sequences are cut.*cut_sequences"),
        (decoder, {"experts": 2}, "no module of experts"),
        (tiny(), {"ulysses": 3}, "ulysses=3 does not divide 8 ranks"),
        (tiny(), {"stages": 2}, "Interleaved1F1B needs more than one stage"),
        (tiny(), {"ulysses": 2, "tensor": 2}, "tensor and ulysses cannot be planned together"),
    ],
)
def test_what_cannot_be_cut_so_is_refused_by_name(model: Any, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        planned(model, **changes)


# ---------------------------------------------------------------- in a job


@on_ranks(4)
def test_a_plan_by_one_rank_of_a_job_leaves_the_job_its_groups() -> None:
    """DTensor finds an operator's placements by mesh: of two that are equal, it has the first's groups."""

    def normalised() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        x, weight = torch.arange(8.0).view(2, 4) + dist.get_rank(), torch.ones(4)
        summed = DTensor.from_local(x, mesh, [Partial()])
        whole = DTensor.from_local(weight, mesh, [Replicate()])
        return nn.functional.rms_norm(summed, (4,), whole).full_tensor()

    first = normalised()
    if dist.get_rank() == 0:
        shardwise.plan("gpt2", ranks=4, tensor=2, device="cpu", sequence=8)
    assert torch.equal(normalised(), first)
