"""What cannot be cut, said before anything is done: arguments of other kinds, and programs cut before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from shardwise.errors import ShardingError
from shardwise.tensor_parallel.explain import collective_kind
from shardwise.tensor_parallel.state import RECORD


def check_whole(program: Any) -> None:
    """Refuse what is no exported program, and one whose ranks communicate already."""
    if not isinstance(program, ExportedProgram):
        kind = "a module" if isinstance(program, nn.Module) else f"{type(program).__name__}"
        raise ShardingError(
            f"expected an ExportedProgram, got {kind}; export the model first:"
            " torch.export.export(model, example_inputs)"
        )
    record = (program.graph_module.meta.get("custom") or {}).get(RECORD)
    if record is not None:
        raise ShardingError(
            f"the program is that of rank {record['rank']} of {record['world_size']} already, and cut again"
            " would compute something else; give the whole program, as torch.export.export made it"
        )
    for node in program.graph.nodes:
        if collective_kind(node) is not None or getattr(node.target, "namespace", None) == "shardwise":
            raise ShardingError(
                f"the program has {node.target} ({node.name}): it is one rank's of several already; give the"
                " whole program, as torch.export.export made it of a model that does not communicate"
            )


def check_ranks(rank: Any, world_size: Any) -> None:
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in (rank, world_size)):
        raise ShardingError(f"rank and world_size must be ints, got {rank!r} and {world_size!r}")
    if not 0 <= rank < world_size:
        raise ShardingError(f"rank {rank} is not one of {world_size} ranks")


def check_device(device_type: Any) -> None:
    """Refuse what is no kind of device that torch knows, whether or not this machine has one."""
    try:
        known = isinstance(device_type, str) and torch.device(device_type) is not None
    except RuntimeError:
        known = False
    if not known:
        raise ShardingError(
            f"device_type is {device_type!r}, which torch does not know; expected 'cpu', 'cuda', ..."
        )


def check_strategies(strategies: Any) -> None:
    if strategies == "auto":
        return
    if isinstance(strategies, Mapping):
        wrong = next((name for name in strategies if not isinstance(name, str)), None)
        if wrong is None:
            return
        raise ShardingError(
            f"the strategies have {wrong!r} for a name; expected fully qualified names of modules or"
            " parameters, or patterns of them"
        )
    raise ShardingError(
        f"the strategies are {type(strategies).__name__} {strategies!r}; expected a mapping of names of"
        " modules or parameters to styles, or 'auto'"
    )
