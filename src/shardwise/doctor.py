"""Checks of one or more machines for sharded training; each check is a function.

Under torchrun, one rank of each host checks its host. All ranks send their findings and versions through the
rendezvous store to rank 0, which compares them.

OK       works
WARNING  works, but will be slower or fail later
BROKEN   nothing will work until it is fixed
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from rich.table import Table

from shardwise import _compat
from shardwise.files.stores import StorePath, StrPath, location, write_whole
from shardwise.torch_version import SUPPORTED, WANTED, minor_version
from shardwise.verify.processes import RankError, run_ranks

DESCRIPTORS_NEEDED = 256
DESCRIPTORS_WANTED = 4096
LOOPBACK_TIMEOUT_S = 60.0
MEETING_TIMEOUT_S = 120.0
DISK_WANTED_BYTES = 10 << 30
SHARED_MEMORY = Path("/dev/shm")
SHARED_WANTED_BYTES = 1 << 30
CLOCKS_APART_S = 1.0


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str
    status: Status
    found: str
    fix: str = ""  # what to do about it; empty when it is OK


def _result(name: str, found: str, fix: str = "", status: Status = Status.WARNING) -> CheckResult:
    """Return a finding that is OK unless there is something to fix."""
    return CheckResult(name, status if fix else Status.OK, found, fix)


def examine(folder: StrPath = ".") -> list[CheckResult]:
    """Run every check of this machine, with a path or URL for checkpoints; a check that raises is BROKEN."""
    checks: dict[str, Callable[[], CheckResult]] = {
        "torch": check_torch,
        "backends": check_backends,
        "devices": check_devices,
        "open files": check_descriptors,
        "disk": lambda: check_disk(folder),
        "shared memory": check_shared_memory,
        "host name": check_host_name,
        "gloo loopback": check_loopback,
    }
    return [_run_check(name, check) for name, check in checks.items()]


def examine_ranks(folder: StrPath = ".") -> list[CheckResult]:
    """Run `examine` on each host, and compare the hosts. Every rank calls it; rank 0 gets the results."""
    local = examine(folder) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEETING_TIMEOUT_S))
    except Exception as error:
        fix = "Let every rank reach MASTER_ADDR:MASTER_PORT; set GLOO_SOCKET_IFNAME to an interface that can."
        return [*local, _result("rendezvous", str(error).partition("\n")[0], fix, Status.BROKEN)]
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), _compat.default_store()
    dist.barrier()
    report = {
        "findings": [asdict(result) for result in local],
        "clock": time.time(),
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "shardwise": metadata.version("shardwise"),
        "Python": platform.python_version(),
        "CUDA": str(torch.version.cuda),
        "devices": check_devices().found,
    }
    store.set(f"shardwise/doctor/{rank}", json.dumps(report))
    facts = [json.loads(store.get(f"shardwise/doctor/{r}")) for r in range(ranks)] if rank == 0 else []
    dist.barrier()
    dist.destroy_process_group()
    return judge_ranks(facts) if facts else []


def judge_ranks(facts: list[dict[str, Any]]) -> list[CheckResult]:
    """Return the first host's findings, problems on other hosts, and what differs between ranks."""
    results = []
    for number, rank in enumerate(facts):
        for finding in rank["findings"]:
            result = CheckResult(**finding | {"status": Status(finding["status"])})
            if number == 0:
                results.append(result)
            elif result.status is not Status.OK:
                results.append(replace(result, name=f"{result.name}, {rank['host']}"))
    hosts, clocks = Counter(rank["host"] for rank in facts), [rank["clock"] for rank in facts]
    found = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    fix = "Start equally many ranks on each host: meshes place ranks of one host side by side."
    results.append(_result("ranks", found, fix if len(set(hosts.values())) > 1 else ""))
    for name in ("torch", "shardwise", "Python"):
        status = Status.WARNING if name == "Python" else Status.BROKEN
        results.append(_compare(facts, name, f"Install the same {name} on every host.", status))
    results.append(_compare(facts, "CUDA", "Install the same build of torch on every host."))
    results.append(_compare(facts, "devices", "Use equal devices: the slowest or smallest limits all."))
    spread = max(clocks) - min(clocks)
    fix = "Run an NTP client: logs and timeouts of different hosts will not agree."
    results.append(_result("clocks", f"{spread:.2f} s apart", fix if spread > CLOCKS_APART_S else ""))
    return results


def _compare(
    facts: list[dict[str, Any]], name: str, fix: str, status: Status = Status.WARNING
) -> CheckResult:
    """Check that all ranks have the same `name`; if not, list the hosts by value."""
    by_value: dict[str, dict[str, None]] = {}
    for rank in facts:
        by_value.setdefault(rank[name], {})[rank["host"]] = None
    if len(by_value) == 1:
        return _result(f"{name} on all ranks", facts[0][name])
    found = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items())
    return _result(f"{name} on all ranks", found, fix, status)


def check_torch(version: str = torch.__version__) -> CheckResult:
    """Check whether shardwise supports the installed torch."""
    found = f"{version} on Python {platform.python_version()}"
    numbers = minor_version(version)
    if numbers is None or numbers < SUPPORTED[0]:
        return _result("torch", found, f"Install torch {WANTED}.", Status.BROKEN)
    is_newer = numbers > SUPPORTED[1]
    return _result("torch", found, f"shardwise is tested with torch {WANTED} only." if is_newer else "")


def check_backends() -> CheckResult:
    """Check the process-group backends of this torch: gloo is needed, and NCCL where there are GPUs."""
    available = [name for name in ("gloo", "mpi", "nccl", "ucc") if dist.is_backend_available(name)]
    found = ", ".join(available) or "none"
    if "gloo" not in available:
        return _result("backends", found, "Install a torch built with gloo.", Status.BROKEN)
    lacks_nccl = torch.cuda.device_count() > 0 and "nccl" not in available
    fix = "Install a CUDA build of torch: GPUs need NCCL."
    return _result("backends", found, fix if lacks_nccl else "")


def check_devices() -> CheckResult:
    """List the devices that can hold shards. A CUDA build that sees no GPU gets a warning."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [f"{cores} CPU cores"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {properties.name} {properties.total_memory / 2**30:.0f} GiB")
    is_blind = torch.version.cuda is not None and len(found) == 1
    fix = "torch is a CUDA build but sees no GPU: check nvidia-smi." if is_blind else ""
    return _result("devices", "; ".join(found), fix)


def check_descriptors() -> CheckResult:
    """Check how many files and sockets a process may have open; ranks need a socket per peer and group."""
    try:
        import resource
    except ImportError:
        return _result("open files", "no limit on this platform")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    found = f"limit {soft}, can be raised to {hard}".replace("limit inf", "limit none").replace("inf", "any")
    command = f"`ulimit -n {DESCRIPTORS_WANTED}`"
    fix = f"Run {command} before training: every rank holds a socket per peer and group."
    status = Status.BROKEN if soft < DESCRIPTORS_NEEDED else Status.WARNING
    return _result("open files", found, fix if soft < DESCRIPTORS_WANTED else "", status)


def check_disk(folder: StrPath = ".") -> CheckResult:
    """Check that `folder` is writable and has room for checkpoints, or that a store keeps its objects."""
    place = location(folder)
    if isinstance(place, StorePath):
        return check_store(place)
    place = place.resolve()
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()  # root may write where nothing can be written
    except OSError as error:
        problem = f"cannot be written: {error.strerror}" if existing.is_dir() else f"{existing} is a file"
        fix = "Make it writable, or choose another folder with --checkpoints."
        return _result("disk", f"{place}: {problem}", fix, Status.BROKEN)
    free_bytes = shutil.disk_usage(existing).free
    fix = "Free up space or choose another --checkpoints: AdamW in float32 saves 12 bytes per parameter."
    is_full = free_bytes < DISK_WANTED_BYTES
    return _result("disk", f"{free_bytes / 2**30:.1f} GiB free in {place}", fix if is_full else "")


def check_store(url: StorePath) -> CheckResult:
    """Check whether an object can be written, seen and removed in a store."""
    probe = url / f"shardwise-doctor-{uuid4().hex[:6]}"
    try:
        write_whole(probe, b"")
        visible = probe.is_file()
        probe.unlink()
    except Exception as error:  # whatever a client raises
        fix = "Set the credentials and endpoint that the store's client reads, or choose another URL."
        return _result("disk", f"{url}: {type(error).__name__}: {error}", fix, Status.BROKEN)
    if not visible:
        fix = "Choose a store that shows objects as soon as they are written."
        return _result("disk", f"{url} does not show an object that was just written", fix, Status.BROKEN)
    return _result("disk", f"objects can be written to {url}")


def check_shared_memory() -> CheckResult:
    """Check the size of /dev/shm, through which NCCL and data loaders pass buffers; by default 64 MiB."""
    if not SHARED_MEMORY.is_dir():
        return _result("shared memory", "no /dev/shm on this platform")
    total_bytes = shutil.disk_usage(SHARED_MEMORY).total
    fix = "Start the container with --ipc=host or --shm-size=8g (Kubernetes: an emptyDir of medium Memory)."
    is_small = total_bytes < SHARED_WANTED_BYTES
    found = f"{total_bytes / 2**20:,.0f} MiB in {SHARED_MEMORY}"
    return _result("shared memory", found, fix if is_small else "")


def check_host_name() -> CheckResult:
    """Check whether the host name, where gloo listens, resolves to an address that other hosts can reach."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        fix = f"Add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface that is up."
        return _result("host name", f"{name} does not resolve ({error})", fix)
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    hidden = several and all(address.startswith("127.") or address == "::1" for address in addresses)
    fix = "Other hosts cannot reach it: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or fix /etc/hosts."
    return _result("host name", f"{name} resolves to {', '.join(addresses)}", fix if hidden else "")


def check_loopback() -> CheckResult:
    """Check whether two local processes connect over gloo and agree on a sum."""
    fix = "Allow local connections in the firewall; set GLOO_SOCKET_IFNAME to an interface that is up."
    try:
        sums = run_ranks(_sum_of_ranks, world_size=2, timeout=LOOPBACK_TIMEOUT_S)
    except RankError as failure:
        return _result("gloo loopback", str(failure), fix, Status.BROKEN)
    if sums != [3.0, 3.0]:
        return _result("gloo loopback", f"sums {sums}, expected 3.0", fix, Status.BROKEN)
    return _result("gloo loopback", "2 processes agree on a sum")


def _sum_of_ranks(alive: Callable[[], None]) -> float:
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    alive()
    return value.item()


def table(results: list[CheckResult]) -> Table:
    """Return the findings, one row each."""
    styles = {Status.OK: "green", Status.WARNING: "yellow", Status.BROKEN: "red"}
    rendered = Table(title="shardwise doctor")
    for heading in ("check", "status", "found", "what to do"):
        rendered.add_column(heading, overflow="fold")
    for result in results:
        status = f"[{styles[result.status]}]{result.status}[/]"
        rendered.add_row(result.name, status, result.found, result.fix)
    return rendered


def _run_check(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except Exception as error:
        return _result(name, f"{type(error).__name__}: {error}", "The check itself failed.", Status.BROKEN)
