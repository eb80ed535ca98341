"""torchrun's agents come and go: 4 ranks, one killed with its agent, 3 ranks, another agent, 4 ranks again.

    PYTHONPATH=tests:. python -m faults.elastic

Each agent stands for a host with one rank. The example trains under them; which agent is killed is drawn.
At the end its log must have every step once, and losses those of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from training_report import read_run

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train_gpt.py")
TINY = [
    *("--batch", "12", "--seq", "16", "--width", "12", "--depth", "2", "--heads", "2"),
    *("--eval-windows", "12", "--sample", "4", "--log-every", "1"),
]
PATIENCE = 240.0  # seconds for each stage
CLOSE = 0.05  # nats a byte: sums over other numbers of ranks round otherwise


class Run:
    """Agents over one c10d rendezvous, the first of which keeps its store."""

    endpoint = "localhost"

    def __init__(self, folder: Path, *, steps: int, save_every: int = 20) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        self.script = [SCRIPT, *TINY, "--steps", str(steps), "--save-every", str(save_every), "--out", "run"]
        self.agents: list[subprocess.Popen[bytes]] = []

    def where(self, number: int) -> tuple[list[str], str, str, str]:
        """What an agent's command begins with; its address, interface, and settings of its rendezvous."""
        is_host = int(number == 0)  # left out, the first agent to bind would keep the store
        return [], "localhost", "lo", f"{is_host=},last_call_timeout=10"

    def start_agent(self) -> None:
        number = len(self.agents)
        prefix, address, interface, rendezvous = self.where(number)
        options = ["--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint={self.endpoint}:{self.port}", "--rdzv-id=elastic"]
        options += ["--monitor-interval=0.5", f"--rdzv-conf=join_timeout=120,{rendezvous}"]
        options += [f"--local-addr={address}"]
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", *options, *self.script]
        with (self.folder / f"agent-{number}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "GLOO_SOCKET_IFNAME": interface,
                        "PYTHONWARNINGS": "ignore",
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else attempts share keys
                    },
                    start_new_session=True,
                )
            )

    def kill(self, number: int) -> None:
        """The agent and its rank, at once."""
        for pid in [self.agents[number].pid, *self._ranks_of(number)]:
            os.kill(pid, signal.SIGKILL)

    def _ranks_of(self, number: int) -> list[int]:
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.agents[number].pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(pid) for pid in found.stdout.split()]

    def said(self) -> str:
        logs = sorted(self.folder.glob("agent-*.log"), key=lambda file: file.stat().st_mtime)
        return "\n".join(file.read_text(errors="replace") for file in logs)

    def wait_for_steps(self, ranks: int, *, after: int, count: int) -> int:
        """Until `ranks` ranks have started after step `after` and done `count` steps; the last step."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(agent.poll() is None for agent in self.agents):
            for log in self.folder.glob("agent-*.log"):
                latest = log.read_text(errors="replace").rpartition(" parameters over ")[2]
                steps = [int(step) for step in re.findall(r"^step +(\d+) ", latest, flags=re.M)]
                if latest.startswith(f"{ranks} ranks") and len(steps) >= count and steps[-1] > after:
                    return steps[-1]
            time.sleep(0.2)
        raise TimeoutError(f"no {count} steps on {ranks} ranks:\n{self.said()[-6000:]}")

    def stop(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            agent.wait(90)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run, of which each must be there once."""
    rows = read_run(folder / "run").steps
    there = [int(row["step"]) for row in rows]
    assert there == list(range(1, len(rows) + 1)), f"a step is missing, or there twice: {there}"
    return rows


def judged(folder: Path) -> tuple[int, float]:
    """The last step, and how far losses are from those of a run alone."""
    rows = steps_of(folder)
    last = len(rows)
    alone = Run(folder / "alone", steps=last)
    (folder / "alone").mkdir()
    subprocess.run(
        [sys.executable, *alone.script, "--ranks", "1"], cwd=folder / "alone", check=True, capture_output=True
    )
    expected = read_run(folder / "alone" / "run").steps
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(rows, expected, strict=True))
    assert apart < CLOSE, f"losses are {apart} apart"
    return last, apart


def main() -> None:
    parser = argparse.ArgumentParser(description="4 -> 3 -> 4 ranks under torchrun.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random = Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    begun = time.monotonic()
    run = Run(folder, steps=100_000)
    try:
        for _ in range(4):
            run.start_agent()
        step = run.wait_for_steps(4, after=0, count=30)
        run.kill(random.randrange(1, 4))
        killed = time.monotonic()
        step = run.wait_for_steps(3, after=0, count=30)
        back = time.monotonic() - killed
        run.start_agent()
        step = run.wait_for_steps(4, after=step, count=30)
    finally:
        run.stop()
    last, apart = judged(folder)
    print(
        f"4 -> 3 -> 4 ranks: {last} steps, each once; losses at most {apart:.1e} from an uninterrupted run's;"
    )
    print(f"30 steps on 3 ranks {back:.0f} s after the kill; {time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
