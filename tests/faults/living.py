"""Two of four ranks killed one after the other under `LivingRanks`, the second while the others meet.

    PYTHONPATH=tests:.:examples python -m faults.living --trials 22

The first dies in a step. The second dies where its next meeting has come to: before it has told others where
it is, while they connect, agree, build, hand on state, or take the first step. Both are replaced at once. The
run must end on four ranks, in the bits of a run without a loss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.results import RESULTS, machine_facts, write_section
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardwise import fully_shard
from shardwise.checkpoint import HostMemory, LivingRanks, latest_step, load, meeting, optimizer_state, save
from shardwise.checkpoint import living as module

ABOUT = (
    "`python -m faults.living`: two of four ranks under `LivingRanks` killed one after the other and"
    " replaced, the second in each phase of the meeting after the first, HSDP and DDP. Under torchrun: with"
    " what each ended, and how many processes each of two ranks had, one of them killed."
)
STEPS, RANKS, LIMIT = 5, 4, 90.0
PHASES = ("come", "join", "tell", "connected", "group", "agree", "copy", "mesh", "fetch", "step", "commit")
OPTIONS: Any = {"wait_s": 60.0, "timeout": timedelta(seconds=30)}


class Training:
    """A tiny model, replicated twice over two axes, or on every rank."""

    def __init__(self, strategy: str) -> None:
        torch.manual_seed(0)
        self.model, self.step = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), 0
        if strategy == "ddp":
            mesh = device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model, mesh=mesh, layout="contiguous", strategy="ddp")
        else:
            mesh = device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)

    def state(self) -> dict[str, Any]:
        moments = optimizer_state(self.model, self.optimizer)
        return {"model": get_model_state_dict(self.model), "optimizer": moments, "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.step = state["step"]

    def backward(self) -> None:
        draw = torch.Generator().manual_seed(RANKS * self.step + dist.get_rank())
        self.model(torch.randn(3, 6, generator=draw)).square().mean().backward()

    def advance(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def digest(self) -> str:
        whole = [parameter.full_tensor() for parameter in self.model.parameters()]
        return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in whole)).hexdigest()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    """`function`, of which this process does not live to see the end."""

    def call(*args: Any, **options: Any) -> Any:
        if not before:
            function(*args, **options)
        die()

    return call


def arm(phase: str, patch: pytest.MonkeyPatch) -> None:
    """Have this process die where its next meeting comes to `phase`."""
    connect = dist.init_process_group

    def tell(*args: Any, **options: Any) -> None:  # where it is: others may connect, and it dies
        patch.setattr(meeting._WatchedStore, "set", dying(meeting._WatchedStore.set, before=False))
        connect(*args, **options)

    if phase == "tell":
        patch.setattr(dist, "init_process_group", tell)
        return
    owner, name, before = {
        "come": (meeting.Meeting, "_sign_in", False),
        "join": (dist, "init_process_group", True),
        "connected": (dist, "init_process_group", False),
        "group": (dist, "new_group", True),
        "agree": (module, "together", True),
        "copy": (HostMemory, "save", True),
        "mesh": (device_mesh, "init_device_mesh", True),
        "fetch": (HostMemory, "load", True),
        "step": (Training, "backward", True),
        "commit": (Training, "advance", False),
    }[phase]
    patch.setattr(owner, name, dying(getattr(owner, name), before=before))


def live(folder: Path, strategy: str, rank: int, life: int, victims: dict[int, Any]) -> None:
    """One process of the run. `victims`: by rank, at which step, or in which phase after it, it dies."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"))
    run = LivingRanks(
        lambda: Training(strategy),
        store=store,
        ranks=RANKS,
        rank=rank if life == 0 else None,
        folder=folder / f"memory{rank}",
        **OPTIONS,
    )
    step, phase = victims.get(rank, (None, None)) if life == 0 else (None, None)
    armed = False
    with pytest.MonkeyPatch.context() as patch:
        while run.training.step < STEPS:
            with run.attempt() as training:
                training.backward()
                if training.step == step and phase is None:
                    die()
                if training.step == step and not armed:
                    arm(phase, patch)
                    armed = True
                run.commit(training.advance)
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(run.training.digest()))
    dist.barrier()
    dist.destroy_process_group()


def trial(folder: Path, strategy: str, victims: dict[int, Any]) -> list[str]:
    """Run it, each process that is killed replaced at once; what each rank ended with."""
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.living"])

    def start(rank: int, life: int) -> Any:
        process = context.Process(target=live, args=(folder, strategy, rank, life, victims))
        process.start()
        return process

    running = [(rank, start(rank, 0)) for rank in range(RANKS)]
    begun = time.monotonic()
    while running and time.monotonic() - begun < LIMIT:
        time.sleep(0.05)
        for rank, process in list(running):
            if process.exitcode is not None:
                running.remove((rank, process))
                if process.exitcode == -signal.SIGKILL:
                    running.append((rank, start(rank, 1)))
    for _, process in running:
        process.kill()
    return [json.loads(file.read_text()) for file in sorted(folder.glob("found-*.json"))]


def launched(folder: Path) -> None:
    """A rank that torchrun has started, on two in all; rank 1 dies once. Leaves who it was at each step."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("MY_RANK", os.environ["RANK"]))
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def resume(training: Training) -> None:
        if latest_step(folder / "checkpoints") is not None:
            state = training.state()
            load(folder / "checkpoints", state)
            training.load(state)

    run = LivingRanks(
        lambda: Training("ddp"),
        resume=resume,
        store=dist.FileStore(str(folder / "store")),
        ranks=2,
        rank=rank if first else None,
        folder=folder / f"memory{rank}",
        **OPTIONS,
    )
    while run.training.step < STEPS:
        with run.attempt() as training:
            training.backward()
            if first and rank == 1 and training.step == 2:
                die()
            run.commit(training.advance)
            save(folder / "checkpoints", training.state(), step=training.step)
            with (folder / f"pids-{dist.get_rank()}").open("a") as file:
                file.write(f"{os.getpid()} ")
    dist.barrier()
    dist.destroy_process_group()


def under_torchrun(folder: Path, *, apart: bool, restarts: int) -> list[int]:
    """Two ranks under one torchrun, or under one each; its statuses, and how many processes ranks had."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
    command += [f"--nproc-per-node={1 if apart else 2}", "-m", "faults.living", "--launched", str(folder)]
    environments = [{"MY_RANK": str(rank)} for rank in range(2)] if apart else [{}]
    started = [subprocess.Popen(command, env={**os.environ, **more}) for more in environments]
    statuses = [each.wait(LIMIT) for each in started]
    pids = [(folder / f"pids-{rank}").read_text().split() for rank in range(2)]
    return [*statuses, *(len(set(each)) for each in pids)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2 * len(PHASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--write", action="store_true", help="replace the section in --results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--launched", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launched:
        launched(args.launched)
        return
    root, wrong, seconds = Path(tempfile.mkdtemp(prefix="living-")), 0, list[float]()
    references = {each: trial(root / each, each, {}) for each in ("hsdp", "ddp")}
    for number in range(args.trials) if args.only is None else args.only:
        random = Random(f"{args.seed} {number}")
        strategy, phase = ("hsdp", "ddp")[number % 2], PHASES[number // 2 % len(PHASES)]
        first = random.randrange(RANKS)
        second = (first + random.choice([1, 3])) % RANKS  # has another shard
        step = random.randrange(1, STEPS - 1)
        begun = time.monotonic()
        found = trial(root / str(number), strategy, {first: (step, None), second: (step, phase)})
        fine = found == references[strategy] and len(found) == RANKS
        wrong += not fine
        seconds.append(time.monotonic() - begun)
        told = "fine" if fine else f"WRONG {found}"
        print(
            f"{number:3d} {strategy}, ranks {first} and {second} lost at step {step}, the second in {phase}:"
            f" {told}, {seconds[-1]:.0f} s",
            flush=True,
        )
    said = f"{len(seconds) - wrong} of {len(seconds)} runs ended in the bits of a run without a loss"
    lines = [f"{said}; {median(seconds or [0]):.0f} s a run, the most {max(seconds, default=0):.0f}.", ""]
    for apart, restarts, expected in ((False, 0, [1, 1, 1]), (False, 1, [0, 2, 2]), (True, 1, [0, 0, 1, 2])):
        found_there = under_torchrun(root / f"torchrun-{apart}-{restarts}", apart=apart, restarts=restarts)
        wrong += found_there != expected
        where = "one torchrun each" if apart else "one torchrun"
        lines.append(f"- under {where}, {restarts} restarts: {found_there}, expected {expected}")
    print(*lines, sep="\n")
    if args.write:
        facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
        text = "\n".join(["## Two ranks lost", "", facts, "", ABOUT, "", *lines])
        write_section("living", text, path=args.results)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
