"""Placements: how one parameter is cut over the ranks of the shard axis.

===================  ===========================================  =======================
placement            a rank holds                                 layout
===================  ===========================================  =======================
`EvenShard(dim)`     an equal chunk of `dim`                      interleaved
`RaggedShard(block)` any number of whole blocks of `block` rows   contiguous
`Owned(rank)`        all of it on one rank, nothing elsewhere     contiguous
===================  ===========================================  =======================

`EvenShard(dim)` equals DTensor's `Shard(dim)`: chunks of `ceil(size / ranks)`, the last chunks short
or empty. Five rows over four ranks::

    rank 0: rows 0-1    rank 1: rows 2-3    rank 2: row 4    rank 3: none

Each rank stores its chunk padded to the first rank's size, so that all ranks send equally much.

With the other two, which rank holds what follows from how the parameters of a group are packed together
(`shardwise.layout.packing`); the placement says only where a parameter may be cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import ShardingError
from shardwise.layout.box import Box


def even_intervals(size: int, ranks: int) -> list[tuple[int, int]]:
    """Return [begin, end) of each rank, as even as can be; as of `tensor_split`, the first have one more."""
    least, more = divmod(size, ranks)
    return list(pairwise(rank * least + min(rank, more) for rank in range(ranks + 1)))


@dataclass(frozen=True)
class EvenShard:
    """Chunks of `ceil(size / ranks)` along `dim`, empty where the rows run out."""

    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ShardingError(f"EvenShard counts dims from the first, got dim {self.dim}")

    def box(self, shape: tuple[int, ...], *, rank: int, ranks: int) -> Box:
        """Return the elements of a tensor of `shape` that `rank` of `ranks` holds."""
        size = shape[self.dim]
        chunk = -(-size // ranks)
        start = min(rank * chunk, size)
        offsets = tuple(start if d == self.dim else 0 for d in range(len(shape)))
        return Box(offsets, self._with_size(shape, min(chunk, size - start)))

    def padded_shape(self, shape: tuple[int, ...], *, ranks: int) -> tuple[int, ...]:
        """Return the shape each rank stores: its chunk padded to the largest chunk."""
        return self._with_size(shape, -(-shape[self.dim] // ranks))

    def _with_size(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class RaggedShard:
    """A cut into whole blocks of `block` rows of dim 0, any number on a rank; the last block may be short.

    For optimizers and quantisation that work on tiles: a 2-D tile aligned to rows is a block of the
    tile's rows, so 128 x 128 tiles are kept whole by `RaggedShard(128)`.
    """

    block: int = 1

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ShardingError(f"RaggedShard needs a block of at least 1 row, got {self.block}")


@dataclass(frozen=True)
class Owned:
    """A placement whole on one rank, `rank` of the shard axis or any: for optimizers of matrices."""

    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 0:
            raise ShardingError(f"Owned counts ranks from 0, got rank {self.rank}")


Placement = EvenShard | RaggedShard | Owned
