"""Checks of one or more machines for sharded training; each check is a function.

Under torchrun, one rank of each host checks its host. All ranks send their findings and versions through the
rendezvous store to rank 0, which compares them.

OK       works
WARNING  works, but will be slower or fail later
BROKEN   nothing will work until it is fixed
"""

from __future__ import annotations

import json
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
from shardwise.files.stores import StorePath, location, write_whole
from shardwise.torch_version import SUPPORTED, WANTED, minor_version
from shardwise.verify.processes import RankError, run_ranks

DESCRIPTORS_NEEDED = 256
DESCRIPTORS_WANTED = 4096
LOOPBACK_RANKS = 2
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


def examine(folder: str | os.PathLike[str] = ".") -> list[CheckResult]:
    """Run every check of this machine. A check that raises is BROKEN; the others still run.

    `folder` is the path or URL for checkpoints.
    """
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


def examine_ranks(folder: str | os.PathLike[str] = ".") -> list[CheckResult]:
    """Run `examine` on each host, and compare the hosts. Every rank calls it; rank 0 gets the results."""
    local = examine(folder) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEETING_TIMEOUT_S))
    except Exception as error:
        fix = "Let every rank reach MASTER_ADDR:MASTER_PORT; set GLOO_SOCKET_IFNAME to an interface that can."
        return [*local, CheckResult("rendezvous", Status.BROKEN, str(error).partition("\n")[0], fix)]
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), _compat.default_store()
    dist.barrier()
    report = {"findings": [asdict(result) for result in local], "clock": time.time(), **_versions()}
    store.set(f"shardwise/doctor/{rank}", json.dumps(report))
    facts = [json.loads(store.get(f"shardwise/doctor/{r}")) for r in range(ranks)] if rank == 0 else []
    dist.barrier()
    dist.destroy_process_group()
    return judge_ranks(facts) if facts else []


def _versions() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "shardwise": metadata.version("shardwise"),
        "Python": platform.python_version(),
        "CUDA": str(torch.version.cuda),
        "devices": check_devices().found,
    }


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
    hosts = Counter(rank["host"] for rank in facts)
    found = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    if len(set(hosts.values())) == 1:
        results.append(CheckResult("ranks", Status.OK, found))
    else:
        fix = "Start equally many ranks on each host: meshes place ranks of one host side by side."
        results.append(CheckResult("ranks", Status.WARNING, found, fix))
    for name, status in (("torch", Status.BROKEN), ("shardwise", Status.BROKEN), ("Python", Status.WARNING)):
        results.append(_compare(facts, name, status, f"Install the same {name} on every host."))
    results.append(_compare(facts, "CUDA", Status.WARNING, "Install the same build of torch on every host."))
    results.append(
        _compare(facts, "devices", Status.WARNING, "Use equal devices: the slowest or smallest limits all.")
    )
    spread = max(rank["clock"] for rank in facts) - min(rank["clock"] for rank in facts)
    late = spread > CLOCKS_APART_S
    fix = "Run an NTP client: logs and timeouts of different hosts will not agree." if late else ""
    results.append(CheckResult("clocks", Status.WARNING if late else Status.OK, f"{spread:.2f} s apart", fix))
    return results


def _compare(facts: list[dict[str, Any]], name: str, status: Status, fix: str) -> CheckResult:
    """Check that all ranks have the same `name`; if not, list the hosts by value."""
    by_value: dict[str, list[str]] = {}
    for rank in facts:
        hosts = by_value.setdefault(rank[name], [])
        if rank["host"] not in hosts:
            hosts.append(rank["host"])
    if len(by_value) == 1:
        return CheckResult(f"{name} on all ranks", Status.OK, *by_value)
    found = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items())
    return CheckResult(f"{name} on all ranks", status, found, fix)


def check_torch(version: str = torch.__version__) -> CheckResult:
    """Check whether shardwise supports the installed torch."""
    found = f"{version} on Python {platform.python_version()}"
    numbers = minor_version(version)
    if numbers is None or numbers < SUPPORTED[0]:
        return CheckResult("torch", Status.BROKEN, found, f"Install torch {WANTED}.")
    if numbers > SUPPORTED[1]:
        return CheckResult("torch", Status.WARNING, found, f"shardwise is tested with torch {WANTED} only.")
    return CheckResult("torch", Status.OK, found)


def check_backends() -> CheckResult:
    """Check the process-group backends of this torch: gloo is needed, and NCCL where there are GPUs."""
    if not dist.is_available():
        return CheckResult("backends", Status.BROKEN, "none", "Install a torch built with USE_DISTRIBUTED=1.")
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    return judge_backends({name for name, works in backends.items() if works}, torch.cuda.device_count())


def judge_backends(available: set[str], gpus: int) -> CheckResult:
    """Judge whether the available backends suffice for this many GPUs."""
    found = ", ".join(sorted(available)) or "none"
    if "gloo" not in available:
        return CheckResult("backends", Status.BROKEN, found, "Install a torch built with gloo.")
    if gpus and "nccl" not in available:
        return CheckResult(
            "backends", Status.WARNING, found, "Install a CUDA build of torch: GPUs need NCCL."
        )
    return CheckResult("backends", Status.OK, found)


def check_devices() -> CheckResult:
    """List the devices that can hold shards. A CUDA build that sees no GPU gets a warning."""
    cores = f"{_cores()} CPU cores"
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(f"cuda:{index} {properties.name} {properties.total_memory / 2**30:.0f} GiB")
    if torch.version.cuda is not None and not gpus:
        return CheckResult(
            "devices", Status.WARNING, cores, "torch is a CUDA build but sees no GPU: check nvidia-smi."
        )
    return CheckResult("devices", Status.OK, "; ".join([cores, *gpus]))


def check_descriptors() -> CheckResult:
    """Check how many files and sockets a process may have open; ranks need a socket per peer and group."""
    try:
        import resource
    except ImportError:
        return CheckResult("open files", Status.OK, "no limit on this platform")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_descriptors(*(limit if limit != resource.RLIM_INFINITY else None for limit in (soft, hard)))


def judge_descriptors(soft: int | None, hard: int | None) -> CheckResult:
    """Judge whether this limit on open files (None: unlimited) is enough."""
    found = f"limit {'none' if soft is None else soft}, can be raised to {'any' if hard is None else hard}"
    fix = (
        f"Run `ulimit -n {DESCRIPTORS_WANTED}` before training: every rank holds a socket per peer and group."
    )
    if soft is None or soft >= DESCRIPTORS_WANTED:
        return CheckResult("open files", Status.OK, found)
    return CheckResult(
        "open files", Status.BROKEN if soft < DESCRIPTORS_NEEDED else Status.WARNING, found, fix
    )


def check_disk(folder: str | os.PathLike[str] = ".") -> CheckResult:
    """Check that `folder` is writable and has room for checkpoints, or that a store keeps its objects."""
    place = location(folder)
    if isinstance(place, StorePath):
        return check_store(place)
    existing = next(path for path in (place.resolve(), *place.resolve().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # root may write where nothing can be written
            problem = ""
    except OSError as error:
        problem = f"cannot be written: {error.strerror}" if existing.is_dir() else f"{existing} is a file"
    return judge_disk(str(place.resolve()), shutil.disk_usage(existing).free, problem)


def check_store(url: StorePath) -> CheckResult:
    """Check whether an object can be written, seen and removed in a store."""
    probe = url / f"shardwise-doctor-{uuid4().hex[:6]}"
    try:
        write_whole(probe, b"")
        visible = probe.is_file()
        probe.unlink()
    except Exception as error:  # whatever a client raises
        fix = "Set the credentials and endpoint that the store's client reads, or choose another URL."
        return CheckResult("disk", Status.BROKEN, f"{url}: {type(error).__name__}: {error}", fix)
    if not visible:
        fix = "Choose a store that shows objects as soon as they are written."
        return CheckResult("disk", Status.BROKEN, f"{url} does not show an object that was just written", fix)
    return CheckResult("disk", Status.OK, f"objects can be written to {url}")


def judge_disk(folder: str, free_bytes: int, problem: str = "") -> CheckResult:
    """Judge whether checkpoints fit; AdamW in float32 saves 12 bytes per parameter."""
    found = f"{free_bytes / 2**30:.1f} GiB free in {folder}"
    if problem:
        fix = "Make it writable, or choose another folder with --checkpoints."
        return CheckResult("disk", Status.BROKEN, f"{folder}: {problem}", fix)
    if free_bytes < DISK_WANTED_BYTES:
        fix = "Free up space or choose another --checkpoints: AdamW in float32 saves 12 bytes per parameter."
        return CheckResult("disk", Status.WARNING, found, fix)
    return CheckResult("disk", Status.OK, found)


def check_shared_memory() -> CheckResult:
    """Check the size of /dev/shm, through which NCCL and data loaders pass buffers."""
    if not SHARED_MEMORY.is_dir():
        return CheckResult("shared memory", Status.OK, "no /dev/shm on this platform")
    return judge_shared_memory(shutil.disk_usage(SHARED_MEMORY).total)


def judge_shared_memory(total_bytes: int) -> CheckResult:
    """Judge whether this much shared memory is enough; containers have 64 MiB by default."""
    found = f"{total_bytes / 2**20:,.0f} MiB in {SHARED_MEMORY}"
    if total_bytes < SHARED_WANTED_BYTES:
        fix = (
            "Start the container with --ipc=host or --shm-size=8g (Kubernetes: an emptyDir of medium Memory)."
        )
        return CheckResult("shared memory", Status.WARNING, found, fix)
    return CheckResult("shared memory", Status.OK, found)


def check_host_name() -> CheckResult:
    """Check whether this machine's host name resolves to an address; gloo listens there by default."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        fix = f"Add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface that is up."
        return CheckResult("host name", Status.WARNING, f"{name} does not resolve ({error})", fix)
    return judge_host_name(name, addresses, several=int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1)


def judge_host_name(name: str, addresses: list[str], *, several: bool) -> CheckResult:
    """Judge whether other hosts, if there are `several`, can reach the addresses of this host's name."""
    found = f"{name} resolves to {', '.join(addresses)}"
    if several and all(address.startswith("127.") or address == "::1" for address in addresses):
        fix = "Other hosts cannot reach it: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or fix /etc/hosts."
        return CheckResult("host name", Status.WARNING, found, fix)
    return CheckResult("host name", Status.OK, found)


def check_loopback() -> CheckResult:
    """Check whether two local processes connect over gloo and agree on a sum."""
    expected = float(sum(range(1, LOOPBACK_RANKS + 1)))
    fix = "Allow local connections in the firewall; set GLOO_SOCKET_IFNAME to an interface that is up."
    try:
        sums = run_ranks(_all_reduce_rank, world_size=LOOPBACK_RANKS, timeout=LOOPBACK_TIMEOUT_S)
    except RankError as failure:
        return CheckResult("gloo loopback", Status.BROKEN, str(failure), fix)
    if sums != [expected] * LOOPBACK_RANKS:
        return CheckResult("gloo loopback", Status.BROKEN, f"sums {sums}, expected {expected}", fix)
    return CheckResult("gloo loopback", Status.OK, f"{LOOPBACK_RANKS} processes agree on a sum")


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


def _all_reduce_rank(alive: Callable[[], None]) -> float:
    value = torch.full((1,), float(dist.get_rank() + 1))
    dist.all_reduce(value)
    alive()
    return float(value)


def _run_check(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except Exception as error:
        return CheckResult(
            name, Status.BROKEN, f"{type(error).__name__}: {error}", "The check itself failed."
        )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
