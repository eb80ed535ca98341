"""How one parameter is cut over the ranks of the shard axis.

`EvenShard(dim)` is the placement of the interleaved layout and equals DTensor's `Shard(dim)`:
equal chunks of `ceil(size / ranks)`, the last chunks short or empty. Five rows over four ranks::

    rank 0: rows 0-1    rank 1: rows 2-3    rank 2: row 4    rank 3: none

Each rank stores its chunk padded to the first rank's size, so that all ranks send equally much.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ShardingError
from shardwise.layout.box import Box


@dataclass(frozen=True)
class EvenShard:
    """Chunks of `ceil(size / ranks)` along `dim`, empty where the rows run out."""

    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ShardingError(f"EvenShard counts dims from the first, got dim {self.dim}")

    def box(self, shape: tuple[int, ...], *, rank: int, ranks: int) -> Box:
        """The elements of a tensor of `shape` that `rank` of `ranks` holds."""
        size = shape[self.dim]
        chunk = -(-size // ranks)
        start = min(rank * chunk, size)
        offsets = tuple(start if d == self.dim else 0 for d in range(len(shape)))
        return Box(offsets, self._with_size(shape, min(chunk, size - start)))

    def padded_shape(self, shape: tuple[int, ...], *, ranks: int) -> tuple[int, ...]:
        """The shape each rank stores: its chunk padded to the largest chunk."""
        return self._with_size(shape, -(-shape[self.dim] // ranks))

    def _with_size(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])
