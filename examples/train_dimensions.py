"""Train a small GPT, with or without experts, on a mesh of several dimensions; the losses match on any.

    python examples/train_dimensions.py --mesh pp2,dp2,tp2      # starts its 8 ranks itself
    make train MESH=ep2,sp2                                     # resumes from any mesh's checkpoint

Any subset of dimensions: `pp` splits the model into stages (torch.distributed.pipelining), `replicate`
and `dp` split the batch, `sp` sequences, `ep` experts and `tp` matrices (torch's DTensor). `shard` and
`stages_of` cut the model; `Step` combines losses and gradients.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import shardwise
import train_gpt
from run_log import memory_held, open_log
from shardwise import fully_shard, share_comm_ctx, watched_stages
from shardwise.checkpoint import latest_step, save
from shardwise.dimensions import Dimensions, data_ranks, dense_mesh, expert_mesh, part, share_of_batch
from shardwise.errors import ShardingError
from shardwise.launch import on_ranks, report_errors
from shardwise.nn import ExpertCut, SequenceCut
from shardwise.optim import clip_grad_norm_
from train_gpt import VOCABULARY, say, training_state

SIZES = {"batch": 16, "seq": 64, "width": 64, "depth": 4, "heads": 4, "experts": 4, "seed": 0}
EVERY = {"log-every": 10, "save-every": 50}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
HEADS = dict.fromkeys(("query", "key", "value"), ColwiseParallel()) | {"out": RowwiseParallel()}
MLP = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
ENDS = ("embedding", "head")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on a mesh of several dimensions.")
    add = parser.add_argument
    add("--mesh", default="dp1", help="dims with sizes, such as pp2,dp2,tp2 (pp, replicate, dp, sp, ep, tp)")
    add("--steps", type=int, default=100, help="total optimizer steps, including earlier runs")
    add("--layout", choices=["interleaved", "contiguous"], default="interleaved")
    add("--dtype", choices=["float32", "float64"], default="float32", help="dtype of everything")
    add("--schedule", default="1F1B", help="pipeline: GPipe, 1F1B, Interleaved1F1B, ZBVZeroBubble, ...")
    add("--micro-batches", type=int, default=4, help="micro-batches per step in a pipeline")
    add("--no-resume", dest="resume", action="store_false", help="do not resume from --out's checkpoint")
    add(
        "--out",
        type=Path,
        default=Path("runs/train_dimensions"),
        help="folder for checkpoints and the report",
    )
    add("--data", type=Path, help="folder of text (default: Python's standard library)")
    add("--lr", type=float, default=2e-3)
    for name, default in (SIZES | EVERY).items():
        add(f"--{name}", type=int, default=default)
    parser.set_defaults(compare=[], tensorboard=False)
    return parser.parse_args(argv)


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
    """A layer that sends each token to two experts."""

    cut: ExpertCut

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        return self.cut.mixture(self.experts)(tokens, chosen, weights).view_as(x)


class Block(nn.Module):
    attend: Any = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = MixtureOfExperts(width, experts) if experts else mlp

    def attention(self, x: Tensor) -> Tensor:
        every = (each(x).unflatten(-1, (-1, self.head_size)) for each in (self.query, self.key, self.value))
        heads = self.attend(*(each.transpose(1, 2) for each in every), is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))

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
    """The model, or a stage of it without the other stages' modules; names are the whole model's."""

    def __init__(self, embedding: Any, blocks: dict[str, Any], head: Any) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = embedding, nn.ModuleDict(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.embedding, *self.blocks.values(), self.head):
            x = x if module is None else module(x)
        return x


def joined(stages: list[GPT]) -> GPT:
    """Join a rank's stages into one module, for the optimizer and the checkpoint."""
    embedding, head = (next((m for stage in stages if (m := getattr(stage, end))), None) for end in ENDS)
    return GPT(embedding, {name: block for stage in stages for name, block in stage.blocks.items()}, head)


def build(args: argparse.Namespace) -> GPT:
    """Build the model, with the same weights on every rank."""
    torch.manual_seed(args.seed)
    blocks = {str(i): Block(args.width, args.heads, args.experts * (i % 2)) for i in range(args.depth)}
    head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, VOCABULARY, bias=False))
    return GPT(Embedding(args.width, args.seq), blocks, head).to(getattr(torch, args.dtype))


def shard(model: GPT, mesh: DeviceMesh, *, layout: str, sequences: SequenceCut | None) -> None:
    """Shard all parameters: experts and matrices over their own dims, then all over the rest of the mesh."""
    tp, ep = part(mesh, "tp"), part(mesh, "ep")
    # Every micro-batch uses the parameters, so a pipeline gathers them once.
    options: dict[str, Any] = {"layout": layout, "reshard_after_forward": part(mesh, "pp") is None}
    for block in model.blocks.values():
        if tp is not None:
            parallelize_module(block, tp, HEADS if isinstance(block.mlp, MixtureOfExperts) else HEADS | MLP)
        if sequences is not None:
            block.attend = sequences.attention(F.scaled_dot_product_attention)
        if isinstance(moe := block.mlp, MixtureOfExperts):
            moe.cut = ExpertCut(ep, len(moe.experts.up), tp_mesh=tp)
            moe.cut.distribute(moe.experts)
            fully_shard(moe.experts, mesh=expert_mesh(mesh), **options)
            moe.experts.set_gradient_divide_factor(data_ranks(mesh))  # a sum over all ranks' tokens
        fully_shard(block, mesh=dense_mesh(mesh), **options)
    if model.embedding is not None and sequences is not None:
        model.embedding.positions = sequences.positions
    for module in (model.embedding, model.head, model):
        if module is not None:
            fully_shard(module, mesh=dense_mesh(mesh), **options)


def stages_of(model: GPT, pp: DeviceMesh, args: argparse.Namespace) -> list[tuple[int, GPT]]:
    """Return this rank's stages with their numbers: even shares of the blocks, two if the schedule asks."""
    places = list(range(pp.size()))
    if not issubclass(get_schedule_class(args.schedule), PipelineScheduleSingle):
        places += places[::-1] if args.schedule in V_SHAPED else places
    if args.depth < len(places):
        raise ShardingError(f"--depth {args.depth} does not fill {len(places)} stages: give as many")
    ends = [args.depth * i // len(places) for i in range(len(places) + 1)]
    found = []
    for stage in (i for i, place in enumerate(places) if place == pp.get_local_rank()):
        blocks = {str(i): model.blocks[str(i)] for i in range(ends[stage], ends[stage + 1])}
        head = model.head if stage == len(places) - 1 else None
        found.append((stage, GPT(None if stage else model.embedding, blocks, head)))
    return found


class Step:
    """A training step on any mesh: gradients of the whole batch's mean loss, clipped by the global norm."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        pp, sp, tp = (part(mesh, name) for name in ("pp", "sp", "tp"))
        self.sequences = None if sp is None else SequenceCut(sp)
        if tp is not None and (args.heads % tp.size() or (sp is not None and args.seq < sp.size())):
            found = f"--heads {args.heads}, --seq {args.seq}"
            raise ShardingError(f"{args.mesh}, {found}: tp divides heads; ranks of sp have tokens")
        pieces = share_of_batch(mesh)[1] * (1 if pp is None else args.micro_batches)
        if not pieces or args.batch % pieces:
            raise ShardingError(f"--batch {args.batch} is no multiple of {pieces}: ranks x micro-batches")
        whole = build(args).to(device)
        own = [(0, whole)] if pp is None else stages_of(whole, pp, args)
        for _, piece in own:
            shard(piece, mesh, layout=args.layout, sequences=self.sequences)
        share_comm_ctx([piece for _, piece in own])
        self.model = own[0][1] if len(own) == 1 else joined([piece for _, piece in own])
        self.is_first, self.is_last = self.model.embedding is not None, self.model.head is not None
        self.schedule: Any = None
        if pp is not None:
            kind, count = get_schedule_class(args.schedule), pp.size() * len(own)
            stages: Any = [PipelineStage(m, i, count, device, group=pp.get_group()) for i, m in own]
            # The schedule divides gradients by the number of micro-batches, as needed: the loss is a mean.
            stages = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            self.schedule = kind(stages, args.micro_batches, loss_fn=self.loss)

    def mine(self, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return this rank's rows, and its piece of their sequences."""
        index, count = share_of_batch(self.mesh)
        rows = [each.chunk(count)[index].to(self.device) for each in batch]
        return rows if self.sequences is None else [self.sequences(each).contiguous() for each in rows]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        count = targets.numel()
        return total / count if self.sequences is None else self.sequences.mean(total, count)

    def backward(self, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """Return the batch's loss and the gradients' norm, equal on all ranks."""
        inputs, targets = self.mine(batch)
        losses: list[Tensor] = []
        if self.schedule is None:
            losses.append(self.loss(self.model(inputs), targets))
            losses[0].backward()
        else:
            ends = {"target": targets, "losses": losses} if self.is_last else {}
            with watched_stages(self.mesh["pp"]):
                self.schedule.step(*((inputs,) if self.is_first else ()), **ends)
        norm = clip_grad_norm_(self.model.parameters(), 1.0, stages=part(self.mesh, "pp"))
        held = [sum(each.item() for each in losses), len(losses)]
        total = torch.tensor(held, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)  # ranks without the last stage have no loss
        return float(total[0] / total[1]), norm.item()


def what_ranks_hold(step: Step, optimizer: torch.optim.Optimizer, dimensions: Dimensions) -> str:
    place = "  ".join(f"{name} {at}" for name, at in dimensions.place(dist.get_rank()).items())
    names = [name for name in ENDS if getattr(step.model, name) is not None]
    parts = ", ".join([*names, "blocks " + ", ".join(step.model.blocks)])
    held = memory_held(step.model, optimizer)["parameters"]
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, f"rank {dist.get_rank()}: {place}: {parts}; {held:,} bytes")
    return "\n".join([dimensions.picture(), "", "of parameters", *lines])


def run(args: argparse.Namespace, device: torch.device) -> None:
    dimensions = Dimensions(args.mesh)
    step = Step(args, dimensions.mesh(device.type), device)
    optimizer = torch.optim.AdamW(step.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    text, _ = train_gpt.read_text(args.data, args.seq)
    progress: dict[str, Any] = {"step": 0}
    checkpoints, stages = args.out / "checkpoints", part(step.mesh, "pp")
    if args.resume and latest_step(checkpoints) is not None:
        train_gpt.resume(checkpoints, step.model, optimizer, progress, stages=stages)
        say(f"resumed at step {progress['step']}")

    log, picture = open_log(args, device, done=progress["step"]), what_ranks_hold(step, optimizer, dimensions)
    if log is not None:
        log.note(mesh=picture)
    draw = {"batch": args.batch, "seq": args.seq, "seed": args.seed}
    for number in range(progress["step"] + 1, args.steps + 1):
        train_gpt.set_learning_rate(optimizer, peak=args.lr, step=number - 1)
        loss, norm = step.backward(train_gpt.training_batch(text, position=(number - 1) * args.batch, **draw))
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] = number
        if log is not None:
            log.step(number, loss=loss, gradient_norm=norm)
        if number % args.log_every == 0 or number == args.steps:
            say(f"step {number:5d}  loss {loss:.6f}  norm {norm:.6f}")
        if number % args.save_every == 0 or number == args.steps:
            save(checkpoints, training_state(step.model, optimizer, progress, stages), step=number, keep=2)
    if log is not None:
        say(f"page: {log.close()}")


def main() -> None:
    args = parse_arguments()
    report_errors()  # also for an invalid mesh
    on_ranks(Dimensions(args.mesh).ranks)
    device = train_gpt.start()
    shardwise.install()  # so that torch's pipeline stages handle sharded modules
    run(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
