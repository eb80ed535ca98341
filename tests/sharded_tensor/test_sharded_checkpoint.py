"""Checkpoints hold whole tensors: sharded tensors, rows, DTensors and plain tensors read each other's."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor as peer
from torch.distributed._shard import sharding_spec as peer_spec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

import shardwise.checkpoint
import shardwise.sharded_tensor.dcp
from ranks import RankPool, on_ranks
from sharded_tensor.forms import WHOLE, check, load, names, save, sharded, state
from sharded_tensor.rows import pieces
from shardwise.errors import ShardingError
from shardwise.files.manifest import digest
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.rows import ShardedParameter, ShardedRows

# How many ranks save each form; on how many which forms are loaded.
LOADED: dict[str, tuple[int, dict[int, list[str]]]] = {
    "sharded": (4, {1: ["sharded", "plain"], 2: ["sharded", "dtensor"], 3: ["sharded", "dtensor", "plain"]}),
    "dtensor": (2, {1: ["uneven"], 3: ["sharded", "uneven", "sharded"]}),
    "plain": (4, {1: ["uneven"], 3: ["sharded", "uneven", "sharded"]}),
    "uneven": (2, {1: ["even"], 3: ["all_on_last", "dtensor"], 4: ["plain", "two_groups", "columnwise"]}),
    "all_on_last": (2, {1: ["dtensor"], 3: ["uneven", "plain"], 4: ["even", "replicated", "rowwise"]}),
    **dict.fromkeys(["two_groups", "replicated", "rowwise", "columnwise"], (4, {1: ["plain"]})),
}


@pytest.mark.parametrize("form", LOADED)
def test_what_any_form_saved_loads_on_any_number_of_ranks_in_any_form(
    ranks: RankPool, tmp_path: Path, form: str
) -> None:
    saving, loading = LOADED[form]
    ranks(save, form, tmp_path, world_size=saving)
    for world_size, forms in loading.items():
        ranks(load, form, tmp_path, forms, world_size=world_size)


def test_a_checkpoint_converts_to_one_file_of_plain_tensors(ranks: RankPool, tmp_path: Path) -> None:
    ranks(save, "sharded", tmp_path / "sharded", world_size=3)
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt")
    assert set(found) == set(WHOLE)
    check(found)


@on_ranks(2)
def test_torchs_own_sharded_tensors_are_read_and_read_ours(tmp_path: Path) -> None:
    folders: list[Any] = [str(tmp_path)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folders)
    whole, columns = (
        torch.arange(12.0).view(3, 4),
        peer_spec.ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"]),
    )
    theirs, ours = peer.zeros(columns, 3, 4), sharded(whole, 1)
    dcp.save({"weight": ours}, checkpoint_id=f"{folders[0]}/ours")
    dcp.load({"weight": theirs}, checkpoint_id=f"{folders[0]}/ours")
    (shard,) = theirs.local_shards()
    assert torch.equal(shard.tensor, whole.chunk(2, dim=1)[1 - dist.get_rank()])
    dcp.save({"weight": theirs}, checkpoint_id=f"{folders[0]}/theirs")
    again = sharded(torch.zeros(3, 4), 2)
    dcp.load({"weight": again}, checkpoint_id=f"{folders[0]}/theirs")
    assert torch.equal(again.full_tensor(), whole)


def save_ours(path: Path) -> None:
    tensors = {form: state(form, empty=False) for form in ("sharded", "uneven")}
    shardwise.checkpoint.save(path, {**tensors, "model": model(0).state_dict()}, step=3)


def load_ours(path: Path, forms: dict[str, str]) -> None:
    """What was saved in one form, in another."""
    other = model(40, value=-1.0)
    target: dict[str, Any] = {"model": other.state_dict()}
    for saved, form in forms.items():
        tensors = state(form, empty=True, seed=5)
        target[saved] = {name: value for name, value in tensors.items() if name in names(saved)}
    assert shardwise.checkpoint.load(path, target) == 3
    for saved in forms:
        check(target[saved])
    found, expected = whole_state(other), whole_state(model(0))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_shardwise_checkpoints_hold_sharded_tensors_and_rows(ranks: RankPool, tmp_path: Path) -> None:
    ranks(save_ours, tmp_path, world_size=4)
    ranks(load_ours, tmp_path, {"sharded": "sharded", "uneven": "even"}, world_size=1)
    for forms in ({"sharded": "sharded", "uneven": "all_on_last"}, {"sharded": "plain", "uneven": "plain"}):
        ranks(load_ours, tmp_path, forms, world_size=3)


# torch's state-dict functions


def model(seed: int, *, value: float | None = None, cut: pieces.Cut = pieces.uneven) -> nn.Sequential:
    """A sharded weight of which a rank holds none, a sharded bias and buffer, plain parameters, rows."""
    torch.manual_seed(6)
    made = nn.Sequential(nn.Linear(5, 7), nn.Linear(2, 3), nn.Linear(5, 7))
    with torch.no_grad():
        for param in made.parameters():
            if value is not None:
                param.fill_(value)
    for index, name in enumerate(("weight", "bias")):
        setattr(made[0], name, nn.Parameter(sharded(getattr(made[0], name).detach(), seed + index)))
        setattr(made[2], name, pieces.parameter(getattr(made[2], name).detach(), cut))
    made.register_buffer("table", sharded(torch.arange(6.0) if value is None else torch.zeros(6), seed + 7))
    return made


def whole_state(made: nn.Module) -> dict[str, Tensor]:
    kinds = ShardedTensor, ShardedRows
    return {n: v.full_tensor() if isinstance(v, kinds) else v for n, v in made.state_dict().items()}


@on_ranks(1, 3)
def test_model_state_dicts_of_torch() -> None:
    made, rank = model(0), dist.get_rank()
    expected = whole_state(made)
    assert set(expected) == {f"{n}.{kind}" for n in range(3) for kind in ("weight", "bias")} | {"table"}

    parts = get_model_state_dict(made)
    assert isinstance(parts["0.weight"], ShardedTensor)
    assert isinstance(parts["2.weight"], ShardedRows)
    assert not parts["0.weight"].requires_grad
    full = get_model_state_dict(made, options=StateDictOptions(full_state_dict=True))
    assert all(type(value) is Tensor and torch.equal(value, expected[n]) for n, value in full.items())
    on_first = get_model_state_dict(made, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert set(on_first) == (set(expected) if rank == 0 else set())
    assert all(type(value) is Tensor and torch.equal(value, expected[n]) for n, value in on_first.items())

    for given, options in (
        (parts, StateDictOptions()),
        (full, StateDictOptions(full_state_dict=True)),
        (on_first, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
    ):
        other = model(0, value=-1.0, cut=pieces.all_on_last)
        before = other[0].weight.tensors
        result = set_model_state_dict(other, given, options=options)
        assert not result.missing_keys
        assert not result.unexpected_keys
        found = whole_state(other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for layer, kind in ((other[0], ShardedTensor), (other[2], ShardedParameter)):
            assert isinstance(layer.weight, nn.Parameter)
            assert isinstance(layer.weight, kind)
        assert all(new is old for new, old in zip(other[0].weight.tensors, before, strict=True))


@on_ranks(2)
def test_optimizer_state_dicts_of_torch_hold_rows() -> None:
    rows = model(0)[2]
    optimizer = torch.optim.AdamW(rows.parameters())
    for param in rows.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert isinstance(get_optimizer_state_dict(rows, optimizer)["state"]["weight"]["exp_avg"], ShardedRows)


@on_ranks(3)
def test_a_model_loads_a_full_state_dict_into_another_cut_by_a_checkpoint(tmp_path: Path) -> None:
    folders: list[Any] = [str(tmp_path)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folders)
    made = model(0)
    dcp.save({"model": get_model_state_dict(made)}, checkpoint_id=folders[0])
    other = model(40, value=-1.0)
    into = {"model": get_model_state_dict(other)}
    dcp.load(into, checkpoint_id=folders[0])
    set_model_state_dict(other, into["model"])
    found, expected = whole_state(other), whole_state(made)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Nothing in a checkpoint is code


class Payload:
    """Pickled, it names a call that makes a folder when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def load_damaged(path: Path, ours: bool) -> str:
    target: dict[str, Any] = {"weight": sharded(torch.zeros(4, 3), 3)}
    try:
        if ours:
            shardwise.checkpoint.load(path, target)
        else:
            dcp.load(target, checkpoint_id=path)
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def save_one(path: Path, ours: bool) -> None:
    target: dict[str, Any] = {"weight": sharded(torch.ones(4, 3), 2)}
    if ours:
        shardwise.checkpoint.save(path, target, step=0)
    else:
        dcp.save(target, checkpoint_id=path)


def poison(folder: Path, trace: Path) -> None:
    """Every shard's bytes become a pickle of `Payload`, and the index says so."""
    index = folder / ".metadata"
    known = pickle.loads(index.read_bytes())
    content = io.BytesIO()
    torch.save(Payload(trace), content)
    for key, place in known.storage_data.items():
        (folder / place.relative_path).write_bytes(content.getvalue())
        known.storage_data[key] = dataclasses.replace(place, offset=0, length=len(content.getvalue()))
    index.write_bytes(pickle.dumps(known))


def test_a_shard_that_is_code_is_refused_and_does_not_run(ranks: RankPool, tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "torch"
    ranks(save_one, folder, False, world_size=2)
    poison(folder, trace)
    for found in ranks(load_damaged, folder, False, world_size=2):
        assert "Weights only load failed" in found
    assert not trace.exists()
    content = next(folder.glob("*.distcp"))
    torch.load(content, weights_only=False)  # what a careless reader would have done
    assert trace.exists()


def test_an_index_that_is_code_is_refused_and_does_not_run(ranks: RankPool, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    ranks(save_one, tmp_path / "ours", True, world_size=2)
    (folder,) = (tmp_path / "ours").glob("step-*")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(trace)))
    manifest["files"][".metadata"] = digest(folder / ".metadata")
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for found in ranks(load_damaged, tmp_path / "ours", True, world_size=2):
        assert found.startswith("CheckpointError")
        assert "which a checkpoint has no use for; not read" in found
    assert not trace.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert trace.exists()


@on_ranks(2)
def test_torchs_save_in_the_background_is_refused_and_ours_named(tmp_path: Path) -> None:
    state = {"weight": sharded(WHOLE["weight"], 1)}
    with pytest.raises(ShardingError, match=r"use shardwise\.checkpoint\.save_async"):
        dcp.async_save(state, checkpoint_id=tmp_path)
