"""One model again from a folder of ranks' programs: its whole state dict, bit by bit as it was cut.

What one rank has is put in its place; what several have, whole or in part, must be equal on all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import save_slices
from shardwise.errors import CheckpointError
from shardwise.tensor_parallel.materialize import missing_weights
from shardwise.tensor_parallel.package import file_in, manifest_of
from shardwise.tensor_parallel.placement import Placement, Split
from shardwise.tensor_parallel.state import placement_from_json


@torch.no_grad()
def merge(folder: str | Path) -> dict[str, Tensor]:
    """Return the whole state dict of the model whose programs `save` wrote to a folder, on the CPU. Local.

    Names that share a tensor share it here. Beside it, one rank's program is in memory at a time.

    Raises:
        CheckpointError: a rank's file that is missing or damaged; weights without values; ranks that do not
            have the same of what both have, as after training that went wrong.
    """
    place = Path(folder)
    manifest = manifest_of(place)
    paths = [file_in(place, manifest, f"rank-{rank}.pt2") for rank in range(manifest["world_size"])]
    entries: dict[str, Any] = manifest["parameters"]
    made: dict[str, Tensor] = {}
    for rank, path in enumerate(paths):
        program = torch.export.load(path)
        if missing := missing_weights(program):
            raise CheckpointError(f"{path} has no values for {missing[0]}; `materialize` the programs first")
        for name, part in program.state_dict.items():
            entry = entries.get(name, {"placement": "replicate", "shape": part.shape})
            at = placement_from_json(entry["placement"])
            whole = made.setdefault(name, part.new_empty(entry["shape"], device="cpu"))
            if not _put(whole, part.cpu(), at, rank):
                raise CheckpointError(
                    f"{path} has other values of {name} than the ranks before it, which must have the same;"
                    " save the programs again, of ranks that agree"
                )
    for name, entry in entries.items():
        if name in made and entry["tied"] in made:
            made[name] = made[entry["tied"]]
    return made


def _put(whole: Tensor, part: Tensor, at: Placement, rank: int) -> bool:
    """Put into `whole` what `rank` is the first to have; return whether all that it has is equal there."""
    if not isinstance(at, Split):
        if rank == 0:
            whole.copy_(part)
        return _bits_equal(whole, part)

    def both(begin: int, end: int) -> tuple[Tensor, Tensor]:
        here = part.narrow(at.dim, at.on_rank(rank, begin), end - begin)
        return whole.narrow(at.dim, begin, end - begin), here

    for interval in at.once().ranges[rank]:
        place, here = both(*interval)
        place.copy_(here)
    return all(_bits_equal(*both(*interval)) for interval in at.ranges[rank])


def _bits_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether bits are equal, so also nan equals nan, and zeros of another sign differ."""
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (one, other)))


def merge_command(folder: str | Path, out: str | Path, *, strip: str = "", overwrite: bool = False) -> str:
    """Write the whole state dict to a safetensors file, without `strip` at the beginning of names. Local."""
    place = Path(out)
    if place.is_dir() or (place.exists() and not overwrite):
        raise CheckpointError(f"{out} is there already; choose another file, or pass --overwrite")
    named = {name.removeprefix(strip): x for name, x in merge(folder).items()}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    save_slices(named, place, metadata={"format": "pt"})
    return f"{len(named)} tensors, {sum(x.nbytes for x in named.values()):,} bytes, in {out}\n"
