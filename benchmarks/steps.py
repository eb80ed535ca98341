"""Whole training steps on local gloo ranks: CPU time, wall time, collectives and bytes on the wire.

    python benchmarks/steps.py
    python benchmarks/steps.py --world 2 --width 512 --blocks 30

Every rank trains the same GPT on its own windows of text (the source of Python's standard library, a token
a byte) with fused AdamW, under each implementation in turn, step by step in the same processes, with gloo's
threads as they are where it is alone. "Unsharded" is a rank on its own, without communication; the rest
share a global batch, so their losses must agree.

CPU time is a rank's own (user and system, all threads), mean over ranks. Ratios divide what each adds to the
unsharded step by what torch's FSDP2 adds. The wire is the loopback interface of a private network namespace,
made with unshare(1), in which nothing else talks: bytes sent by all ranks, headers and acknowledgements
included, over their number. Where no namespace can be made, only theory is shown: (n-1)/n of the float32
parameters for each gather and each reduction. Backward gathers again what forward freed: with FSDP2 the
blocks, with shardwise the blocks but the last, which backward begins with.
"""

import argparse
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from gloo_transport import set_input_threads
from results import Table, add_output_arguments, machine_facts, ratio, report, spread, with_spread
from subjects import PEER, available, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.count import CommCounter

VOCABULARY, HEAD_WIDTH = 256, 64
TIMEOUT = timedelta(minutes=2)
IN_NAMESPACE = "SHARDWISE_BENCH_NAMESPACE"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width), in and out
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, *, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:  # (batch, length + 1) -> scalar
        x = self.tokens(text[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def standard_library_text() -> Tensor:
    """The bytes of the standard library's top-level modules, 1-D uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def windows(text: Tensor, *, count: int, length: int, seed: int) -> Tensor:
    """`count` windows of `length` + 1 bytes at random places, int64."""
    starts = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()


# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Sizes:
    width: int
    blocks: int
    batch: int  # windows per rank
    length: int


@dataclass(frozen=True)
class Way:
    """One way to train. Traffic is in multiples of (n-1)/n of the bytes of the parameters."""

    make: Callable[..., tuple[nn.Module, torch.optim.Optimizer]]  # (GPT, mesh)
    gathers_again: Callable[[float, float], float] | None = None  # share of all parameters, from that
    # of all blocks and of one block; None: there is one gather and one reduction, or one all-reduce


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def _unsharded(model: GPT, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, _adamw(model)


def _ddp(model: GPT, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model)
    return wrapped, _adamw(wrapped)


def _sharded(name: str, model: GPT, mesh: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    library = shard(name, model, model.blocks, mesh=mesh, **options)
    return model, library.adamw(model, lr=3e-4, fused=True)


def _all_blocks(blocks: float, block: float) -> float:
    return blocks


def _all_but_the_last(blocks: float, block: float) -> float:
    return blocks - block


UNSHARDED, REFERENCE, NO_RESHARD = "unsharded", "DDP", f"{PEER}, no reshard"
OTHERS = (UNSHARDED, REFERENCE, PEER, NO_RESHARD)
WAYS: dict[str, Way] = {
    UNSHARDED: Way(_unsharded),
    REFERENCE: Way(_ddp),
    PEER: Way(partial(_sharded, PEER), _all_blocks),
    NO_RESHARD: Way(partial(_sharded, PEER, reshard_after_forward=False)),
    "interleaved": Way(partial(_sharded, "interleaved"), _all_but_the_last),
    "contiguous": Way(partial(_sharded, "contiguous"), _all_but_the_last),
    "contiguous+flat": Way(partial(_sharded, "contiguous+flat"), _all_but_the_last),
}


# ---------------------------------------------------------------- on a rank


def _sent_bytes() -> int:
    """Bytes that left through the loopback interface so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise OSError("no loopback interface in /proc/net/dev")


def run_rank(rank: int, world: int, names: Sequence[str], sizes: Sizes, steps: int, folder: str) -> None:
    """Train under every way; rank 0 writes `{name: figures}` to `folder`/figures.json."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    text = standard_library_text()

    def batch(step: int) -> Tensor:
        return windows(text, count=sizes.batch, length=sizes.length, seed=step * world + rank)

    mesh = init_device_mesh("cpu", (world,))
    subjects = {}
    for name in names:
        torch.manual_seed(0)
        model = GPT(width=sizes.width, blocks=sizes.blocks, length=sizes.length)
        subjects[name] = WAYS[name].make(model, mesh)
    losses: dict[str, list[float]] = {name: [] for name in names}

    def step(name: str, number: int) -> None:
        model, optimizer = subjects[name]
        loss = model(batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[name].append(loss.item())

    collectives: dict[str, dict[str, int]] = {}
    for name in names:
        step(name, 0)  # first steps set up, DDP's second too
        step(name, 1)
        with CommCounter() as counter:
            step(name, 2)
        collectives[name] = dict(Counter(call.kind for call in counter.calls))
    measured: dict[str, dict[str, list[float]]] = {
        name: {"cpu_s": [], "wall_s": [], "wire": []} for name in names
    }
    for number in range(3, 3 + steps):
        for name in names:
            set_input_threads(ours=name not in OTHERS)
            dist.barrier()
            sent, wall, cpu = _sent_bytes(), time.perf_counter(), time.process_time()
            step(name, number)
            cpu = time.process_time() - cpu
            dist.barrier()
            wall = time.perf_counter() - wall
            for key, value in (("cpu_s", cpu), ("wall_s", wall), ("wire", (_sent_bytes() - sent) / world)):
                measured[name][key].append(value)
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, (measured, losses))
    if rank == 0:
        figures = {name: _figures(name, everything, collectives[name]) for name in names}
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def _figures(name: str, ranks: Sequence[Any], collectives: dict[str, int]) -> dict[str, Any]:
    cpu = [sum(times) / len(ranks) for times in zip(*(m[name]["cpu_s"] for m, _ in ranks), strict=True)]
    losses = [sum(values) / len(ranks) for values in zip(*(each[name] for _, each in ranks), strict=True)]
    first, _ = ranks[0]
    return {
        "cpu_s": spread(cpu),
        "wall_s": spread(first[name]["wall_s"]),
        "wire_bytes": spread(first[name]["wire"]),
        "collectives": collectives,
        "losses": losses,
    }


# ---------------------------------------------------------------- starting ranks, tables


def measure(names: Sequence[str], *, world: int, sizes: Sizes, steps: int) -> dict[str, Any]:
    """`{name: {"cpu_s", "wall_s", "wire_bytes": [median, min, max], "collectives", "losses"}}`."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked: torch is imported once, and no thread of it runs here.
        mp.start_processes(run_rank, (world, names, sizes, steps, folder), nprocs=world, start_method="fork")
        return dict(json.loads(Path(folder, "figures.json").read_text()))


def theory_bytes(name: str, *, world: int, sizes: Sizes) -> float:
    """The least each rank has to send in a step."""
    with torch.device("meta"):
        model = GPT(width=sizes.width, blocks=sizes.blocks, length=sizes.length)
    total = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for p in model.blocks.parameters()) / total
    again = WAYS[name].gathers_again
    times = 2 + again(blocks, blocks / sizes.blocks) if again else 2
    return 0.0 if name == UNSHARDED else times * (world - 1) / world * 4 * total


def disagreement(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}


def tables(figures: dict[str, Any]) -> list[Table]:
    header = [
        "implementation",
        "CPU s/step/rank",
        "CPU over unsharded",
        f"CPU over unsharded / {PEER}",
        "wall s",
    ]
    header += [f"wall / {PEER}", "collectives", "wire MB/rank", "theory MB/rank", "wire / theory"]
    header += [f"loss, last; largest difference from {REFERENCE}"]
    result = []
    for world, found in figures["worlds"].items():
        bare, peer = found[UNSHARDED], found[PEER]
        rows = []
        for name, one in found.items():
            over, over_peer = (each["cpu_s"][0] - bare["cpu_s"][0] for each in (one, peer))
            kinds = [f"{n} {SHORT.get(kind, kind)}" for kind, n in one["collectives"].items()]
            wire, theory = one["wire_bytes"][0], one["theory_bytes"]
            row = [name, with_spread(one["cpu_s"], digits=3), f"{over:.3f}", ratio(over, over_peer)]
            row += [with_spread(one["wall_s"]), ratio(one["wall_s"][0], peer["wall_s"][0])]
            row.append(" + ".join(kinds) or "-")
            row += [f"{wire / 1e6:.1f}" if figures["namespace"] else "not measured", f"{theory / 1e6:.1f}"]
            row.append(ratio(wire, theory) if figures["namespace"] else "-")
            apart = disagreement(one["losses"], found[REFERENCE]["losses"])
            row.append(f"{one['losses'][-1]:.5f}; " + ("own batch" if name == UNSHARDED else f"{apart:.1e}"))
            rows.append(row)
        title = f"{world} ranks, {figures['parameters'] / 1e6:.1f} M parameters"
        result.append(Table(f"{title}: median [min..max]", header, rows))
    return result


def enter_namespace() -> bool:
    """Run on in a private network namespace, as this program started anew; False if none can be made."""
    if os.environ.get(IN_NAMESPACE) == "yes":
        _bring_up_loopback()
        return True
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
        os.environ[IN_NAMESPACE] = "yes"
        os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"wire bytes are not measured: no network namespace can be made ({error})", file=sys.stderr)
    return False


def _bring_up_loopback() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of linux/sockios.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, get_flags, struct.pack("16sh22x", b"lo", 0))
        _, flags = struct.unpack("16sh22x", request)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh22x", b"lo", flags | up))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--width", type=int, default=640, help=f"a multiple of {HEAD_WIDTH}")
    parser.add_argument("--blocks", type=int, default=6, help="with width 640: 5 M parameters each")
    parser.add_argument("--batch", type=int, default=2, help="windows per rank")
    parser.add_argument("--length", type=int, default=128, help="bytes per window")
    parser.add_argument("--steps", type=int, default=8, help="timed steps on 2 ranks; on n, 2/n of that")
    add_output_arguments(parser)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    namespace = enter_namespace()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sizes = Sizes(options.width, options.blocks, options.batch, options.length)
    sharders = available([PEER, "interleaved", "contiguous", "contiguous+flat"])
    names = [name for name in WAYS if name in (UNSHARDED, REFERENCE, NO_RESHARD, *sharders)]
    with torch.device("meta"):
        model = GPT(width=sizes.width, blocks=sizes.blocks, length=sizes.length)
    figures: dict[str, Any] = {
        "facts": machine_facts(),
        "peer": PEER,
        "namespace": namespace,
        "parameters": sum(p.numel() for p in model.parameters()),
        "worlds": {},
    }
    for world in options.world:
        found = measure(names, world=world, sizes=sizes, steps=max(1, options.steps * 2 // world))
        for name, one in found.items():
            one["theory_bytes"] = theory_bytes(name, world=world, sizes=sizes)
        figures["worlds"][world] = found
    report("steps", figures, tables(figures), options)


if __name__ == "__main__":
    main()
