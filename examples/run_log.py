"""The log of a run: memory, collectives, a progress bar, and in its folder `metrics.jsonl`, the report made
from it, TensorBoard scalars and a trace.

Each line of `metrics.jsonl` is one of

    {"begins": step, "ranks": 4, "device": ...}   a start or resume of the run, and its hardware
    {"step": 1, "loss": ..., "seconds": ...}      a step
    {"note": {...}}                               facts about the whole run: collectives, memory, results

A run that resumes at a step drops the lines of later steps, which it will repeat. Only rank 0 writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn, profiler

import shardwise
from shardwise.comm.count import CommCounter
from training_report import LOG, make_run, read_lines, read_run, replace_file, write_page

PAGE_EVERY_S = 10.0


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return the device and versions that a run uses."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "shardwise": shardwise.__version__,
        "python": platform.python_version(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return memory now and at its peak, of the device on a GPU, otherwise of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    pages = Path("/proc/self/statm")
    now = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else peak
    return now, max(now, peak)  # the system updates the peak later


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor or of rows (contiguous layout), or all of a plain tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else getattr(tensor, "local", tensor)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind this rank's part of the tensors."""
    storages = {s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def memory_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    moments = (value for state in optimizer.state.values() for value in state.values())
    return {
        "parameters": held_bytes(p for p in model.parameters()),
        "gradients": held_bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": held_bytes(m for m in moments if isinstance(m, Tensor)),
    }


def what_ranks_said(counter: CommCounter, held: dict[str, int]) -> dict[str, Any]:
    """Return the collectives of a counted step, and what every rank held at its end."""
    memory: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(memory, held)
    kinds = dict.fromkeys(call.kind for call in counter.calls)
    collectives = [{"kind": k, "calls": counter.count(k), "bytes": counter.bytes(k)} for k in kinds]
    return {"memory": memory, "collectives": collectives}


@dataclass
class RunLog:
    """The log of the run in `folder`, whose first `done` steps stay; `others` are runs to compare it with."""

    folder: Path
    done: int = 0
    title: str = "A run"
    steps: int = 0  # target of the run
    others: list[Path] = field(default_factory=list)
    tensorboard: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = [
            line for line in read_lines(self.folder) if line.get("step", line.get("begins", 0)) <= self.done
        ]
        self._lines = kept if self.done else []
        replace_file(self.folder / LOG, "".join(json.dumps(line) + "\n" for line in self._lines))
        self._file = (self.folder / LOG).open("a", encoding="utf-8")
        self._written = -PAGE_EVERY_S
        self._scalars = tensorboard_writer(self.folder, self.done) if self.tensorboard else None

    def begin(self, **about: Any) -> None:
        """Record a start or resume, with its hardware and settings."""
        self._add({"begins": self.done, **about})

    def step(self, step: int, **numbers: float) -> None:
        """Record the end of step `step` (from 1), and write the report from time to time."""
        self._add({"step": step, **numbers})
        if self._scalars is not None:
            for name, value in numbers.items():
                self._scalars.add_scalar(name, value, step)
        if time.monotonic() - self._written > PAGE_EVERY_S:
            self.write(running=True)

    def note(self, **facts: Any) -> None:
        """Record facts about the whole run; later ones replace earlier ones."""
        self._add({"note": facts})

    def write(self, *, running: bool) -> Path:
        """Write the current report; return its path."""
        self._file.flush()
        runs = [make_run(self.folder, self._lines), *(read_run(folder) for folder in self.others)]
        page = write_page(
            self.folder / "report.html", runs, title=self.title, steps=self.steps, running=running
        )
        self._written = time.monotonic()
        return page

    def close(self) -> Path:
        """Write the final report; return its path."""
        if self._scalars is not None:
            self._scalars.close()
        page = self.write(running=False)
        self._file.close()
        return page

    def _add(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        self._file.write(json.dumps(line) + "\n")


def open_log(args: argparse.Namespace, device: torch.device, *, done: int) -> RunLog | None:
    """Return the run's log on rank 0, which writes the report during the run; None on other ranks."""
    if dist.get_rank() != 0:
        return None
    log = RunLog(
        args.out,
        done=done,
        title="A small GPT, sharded",
        steps=args.steps,
        others=args.compare,
        tensorboard=args.tensorboard,
    )
    settings = {name: str(value) for name, value in vars(args).items() if value not in (None, [])}
    log.begin(ranks=dist.get_world_size(), settings=settings, **surroundings(device))
    return log


def tensorboard_writer(folder: Path, done: int) -> Any:
    """Return a TensorBoard writer that discards an earlier run's steps after `done`."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)


@contextmanager
def progress_bar(done: int, steps: int) -> Iterator[Callable[[str], None]]:
    """Yield advance(text), which moves rank 0's bar on stderr by one step."""
    if dist.get_rank() != 0:
        yield lambda text: None
        return
    columns = (BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=steps, completed=done)
        yield lambda text: bar.update(task, advance=1, description=text)


@contextmanager
def profiled(folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step; write a trace of `steps` steps after the first two.

    Each rank writes its own file in `folder`, with modules' names, for chrome://tracing or Perfetto.
    """
    if not steps:
        yield lambda: None
        return
    rank = os.environ.get("RANK", "0")

    def save(trace: profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"rank-{rank}.json"))

    plan = profiler.schedule(wait=1, warmup=1, active=steps, repeat=1)
    with profiler.profile(schedule=plan, on_trace_ready=save) as running:
        yield running.step
