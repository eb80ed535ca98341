"""The recommender example: sharded training is unsharded training, and its data are what they say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from examples import recommender
from examples.recommender import ClickModel, Clicks, Field

import shardwise.sharded_tensor as st
from ranks import on_ranks
from shardwise.errors import ShardwiseError

FIELDS = (
    Field("user", 50, cut="rows"),
    Field("history", 33, bag=5, mode="mean", cut="rows"),
    Field("words", 40, bag=4, cut="columns"),
    Field("city", 20),
    Field("category", 12, bag=3),
    Field("device", 3, bag=2),
)
STEPS, BATCH = 3, 9  # on 4 ranks: 3 + 3 + 3 + 0 examples


def arguments(out: Path) -> list[str]:
    numbers = {"steps": STEPS, "batch": BATCH, "check": 2, "log-every": 1, "held-out": 200, "seed": 5}
    return ["--out", str(out), *(part for name, n in numbers.items() for part in (f"--{name}", str(n)))]


def unsharded_run(lr: float) -> tuple[ClickModel, list[float]]:
    """Model and losses of the same training in one process, one step longer than --steps."""
    clicks = Clicks(FIELDS, seed=5)
    torch.manual_seed(5)
    model = ClickModel(FIELDS)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=lr, eps=recommender.EPS)
    losses = []
    for number in range(STEPS + 1):
        batch = clicks.batch(number, BATCH)
        logits = model(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["click"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@on_ranks(4)
def test_sharded_training_has_the_losses_and_tables_of_unsharded_training(tmp_path: Path) -> None:
    args, printed = recommender.parse_arguments(arguments(tmp_path)), io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = recommender.run(args, FIELDS)
    expected, losses = unsharded_run(args.lr)
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(found, st.ShardedTensor) == name.startswith("tables.")
        assert not torch.equal(wanted, torch.zeros_like(wanted))
        torch.testing.assert_close(recommender.unsharded(found), wanted.detach(), rtol=0, atol=args.lr / 100)

    out = printed.getvalue()
    if dist.get_rank() != 0:
        assert out == ""
        return
    found_losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\d\.\d{6})$", out, flags=re.M)]
    assert found_losses == pytest.approx(losses[:STEPS], abs=recommender.TOLERANCE)
    assert "2 steps of the sharded and the unsharded model:\n  losses apart by" in out
    assert re.search(r"^held-out AUC 0\.\d{4}; of the true chances 0\.\d{4}$", out, flags=re.M)
    assert "loaded into tables that are all cut by rows:\n  predictions apart by" in out


@on_ranks(3)
def test_tables_lie_where_the_plan_says_whole_ones_on_the_least_loaded_rank() -> None:
    plan = recommender.place_tables(
        (
            Field("large", 30, cut="rows"),
            Field("wide", 10, cut="columns"),
            *(Field(f"whole{rows}", rows) for rows in (2, 9, 5, 4, 6)),
        )
    ).plan
    ranks = {}
    for name, spec in plan.items():
        assert isinstance(spec, st.ChunkShardingSpec)
        ranks[name.split(".")[1]] = spec.dim, [placement.rank() for placement in spec.placements]
    assert ranks.pop("large") == (0, [0, 1, 2])
    assert ranks.pop("wide") == (1, [0, 1, 2])
    # Of 16 columns the ranks have 6, 6, 4: on rank 2 lie 20 elements of `wide` less than on the others.
    assert ranks == {
        "whole9": (0, [2]),  # 144 elements, after which it has 124 more than the others
        "whole6": (0, [0]),
        "whole5": (0, [1]),
        "whole4": (0, [1]),
        "whole2": (0, [0]),
    }


@on_ranks(2)
def test_a_difference_beyond_the_tolerance_ends_the_run() -> None:
    recommender.agree("losses", 0.5, 0.5)
    for apart in (0.6, float("nan")):
        with pytest.raises(ShardwiseError, match="losses: expected a difference"):
            recommender.agree("losses", apart, 0.5)


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    first = Clicks(FIELDS, seed=1).batch(4, 30)
    again = Clicks(FIELDS, seed=1)
    again.batch(0, 7)
    assert all(torch.equal(values, first[name]) for name, values in again.batch(4, 30).items())
    for other in (
        again.batch(5, 30),
        Clicks(FIELDS, seed=2).batch(4, 30),
        again.batch(recommender.HELD_OUT, 30),
    ):
        assert not torch.equal(other["dense"], first["dense"])
        assert not torch.equal(other["user"], first["user"])


def test_chances_and_ids_follow_the_stated_formulas() -> None:
    clicks = Clicks(FIELDS, seed=3)
    batch = clicks.batch(0, 4000)
    for row in (0, 1, 17):
        vectors = [batch["dense"][row] @ clicks.dense_map + clicks.constant]
        for field in FIELDS:
            ids = [i for i in batch[field.name][row].tolist() if i != 0]
            rows = [clicks.hidden[field.name][i] for i in ids]
            vectors.append(torch.stack(rows).mean(0) if rows else torch.zeros(4))
        total = sum(vectors[f] @ vectors[g] for g in range(len(vectors)) for f in range(g))
        assert batch["chance"][row].item() == pytest.approx(
            torch.sigmoid(-1.5 + 0.5 * total).item(), abs=1e-5
        )
    assert batch["click"].mean().item() == pytest.approx(batch["chance"].mean().item(), abs=0.03)

    users = torch.bincount(batch["user"].flatten(), minlength=50) / 4000
    shares = torch.arange(1, 50, dtype=torch.float64).pow(-1.1)
    torch.testing.assert_close(users[1:].double(), shares / shares.sum(), rtol=0, atol=0.03)
    assert users[0] == 0
    lengths = torch.bincount((batch["history"] > 0).sum(1)) / 4000
    torch.testing.assert_close(lengths, torch.full((6,), 1 / 6), rtol=0, atol=0.03)


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(6, (40,), generator=generator).float()  # with ties
    clicks = torch.randint(2, (40,), generator=generator).float()
    pairs = [(a, b) for a in scores[clicks == 1].tolist() for b in scores[clicks == 0].tolist()]
    share = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    assert recommender.area_under_curve(scores, clicks) == pytest.approx(share)


def test_padding_adds_nothing_to_a_prediction() -> None:
    model, batch = ClickModel(FIELDS), Clicks(FIELDS, seed=0).batch(0, 20)
    before = model(batch)
    with torch.no_grad():
        for table in model.tables.values():
            table.weight[0] += 1
    assert torch.equal(model(batch), before)
