"""Train a click model whose embedding tables are sharded over the ranks, each in its own way.

    torchrun --standalone --nproc-per-node 4 examples/recommender.py
    python examples/recommender.py --ranks 4          # the same: starts its ranks itself

A recommender is mostly tables: a row for every user, item and word. `place_tables` cuts each table by rows or
by columns, or places it whole on the rank with the least load. The small dense layers are on every rank, and
each rank has its own rows of each batch:

    model-parallel   tables        `ShardedTensor`s, placed by a `ShardingPlan`
    data-parallel    activations   `ShardedTensor`s too, cut along the batch
    replicated       dense layers  plain parameters; operations sum their gradients over the ranks

The model's code does not depend on this: the same code trains an unsharded copy, and the first --check steps
are compared with it. At the end a checkpoint is loaded into tables that are cut differently, which predict
and train the same. No data and no GPU are needed: `Clicks` draws both ids and clicks.

stdout has only output that the seed and the number of ranks determine; output that depends on time goes to
stderr.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise.sharded_tensor as st
from shardwise.checkpoint import load, save
from shardwise.errors import ShardwiseError
from shardwise.launch import on_ranks
from shardwise.optim.sharded import ShardedOptimizer

WIDTH = 16  # elements per embedding
DENSE = 8  # numbers per example in addition to the ids
EPS = 1e-6  # of Adagrad
HELD_OUT = -1  # number of the batch that is never trained on
TOLERANCE = 1e-5  # for losses and logits: other cuts sum in another order


@dataclass(frozen=True)
class Field:
    """One feature: up to `bag` ids from 1 to rows - 1, whose embeddings are pooled; 0 pads short bags."""

    name: str
    rows: int
    bag: int = 1
    mode: str = "sum"
    cut: str = "whole"  # on one rank; or by "rows" or "columns" over all


FIELDS = (
    Field("user", 20_000, cut="rows"),
    Field("item", 12_000, cut="rows"),
    Field("history", 12_000, bag=8, mode="mean", cut="rows"),
    Field("words", 6_000, bag=6, cut="columns"),
    Field("city", 2_000),
    Field("category", 600, bag=3),
    Field("weekday", 8),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a click model with sharded embedding tables.")
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="ranks to start when torchrun did not start this script")
    add("--steps", type=int, default=150)
    add("--batch", type=int, default=1024, help="examples per step over all ranks")
    add("--check", type=int, default=5, help="steps to compare with an unsharded copy")
    add("--lr", type=float, default=0.05)
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=10, help="steps between printed losses")
    add("--held-out", type=int, default=8192, help="examples for the final AUC")
    add("--out", type=Path, default=Path("runs/recommender"), help="folder for the checkpoint")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------- data


class Clicks:
    """Synthetic clicks with structure to learn; a seed gives the same ones on any number of ranks.

    Every id of every field has a hidden vector z ~ N(0, 1) in 4 dims. An example's u_f is the mean of z over
    its ids of field f (zero where it has none), and u_dense is a hidden linear map of its dense numbers plus
    a hidden constant. Then

        P(click) = sigmoid(-1.5 + 0.5 * sum over pairs f < g of <u_f, u_g>)

    Ids are Zipf distributed, P(id = r) ~ r ** -1.1 for r = 1, 2, ..., and lengths of bags uniform from 0.
    """

    def __init__(self, fields: Sequence[Field], *, seed: int) -> None:
        self.fields, self.seed = fields, seed
        generator = torch.Generator().manual_seed(1_000_003 * seed)
        self.hidden = {field.name: torch.randn(field.rows, 4, generator=generator) for field in fields}
        self.dense_map = torch.randn(DENSE, 4, generator=generator) / DENSE**0.5
        self.constant = torch.randn(4, generator=generator)
        longest = torch.arange(1, max(field.rows for field in fields), dtype=torch.float64)
        self.shares = longest.pow(-1.1).cumsum(0)

    def batch(self, number: int, size: int) -> dict[str, Tensor]:
        """Batch `number`: [size, bag] ids by field, [size, DENSE] "dense", [size] "chance" and "click"."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 2 + number)
        found = {"dense": torch.randn(size, DENSE, generator=generator)}
        vectors = [found["dense"] @ self.dense_map + self.constant]
        for field in self.fields:
            shares = self.shares[: field.rows - 1]
            drawn = torch.rand(size, field.bag, dtype=torch.float64, generator=generator) * shares[-1]
            ids = torch.searchsorted(shares, drawn) + 1
            if field.bag > 1:
                lengths = torch.randint(0, field.bag + 1, (size, 1), generator=generator)
                ids = ids.masked_fill(torch.arange(field.bag) >= lengths, 0)
            found[field.name] = ids
            there = (ids > 0).unsqueeze(2)
            vectors.append((self.hidden[field.name][ids] * there).sum(1) / there.sum(1).clamp(min=1))
        found["chance"] = torch.sigmoid(-1.5 + 0.5 * sum((u * v).sum(1) for u, v in combinations(vectors, 2)))
        found["click"] = torch.bernoulli(found["chance"], generator=generator)
        return found


# --------------------------------------------------------------------------------------- model


class ClickModel(nn.Module):
    """Model from a batch to [batch] click logits: embeddings, the dot products of all pairs, an MLP."""

    def __init__(self, fields: Sequence[Field]) -> None:
        super().__init__()
        tables = {f.name: nn.EmbeddingBag(f.rows, WIDTH, mode=f.mode, padding_idx=0) for f in fields}
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.05)
        self.tables = nn.ModuleDict(tables)
        pairs = len(fields) * (len(fields) + 1) // 2
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        dense = self.bottom(batch["dense"])
        pooled = [table(batch[name]) for name, table in self.tables.items()]
        vectors = torch.stack([dense, *pooled], dim=1)
        dots = vectors @ vectors.transpose(1, 2)  # batch, vector, vector
        above_diagonal = [dots[:, i, i + 1 :] for i in range(len(pooled))]
        return self.top(torch.cat([dense, *above_diagonal], dim=1)).squeeze(1)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss over the whole batch, a plain tensor even if the batch is sharded."""
    return F.binary_cross_entropy_with_logits(model(batch), batch["click"])


# ------------------------------------------------------------------------------------ sharding


def place_tables(fields: Sequence[Field]) -> st.ShardingPlan:
    """Plan tables cut by rows or columns over all ranks, and the others whole on the least loaded ranks.

    Whole tables are placed from largest to smallest, each on the rank that holds the fewest table elements so
    far, including cut tables; ties go to the lowest rank.
    """
    everywhere, held = placements(), [0] * dist.get_world_size()
    specs: dict[str, st.ShardingSpec | st.Sharder] = {}
    for field in sorted(fields, key=lambda field: (field.cut == "whole", -field.rows)):
        chosen = everywhere if field.cut != "whole" else [everywhere[held.index(min(held))]]
        spec = st.ChunkShardingSpec(dim=1 if field.cut == "columns" else 0, placements=chosen)
        specs[f"tables.{field.name}.weight"] = spec
        metadata = spec.build_metadata(torch.Size([field.rows, WIDTH]), st.TensorProperties())
        for shard in metadata.shards_metadata:
            held[shard.rank] += shard.box.numel
    return st.ShardingPlan(specs)


def all_by_rows(fields: Sequence[Field]) -> st.ShardingPlan:
    """Plan every table cut by rows, with the first rows on the last rank."""
    spec = st.ChunkShardingSpec(dim=0, placements=placements()[::-1])
    return st.ShardingPlan({f"tables.{field.name}.weight": spec for field in fields})


def placements() -> list[str]:
    return [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]


def my_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch as sharded tensors with this rank's rows. No communication.

    Here every rank draws the whole batch and keeps a part; a file reader would read only that part.
    """
    spec = st.ChunkShardingSpec(dim=0, placements=placements())
    found: dict[str, Tensor] = {}
    for name, whole in batch.items():
        metadata = spec.build_metadata(whole.shape, st.TensorProperties.create_from_tensor(whole))
        places = metadata.held_by(dist.get_rank())
        mine = [st.Shard(whole.narrow(0, p.shard_offsets[0], p.shard_sizes[0]), p) for p in places]
        found[name] = st.init_from_local_shards_and_global_metadata(mine, metadata)
    return found


def make_optimizer(model: nn.Module, *, lr: float) -> ShardedOptimizer:
    """Make Adagrad over this rank's shards and the dense layers."""
    parameters = st.named_params_with_sharded_tensor(model)
    return ShardedOptimizer(parameters, torch.optim.Adagrad, lr=lr, eps=EPS)


# ------------------------------------------------------------------------------------ training


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """Run one update, sharded or not; return the loss before it, equal on every rank."""
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(
    args: argparse.Namespace, clicks: Clicks, model: nn.Module, optimizer: ShardedOptimizer, whole: nn.Module
) -> None:
    """Train the sharded model and, on every rank for the first steps, its unsharded copy `whole`."""
    its_optimizer, apart = torch.optim.Adagrad(whole.parameters(), lr=args.lr, eps=EPS), 0.0
    console, off = Console(stderr=True), dist.get_rank() != 0
    with Progress(console=console, redirect_stdout=sys.stdout.isatty(), disable=off) as bar:
        for number in bar.track(range(args.steps), description="training"):
            batch = clicks.batch(number, args.batch)
            loss = train_step(model, optimizer, my_rows(batch))
            if number < args.check:
                apart = max(apart, abs(loss - train_step(whole, its_optimizer, batch)))
            if number + 1 == min(args.check, args.steps):
                say(f"{number + 1} steps of the sharded and the unsharded model:")
                agree("losses", apart, TOLERANCE)
                # Adagrad divides by the size of gradients, which magnifies rounding in tiny ones.
                agree("parameters", largest_difference(model, whole), args.lr / 100)
            if (number + 1) % args.log_every == 0 or number + 1 == args.steps:
                say(f"step {number + 1:4d}  loss {loss:.6f}")


def unsharded(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, st.ShardedTensor) else tensor).detach()


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of any parameter's element, for any cuts. Collective."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((unsharded(p) - unsharded(q)).abs().max()) for p, q in pairs)


@torch.no_grad()
def predict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return [batch] logits, on every rank."""
    return unsharded(model(my_rows(batch)))


def area_under_curve(scores: Tensor, clicks: Tensor) -> float:
    """Return the share of (click, non-click) pairs in which the click scores higher; ties count half."""
    clicked, others = scores[clicks > 0], scores[clicks == 0].sort().values
    below, up_to = torch.searchsorted(others, clicked), torch.searchsorted(others, clicked, right=True)
    return float((below + up_to).double().mean() / (2 * len(others)))


# ------------------------------------------------------------------------------------- running


def say(what: str | Table) -> None:
    if dist.get_rank() == 0:
        Console(width=120, highlight=False).print(what)


def agree(what: str, apart: float, tolerance: float) -> None:
    """Print a difference, equal on every rank; end the run if it is too large."""
    say(f"  {what} apart by at most {apart:.1e} (tolerance {tolerance:.0e})")
    if not apart <= tolerance:
        raise ShardwiseError(f"{what}: expected a difference of at most {tolerance}, found {apart}")


def where_tables_lie(model: ClickModel) -> Table:
    """Describe each table in a line. Every rank knows all placements, so this needs no communication."""
    ranks = range(dist.get_world_size())
    shown = Table("table", "rows x width", "cut", *[f"rank {r}" for r in ranks], title="KiB of each rank")
    total = [0.0] * len(ranks)
    for name, table in model.tables.items():
        metadata, spec = table.weight.metadata(), table.weight.sharding_spec()
        held = [sum(s.box.numel for s in metadata.shards_metadata if s.rank == r) / 256 for r in ranks]
        total = [a + b for a, b in zip(total, held, strict=True)]
        one = len(spec.placements) == 1
        cut = f"whole, {spec.placements[0]}" if one else ("by rows", "by columns")[spec.dim]
        shown.add_row(name, " x ".join(map(str, metadata.size)), cut, *[f"{n:.1f}" for n in held])
    shown.add_section()
    shown.add_row("all", "", "", *[f"{n:.1f}" for n in total])
    return shown


def run(args: argparse.Namespace, fields: Sequence[Field] = FIELDS) -> ClickModel:
    """Run everything between joining and leaving the process group."""
    clicks = Clicks(fields, seed=args.seed)
    torch.manual_seed(args.seed)  # every rank makes the same model, then keeps its share
    model = ClickModel(fields)
    whole = copy.deepcopy(model)
    st.shard_module(model, place_tables(fields), src_rank=None)
    optimizer = make_optimizer(model, lr=args.lr)
    train(args, clicks, model, optimizer, whole)

    say(where_tables_lie(model))
    held_out = clicks.batch(HELD_OUT, args.held_out)
    logits, truth = predict(model, held_out), held_out["click"]
    reached, best = (area_under_curve(scores, truth) for scores in (logits, held_out["chance"]))
    say(f"held-out AUC {reached:.4f}; of the true chances {best:.4f}")

    # A checkpoint fits any cut: each rank reads what its shards need, straight into their memory.
    save(args.out, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=args.steps)
    again = ClickModel(fields)
    st.shard_module(again, all_by_rows(fields))
    its_optimizer = make_optimizer(again, lr=args.lr)
    state = {"model": again.state_dict(), "optimizer": its_optimizer.state_dict()}
    load(args.out, state, step=args.steps)
    its_optimizer.load_state_dict(state["optimizer"])

    say("loaded into tables that are all cut by rows:")
    agree("predictions", float((predict(again, held_out) - logits).abs().max()), TOLERANCE)
    more = my_rows(clicks.batch(args.steps, args.batch))
    loss, its_loss = train_step(model, optimizer, more), train_step(again, its_optimizer, more)
    agree("losses of one more step", abs(loss - its_loss), TOLERANCE)
    agree("parameters after it", largest_difference(model, again), args.lr / 100)
    return model


def main() -> None:
    args = parse_arguments()
    on_ranks(args.ranks)
    dist.init_process_group("gloo")
    run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
