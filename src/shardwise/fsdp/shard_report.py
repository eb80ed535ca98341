"""`FSDPModule.shard_report`: what every group holds and how it communicates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.module_state import ModuleState


@dataclass(frozen=True)
class GroupReport:
    """One group of parameters that are gathered and reduced together; bytes include padding."""

    module: str  # its name, or the names of several; the class before the first forward
    parameters: tuple[str, ...]  # name, shape, dtype and placement of each, in words
    shard_bytes: int  # what this rank keeps
    gathered_bytes: int  # the whole parameters in the dtype of computation
    padding_bytes: int  # the part of `gathered_bytes` that is padding
    ranks: int  # over which parameters are gathered
    strategy: str  # what is cut and what is replicated over each axis of the mesh
    after_forward: str  # whether forward frees the parameters; the first forward shows which module is root
    transport: str  # which transport gathers, and why


@dataclass(frozen=True)
class ShardReport:
    """The groups of a model, in the order of its modules; prints as a table."""

    groups: tuple[GroupReport, ...]

    @property
    def shard_bytes(self) -> int:
        """Bytes of all parameters that this rank keeps."""
        return sum(group.shard_bytes for group in self.groups)

    def __str__(self) -> str:
        table = Table(title=f"{len(self.groups)} groups, {decimal(self.shard_bytes)} on this rank")
        for name in ("module", "parameters", "on this rank", "gathered", "padding", "ranks"):
            table.add_column(name, justify="left" if name == "module" else "right")
        for name in ("strategy", "after forward", "gathered by"):
            table.add_column(name, overflow="fold")
        for group in self.groups:
            table.add_row(
                group.module,
                str(len(group.parameters)),
                decimal(group.shard_bytes),
                decimal(group.gathered_bytes),
                f"{group.padding_bytes / max(1, group.gathered_bytes):.1%}",
                str(group.ranks),
                group.strategy,
                group.after_forward,
                group.transport,
            )
        console = Console(width=160)
        with console.capture() as printed:
            console.print(table)
        return printed.get()


def report(states: Iterable[ModuleState]) -> ShardReport:
    """Return the groups of these modules. Local."""
    return ShardReport(tuple(_group(state, group) for state in states for group in state.groups))


def _group(state: ModuleState, group: ParamGroup) -> GroupReport:
    gathered = sum(group.gathered_bytes)
    undecided = state.schedule is None and state.reshard_is_automatic and not state.inside
    after_forward = "freed, but kept of the root" if undecided else "freed"
    used = sum(param.numel * param.gather_dtype.itemsize for param in group.params)
    return GroupReport(
        module=state.name or state.classes,
        parameters=tuple(
            f"{param.name}: {list(param.shape)} {param.dtype}, {param.placement}" for param in group.params
        ),
        shard_bytes=group.shard_bytes,
        gathered_bytes=gathered,
        padding_bytes=max(0, gathered - used),
        ranks=group.ranks,
        strategy=str(group.strategy),
        after_forward="kept" if group.post_forward_mesh is None else after_forward,
        transport=group.transport(),
    )
