"""`shardwise doctor`: each check, on what it should accept, warn about and refuse."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise import doctor
from shardwise.doctor import (
    CheckResult,
    Status,
    check_backends,
    check_descriptors,
    check_devices,
    check_disk,
    check_host_name,
    check_loopback,
    check_shared_memory,
    check_torch,
    examine,
    examine_ranks,
    judge_ranks,
)
from shardwise.files.stores import location
from shardwise.verify.processes import RankError


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.13.0+cpu", Status.OK),
        ("2.12.1a0+git123", Status.OK),
        ("2.11.0", Status.BROKEN),
        ("1.13.1", Status.BROKEN),
        ("2.15.1+cu130", Status.OK),
        ("2.16.0", Status.WARNING),
        ("3.0", Status.WARNING),
        ("unknown", Status.BROKEN),
    ],
)
def test_torch_2_12_to_2_15_is_supported(version, status):
    result = check_torch(version)
    assert result.status is status
    assert version in result.found
    assert bool(result.fix) == (status is not Status.OK)


def test_gloo_is_needed_everywhere_and_nccl_where_gpus_are(monkeypatch):
    def judged(available, gpus):
        monkeypatch.setattr(dist, "is_backend_available", available.__contains__)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return check_backends()

    assert judged({"gloo", "mpi"}, 0) == CheckResult("backends", Status.OK, "gloo, mpi")
    assert judged({"gloo", "nccl"}, 8).status is Status.OK
    assert judged({"gloo"}, 8).status is Status.WARNING
    assert judged({"nccl"}, 8).status is Status.BROKEN
    assert judged(set(), 0).found == "none"


def test_the_limit_on_open_files_is_judged_by_the_soft_one(monkeypatch):
    def judged(*limits):
        monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
        return check_descriptors()

    unlimited = judged(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert (unlimited.status, unlimited.found) == (Status.OK, "limit none, can be raised to any")
    assert judged(4096, 4096).status is Status.OK
    assert judged(1024, 1 << 20).status is Status.WARNING
    assert "ulimit -n 4096" in judged(1024, 1 << 20).fix
    assert judged(128, 1 << 20).status is Status.BROKEN


def test_devices_are_listed_and_a_cuda_build_without_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert check_devices().status is Status.OK
    assert "CPU cores" in check_devices().found
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert check_devices().status is Status.WARNING


def test_this_machine_has_gloo_and_two_processes_agree_over_it():
    assert "gloo" in check_backends().found
    assert check_descriptors().name == "open files"
    assert check_loopback() == CheckResult("gloo loopback", Status.OK, "2 processes agree on a sum")


def test_processes_that_do_not_meet_or_disagree_are_broken(monkeypatch):
    def fail(*_, **__):
        raise RankError("rank 1: died", rank=1, traceback="")

    monkeypatch.setattr(doctor, "run_ranks", fail)
    assert check_loopback().status is Status.BROKEN
    assert check_loopback().found == "rank 1: died"
    monkeypatch.setattr(doctor, "run_ranks", lambda *_, **__: [3.0, 1.0])
    assert check_loopback().found == "sums [3.0, 1.0], expected 3.0"


def test_a_check_that_fails_itself_does_not_stop_the_others(monkeypatch):
    def check_devices():
        raise OSError("no driver")

    monkeypatch.setattr(doctor, "check_devices", check_devices)
    monkeypatch.setattr(doctor, "run_ranks", lambda *_, **__: [3.0, 3.0])
    results = {result.name: result for result in examine()}
    assert results["devices"].status is Status.BROKEN
    assert results["devices"].found == "OSError: no driver"
    assert results["gloo loopback"].status is Status.OK


def test_room_for_checkpoints_is_judged_where_they_will_go(monkeypatch, tmp_path):
    for free_bytes, status in ((100 << 30, Status.OK), (1 << 30, Status.WARNING)):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, free=free_bytes: mock.Mock(free=free))
        assert check_disk(tmp_path).status is status
    (tmp_path / "file").touch()
    for place, problem in ((tmp_path / "file", "is a file"), (Path("/proc/nowhere"), "cannot be written")):
        result = check_disk(place)
        assert (result.status, problem in result.found) == (Status.BROKEN, True)
    assert str(tmp_path / "not" / "yet") in check_disk(tmp_path / "not" / "yet").found


def test_a_store_is_one_that_keeps_an_object(monkeypatch):
    assert check_disk("memory://doctor").status is Status.OK
    assert not [*location("memory://doctor").iterdir()]
    monkeypatch.setattr(doctor, "write_whole", mock.Mock(side_effect=PermissionError("Access Denied")))
    denied = check_disk("memory://doctor")
    assert denied.status is Status.BROKEN
    assert "Access Denied" in denied.found


def test_a_containers_small_shared_memory_is_a_warning(monkeypatch, tmp_path):
    for total_bytes, status in ((8 << 30, Status.OK), (64 << 20, Status.WARNING)):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, total=total_bytes: mock.Mock(total=total))
        assert check_shared_memory().status is status
    assert "--shm-size" in check_shared_memory().fix
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "none")
    assert check_shared_memory().status is Status.OK


def test_a_host_name_must_lead_to_an_address_that_others_reach(monkeypatch):
    for hosts, addresses, status in (
        ("1", ["127.0.1.1"], Status.OK),
        ("2", ["127.0.1.1", "::1"], Status.WARNING),
        ("2", ["127.0.1.1", "10.0.0.1"], Status.OK),
    ):
        entries = [(0, 0, 0, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(doctor.socket, "getaddrinfo", lambda *_, entries=entries: entries)
        monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
        assert check_host_name().status is status

    def unknown(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr(doctor.socket, "getaddrinfo", unknown)
    assert check_host_name().status is Status.WARNING
    assert "does not resolve" in check_host_name().found


def told(host, **changes):
    versions = {
        "torch": "2.13.0",
        "shardwise": "0.1.0",
        "Python": "3.11.7",
        "CUDA": "13.0",
        "devices": "8 H100",
    }
    finding = {"name": "disk", "status": "ok", "found": "1 TiB", "fix": ""}
    return {"host": host, "clock": 50.0, "findings": [finding], **versions, **changes}


def test_hosts_that_are_alike_are_fine():
    results = judge_ranks([told("a"), told("a"), told("b", clock=50.5), told("b")])
    assert {result.status for result in results} == {Status.OK}
    found = {result.name: result.found for result in results}
    assert found["ranks"] == "2 on a, 2 on b"
    assert found["clocks"] == "0.50 s apart"


@pytest.mark.parametrize(
    ("changes", "name", "status", "found"),
    [
        ({"torch": "2.12.0"}, "torch on all ranks", Status.BROKEN, "2.13.0 on a; 2.12.0 on b"),
        ({"Python": "3.12.1"}, "Python on all ranks", Status.WARNING, "3.11.7 on a; 3.12.1 on b"),
        ({"clock": 55.0}, "clocks", Status.WARNING, "5.00 s apart"),
        (
            {"findings": [{"name": "disk", "status": "broken", "found": "full", "fix": "room"}]},
            "disk, b",
            Status.BROKEN,
            "full",
        ),
    ],
)
def test_what_differs_between_hosts_is_named(changes, name, status, found):
    results = judge_ranks([told("a"), told("b", **changes)])
    (amiss,) = [result for result in results if result.status is not Status.OK]
    assert (amiss.name, amiss.status, amiss.found) == (name, status, found)
    assert amiss.fix


def test_hosts_of_unlike_numbers_of_ranks_are_a_warning():
    results = {result.name: result for result in judge_ranks([told("a"), told("a"), told("b")])}
    assert (results["ranks"].status, results["ranks"].found) == (Status.WARNING, "2 on a, 1 on b")


def meet(port):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()
    environment = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 1, "MASTER_PORT": port}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}):
        os.environ["MASTER_ADDR"] = "localhost"
        return examine_ranks()


def test_ranks_that_do_not_meet_are_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("connection refused\nand a long trace")

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    (found,) = examine_ranks()
    assert (found.name, found.status, found.found) == ("rendezvous", Status.BROKEN, "connection refused")
    assert "MASTER_ADDR" in found.fix


def test_ranks_tell_rank_0_what_they_are(ranks):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first, second = ranks(meet, port, world_size=2)
    assert second == []
    assert {result.name: result.found for result in first}["ranks"] == f"2 on {socket.gethostname()}"
