"""Ranks that live go on where one is lost, and hand their state to the one that comes in its place."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from ranks import RankFailure, RankPool, on_ranks
from shardwise import fully_shard
from shardwise.checkpoint import LivingRanks, PerRank, meeting
from shardwise.checkpoint.meeting import Meeting, places
from shardwise.errors import CheckpointError

STEPS, LOST_AT, RANKS, LOST = 6, 2, 4, 3
BATCH = torch.arange(24.0 * 6).view(24, 6).sin()


class Training:
    def __init__(self, strategy: str, dropout: float) -> None:
        size = dist.get_world_size()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 7), nn.Dropout(dropout), nn.Linear(7, 5))
        if strategy == "ddp":
            fully_shard(
                self.model, mesh=init_device_mesh("cpu", (size,)), layout="contiguous", strategy="ddp"
            )
        else:
            names = ("replicate", "shard")
            hsdp = size == RANKS
            mesh = (
                init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
                if hsdp
                else init_device_mesh("cpu", (size,))
            )
            fully_shard(self.model[0], mesh=mesh, layout="contiguous")
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.progress = {"step": 0}
        torch.manual_seed(dist.get_rank())

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "schedule": self.schedule.state_dict(),
            "progress": self.progress,
            "own": PerRank({"came from": dist.get_rank()}, optional=True),
        }

    def load(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def backward(self) -> float:
        rows = BATCH.chunk(dist.get_world_size())[dist.get_rank()]
        torch.manual_seed(100 * self.progress["step"] + dist.get_rank())
        loss = self.model(rows * (self.progress["step"] + 1)).square().mean()
        loss.backward()
        return float(loss.detach())

    def advance(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.progress["step"] += 1


def live(folder: Path, strategy: str, place: str, dropout: float, wait_s: float, come_at: int) -> None:
    """Train on RANKS ranks, of which LOST is killed at LOST_AT; the pool's last process replaces it.

    Args:
        come_at: the step that the others have come to before it does.
    """
    process = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    flag = folder / "lost"
    while process == RANKS and not (flag.exists() and (folder / f"step-{come_at}").exists()):
        time.sleep(0.02)

    def lose() -> None:
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    store = dist.FileStore(str(folder / "store"))
    resumed: list[Any] = []
    run = LivingRanks(
        lambda: Training(strategy, dropout),
        store=store,
        resume=resumed.append,
        ranks=RANKS,
        rank=min(process, LOST),
        folder=folder / f"memory{process}",
        wait_s=wait_s,
    )
    assert len(resumed) == (process != RANKS)
    sizes: dict[int, int] = {}
    losses: dict[int, float] = {}
    drawn: dict[int, set[float]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_SILENT_S", 1.5)
        patch.setattr(meeting, "_BEAT_S", 0.1)
        if place == "commit" and process in (1, LOST):
            patch.setattr(dist, "all_reduce", failing_after(run, lose if process == LOST else None))
        while run.training.progress["step"] < STEPS:
            step = run.training.progress["step"]
            (folder / f"step-{step}").touch()
            while step == come_at > LOST_AT and dist.get_rank() == 0 and not run._meeting.has_new():
                time.sleep(0.02)
            with run.attempt() as training:
                drawn.setdefault(step, set()).add(torch.rand(()).item())
                if place == "backward" and process == LOST and step == LOST_AT:
                    training.model[2].register_full_backward_hook(lambda *_: lose())
                losses[step] = training.backward()
                run.commit(training.advance)
            sizes[step] = dist.get_world_size()
    assert all(len(numbers) == 1 for numbers in drawn.values()), "an attempt drew other numbers than before"
    found = {"losses": losses, "sizes": [*sizes.values()], "parameters": whole(run.training.model)}
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


def failing_after(run: Any, lose: Any) -> Any:
    """An all-reduce that at LOST_AT ends for others, and on this rank in an error or worse."""
    all_reduce = dist.all_reduce

    def call(*args: Any, **options: Any) -> Any:
        work = all_reduce(*args, **options)
        if (
            options.get("group") is run._group
            and run.training.progress["step"] == LOST_AT
            and run._meeting.size == RANKS
        ):
            if lose is not None:
                time.sleep(0.5)
                lose()
            if run._meeting.round == 0:
                raise RuntimeError("Connection closed by peer")
        return work

    return call


def go_through(pool: RankPool, folder: Path, **case: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    with pytest.raises(RankFailure, match="died with exit code -9") as failure:
        pool(live, folder, world_size=RANKS + 1, timeout=60, **case)
    assert str(failure.value).count("-----") == 1, failure.value
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)]


def test_a_replacement_takes_state_from_those_that_live_to_the_same_bits(
    ranks: RankPool, mortal_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.GRACE_SECONDS", 40.0)
    case = {"strategy": "hsdp", "place": "backward", "dropout": 0.2, "wait_s": 60.0, "come_at": 0}
    found = go_through(mortal_ranks, tmp_path / "lost", **case)
    through = ranks(train_alone, "hsdp", 0.2, world_size=RANKS)
    for rank in range(RANKS):
        assert found[rank]["parameters"] == through[rank]["parameters"]
        assert through[rank]["losses"].items() >= found[rank]["losses"].items()


def test_those_that_live_go_on_alone_and_take_the_step_that_one_of_them_took(
    ranks: RankPool, mortal_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.GRACE_SECONDS", 40.0)
    case = {"strategy": "ddp", "place": "commit", "dropout": 0.0, "wait_s": 1.5, "come_at": 4}
    found = go_through(mortal_ranks, tmp_path / "lost", **case)
    through = ranks(train_alone, "ddp", 0.0, world_size=RANKS)
    for rank in range(RANKS):
        torch.testing.assert_close(found[rank]["parameters"], through[rank]["parameters"])
    took = [4, 4, 4, 3, 4, 4]  # sizes of the group after each step
    took_later = [4, 4, 3, 3, 4, 4]
    assert [found[rank]["sizes"] for rank in range(RANKS)] == [took, took_later, took, [4]]


def train_alone(strategy: str, dropout: float) -> dict[str, Any]:
    training, losses = Training(strategy, dropout), {}
    for step in range(STEPS):
        losses[str(step)] = training.backward()
        training.advance()
    return {"losses": losses, "parameters": whole(training.model)}


def whole(model: nn.Module) -> list[list[float]]:
    return [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]


@on_ranks(2)
def test_what_cannot_be_made_good_raises_on_every_rank(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    store, resumed = dist.FileStore(str(tmp_path / "store")), list[Any]()
    run = LivingRanks(
        lambda: Training("hsdp", 0.0), resume=resumed.append, store=store, ranks=2, rank=rank, folder=tmp_path
    )

    def fail(*, replaced: bool) -> None:
        if replaced and rank == 1:  # as one that came in the place of another
            run._training = run._step = None
        raise RuntimeError("Connection closed by peer")

    with run.attempt() as training:  # all begin anew, where none has taken a step
        training.backward()
        fail(replaced=True)
    assert resumed[1:] == [run.training]
    with run.attempt() as training:
        training.backward()
        run.commit(training.advance)
    assert run.training.optimizer.state_dict()["state"][0]["step"] == 1
    with run.attempt():  # nobody is lost: it is tried once more
        fail(replaced=False)
    with pytest.raises(RuntimeError, match="closed by peer"), run.attempt():
        fail(replaced=False)
    with pytest.raises(ValueError, match="own"), run.attempt():
        raise ValueError("my own")
    with pytest.raises(CheckpointError, match="had what no living one has"), run.attempt():
        fail(replaced=True)


@pytest.mark.parametrize(("met", "found"), [("", "1 of 3 ranks.*without ranks 0, 2"), ("4", "has begun")])
def test_ranks_without_state_begin_no_run_unless_all_are_there(tmp_path: Path, met: str, found: str) -> None:
    store = dist.FileStore(str(tmp_path / "store"))
    if met:
        dist.PrefixStore("shardwise/living", store).set("round", met)
    with pytest.raises(CheckpointError, match=found):
        LivingRanks(
            lambda: Training("hsdp", 0.0),
            store=store,
            ranks=3,
            rank=1,
            folder=tmp_path,
            wait_s=0.1,
            timeout=timedelta(seconds=0.1),
        )


@on_ranks(2)
def test_a_rank_that_dies_while_others_connect_to_it_is_not_waited_for(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    options: Any = {"store": dist.FileStore(str(tmp_path / "store")), "ranks": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_SILENT_S", 1.0)
        patch.setattr(meeting, "_BEAT_S", 0.1)
        patch.setattr(meeting, "_NOTICE_S", 1.0)
        if rank == 1:  # another process, which dies once it has come
            before = Meeting(wait_s=60.0, timeout=timedelta(seconds=60), **options)
            before.join_round(1, has_state=False)
            before.hold()
        run = LivingRanks(lambda: Training("hsdp", 0.0), rank=rank, folder=tmp_path, **options)
        with run.attempt() as training:
            training.backward()
            run.commit(training.advance)
    assert (run.training.progress["step"], run._meeting.round) == (1, 1)


def test_a_round_waits_for_those_who_live_and_not_for_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_SILENT_S", 1.0)
    monkeypatch.setattr(meeting, "_BEAT_S", 0.1)
    stores = [dist.FileStore(str(tmp_path / "store")) for _ in range(2)]
    here, away = (Meeting(store, ranks=2, wait_s=0.1, timeout=timedelta(seconds=60)) for store in stores)
    with ThreadPoolExecutor(2) as threads:
        met = [threads.submit(each.join_round, None, has_state=False) for each in (here, away)]
        assert sorted(each.result() for each in met) == [(0, False), (1, False)]
        assert here._store.add("0/came", 0) == 2  # to look who has come is not to come
        alone = threads.submit(here.join_round, 0, has_state=True)
        with pytest.raises(TimeoutError):
            alone.result(timeout=1.5)
        away.hold()  # beats no more
        assert alone.result() == (0, True)
    assert here.size == 1
    here.hold()


def test_those_with_state_are_seated_before_new_ones_and_a_spare_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(timeout_s: float = 60.0) -> Meeting:
        store = dist.FileStore(str(tmp_path / "store"))
        return Meeting(store, ranks=3, wait_s=0.0, timeout=timedelta(seconds=timeout_s))

    monkeypatch.setattr(meeting, "_NOTICE_S", 1.0)
    first, spare, last = [one() for _ in range(3)], one(2.0), one()
    with ThreadPoolExecutor(4) as threads:
        met = [threads.submit(each.join_round, rank, has_state=False) for rank, each in enumerate(first)]
        assert [each.result() for each in met] == [(0, False), (1, False), (2, False)]
        first[0].hold()
        waits = threads.submit(spare.join_round, None, has_state=False)
        time.sleep(0.3)
        assert not first[0].has_new()
        first[0].break_up("rank 1 is lost")
        begins = threads.submit(first[0].join_round, 0, has_state=True)
        while spare.round < 1:
            time.sleep(0.02)
        comes = threads.submit(last.join_round, None, has_state=False)
        time.sleep(0.5)
        assert not begins.done()  # three are there, but rank 2 may not have noticed yet
        assert first[2].join_round(2, has_state=True) == (2, True)
        assert (begins.result(), comes.result()) == ((0, True), (1, False))
        with pytest.raises(CheckpointError, match="has all its 3 ranks"):
            waits.result()
    for each in (*first, spare, last):
        each.hold()


def test_all_ranks_started_again_meet_in_the_store_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_NOTICE_S", 0.2)
    for _ in range(2):
        stores = [dist.FileStore(str(tmp_path / "store")) for _ in range(2)]
        met = [Meeting(store, ranks=2, wait_s=60.0, timeout=timedelta(seconds=60)) for store in stores]
        with ThreadPoolExecutor(2) as threads:
            found = [threads.submit(each.join_round, None, has_state=False) for each in met]
            assert sorted(each.result(30) for each in found) == [(0, False), (1, False)]
        for each in met:
            each.hold()
    assert met[0].round == 1


def test_a_place_is_kept_and_holes_are_filled() -> None:
    assert places([2, None, 0, 1]) == [2, 3, 0, 1]
    assert places([3, 1, 0]) == [2, 1, 0]
    assert places([None, None]) == [0, 1]
    assert places([2, 1, 0, None]) == [2, 1, 0, 3]
