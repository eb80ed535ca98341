"""Saves every rank's program to one folder; loads from it one rank's program, or the whole model.

    folder/manifest.json     world size, strategies, every parameter's placement, every file's sha256
    folder/rank-0.pt2        by torch.export.save
    folder/rank-1.pt2

A folder is written next to its final path and renamed, so that it exists whole or not at all. `load` rejects
a rank or world size other than the folder's, and files that differ from those written (`files.manifest`). It
unpickles a file's example inputs and custom objects if they are more than tensors, as `torch.export.load`
does: load folders only from people whom you would let run code.

The graph names the process group of its collectives. `load` and `bind` set that name to the given group's, so
programs made in one process without any group run in any group of a job.

`merge` restores the whole model's state dict from a folder, bit for bit. Elements that several
ranks hold must be equal on all of them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.export import ExportedProgram

from shardwise.checkpoint import save_slices
from shardwise.comm.agree import together
from shardwise.errors import CheckpointError, ShardingError, here
from shardwise.files.manifest import MANIFEST, digest, is_count, read_manifest, whole_file, write_manifest
from shardwise.files.stores import on_disk
from shardwise.graph.nodes import kind_of
from shardwise.tensor_parallel import device
from shardwise.tensor_parallel.auto import choose
from shardwise.tensor_parallel.explain import explain
from shardwise.tensor_parallel.materialize import missing_weights
from shardwise.tensor_parallel.placement import Placement, Split
from shardwise.tensor_parallel.program import RECORD
from shardwise.tensor_parallel.state import placement_from_json, record_of
from shardwise.tensor_parallel.transform import tensor_parallel_transformation

FORMAT = "shardwise.tensor_parallel 2"

_SHARED = ("world_size", "strategies", "parameters")  # what the records of all ranks have in common


def save(
    programs: ExportedProgram | Sequence[ExportedProgram],
    folder: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
) -> None:
    """Write every rank's program to `folder`.

    Args:
        programs: those of all ranks, in order: local, and needs no process group. Or only this rank's:
            collective over `group` (the default group if None), whose ranks must share a file system.
        folder: to write to; its parents are created.
        group: only if each rank passes its own program.
        overwrite: replace an existing folder that holds nothing but programs.

    Raises:
        ShardingError: programs that are not all parts of one, in order; a folder that exists, or that cannot
            be written.
    """
    place = on_disk(folder).resolve()  # not a link to it
    single = isinstance(programs, ExportedProgram)
    local: list[ExportedProgram] = [programs] if single else list(programs)  # type: ignore[list-item, arg-type]
    records = [record_of(program) for program in local]
    if not single or records[0]["world_size"] == 1:
        group = None
    elif not dist.is_initialized():
        raise ShardingError(
            f"got one program of {records[0]['world_size']}, but there is no process group to collect the"
            " others; pass all of them as a list"
        )
    else:
        group = group or default_group()
    first = group is None or dist.get_rank(group) == 0

    def run_on_all(action: Callable[[], Any]) -> list[Any]:
        if group is None:
            try:
                return [action()]
            except OSError as error:
                raise ShardingError(f"cannot write {place}: {error}") from error
        return together(f"tensor_parallel.save to {place}", action, group=group, kind=ShardingError)

    def check() -> list[dict[str, Any]]:
        if place.exists() and not (overwrite and _is_replaceable(place)):
            reason, hint = "already exists", ", or pass overwrite=True (--overwrite)"
            if overwrite:
                reason, hint = "is not a folder of programs alone, so it is not replaced", ""
            raise ShardingError(f"{place} {reason}; choose another folder{hint}")
        return [{key: record[key] for key in ("rank", *_SHARED)} for record in records]

    _check_parts([record for part in run_on_all(check) for record in part])
    sibling = str(_temporary_path(place))
    temporary = Path(run_on_all(lambda: sibling)[0])
    try:
        digests = run_on_all(lambda: _write(local, temporary))
        files = {name: sha256 for part in digests for name, sha256 in part.items()}
        run_on_all(lambda: _finish(temporary, place, records[0], files) if first else None)
    finally:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)


def load(
    folder: str | Path,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> ExportedProgram:
    """Load one rank's program from a folder that `save` wrote, to the device that it was made for. Local.

    Args:
        folder: the folder.
        rank, world_size: of this process in its group; by default those of `group`.
        group: to communicate over, of any ranks; by default the default group. If there is neither, the
            program is loaded as it is: `bind` it before it runs.

    Raises:
        ShardingError: a rank or world size other than the group's or the folder's.
        CheckpointError: a file that is missing, damaged or outside the folder; a folder of another format.
    """
    place = on_disk(folder)
    manifest = manifest_of(place)
    group = group or (default_group() if dist.is_initialized() and rank is None else None)
    rank = rank_in(place, manifest["world_size"], group, rank=rank, world_size=world_size)
    path = file_in(place, manifest, f"rank-{rank}.pt2")
    program = torch.export.load(path)
    saved_rank = record_of(program)["rank"]
    if saved_rank != rank:
        raise ShardingError(f"{here()}: {path} is the program of rank {saved_rank}, not {rank}")
    device.move_state(program, record_of(program).get("device", "cpu"))
    return program if group is None else bind(program, group)


def bind(program: ExportedProgram, group: dist.ProcessGroup | str | None = None) -> ExportedProgram:
    """Make a rank's program communicate over `group` (the default group if None), in place. Local.

    A group may be given by its name, which it must then have where the program runs.

    Raises:
        ShardingError: a group of another size, or in which this process has another rank.
    """
    record = record_of(program)
    if not isinstance(group, str):
        group = group or default_group()
        if group.size() != record["world_size"] or dist.get_rank(group) != record["rank"]:
            raise ShardingError(
                f"{here()}: the program is for rank {record['rank']} of {record['world_size']}, but this"
                f" process is rank {dist.get_rank(group)} of {group.size()} in the given group"
            )
        group = group.group_name
    old = record["group"]
    for node in program.graph.nodes:
        if kind_of(node) is not None or getattr(node.target, "namespace", None) == "shardwise":
            node.args = tuple(group if arg == old else arg for arg in node.args)
    program.graph_module.meta["custom"][RECORD] = {**record, "group": group}
    program.graph_module.recompile()
    return program


def default_group() -> dist.ProcessGroup:
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise ShardingError("there is no default process group; call init_process_group first")
    return dist.group.WORLD


def rank_in(
    folder: Path,
    ranks: int,
    group: dist.ProcessGroup | None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> int:
    """Return the rank of this process among the `ranks` programs in a folder."""
    if group is not None:
        rank = _resolve("rank", rank, dist.get_rank(group))
        world_size = _resolve("world size", world_size, group.size())
    if rank is None:
        raise ShardingError(f"cannot tell which program of {folder} to load; pass rank, or a process group")
    if world_size not in (None, ranks):
        raise ShardingError(
            f"{here()}: {folder} has programs for {ranks} ranks, but world_size is {world_size}; transform"
            f" the program for {world_size} ranks"
        )
    if not 0 <= rank < ranks:
        raise ShardingError(f"{here()}: {folder} has programs for ranks 0 to {ranks - 1}, got rank {rank}")
    return rank


def _resolve(quantity: str, argument: int | None, actual: int) -> int:
    if actual < 0:
        raise ShardingError(f"{here()}: this process is not in the given group")
    if argument is not None and argument != actual:
        raise ShardingError(
            f"{here()}: got {quantity} {argument}, but it is {actual} in the group; pass only one of them"
        )
    return actual


# ------------------------------------------------------------ writing


def _check_parts(records: list[dict[str, Any]]) -> None:
    ranks = records[0]["world_size"] if records else 0
    order = [record["rank"] for record in records]
    if not records or order != list(range(ranks)):
        raise ShardingError(
            f"expected the programs of ranks 0 to {ranks - 1} in order, got those of ranks {order}"
        )
    for record in records[1:]:
        field = next((key for key in _SHARED if record[key] != records[0][key]), None)
        if field is not None:
            raise ShardingError(
                f"the programs of ranks 0 and {record['rank']} are not parts of one: their {field} differ;"
                " create all of them from the same program with the same strategies"
            )


def _temporary_path(place: Path) -> Path:
    return place.with_name(f".{place.name}.{secrets.token_hex(6)}")


def _is_replaceable(place: Path) -> bool:
    """Return whether a path is an empty folder, or one of files that `save` wrote alone."""
    with suppress(OSError, CheckpointError):
        found = {path.name for path in place.iterdir()}
        return not found or found <= {MANIFEST, *manifest_of(place)["files"]}
    return False


def _write(programs: list[ExportedProgram], folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {f"rank-{record_of(program)['rank']}.pt2": program for program in programs}
    for name, program in paths.items():
        torch.export.save(program, folder / name)
    return {name: digest(folder / name) for name in paths}


def _finish(temporary: Path, place: Path, record: dict[str, Any], files: dict[str, Any]) -> None:
    shared = {key: record[key] for key in _SHARED}
    write_manifest(temporary, {"format": FORMAT, "torch": torch.__version__, "files": files, **shared})
    place.parent.mkdir(parents=True, exist_ok=True)
    old = _temporary_path(place)
    if place.exists():
        os.rename(place, old)
    os.rename(temporary, place)
    shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------ reading


def manifest_of(folder: Path) -> dict[str, Any]:
    """Read the manifest that `save` wrote into a folder.

    Raises:
        CheckpointError: a manifest that is missing, damaged, or of another format.
    """
    try:
        return read_manifest(folder, formats=(FORMAT,), types={"world_size": (is_count, "a number of ranks")})
    except CheckpointError as error:
        problem = str(error).partition("; copy it again")[0]
        raise CheckpointError(
            f"{here()}: {problem}; copy the folder again, or save the programs again"
        ) from error


def file_in(folder: Path, manifest: Mapping[str, Any], name: str) -> Path:
    """Return a file of a folder, checked against its digest.

    Raises:
        CheckpointError: the file is missing, damaged, or outside the folder.
    """
    try:
        return whole_file(folder, name, manifest["files"].get(name, {}))
    except CheckpointError as error:
        problem = str(error).partition("; copy it again")[0]
        raise CheckpointError(f"{here()}: {problem}; copy the folder again") from error


# ------------------------------------------------------------ the command


def export_command(
    model: str | Path,
    out: str | Path,
    *,
    ranks: int,
    strategies: str | Path | Mapping[str, Any] = "auto",
    device_type: str = "cpu",
    strict: bool = False,
    overwrite: bool = False,
) -> str:
    """Cut an exported program, read from a file, for `ranks` ranks; save their programs to a folder. Local.

    Args:
        model: a .pt2 file from `torch.export.save`.
        out: the folder to write.
        strategies: a JSON file of {module or pattern: word}, words as in `styles`; such a mapping; or "auto",
            for `auto.choose`.
        device_type, strict: as for `tensor_parallel_transformation`.
        overwrite: as for `save`.

    Returns:
        The text to print: `explain` of rank 0, and the strategies.

    Raises:
        ShardingError: a file that cannot be read, or strategies that do not fit.
    """
    on_disk(out)  # before the work
    program = _load_program(on_disk(model))
    if not isinstance(strategies, Mapping):
        auto = str(strategies) == "auto"
        strategies = choose(program, ranks).strategies if auto else read_strategies(strategies)
    parts = [
        tensor_parallel_transformation(program, rank, ranks, device_type, strategies, strict=strict)
        for rank in range(ranks)
    ]
    save(parts, out, overwrite=overwrite)
    as_listed = {"colwise": "column", "rowwise": "row"}  # above, by parameter
    entries = record_of(parts[0])["strategies"].items()
    listing = "\n".join(f"  {name}: {as_listed.get(style, style)}" for name, style in entries)
    return f"{explain(parts[0])}\nStrategies:\n{listing}\nSaved {ranks} programs to {out}\n"


def _load_program(path: Path) -> ExportedProgram:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise ShardingError(f"{path}: {found}; expected a file that torch.export.save wrote")
    try:
        with zipfile.ZipFile(path) as archive:
            written_by_export = any(name.endswith("/archive_format") for name in archive.namelist())
    except zipfile.BadZipFile:
        written_by_export = False
    if not written_by_export:  # torch would log its errors before it raises
        raise ShardingError(
            f"cannot read {path} as an exported program: it is damaged, or torch.export.save did not write it"
        )
    try:
        return torch.export.load(path)
    except Exception as error:
        raise ShardingError(f"cannot read {path} as an exported program: {error}") from error


def read_strategies(path: str | Path) -> Mapping[str, Any]:
    """Return strategies from a JSON file of {module or pattern: word}."""
    try:
        styles = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ShardingError(f"cannot read strategies from {path}: {error}") from error
    if not isinstance(styles, dict):
        raise ShardingError(f"{path}: expected a JSON object of module: style, found {type(styles).__name__}")
    return styles


@torch.no_grad()
def merge(folder: str | Path) -> dict[str, Tensor]:
    """Return the whole state dict of the model whose programs `save` wrote to a folder, on the CPU. Local.

    Names that share a tensor share it here too. Besides it, one rank's program is in memory at a time.

    Raises:
        CheckpointError: a rank's file that is missing or damaged; weights without values; ranks that disagree
            on elements that both hold, for example after training went wrong.
    """
    place = on_disk(folder)
    manifest = manifest_of(place)
    paths = [file_in(place, manifest, f"rank-{rank}.pt2") for rank in range(manifest["world_size"])]
    entries: dict[str, Any] = manifest["parameters"]
    merged: dict[str, Tensor] = {}
    for rank, path in enumerate(paths):
        program = torch.export.load(path)
        if missing := missing_weights(program):
            raise CheckpointError(f"{path} has no values for {missing[0]}; `materialize` the programs first")
        for name, part in program.state_dict.items():
            entry = entries.get(name, {"placement": "replicate", "shape": part.shape})
            placement = placement_from_json(entry["placement"])
            whole = merged.setdefault(name, part.new_empty(entry["shape"], device="cpu"))
            if not _merge_part(whole, part.cpu(), placement, rank):
                raise CheckpointError(
                    f"{path}: its values of {name} differ from those of lower ranks, which hold the same"
                    " elements; save the programs again when all ranks agree"
                )
    for name, entry in entries.items():
        if name in merged and entry["tied"] in merged:
            merged[name] = merged[entry["tied"]]
    return merged


def _merge_part(whole: Tensor, part: Tensor, placement: Placement, rank: int) -> bool:
    """Copy to `whole` what `rank` is the first to hold; return whether all that it holds equals `whole`."""
    if not isinstance(placement, Split):
        if rank == 0:
            whole.copy_(part)
        return _bits_equal(whole, part)

    def slices(begin: int, end: int) -> tuple[Tensor, Tensor]:
        local = part.narrow(placement.dim, placement.on_rank(rank, begin), end - begin)
        return whole.narrow(placement.dim, begin, end - begin), local

    for interval in placement.once().ranges[rank]:
        target, local = slices(*interval)
        target.copy_(local)
    return all(_bits_equal(*slices(*interval)) for interval in placement.ranges[rank])


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether the bits are equal: nan equals nan, and zeros of different signs differ."""
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def merge_command(folder: str | Path, out: str | Path, *, strip: str = "", overwrite: bool = False) -> str:
    """Write the whole state dict to a safetensors file, with the prefix `strip` removed from names. Local."""
    place, source = on_disk(out), on_disk(folder)
    if not source.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected one that `shardwise tp export` wrote")
    if place.is_dir() or source.resolve() in place.resolve().parents:
        raise CheckpointError(f"{out} is a folder, or in the one to merge; choose another file to write")
    if place.exists() and not overwrite:
        raise CheckpointError(f"{out} already exists; choose another file, or pass --overwrite")
    merged = merge(folder)
    if strip and not any(name.startswith(strip) for name in merged):
        names = ", ".join([*merged][:3])
        raise CheckpointError(f"--strip: no name begins with {strip!r}; the first ones are {names}")
    tensors = {name.removeprefix(strip): x for name, x in merged.items()}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    save_slices(tensors, place, metadata={"format": "pt"})
    return f"Saved {len(tensors)} tensors, {sum(x.nbytes for x in tensors.values()):,} bytes, to {out}\n"
