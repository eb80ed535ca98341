"""What users of FSDP2 write is there: arguments of `fully_shard`, names, methods."""

from __future__ import annotations

import inspect

import torch.distributed.fsdp as torchs

import shardwise

CLASSES = ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "UnshardHandle", "FSDPModule"]
LATER = ["DataParallelMeshDims", "GradientReductionHandle"]  # that older releases of torch lack
FUNCTIONS = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def test_fully_shard_takes_torchs_arguments_first_and_in_their_order() -> None:
    theirs = [*inspect.signature(torchs.fully_shard).parameters.values()]
    ours = [*inspect.signature(shardwise.fully_shard).parameters.values()][: len(theirs)]
    assert [(one.name, one.kind) for one in ours] == [(one.name, one.kind) for one in theirs]


def test_every_name_and_every_public_method_of_fsdp2_is_here() -> None:
    names = [*CLASSES, *LATER, *FUNCTIONS]
    assert [name for name in names if not hasattr(shardwise, name)] == []
    classes = [*CLASSES, *(name for name in LATER if hasattr(torchs, name))]
    missing = {name: public(getattr(torchs, name)) - set(dir(getattr(shardwise, name))) for name in classes}
    assert missing == {name: set() for name in classes}


def test_methods_of_fsdp2_have_its_arguments_with_their_defaults() -> None:
    for name in public(torchs.FSDPModule):
        ours = inspect.signature(getattr(shardwise.FSDPModule, name)).parameters
        for theirs in inspect.signature(getattr(torchs.FSDPModule, name)).parameters.values():
            assert (name, ours[theirs.name].default) == (name, theirs.default)
