"""Compiles ranks' programs to machine code ahead of time, with AOTInductor, in the folder that `save` wrote.

    folder/rank-0.aot.pt2     of rank-0.pt2, with its weights
    folder/manifest.json      adds the name of the process group and these files' sha256

Collectives are compiled as calls of torch's functional collectives over a job's default group, by the name
that torch gives it. Weights need values: `materialize` before `save`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise import _compat
from shardwise.comm.auto import over_gloo
from shardwise.errors import ShardingError, here
from shardwise.files.manifest import digest, write_manifest
from shardwise.files.stores import on_disk
from shardwise.tensor_parallel import package
from shardwise.tensor_parallel.materialize import missing_weights
from shardwise.tensor_parallel.operators import ops


def compile_package(folder: str | Path) -> None:
    """Compile all ranks' programs in a folder from `save`, for inference on machines like this one. Local.

    Needs a C++ compiler. There must be no process group: this creates a temporary one for this process alone.

    Args:
        folder: the folder; files are added to it.

    Raises:
        ShardingError: there is a process group already, or weights have no values.
        CheckpointError: a folder that cannot be read.
    """
    place = on_disk(folder)
    manifest = package.manifest_of(place)
    with _stand_in() as group_name:
        for rank in range(manifest["world_size"]):
            program = package.load(place, rank=rank)
            missing = missing_weights(program)
            if missing:
                raise ShardingError(
                    f"the program of rank {rank} has no weights yet ({', '.join(missing[:3])}); materialize"
                    " the programs of all ranks, save them, then compile them"
                )
            path = place / f"rank-{rank}.aot.pt2"
            package.bind(program, group_name)
            for node in list(program.graph.nodes):  # compiled programs have no backward, in which these raise
                if node.target is ops.untrainable.default:
                    node.replace_all_uses_with(node.args[0])
                    program.graph_signature.replace_all_uses(node.name, node.args[0].name)
                    program.graph.erase_node(node)
            program.graph_module.recompile()
            _compat.aoti_compile(program, str(path))
            manifest["files"][path.name] = digest(path)
    write_manifest(place, {**manifest, "compiled_for": group_name})


def load_compiled(
    folder: str | Path, *, rank: int | None = None, group: dist.ProcessGroup | None = None
) -> Callable[..., Any]:
    """Load this rank's function from a folder that `compile_package` completed; call it as the model. Local.

    Over gloo it warns: torch's compiled functions hold Python's lock, for which gloo's threads may wait, so a
    program with several collectives hangs at random. Sizes of inputs are not checked.

    Args:
        folder: the folder. It holds machine code: load it only from people whom you would let run code.
        rank: of the process within its group; by default that of `group`.
        group: to communicate over. It must have the name that was compiled in: that of a default group.

    Raises:
        ShardingError: a group of another name or size; a folder without compiled programs.
        CheckpointError: a file that is missing or damaged.
    """
    place = on_disk(folder)
    manifest = package.manifest_of(place)
    group = group or package.default_group()
    name = manifest.get("compiled_for")
    if name is None:
        raise ShardingError(f"{here()}: {place} has no compiled programs; run compile_package on it first")
    rank = package.rank_in(place, manifest["world_size"], group, rank=rank)
    if group.group_name != name:
        raise ShardingError(
            f"{here()}: {place} was compiled for a default group, whose name is {name!r}, but this group is"
            f" {group.group_name!r}; use the default group, or `load` the program and torch.compile it"
        )
    path = str(package.file_in(place, manifest, f"rank-{rank}.aot.pt2"))
    if over_gloo(group):
        warnings.warn(
            f"{here()}: compiled programs with several collectives may hang over gloo, whose threads wait for"
            " the lock that torch's compiled functions hold; on CPU run `load(folder).module()` instead",
            stacklevel=2,
        )
    return _compat.aoti_load(path)


@contextmanager
def _stand_in() -> Iterator[str]:
    """Make a default group of this process alone, as the compiler needs, and yield its name."""
    if dist.is_initialized():
        raise ShardingError(
            f"{here()}: compile_package found a process group; call it in a separate process before the job,"
            " for example with `shardwise tp export --aot`"
        )
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()
