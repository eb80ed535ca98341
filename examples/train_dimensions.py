"""Train a small GPT, with experts or without, on a mesh of up to six dimensions: one loss curve whatever the mesh.

    python examples/train_dimensions.py --mesh pp2,dp2,tp2      # starts its 8 ranks itself
    make train MESH=ep2,sp2                                     # goes on from any mesh's checkpoint

`pp` stages of the model (torch.distributed.pipelining), `replicate` and `dp` rows of the batch, `sp` sequences in
pieces, `ep` experts, `tp` matrices (torch's DTensor); any subset. Each is a few lines below, in that order of use:
`tensor_parallel`, `shard`, `make_stages`, and `Step`, which knows whose loss and whose gradients are whose.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import shardwise
from run_log import memory_held, open_log
from shardwise import fully_shard
from shardwise.checkpoint import latest_step, load, optimizer_state, save
from shardwise.dimensions import Dimensions, data_ranks, dense_mesh, expert_mesh, part, share_of_batch
from shardwise.errors import ShardingError
from shardwise.launch import on_ranks
from shardwise.nn import ExpertCut, SequenceCut
from shardwise.optim import clip_grad_norm_
from train_gpt import VOCABULARY, read_text, say, set_learning_rate, start, training_batch

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on a mesh of several dimensions.")
    add = parser.add_argument
    add("--mesh", default="dp1", help="dims with sizes: pp2,dp2,tp2; of pp, replicate, dp, sp, ep, tp")
    add("--steps", type=int, default=100, help="optimizer steps in all, earlier runs' included")
    add("--layout", choices=["interleaved", "contiguous"], default="interleaved")
    add("--dtype", choices=["float32", "float64"], default="float32", help="of everything")
    add("--schedule", default="1F1B", help="of the pipeline: GPipe, 1F1B, Interleaved1F1B, ZBVZeroBubble, ...")
    add("--micro-batches", type=int, default=4, help="of each rank's rows, in a pipeline")
    add("--no-resume", dest="resume", action="store_false", help="do not go on from --out's checkpoint")
    add("--out", type=Path, default=Path("runs/train_dimensions"), help="checkpoints and the page go here")
    add("--data", type=Path, help="folder of text (default: Python's standard library)")
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=16, help="windows per step over all ranks")
    add("--seq", type=int, default=64, help="bytes per window")
    add("--width", type=int, default=64)
    add("--depth", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--experts", type=int, default=4, help="in every second block; 0: none")
    add("--lr", type=float, default=2e-3)
    add("--log-every", type=int, default=10, help="steps between printed losses")
    add("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.set_defaults(compare=[], tensorboard=False)
    return parser.parse_args(argv)


# --------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.attend = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        return self.out(self.attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width).normal_(std=0.02))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        each = zip(tokens.split(counts.tolist()), up, down, strict=True)
        return torch.cat([F.gelu(mine @ a) @ b for mine, a, b in each])


class MixtureOfExperts(nn.Module):
    """Two experts for each token. `cut` sends tokens over ep; ranks of `tp`, which have the same, share them."""

    cut: ExpertCut
    tp: DeviceMesh | None = None

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        mine = [self.share(each) for each in (tokens, weights, chosen)]
        results = self.cut.experts(self.experts)(mine[0], mine[2])
        mixed = (results * mine[1].unsqueeze(-1)).sum(1)
        if self.tp is not None:
            whole = {"shape": tokens.shape, "stride": tokens.stride()}
            mixed = DTensor.from_local(mixed, self.tp, [Shard(0)], run_check=False, **whole).full_tensor()
        return mixed.view_as(x)

    def share(self, whole: Tensor) -> Tensor:
        if self.tp is None:
            return whole
        same = DTensor.from_local(whole, self.tp, [Replicate()], run_check=False)
        return same.redistribute(self.tp, [Shard(0)]).to_local()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp: nn.Module = MixtureOfExperts(width, experts) if experts else MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(seq, width)
        self.positions = lambda: torch.arange(seq)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(self.positions().to(tokens.device))


class GPT(nn.Module):
    """All of the model, or a stage of it: what is not there is another stage's. Names are the whole model's."""

    def __init__(self, embedding: nn.Module | None, blocks: dict[str, nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = embedding, nn.ModuleDict(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.embedding, *self.blocks.values(), self.head):
            x = x if module is None else module(x)
        return x


def build(args: argparse.Namespace) -> GPT:
    """The same weights on every rank."""
    torch.manual_seed(args.seed)
    blocks = {str(i): Block(args.width, args.heads, args.experts * (i % 2)) for i in range(args.depth)}
    head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, VOCABULARY, bias=False))
    return GPT(Embedding(args.width, args.seq), blocks, head).to(getattr(torch, args.dtype))


# ----------------------------------------------------------------------------- the dimensions


def tensor_parallel(block: Block, tp: DeviceMesh) -> None:
    """Heads and the middle of an MLP cut over tp, in DTensor's ways; ranks of tp share an expert's tokens."""
    names = ("attention.query", "attention.key", "attention.value", "mlp.up")
    plan = {**dict.fromkeys(names, ColwiseParallel()), **dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel())}
    if isinstance(block.mlp, MixtureOfExperts):
        block.mlp.tp = tp
        plan = {name: style for name, style in plan.items() if not name.startswith("mlp")}
    parallelize_module(block, tp, plan)


def shard(model: GPT, mesh: DeviceMesh, *, layout: str, sequences: SequenceCut | None) -> None:
    """Cut everything over its part of the mesh: first what is cut by itself, then what is left over all ranks."""
    tp, ep = part(mesh, "tp"), part(mesh, "ep")
    # Micro-batches use parameters again and again: gathered once, in a pipeline.
    options: dict[str, Any] = {"layout": layout, "reshard_after_forward": part(mesh, "pp") is None}
    for block in model.blocks.values():
        if tp is not None:
            tensor_parallel(block, tp)
        if sequences is not None:
            block.attention.attend = sequences.attention(F.scaled_dot_product_attention)
        if isinstance(moe := block.mlp, MixtureOfExperts):
            experts = moe.experts
            moe.cut = ExpertCut(ep, len(experts.up))
            if ep is not None:
                for name, weight in list(experts.named_parameters()):
                    experts.register_parameter(name, nn.Parameter(distribute_tensor(weight, ep, [Shard(0)])))
            fully_shard(experts, mesh=expert_mesh(mesh), **options)
            experts.set_gradient_divide_factor(data_ranks(mesh))  # a sum over the tokens of all ranks
        fully_shard(block, mesh=dense_mesh(mesh), **options)
    if model.embedding is not None and sequences is not None:
        model.embedding.positions = sequences.positions
    for module in (model.embedding, model.head, model):
        if module is not None:
            fully_shard(module, mesh=dense_mesh(mesh), **options)


def make_stages(
    model: GPT, mesh: DeviceMesh, args: argparse.Namespace, device: torch.device, sequences: SequenceCut | None
) -> tuple[GPT, list[PipelineStage]]:
    """This rank's part of the model, sharded; and its stages, if there is a pipeline."""
    pp = part(mesh, "pp")
    if pp is None:
        shard(model.to(device), mesh, layout=args.layout, sequences=sequences)
        return model, []
    kind, ranks = get_schedule_class(args.schedule), pp.size()
    places = list(range(ranks))  # of the stages; several to a rank for schedules that need them
    if not issubclass(kind, PipelineScheduleSingle):
        places += places[::-1] if args.schedule in V_SHAPED else places
    if args.depth < len(places):
        raise ShardingError(f"--depth {args.depth} does not fill {len(places)} stages: give it at least as many")
    stages, last = [], len(places) - 1
    ends = [round(i * args.depth / len(places)) for i in range(len(places) + 1)]
    for stage in (i for i, place in enumerate(places) if place == pp.get_local_rank()):
        blocks = {str(i): model.blocks[str(i)] for i in range(ends[stage], ends[stage + 1])}
        piece = GPT(None if stage else model.embedding, blocks, model.head if stage == last else None).to(device)
        shard(piece, mesh, layout=args.layout, sequences=sequences)
        stages.append(PipelineStage(piece, stage, len(places), device, group=pp.get_group()))
    pieces: list[Any] = [stage.submod for stage in stages]
    blocks = {name: block for piece in pieces for name, block in piece.blocks.items()}
    embeddings, heads = [p.embedding for p in pieces if p.embedding], [p.head for p in pieces if p.head]
    return GPT(next(iter(embeddings), None), blocks, next(iter(heads), None)), stages


class Step:
    """One training step on any mesh: gradients of the whole batch's mean loss, clipped by the whole norm."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.args, self.mesh, self.device = args, mesh, device
        sp = part(mesh, "sp")
        self.sequences = None if sp is None else SequenceCut(sp)
        self.model, self.stages = make_stages(build(args), mesh, args, device, self.sequences)
        _, shares = share_of_batch(mesh)
        pieces = shares * (args.micro_batches if self.stages else 1)
        if args.batch % pieces:
            raise ShardingError(f"--batch {args.batch} is not a multiple of {pieces}: ranks times micro-batches")
        if self.stages:
            kind = get_schedule_class(args.schedule)
            single = issubclass(kind, PipelineScheduleSingle)
            # Its default divides gradients by the number of micro-batches: our loss is a mean.
            stages: Any = self.stages[0] if single else self.stages
            self.schedule = kind(stages, args.micro_batches, loss_fn=self.loss)

    def mine(self, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """This rank's rows, and its piece of them."""
        index, count = share_of_batch(self.mesh)
        rows = [each.chunk(count)[index].to(self.device) for each in batch]
        return rows if self.sequences is None else [self.sequences(each).contiguous() for each in rows]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / targets.numel() if self.sequences is None else self.sequences.mean(total, targets.numel())

    def backward(self, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """The batch's loss and the gradients' norm, equal on all ranks."""
        inputs, targets = self.mine(batch)
        losses: list[Tensor] = []
        if not self.stages:
            losses.append(self.loss(self.model(inputs), targets))
            losses[0].backward()
        else:
            last = any(stage.is_last for stage in self.stages)
            first = (inputs,) if any(stage.is_first for stage in self.stages) else ()
            self.schedule.step(*first, target=targets if last else None, losses=losses if last else None)
        norm = clip_grad_norm_(self.model.parameters(), 1.0, stages=part(self.mesh, "pp"))
        return self.mean(losses), norm.item()

    def mean(self, losses: list[Tensor]) -> float:
        """Over ranks that have any: those of the last stage."""
        mine = torch.stack([each.detach() for each in losses]).mean() if losses else 0.0
        total = torch.tensor([float(mine), float(bool(losses))], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total[0] / total[1])


# ------------------------------------------------------------------------------------- running


def training_state(step: Step, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> dict[str, Any]:
    moments = optimizer_state(step.model, optimizer, stages=part(step.mesh, "pp"))
    return {"model": get_model_state_dict(step.model), "optimizer": moments, "progress": progress}


def run(args: argparse.Namespace, device: torch.device) -> None:
    dimensions = Dimensions(args.mesh)
    step = Step(args, dimensions.mesh(device.type), device)
    optimizer = torch.optim.AdamW(step.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    text, _ = read_text(args.data, args.seq)
    progress = {"step": 0}
    checkpoints = args.out / "checkpoints"
    if args.resume and latest_step(checkpoints) is not None:
        state = training_state(step, optimizer, progress)
        load(checkpoints, state)
        set_model_state_dict(step.model, state["model"])
        set_optimizer_state_dict(step.model, optimizer, state["optimizer"])
        say(f"resumed at step {progress['step']}")

    log = open_log(args, device, done=progress["step"])
    held: list[Any] = [None] * dist.get_world_size()
    names = [name for name, _ in step.model.named_children()]
    for number in range(progress["step"], args.steps):
        position, draw = number * args.batch, {"batch": args.batch, "seq": args.seq, "seed": args.seed}
        set_learning_rate(optimizer, peak=args.lr, step=number)
        loss, norm = step.backward(training_batch(text, position=position, **draw))
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] = number + 1
        if log is not None:
            log.step(number + 1, loss=loss, gradient_norm=norm)
        if (number + 1) % args.log_every == 0 or number + 1 == args.steps:
            say(f"step {number + 1:5d}  loss {loss:.6f}  norm {norm:.6f}")
        if (number + 1) % args.save_every == 0 or number + 1 == args.steps:
            save(checkpoints, training_state(step, optimizer, progress), step=number + 1, keep=2)
    if log is not None:
        say(f"page: {log.close()}")


def main() -> None:
    args = parse_arguments()
    on_ranks(Dimensions(args.mesh).ranks)
    device = start()
    shardwise.install(layout=args.layout)  # torch's pipeline stages then know what is sharded
    run(args, device)
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
