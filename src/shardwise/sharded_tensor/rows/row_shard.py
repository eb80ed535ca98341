"""`RowShard`: the placement of rows, as a DTensor's `placements` show it.

Five rows over four ranks, `RowShard((2, 0, 3, 0))`::

    rank 0: rows 0-1    rank 1: none    rank 2: rows 2-4    rank 3: none

It is a `Shard(0)` to whoever asks, but says how many rows each rank holds, where DTensor's own is cut
evenly. So a tensor that is made from it (`distribute_tensor(whole, p.device_mesh, p.placements)`) is cut
as the one that it was read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NoReturn

from shardwise._compat.dtensors import OwnShard
from shardwise.errors import ShardingError, here


class RowShard(OwnShard):
    """A cut into whole rows of dim 0, as many for each rank as `counts` says, one rank's after the other's.

    Attributes:
        counts: rows of each rank. With tensor parallelism, of this rank's part of the tensor.
        step: how far apart neighbours on this mesh axis are in `counts`; 1 unless several axes cut rows.
    """

    counts: tuple[int, ...]
    step: int

    def __new__(cls, counts: Sequence[int], step: int = 1) -> RowShard:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, counts: Sequence[int], step: int = 1) -> None:
        super().__init__(0)
        self.counts = tuple(counts)
        self.step = step

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowShard) and (self.counts, self.step) == (other.counts, other.step)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((RowShard, self.counts, self.step))

    def __repr__(self) -> str:
        return f"RowShard({self.counts}" + (")" if self.step == 1 else f", step={self.step})")

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return RowShard, (self.counts, self.step)

    def __copy__(self) -> RowShard:
        return self

    def __deepcopy__(self, memo: Any) -> RowShard:
        return self

    def local_rows(self, rows: int, ranks: int, rank: int) -> tuple[int, int]:
        """Return how many of `rows` rows `rank` of `ranks` on this axis holds, and the first."""
        if rows != sum(self.counts) or ranks != len(self.counts):
            raise ShardingError(
                f"{here()}: {self} cuts {sum(self.counts)} rows over {len(self.counts)} ranks; here are"
                f" {rows} rows over {ranks} ranks. Where tensor parallelism or a second mesh axis cuts rows"
                " too, ask the tensor itself (.box, to_local(), full_tensor())"
            )
        return self.counts[rank], [*accumulate(self.counts, initial=0)][rank]

    def refuse(self, what: str) -> NoReturn:
        raise ShardingError(
            f"{here()}: torch was asked {what} where {self} says which rows each rank holds, and would cut"
            " evenly; make the tensor with distribute_tensor, DTensor.from_local or redistribute"
        )
