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

from examples import train_gpt

from training_report import read_run

TINY = [
    *("--batch", "12", "--seq", "16", "--width", "12", "--depth", "2", "--heads", "2"),
    *("--eval-windows", "12", "--sample", "4", "--log-every", "1"),
]
PATIENCE = 240.0  # seconds for each stage
CLOSE = 0.05  # nats a byte: sums over other numbers of ranks round otherwise


class Run:
    """Agents over one c10d rendezvous, the first of which keeps its store."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        self.script = [train_gpt.__file__, *TINY, "--steps", str(steps), "--save-every", "20", "--out", "run"]
        self.agents: list[subprocess.Popen[bytes]] = []

    def start_agent(self) -> None:
        number = len(self.agents)
        options = ["--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint=localhost:{self.port}", "--rdzv-id=elastic", "--monitor-interval=0.5"]
        options += ["--rdzv-conf=last_call_timeout=10,join_timeout=120", "--local-addr=localhost"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *self.script]
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
                        "GLOO_SOCKET_IFNAME": "lo",
                        "PYTHONWARNINGS": "ignore",
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else attempts share keys
                    },
                    start_new_session=True,
                )
            )

    def kill(self, number: int) -> None:
        """The agent and its rank, at once."""
        os.killpg(self.agents[number].pid, signal.SIGKILL)  # its session
        for pid in self._ranks_of(number):
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
        while time.monotonic() < end:
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
    rows = read_run(folder / "run").steps
    last = int(rows[-1]["step"])
    assert [int(row["step"]) for row in rows] == list(range(1, last + 1)), "a step is missing, or there twice"
    alone = Run(folder / "alone", steps=last)
    (folder / "alone").mkdir()
    subprocess.run(
        [sys.executable, *alone.script, "--ranks", "1"], cwd=folder / "alone", check=True, capture_output=True
    )
    expected = read_run(folder / "alone" / "run").steps
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(rows, expected, strict=True))
    assert apart < CLOSE, f"losses are {apart} apart"
    print(
        f"4 -> 3 -> 4 ranks: {last} steps, each once; losses at most {apart:.1e} from an uninterrupted run's;"
    )
    print(f"30 steps on 3 ranks {back:.0f} s after the kill; {time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
