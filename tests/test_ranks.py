"""The rank pool itself: results, failures shown in full, and nothing left for the next call."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ranks import RankFailure, RankPool, on_ranks

pytest_plugins = ["pytester"]


def rank_and_sum(offset: int, *, scale: int = 1) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() * scale + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_rank_returns_its_own_result(ranks: RankPool, world_size: int) -> None:
    results = ranks(rank_and_sum, 5, world_size=world_size, scale=10)
    expected = sum(10 * rank + 5 for rank in range(world_size))
    assert [(rank, total.item()) for rank, total in results] == [(r, expected) for r in range(world_size)]


@pytest.mark.parametrize("above", ["a", "b"])
@on_ranks(1, 2, timeout=30)
@pytest.mark.parametrize("below", [torch.float32, torch.int64])
def test_a_body_gets_parameters_from_above_and_below(above: str, below: torch.dtype) -> None:
    gathered: list[tuple[str, torch.dtype]] = [("", torch.bool)] * dist.get_world_size()
    dist.all_gather_object(gathered, (above, below))
    assert gathered == [(above, below)] * dist.get_world_size()
    assert above in ("a", "b")
    assert below in (torch.float32, torch.int64)


@on_ranks(2)
def test_a_body_may_use_a_picklable_fixture(tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


@on_ranks(2)
def test_a_body_runs_in_one_thread_with_a_fixed_seed() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert torch.initial_seed() == 0


@on_ranks(2)
@pytest.mark.filterwarnings("error:spilt milk")
def test_a_body_has_the_warning_filters_of_its_test() -> None:
    with pytest.raises(UserWarning, match="spilt milk"):
        warnings.warn("spilt milk", stacklevel=1)


def pid() -> int:
    return os.getpid()


def test_workers_live_from_call_to_call(ranks: RankPool) -> None:
    first = ranks(pid, world_size=4)
    assert len(set(first)) == 4
    assert os.getpid() not in first
    assert ranks(pid, world_size=2) == first[:2]
    assert ranks(pid, world_size=4) == first == ranks.pids()[:4]


def raise_on(which: list[int]) -> None:
    rank = dist.get_rank()
    print(f"I am {rank}")
    if rank in which:
        left = [rank, 1]
        assert left == ["no", "such", "list"]
    dist.barrier()


def test_every_raising_rank_is_shown(
    mortal_ranks: RankPool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.GRACE_SECONDS", 1.0)
    with pytest.raises(RankFailure) as failure:
        mortal_ranks(raise_on, [0, 2], world_size=3)
    text = str(failure.value)
    assert "rank 0 of 3: raised AssertionError" in text
    assert "rank 2 of 3: raised AssertionError" in text
    assert "in raise_on" in text
    assert "assert [2, 1] == ['no', 'such', 'list']" in text  # rewritten by pytest: values are shown
    assert "rank 1 of 3: still running when another rank had failed" in text
    printed = capsys.readouterr().out
    assert all(f"[rank {rank}] I am {rank}\n" in printed for rank in range(3))
    assert len(mortal_ranks(pid, world_size=3)) == 3


def test_ranks_that_fail_alike_are_shown_once(mortal_ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0, 1 of 2: raised TypeError") as failure:
        mortal_ranks(raise_on, world_size=2)
    assert str(failure.value).count("Traceback") == 1


def wait_for_ever() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.recv(torch.zeros(1), src=0)


def test_hung_ranks_are_reported_with_their_stacks(mortal_ranks: RankPool) -> None:
    waiting = f"line {wait_for_ever.__code__.co_firstlineno + 2} in wait_for_ever"
    for timeout in (1.5, 6, 24):  # a busy machine may take longer than the shortest to begin the call
        before = mortal_ranks(pid, world_size=2)
        with pytest.raises(RankFailure) as failure:
            mortal_ranks(wait_for_ever, world_size=2, timeout=timeout)
        text = str(failure.value)
        sections = text.split("-----")[1:]
        assert [f"hung for {timeout:g} s" in section for section in sections] == [True, True]
        if waiting in sections[0] and "in recv" in sections[1]:
            break
    assert waiting in sections[0]
    assert "in recv" in sections[1]
    assert "in _listen" not in text
    after = mortal_ranks(pid, world_size=2)
    assert set(before).isdisjoint(after)


def exit_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_a_dead_rank_is_named_and_replaced(mortal_ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2: died with exit code 7"):
        mortal_ranks(exit_on_rank_1, world_size=2)
    assert [rank for rank, _ in mortal_ranks(rank_and_sum, 0, world_size=2)] == [0, 1]


def test_a_result_that_cannot_be_pickled_fails_on_its_rank(mortal_ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 1: raised"):
        mortal_ranks(unpicklable, world_size=1)


def unpicklable() -> object:
    return lambda: None


def leave_a_mess() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    dist.new_group([0])
    mesh = init_device_mesh("cpu", (2,))
    (DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]) + 1).full_tensor()


def what_is_set() -> tuple[object, ...]:
    groups = len(dist.distributed_c10d._world.pg_map)
    threads = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
    alone = threads.count("gloo_tcp_loop") <= 1  # this call's own group's, and no earlier call's
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), groups, alone


def test_nothing_a_call_sets_reaches_the_next(mortal_ranks: RankPool) -> None:
    mortal_ranks(leave_a_mess, world_size=2)
    assert mortal_ranks(what_is_set, world_size=2) == [(torch.float32, True, 1, 1, True)] * 2


def test_only_module_level_functions_are_accepted(ranks: RankPool) -> None:
    def local() -> None: ...

    with pytest.raises(TypeError, match="module-level"):
        ranks(local, world_size=2)
    with pytest.raises(TypeError, match="module-level"):
        on_ranks(2)(local)


def test_a_failing_body_fails_its_test_without_the_pool_in_the_way(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)  # there pytest repeats whole messages in its summary
    tests = Path(__file__).parent
    pytester.makeconftest((tests / "conftest.py").read_text())
    pytester.makepyfile(
        test_made_up="""
        import torch.distributed as dist
        from ranks import on_ranks

        @on_ranks(2)
        def test_wrong():
            print("hello from", dist.get_rank())
            assert dist.get_rank() == 0
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-o", f"pythonpath={tests}")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "test_wrong[2ranks]" in text
    assert "rank 1 of 2: raised AssertionError" in text
    assert "[rank 0] hello from 0" in text
    assert text.count("Traceback") == 1
