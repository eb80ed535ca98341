"""`shardwise doctor`: each check, on what it should accept, warn about and refuse."""

from __future__ import annotations

import pytest
import torch

from shardwise import doctor
from shardwise.doctor import (
    CheckResult,
    Status,
    check_backends,
    check_descriptors,
    check_devices,
    check_loopback,
    check_torch,
    examine,
    judge_backends,
    judge_descriptors,
)
from shardwise.verify.processes import RankError


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0", Status.WARNING),
        ("2.13.0+cpu", Status.OK),
        ("2.12.1a0+git123", Status.OK),
        ("2.10.2", Status.BROKEN),
        ("1.13.1", Status.BROKEN),
        ("2.15.1+cu130", Status.OK),
        ("2.16.0", Status.WARNING),
        ("3.0", Status.WARNING),
        ("unknown", Status.BROKEN),
    ],
)
def test_torch_2_11_to_2_15_is_supported(version, status):
    result = check_torch(version)
    assert result.status is status
    assert version in result.found
    assert bool(result.fix) == (status is not Status.OK)


def test_a_torch_without_the_contiguous_layout_is_named():
    assert 'layout="contiguous" needs torch 2.12' in check_torch("2.11.0").fix


def test_gloo_is_needed_everywhere_and_nccl_where_gpus_are():
    assert judge_backends({"gloo", "mpi"}, 0) == CheckResult("backends", Status.OK, "gloo, mpi")
    assert judge_backends({"gloo", "nccl"}, 8).status is Status.OK
    assert judge_backends({"gloo"}, 8).status is Status.WARNING
    assert judge_backends({"nccl"}, 8).status is Status.BROKEN
    assert judge_backends(set(), 0).found == "none"


def test_the_limit_on_open_files_is_judged_by_the_soft_one():
    assert judge_descriptors(None, None).status is Status.OK
    assert judge_descriptors(4096, 4096).status is Status.OK
    assert judge_descriptors(1024, 1 << 20).status is Status.WARNING
    assert "ulimit -n 4096" in judge_descriptors(1024, 1 << 20).fix
    assert judge_descriptors(128, 1 << 20).status is Status.BROKEN


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
