"""Train a small GPT on real text, with every parameter sharded over the ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py
    python examples/train_gpt.py --ranks 4            # the same: starts its ranks itself

Read from top to bottom, the script is a complete sharded training run: the text, the model, how it
is sharded (`shard`), the step, the checkpoint that any number of ranks can resume, and a report of
losses, speed and memory. It needs no network and no GPU: the text is the source of the Python standard
library unless --data names a folder. Importing from `torch.distributed.fsdp` instead of `shardwise`
in the one line below trains the same model to the same losses.

--layout contiguous gathers the same parameters without a copy; checkpoints fit either layout.
stdout has only output that the seed and the number of ranks determine; output that depends on time
or memory goes to stderr and to the report.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import shutil
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from run_log import RunLog, memory_bytes, memory_held, open_log, profiled, progress_bar, what_ranks_said
from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.checkpoint import PerRank, StopSignals, latest_step, load, optimizer_state, save
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError, ShardwiseError
from shardwise.launch import on_ranks
from shardwise.optim import FlatOptimizer, clip_grad_norm_, flat

if TYPE_CHECKING:
    from shardwise.verify import Case

VOCABULARY = 256  # a token is a byte
ON_TWO_AXES = ("hsdp", "hierarchical_fsdp")
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", *ON_TWO_AXES)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT, sharded over ranks.")
    add = parser.add_argument
    add("--ranks", type=int, help="ranks to start when torchrun did not start this script (default: 1)")
    add("--steps", type=int, default=300, help="total optimizer steps, including earlier runs")
    add("--layout", choices=["interleaved", "contiguous"], default="interleaved")
    add("--strategy", choices=STRATEGIES, help="what is sharded (contiguous layout; default: all)")
    add("--hsdp", action="store_true", help="2-D mesh: replicate over 2, shard over the rest")
    add("--flat", action="store_true", help="flat optimizer (contiguous layout)")
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="resume from --out's checkpoint, or discard it",
    )
    add("--step", type=int, help="resume from this checkpoint instead of the newest; discard later ones")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of gathered parameters")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="folder for checkpoints and the report")
    add("--compare", type=Path, nargs="*", default=[], help="--out of other runs to show in the report")
    add("--tensorboard", action="store_true", help="also write TensorBoard scalars, in --out/tensorboard")
    add("--profile", type=int, default=0, metavar="N", help="trace N steps, after two others, in --out/trace")
    add("--data", type=Path, help="folder of text (default: Python's standard library)")
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=12, help="windows per step over all ranks, rounded up to split evenly")
    add("--seq", type=int, default=128, help="bytes per window")
    add("--width", type=int, default=224)
    add("--depth", type=int, default=4)
    add("--heads", type=int, default=7)
    add("--lr", type=float, default=2e-3)
    add("--log-every", type=int, default=10, help="steps between printed losses")
    add("--save-every", type=int, default=50, help="steps between checkpoints; SIGTERM and Ctrl-C also save")
    add("--keep", type=int, default=2, help="number of newest checkpoints to keep")
    add("--keep-every", type=int, help="also keep checkpoints at multiples of this step")
    add("--eval-windows", type=int, default=96, help="windows of held-out text in the final loss")
    add("--sample", type=int, default=240, help="bytes of text to write at the end")
    add("--prompt", default="def ", help="start of the sampled text")
    add("--temperature", type=float, default=0.9, help="sampling temperature; 0 takes the likeliest byte")
    args = parser.parse_args(argv)
    if args.layout != "contiguous" and (args.strategy or args.flat):
        parser.error("--strategy and --flat need --layout contiguous")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard needs the package: pip install tensorboard")
    return args


# ---------------------------------------------------------------------------------------- text


def read_text(folder: Path | None, seq: int) -> tuple[Tensor, Tensor]:
    """Return training and held-out bytes (uint8, 1-D); every 16th of the sorted files is held out."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = sorted(root.rglob("*" if folder else "*.py"))
    files = [f for f in files if f.is_file() and (folder or skipped.isdisjoint(f.relative_to(root).parts))]
    train = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 16 != 15)
    held_out = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 16 == 15)
    if not held_out:  # few files: the last tenth of the text
        cut = len(train) * 9 // 10
        train, held_out = train[:cut], train[cut:]
    if min(len(train), len(held_out)) <= seq:
        found = f"{len(train)} + {len(held_out)} bytes of text"
        raise ShardwiseError(f"{root}: {found} do not fill one window of {seq}")
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out))


def unigram_entropy(text: Tensor) -> float:
    """Return nats per byte of the best model without context, the baseline that training must beat."""
    share = torch.bincount(text, minlength=VOCABULARY).double() / len(text)
    return -torch.xlogy(share, share).sum().item()


def windows(text: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Return inputs and the bytes that follow them, both int64 (len(starts), seq)."""
    rows = torch.stack([text[start : start + seq + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def training_batch(text: Tensor, *, position: int, batch: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the global batch at `position`, counted in windows drawn so far; equal on every rank.

    A separate generator draws each window's start. A resumed run therefore sees the windows that the
    first would have seen, even with another batch size or number of ranks.
    """
    drawn = range(position, position + batch)
    starts = [random.Random(f"{seed} {window}").randrange(len(text) - seq) for window in drawn]
    return windows(text, torch.tensor(starts), seq)


def my_rows(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's even share of a global batch."""
    inputs, targets = (t.chunk(dist.get_world_size())[dist.get_rank()].to(device) for t in batch)
    return inputs, targets


# --------------------------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # batch, seq, 3, heads, size
        query, key, value = heads.transpose(1, 3).unbind(2)  # batch, heads, seq, size each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Model from bytes (batch, seq) to logits (batch, seq, 256); the embedding is also the output head."""

    def __init__(self, *, width: int, depth: int, heads: int, seq: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:  # keep the initial residual stream near the embedding at any depth
            nn.init.normal_(block.attention_out.weight, std=0.02 / math.sqrt(2 * depth))
            nn.init.normal_(block.mlp_out.weight, std=0.02 / math.sqrt(2 * depth))
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------ sharding


def shard(
    model: GPT,
    mesh: DeviceMesh,
    *,
    layout: str = "interleaved",
    strategy: str | None = None,
    dtype: str = "float32",
) -> None:
    """Shard every parameter over the mesh: one group per block, one for all the rest.

    A group is gathered just before it computes and freed right after, so a rank holds its
    share of the model plus about two blocks.
    """
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if layout != "interleaved":
        options |= {"layout": layout, "strategy": strategy}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def make_mesh(device: torch.device, *, two_axes: bool) -> DeviceMesh:
    ranks = dist.get_world_size()
    if not two_axes:
        return init_device_mesh(device.type, (ranks,))
    if ranks % 2:
        raise ShardingError(f"a 2-D mesh replicates over 2: {ranks} ranks cannot be halved")
    return init_device_mesh(device.type, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))


def make_optimizer(model: nn.Module, *, over_flat_memory: bool) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if over_flat_memory:
        return flat(torch.optim.AdamW, model, **options)
    return torch.optim.AdamW(model.parameters(), **options)


# ------------------------------------------------------------------------------------ training


def set_learning_rate(optimizer: torch.optim.Optimizer, *, peak: float, step: int, warmup: int = 40) -> float:
    """Set linear warm-up, then 1 / sqrt(step): independent of the total, so a run can be extended."""
    rate = peak * min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Compute gradients of the global mean loss, clipped to norm 1; return the loss and the norm before."""
    loss = next_byte_loss(model, batch)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    return mean_over_ranks(loss), norm.item()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Return mean nats per byte over windows spread evenly over the held-out text."""
    ranks = dist.get_world_size()
    count = -(-args.eval_windows // ranks) * ranks
    starts = torch.linspace(0, len(text) - args.seq - 1, count, dtype=torch.float64).long()
    inputs, targets = my_rows(windows(text, starts, args.seq), device)
    pieces = list(zip(inputs.split(8), targets.split(8), strict=True))
    total = sum(next_byte_loss(model, piece) * len(piece[0]) for piece in pieces)
    return mean_over_ranks(total / len(inputs))


@torch.no_grad()
def sample(model: nn.Module, args: argparse.Namespace, device: torch.device) -> str:
    """Continue the prompt. Every rank takes part, as each forward gathers each group."""
    generator = torch.Generator().manual_seed(args.seed)
    written = list(args.prompt.encode())
    for _ in range(args.sample):
        context = torch.tensor([written[-args.seq :]], device=device)
        logits = model(context)[0, -1].float().cpu()
        if args.temperature == 0:
            written.append(int(logits.argmax()))
        else:
            chances = torch.softmax(logits / args.temperature, dim=0)
            written.append(int(torch.multinomial(chances, 1, generator=generator)))
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else "?" for byte in written)


# ------------------------------------------------------------------------- checkpoint and log


def training_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    stages: DeviceMesh | None = None,
) -> dict[str, Any]:
    """Return all a run needs to resume: shards of parameters and moments, numbers, random states."""
    moments = optimizer_state(model, optimizer, stages=stages)
    own = PerRank({"rng": torch.get_rng_state()}, optional=True)  # runs with other numbers of ranks ignore it
    return {"model": get_model_state_dict(model), "optimizer": moments, "progress": progress, "own": own}


def resume(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    *,
    step: int | None = None,
    stages: DeviceMesh | None = None,
) -> None:
    state = training_state(model, optimizer, progress, stages)
    load(folder, state, step=step)
    torch.set_rng_state(state["own"].value["rng"])
    set_model_state_dict(model, state["model"])
    if isinstance(optimizer, FlatOptimizer):
        optimizer.load_state_dict(state["optimizer"])
    else:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


# ------------------------------------------------------------------------------------- running


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    *,
    args: argparse.Namespace,
    device: torch.device,
    progress: dict[str, Any],
    log: RunLog | None,
) -> int:
    """Train from progress["step"] to args.steps or a signal, saving checkpoints; return the exit status."""
    draw = {"batch": args.batch, "seq": args.seq, "seed": args.seed}
    counted = min(progress["step"] + 1, args.steps - 1)  # the second step: the first allocates
    with (
        progress_bar(progress["step"], args.steps) as advance,
        profiled(args.out / "trace", args.profile) as profile_step,
        StopSignals() as stop,
    ):
        for step in range(progress["step"], args.steps):
            began = time.perf_counter()
            batch = training_batch(text, position=progress["position"], **draw)
            rate = set_learning_rate(optimizer, peak=args.lr, step=step)
            with CommCounter() if step == counted else nullcontext() as counter:
                loss, norm = backward(model, my_rows(batch, device))
                optimizer.step()
            held = memory_held(model, optimizer)
            optimizer.zero_grad()
            profile_step()

            progress["step"] = step + 1
            progress["position"] += args.batch
            seconds = time.perf_counter() - began
            speed = batch[0].numel() / seconds
            now, peak = memory_bytes(device)
            numbers = {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "seconds": seconds}
            numbers |= {"tokens_per_s": speed, "memory_bytes": now, "peak_bytes": peak}
            said = what_ranks_said(counter, held) if counter is not None else None
            if log is not None:
                if said is not None:
                    log.note(**said)
                log.step(step + 1, **numbers)
            advance(f"loss {loss:.3f}  {speed:,.0f} tokens/s  {sum(held.values()) / 2**20:.1f} MiB/rank")
            if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
                say(f"step {step + 1:5d}  loss {loss:.6f}")
            if stop.asked() or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                save(
                    args.out / "checkpoints",
                    training_state(model, optimizer, progress),
                    step=step + 1,
                    keep=args.keep,
                    keep_every=args.keep_every,
                )
            if stop:
                break
    return stop.status if progress["step"] < args.steps else 0


def start() -> torch.device:
    """Join the process group: NCCL if every rank of this machine can have a GPU, otherwise gloo."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def of_layout(args: argparse.Namespace) -> str:
    return f"{args.layout} layout" + (f" ({args.strategy})" if args.strategy else "")


def run(args: argparse.Namespace, device: torch.device) -> int:
    """Run everything between joining and leaving the process group; return the exit status."""
    ranks = dist.get_world_size()
    args.batch = -(-args.batch // ranks) * ranks
    text, held_out = read_text(args.data, args.seq)

    torch.manual_seed(args.seed)  # every rank builds the same model, then keeps its share
    model = GPT(width=args.width, depth=args.depth, heads=args.heads, seq=args.seq).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    mesh = make_mesh(device, two_axes=args.hsdp or args.strategy in ON_TWO_AXES)
    shard(model, mesh, layout=args.layout, strategy=args.strategy, dtype=args.dtype)
    optimizer = make_optimizer(model, over_flat_memory=args.flat)

    baseline = unigram_entropy(held_out)
    say(f"{parameters:,} parameters over {ranks} ranks ({device.type}), {of_layout(args)}, {args.dtype}")
    say(f"{len(text):,} bytes of text, {len(held_out):,} held out; unigram baseline {baseline:.6f} nats/byte")

    progress: dict[str, Any] = {"step": 0, "position": 0}
    checkpoints = args.out / "checkpoints"
    if args.resume and latest_step(checkpoints) is not None:
        resume(checkpoints, model, optimizer, progress, step=args.step)
        say(f"resumed at step {progress['step']}, {progress['position']} windows into the text")
        if progress["step"] >= args.steps:
            say(f"nothing left of --steps {args.steps}: give more, or --no-resume to start again")
    if (not args.resume or args.step is not None) and dist.get_rank() == 0:
        for old in checkpoints.glob("step-*"):
            if int(old.name[5:13]) > progress["step"] or not args.resume:
                shutil.rmtree(old)

    log = open_log(args, device, done=progress["step"])
    if log is not None:
        whole = {"parameters": 4 * parameters, "gradients": 4 * parameters, "optimizer": 8 * parameters}
        log.note(parameters=parameters, baseline=baseline, unit="nats/byte", unsharded_memory=whole)

    status = train(model, optimizer, text, args=args, device=device, progress=progress, log=log)
    if status:
        say(f"stopped at step {progress['step']}, saved; the same command goes on")
        if log is not None:
            log.close()
        return status

    final = held_out_loss(model, held_out, args, device)
    say(f"held-out loss {final:.6f} nats/byte, {baseline - final:.6f} below the unigram baseline")
    written = sample(model, args, device)
    say(f"sample:\n{written}")
    if log is not None:
        log.note(held_out_loss=final, sample=written)
        say(f"page: {log.close()}")
    return 0


def main() -> None:
    args = parse_arguments()
    on_ranks(args.ranks or 1)
    device = start()
    status = run(args, device)
    dist.destroy_process_group()
    sys.exit(status)


def verify_case() -> Case:
    """Return a tiny case for `shardwise verify examples/train_gpt.py`: 1 process against N ranks."""
    from shardwise.verify import Case

    text, _ = read_text(None, 32)

    def build() -> GPT:
        torch.manual_seed(0)
        return GPT(width=32, depth=2, heads=2, seq=32)

    return Case(
        build=build,
        shard=shard,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        batch=lambda step: training_batch(text, position=24 * step, batch=24, seq=32, seed=0),
        loss=next_byte_loss,
    )


if __name__ == "__main__":
    main()
