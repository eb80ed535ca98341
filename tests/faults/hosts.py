"""Hosts over a network that delays and loses frames; one is cut off and comes back, one dies without a word.

    PYTHONPATH=tests:.:examples python -m faults.hosts --hosts 3

One torchrun agent with one rank a host, over a c10d rendezvous that host 0 keeps; hosts are network
namespaces (`faults.network`). The log must have every step once, and losses those of a run alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from faults.elastic import Run, judged
from faults.network import Network, inside, why_not

DELAY, LOSS = 0.003, 0.002  # seconds one way; part of frames
TIMEOUT = 10  # seconds that ranks wait for one that is silent


class HostRun(Run):
    """An agent on each host."""

    def __init__(self, folder: Path, network: Network, hosts: int, timeout: int) -> None:
        super().__init__(folder, steps=100_000, save_every=5)
        self.script[0:1] = [str(Path(__file__).with_name("host_side.py")), str(timeout)]
        self.network, self.endpoint = network, network.address(0)
        self.host_of: list[int] = []  # by agent
        for host in range(hosts):
            self.start_on(host)

    def start_on(self, host: int) -> None:
        self.host_of.append(host)
        self.start_agent()

    def where(self, number: int) -> tuple[list[str], str, str, str]:
        host = self.host_of[number]
        rendezvous = (
            f"is_host={int(number == 0)},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        )
        return self.network.on(host, []), self.network.address(host), "eth0", rendezvous

    def die(self, host: int) -> None:
        """The host, at once and in silence."""
        self.network.cut_off.add(host)
        self.kill(max(number for number, where in enumerate(self.host_of) if where == host))


def campaign(folder: Path, *, hosts: int, partition: bool, steps: int, seed: int, timeout: int) -> None:
    """From within `inside`. Raises where ranks do not go on; prints what happened."""
    random, network = Random(seed), Network(hosts, delay=DELAY, loss=LOSS, seed=seed)
    run = HostRun(folder, network, hosts, timeout)
    try:
        run.wait_for_steps(hosts, after=0, count=steps)
        if partition:
            apart, at = random.randrange(1, hosts), time.monotonic()
            network.cut_off.add(apart)
            step = run.wait_for_steps(hosts - 1, after=0, count=steps)
            print(f"host {apart} cut off: {steps} steps on the others after {time.monotonic() - at:.0f} s")
            network.cut_off.remove(apart)
            at = time.monotonic()
            if run.agents[apart].poll() is None:  # as whoever starts agents does
                run.kill(apart)
            run.start_on(apart)
            run.wait_for_steps(hosts, after=step, count=steps)
            print(f"host {apart} back: {steps} steps on all after {time.monotonic() - at:.0f} s")
        died, at = random.randrange(1, hosts), time.monotonic()
        run.die(died)
        run.wait_for_steps(hosts - 1, after=0, count=steps)
        print(f"host {died} dead: {steps} steps on the others after {time.monotonic() - at:.0f} s")
    finally:
        run.stop()
        network.close()


def run_inside(
    folder: Path, *, hosts: int, partition: bool, steps: int, seed: int, timeout: int = TIMEOUT
) -> str:
    """What `campaign` printed, from a process in a namespace of its own."""
    call = f"hosts={hosts}, partition={partition}, steps={steps}, seed={seed}, timeout={timeout}"
    script = f"from pathlib import Path; from faults.hosts import *; campaign(Path({str(folder)!r}), {call})"
    here = os.pathsep.join(filter(None, sys.path))
    found = subprocess.run(
        [*inside(), sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise RuntimeError(found.stdout + found.stderr)
    return found.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="at least, between events")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if reason := why_not():
        print(reason)
        return
    folder, begun = Path(tempfile.mkdtemp(prefix="hosts-")), time.monotonic()
    print(run_inside(folder, hosts=args.hosts, partition=True, steps=args.steps, seed=args.seed), end="")
    last, apart = judged(folder)
    print(f"{args.hosts} hosts, {2e3 * DELAY:.0f} ms there and back, {LOSS:.1%} of frames lost:", end=" ")
    print(f"{last} steps, each once; losses at most {apart:.1e} from those of a run alone;", end=" ")
    print(f"{time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
