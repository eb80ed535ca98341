"""Can this machine run sharded training? One function per check, each returning what it found.

OK       works
WARNING  works, and will be slower or fail later
BROKEN   nothing will work until it is mended
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from rich.table import Table

from shardwise._compat.dtensors import OWN_DTENSORS_SINCE
from shardwise.torch_version import SUPPORTED, WANTED, minor_version
from shardwise.verify.processes import RankError, run_ranks

DESCRIPTORS_NEEDED = 256
DESCRIPTORS_WANTED = 4096
LOOPBACK_RANKS = 2
LOOPBACK_TIMEOUT_S = 60.0


class Status(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class CheckResult:
    """What one check found."""

    name: str
    status: Status
    found: str
    fix: str = ""  # what to do about it; empty when it is OK


def examine() -> list[CheckResult]:
    """Run every check; one that raises is broken, and the others still run."""
    checks: tuple[Callable[[], CheckResult], ...] = (
        check_torch,
        check_backends,
        check_devices,
        check_descriptors,
        check_loopback,
    )
    return [_guarded(check) for check in checks]


def check_torch(version: str = torch.__version__) -> CheckResult:
    """Is the installed torch one that shardwise is made for?"""
    found = f"{version} on Python {platform.python_version()}"
    numbers = minor_version(version)
    if numbers is None or numbers < SUPPORTED[0]:
        return CheckResult("torch", Status.BROKEN, found, f"Install torch {WANTED}.")
    if numbers > SUPPORTED[1]:
        return CheckResult("torch", Status.WARNING, found, f"Tested with torch {WANTED} only.")
    if torch.torch_version.TorchVersion(version) < OWN_DTENSORS_SINCE:
        fix = f'layout="contiguous" needs torch {OWN_DTENSORS_SINCE} or later.'
        return CheckResult("torch", Status.WARNING, found, fix)
    return CheckResult("torch", Status.OK, found)


def check_backends() -> CheckResult:
    """Which process-group backends does this torch have? gloo is needed; NCCL as well where GPUs are."""
    if not dist.is_available():
        return CheckResult("backends", Status.BROKEN, "none", "Install a torch built with USE_DISTRIBUTED=1.")
    known = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    return judge_backends({name for name, available in known.items() if available}, torch.cuda.device_count())


def judge_backends(available: set[str], gpus: int) -> CheckResult:
    """Are the available backends enough for this many GPUs?"""
    found = ", ".join(sorted(available)) or "none"
    if "gloo" not in available:
        return CheckResult("backends", Status.BROKEN, found, "Install a torch built with gloo.")
    if gpus and "nccl" not in available:
        return CheckResult(
            "backends", Status.WARNING, found, "Install a CUDA build of torch: GPUs need NCCL."
        )
    return CheckResult("backends", Status.OK, found)


def check_devices() -> CheckResult:
    """Which devices can hold shards? A CUDA build that sees no GPU is worth a warning."""
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
    """How many files and sockets may a process have open? Ranks need one per peer and group."""
    try:
        import resource
    except ImportError:
        return CheckResult("open files", Status.OK, "no limit on this platform")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_descriptors(*(limit if limit != resource.RLIM_INFINITY else None for limit in (soft, hard)))


def judge_descriptors(soft: int | None, hard: int | None) -> CheckResult:
    """Is this limit on open files (None: unlimited) enough?"""
    found = f"limit {'none' if soft is None else soft}, may be raised to {'any' if hard is None else hard}"
    fix = (
        f"Run `ulimit -n {DESCRIPTORS_WANTED}` before training: every rank holds a socket per peer and group."
    )
    if soft is None or soft >= DESCRIPTORS_WANTED:
        return CheckResult("open files", Status.OK, found)
    return CheckResult(
        "open files", Status.BROKEN if soft < DESCRIPTORS_NEEDED else Status.WARNING, found, fix
    )


def check_loopback() -> CheckResult:
    """Do two local processes find each other over gloo and agree on a sum?"""
    expected = float(sum(range(1, LOOPBACK_RANKS + 1)))
    fix = "Let local connections through the firewall; set GLOO_SOCKET_IFNAME to an interface that is up."
    try:
        sums = run_ranks(_all_reduce_rank, world_size=LOOPBACK_RANKS, timeout=LOOPBACK_TIMEOUT_S)
    except RankError as failure:
        return CheckResult("gloo loopback", Status.BROKEN, str(failure), fix)
    if sums != [expected] * LOOPBACK_RANKS:
        return CheckResult("gloo loopback", Status.BROKEN, f"sums {sums}, expected {expected}", fix)
    return CheckResult("gloo loopback", Status.OK, f"{LOOPBACK_RANKS} processes agree on a sum")


def table(results: list[CheckResult]) -> Table:
    """The findings, one row each."""
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


def _guarded(check: Callable[[], CheckResult]) -> CheckResult:
    name = check.__name__.removeprefix("check_")
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
