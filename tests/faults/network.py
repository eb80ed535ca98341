"""Hosts on one machine: network namespaces, joined by a switch that delays, loses, or keeps frames back.

Each host has a TAP device; this process reads its frames and writes them to the others. It takes no rights
but those of a user namespace, so whoever uses it runs within `inside()`.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from random import Random

_OPEN_TAP, _TAP_WITHOUT_HEADERS = 0x400454CA, 0x1002
_MTU = 30_000
_SETTINGS = {"ipv4/tcp_retries2": "2", "ipv4/tcp_syn_retries": "2"}  # who is silent for 2 s is gone


def why_not() -> str:
    """Why this machine cannot have such hosts; empty if it can."""
    missing = [each for each in ("unshare", "nsenter", "ip") if shutil.which(each) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    tried = [*inside(), "unshare", "-n", sys.executable, "-S", __file__]
    found = subprocess.run(tried, capture_output=True, text=True, check=False)
    return (
        f"network namespaces or TAP devices are not allowed here: {found.stderr[-200:]}"
        if found.returncode
        else ""
    )


def inside() -> list[str]:
    """What a command begins with whose processes may make such hosts."""
    return ["unshare", "--user", "--map-root-user", "--net"]


class Network:
    """`hosts` hosts, 0 and up, that reach each other by `address`."""

    def __init__(self, hosts: int, *, delay: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """`delay`: seconds for each frame, one way. `loss`: part of frames that never arrive."""
        self.delay, self.loss = delay, loss
        self.cut_off: set[int] = set()
        self._random = Random(seed)
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._ports: list[int] = []
        for number in range(hosts):
            here, there = socket.socketpair()
            command = [
                "unshare",
                "-n",
                sys.executable,
                "-S",
                __file__,
                self.address(number),
                str(there.fileno()),
            ]
            self._hosts.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[there.fileno()]))
            there.close()
            self._ports.append(socket.recv_fds(here, 1, 1)[1][0])
            here.close()
        threading.Thread(target=self._switch, daemon=True).start()

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host."""
        return ["nsenter", "-t", str(self._hosts[host].pid), "-n", *command]

    def close(self) -> None:
        for host in self._hosts:
            host.communicate()

    def _switch(self) -> None:
        known: dict[bytes, int] = {}
        due: deque[tuple[float, int, bytes]] = deque()
        while True:
            wait = max(0.0, due[0][0] - time.monotonic()) if due else None
            for port in select.select(self._ports, [], [], wait)[0]:
                frame = os.read(port, _MTU + 100)
                sender = self._ports.index(port)
                known[frame[6:12]] = sender
                to = known.get(frame[:6])
                for receiver in range(len(self._ports)) if to is None else [to]:
                    reached = receiver != sender and not {sender, receiver} & self.cut_off
                    if reached and self._random.random() >= self.loss:
                        due.append((time.monotonic() + self.delay, self._ports[receiver], frame))
            while due and due[0][0] <= time.monotonic():
                _, port, frame = due.popleft()
                os.write(port, frame)


def _be_a_host(address: str, switch: int) -> None:
    """Open the device, hand it to the switch, and keep the namespace until the input ends."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _OPEN_TAP, struct.pack("16sH", b"eth0", _TAP_WITHOUT_HEADERS))
    for words in (
        "link set lo up",
        f"addr add {address}/24 dev eth0",
        f"link set eth0 mtu {_MTU} up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    for name, value in _SETTINGS.items():
        Path("/proc/sys/net", name).write_text(value)
    if switch >= 0:
        socket.send_fds(socket.socket(fileno=switch), [b"."], [tap])
        sys.stdin.read()


if __name__ == "__main__":
    _be_a_host(*(sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else ("10.77.0.1", -1))
