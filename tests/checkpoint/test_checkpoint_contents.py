"""What a state may hold, and whose it is: values of every rank, lists, tensors of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from ranks import RankPool, on_ranks
from shardwise.checkpoint import PerRank, load, save, save_async
from shardwise.checkpoint.state import as_bytes
from shardwise.errors import CheckpointError
from shardwise.files.tensors import DTYPES


def rng_after(draws: int) -> torch.Tensor:
    torch.manual_seed(0)
    torch.rand(draws)
    return torch.get_rng_state()


def own_state(value: int) -> dict[str, Any]:
    return {"own": PerRank({"rng": rng_after(value), "samples": value}), "epoch": 3}


def save_own(path: Path) -> None:
    save(path, own_state(10 + dist.get_rank()), step=1)


def load_own(path: Path) -> tuple[Any, bool]:
    state = own_state(0)
    load(path, state)
    rank = dist.get_rank()
    return state["own"].value["samples"], torch.equal(state["own"].value["rng"], rng_after(10 + rank))


def load_optional(path: Path) -> Any:
    state = {"own": PerRank({"rng": rng_after(0), "samples": -1}, optional=True), "epoch": 0}
    load(path, state)
    assert state["epoch"] == 3
    return state["own"].value["samples"]  # type: ignore[attr-defined]


def load_without(path: Path) -> int:
    state = {"epoch": 0}
    load(path, state)
    return state["epoch"]


def why_not(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_own(path)
    return str(caught.value)


def test_what_every_rank_has_its_own_of_returns_to_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks(save_own, tmp_path, world_size=2)
    assert ranks(load_own, tmp_path, world_size=2) == [(10, True), (11, True)]
    for world_size in (3, 1):
        for text in ranks(why_not, tmp_path, world_size=world_size):
            everyone = ", ".join(map(str, range(world_size)))
            assert (
                f"rank{'s' if world_size > 1 else ''} {everyone}: own: saved once for each of 2 ranks" in text
            )
        assert ranks(load_without, tmp_path, world_size=world_size) == [3] * world_size


@on_ranks(2)
def test_what_differs_between_ranks_is_not_saved_as_if_it_did_not(tmp_path: Path) -> None:
    rank = dist.get_rank()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"seen": 10 + rank}, r"rank 1: run\.seen: expected 10 .*found 11\. .*PerRank"),
        ({"loss": [{"a": 0.5 + rank}]}, r"rank 1: run\.loss: expected .*0\.5.*found .*1\.5"),
        (
            {"seen": torch.tensor(rank)},
            r"rank 1: run\.seen: expected 'a plain tensor of numbers .*dist\.broadcast",
        ),
        ({"seen": [1, torch.ones(1)][rank]}, r"run\.seen: a tensor on one rank, a plain"),
        ({"seen": [torch.ones(1)] * (1 + rank)}, r"rank 1: run\.seen: expected 1 .*found 2"),
    ]
    for entry, match in cases:
        with pytest.raises(CheckpointError, match=match):
            save(tmp_path, {"run": entry}, step=1)
    assert not list(tmp_path.iterdir())


def test_an_optional_value_of_each_rank_stays_as_it_is_on_another_number(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks(save_own, tmp_path, world_size=2)
    assert ranks(load_optional, tmp_path, world_size=2) == [10, 11]
    assert ranks(load_optional, tmp_path, world_size=3) == [-1] * 3


@on_ranks(2)
def test_ranks_that_ask_for_different_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1: step: expected 0 as on a lower rank, found 1"):
        save(tmp_path, {}, step=dist.get_rank())
    with pytest.raises(CheckpointError, match="path"):
        save(tmp_path / str(dist.get_rank()), {}, step=1)
    for step in (0, 1):
        save(tmp_path, {"step": step}, step=step)
    with pytest.raises(CheckpointError, match=r"rank 1: step: expected 0 as on a lower rank, found 1"):
        load(tmp_path, {"step": 5}, step=dist.get_rank())
    with pytest.raises(CheckpointError, match=r"rank 1: TypeError"):
        save([tmp_path, None][dist.get_rank()], {}, step=3)


@on_ranks(1, 2)
def test_a_list_of_plain_values_is_replaced_whatever_its_length(tmp_path: Path) -> None:
    history = [{"epoch": 0, "best": None}, {"epoch": 1, 5: [(1, 2), float("inf")]}, [1, [2]]]
    save(tmp_path, {"history": history, "flat": [0.5, 0.25], "none": []}, step=1)
    for before in ([], [{"epoch": 9}], [1] * 7, [[]]):
        mine = list(before)
        state = {"history": mine, "flat": [], "none": list(before)}
        load(tmp_path, state)
        assert state == {"history": history, "flat": [0.5, 0.25], "none": []}
        assert state["history"] is mine


def scheduled() -> tuple[torch.optim.Optimizer, SequentialLR]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = [LinearLR(optimizer, 0.1, total_iters=4), MultiStepLR(optimizer, [2, 4])]
    return optimizer, SequentialLR(optimizer, parts, milestones=[4])


@pytest.mark.filterwarnings("ignore")  # of torch, about its own schedulers
def test_schedulers_in_a_sequence_go_on_past_a_milestone(tmp_path: Path) -> None:
    def rates(optimizer: torch.optim.Optimizer, scheduler: SequentialLR, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    def state_of(optimizer: torch.optim.Optimizer, scheduler: SequentialLR) -> dict[str, Any]:
        return {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}

    through = rates(*scheduled(), 10)
    saved = scheduled()
    before = rates(*saved, 3)
    save(tmp_path, state_of(*saved), step=3)
    optimizer, scheduler = scheduled()
    state = state_of(optimizer, scheduler)
    load(tmp_path, state)
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    assert before + rates(optimizer, scheduler, 7) == through


@on_ranks(2)
def test_a_list_with_tensors_of_another_length_is_an_error_that_names_it(tmp_path: Path) -> None:
    save(tmp_path, {"moments": [torch.ones(2), {"m": torch.ones(3)}]}, step=1)
    for moments, match in (
        ([torch.ones(2)], r"moments: expected a list of 1 with tensors, found one of 2"),
        ([torch.ones(2)] * 3, r"moments: expected a list of 3 with tensors, found one of 2"),
        ([], r"moments: expected one of the values, found a list of 2 with tensors"),
    ):
        with pytest.raises(CheckpointError, match=match):
            load(tmp_path, {"moments": moments})


def test_tensors_of_every_kind_return_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        str(dtype): torch.randint(0, 2, (4, 6 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .contiguous()
        for dtype in [*DTYPES.values(), torch.complex128]
    }
    tensors |= {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "part": torch.arange(12.0).view(3, 4)[1:, ::2],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "expanded": torch.arange(3.0)[:, None].expand(3, 2),
        "overlapping": torch.arange(4.0).as_strided((3, 2), (1, 1)),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
    }
    save(tmp_path, {"t": tensors}, step=1)
    state = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    load(tmp_path, {"t": state})
    for name, tensor in tensors.items():
        assert as_bytes(state[name]) == as_bytes(tensor), name


class Own(torch.Tensor):
    pass


def unfit(kind: str) -> Any:
    if kind == "fake":
        with FakeTensorMode():
            return torch.ones(2)
    if kind == "freed":
        freed = torch.ones(2)
        freed.untyped_storage().resize_(0)
        return freed
    if kind in ("strided", "jagged"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=getattr(torch, kind))
    return {
        "subclass": torch.ones(2).as_subclass(Own),
        "coo": torch.eye(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "lazy": nn.UninitializedParameter(),
    }[kind]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["strided", "jagged", "coo", "meta", "fake", "freed", "subclass", "lazy"])
def test_a_tensor_that_could_not_be_read_again_on_one_rank_is_named_on_all(tmp_path: Path, kind: str) -> None:
    rank = dist.get_rank()
    state = {"w": unfit(kind) if rank else torch.ones(2)}
    found = r"rank 1: w: expected a plain dense tensor with numbers, found a .*; \w+ "
    for function in (save, save_async):
        with pytest.raises(CheckpointError, match=found):
            function(tmp_path / "new", state, step=1)
    assert not [*tmp_path.iterdir()]
    save(tmp_path / "there", {"w": torch.zeros(2)}, step=1)
    with pytest.raises(CheckpointError, match=found):
        load(tmp_path / "there", state)
    assert rank or state["w"].all()


OBJECT_COLLECTIVES = [
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
]


@on_ranks(3)
def test_ranks_tell_each_other_text(tmp_path: Path) -> None:
    """And torch reads what they wrote."""
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(10.0).view(5, 2)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.ones(2), "step": 1}
    again = {"w": distribute_tensor(whole * 0, mesh, [Shard(1)]), "b": torch.zeros(2), "step": 0}
    with mock.patch.multiple(dist, **dict.fromkeys(OBJECT_COLLECTIVES, None)):
        folder = save(tmp_path, state, step=1)
        load(tmp_path, again)
    assert torch.equal(again["w"].full_tensor(), whole)
    assert again["b"].all()
    assert again["step"] == 1
    torchs = {"w": distribute_tensor(whole * 0, mesh, [Shard(1)]), "b": torch.zeros(2)}
    dcp.load(torchs, checkpoint_id=folder)
    assert torch.equal(torchs["w"].full_tensor(), whole)
    assert torchs["b"].all()
