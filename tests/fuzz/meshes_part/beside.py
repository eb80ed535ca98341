"""How far meshes are from one process and from FSDP2, and whether each loads the others' checkpoints."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from examples import train_dimensions as example
from torch import nn

from fuzz.meshes_part.train import OnMesh, Record, in_one_process, relative, settings

LAYOUTS = ("interleaved", "contiguous")


@contextmanager
def by_torchs_fully_shard() -> Iterator[None]:
    """The example's modules are sharded by FSDP2; all else is as it is."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, share_comm_ctx

    def without_layout(module: nn.Module, *, layout: str, mp_policy: Any = None, **options: Any) -> Any:
        dtypes = {
            name: getattr(mp_policy, name, None) for name in ("param_dtype", "reduce_dtype", "output_dtype")
        }
        return fully_shard(module, mp_policy=MixedPrecisionPolicy(**dtypes), **options)

    with (
        mock.patch.object(example, "fully_shard", without_layout),
        mock.patch.object(example, "share_comm_ctx", share_comm_ctx),
        mock.patch("fuzz.meshes_part.train.known_to_pipelines", nothing),
    ):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


def apart(mesh: str, steps: int = 5) -> dict[str, str]:
    """Collective: the largest relative difference of a mesh's training, by what it is compared with."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    meshes: dict[Any, Any] = {}
    records: dict[str, Record] = {"one process": in_one_process(settings(), steps)}
    for layout in LAYOUTS:
        records[layout] = Record()
        OnMesh(settings(mesh=mesh, layout=layout), meshes).train(steps, records[layout])
    found = {layout: f"{worst(records[layout], records['one process']):.0e}" for layout in LAYOUTS}
    try:
        with by_torchs_fully_shard():
            theirs = Record()
            OnMesh(settings(mesh=mesh), meshes).train(steps, theirs)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return found | {"FSDP2": f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"}
    distance = worst(records["interleaved"], theirs)
    return found | {"FSDP2": "equal bits" if distance == 0 else f"{distance:.0e}"}


def worst(found: Record, expected: Record) -> float:
    """Over all ranks."""
    pairs = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(*lists(found, expected), strict=True)]
    for what in ("gradients", "parameters"):
        ours, theirs = getattr(found, what), getattr(expected, what)
        pairs += [(tensor, theirs[name]) for name, tensor in ours.items()]
    largest = torch.tensor(max(relative(a, b) for a, b in pairs), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def lists(*records: Record) -> list[list[list[float]]]:
    return [[record.losses, record.norms] for record in records]


def checkpoints(names: list[str], most: int = 99, **chosen: Any) -> dict[tuple[str, str], bool]:
    """Collective: by (saved on, loaded on), are parameters and moments the same bits as those saved?

    Each is loaded on at most `most` meshes: those that follow, and itself at last. Every second mesh has the
    contiguous layout. Two steps are trained before.
    """
    logging.getLogger("torch").setLevel(logging.ERROR)
    meshes: dict[Any, Any] = {}
    shared: list[Any] = [tempfile.mkdtemp(prefix="meshes-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    saved: dict[str, Record] = {}
    trained: dict[str, OnMesh] = {}
    saved_moments: dict[str, Any] = {}
    for number, name in enumerate(names):
        trained[name] = OnMesh(settings(mesh=name, layout=LAYOUTS[number % 2], seed=number, **chosen), meshes)
        saved[name] = Record()
        trained[name].train(2, saved[name])
        saved[name].parameters = whole(saved[name].parameters)
        saved_moments[name] = whole(trained[name].moments())
        trained[name].save(Path(shared[0], name))
    found: dict[tuple[str, str], bool] = {}
    for number, source in enumerate(names):
        moments = saved_moments[source]
        for target in [*names[number + 1 :], *names[: number + 1]][:most]:
            trained[target].load(Path(shared[0], source))
            loaded = {n: p.detach().full_tensor() for n, p in trained[target].named()}
            alike = all(torch.equal(p, saved[source].parameters[n]) for n, p in loaded.items())
            state = whole(trained[target].moments())
            alike &= state.keys() == moments.keys() and all(torch.equal(state[n], moments[n]) for n in state)
            flag = torch.tensor(float(alike))
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            found[source, target] = bool(flag)
    if dist.get_rank() == 0:  # all have read it: they were in the sum
        shutil.rmtree(shared[0])
    return found


def whole(mine: dict[str, Any]) -> dict[str, Any]:
    """What all ranks hold together: those of a pipeline have some each."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {name: tensor for each in every for name, tensor in each.items()}
