"""Placements: how one parameter is cut over the ranks of the shard axis.

===================  ===========================================  =======================
placement            a rank holds                                 layout
===================  ===========================================  =======================
`EvenShard(dim)`     an equal chunk of `dim`                      interleaved
`RaggedShard(block)` any number of whole blocks of `block` rows   contiguous
`Owned(rank)`        all of it on one rank, nothing elsewhere     contiguous
===================  ===========================================  =======================

`EvenShard(dim)` equals DTensor's `Shard(dim)`: chunks of `ceil(size / ranks)`, the last chunks short
or empty. Each rank stores its chunk padded to the first rank's size, so that all ranks send the same amount.
For the other two, packing the parameters of a group (`shardwise.layout.packing`) decides which rank holds
what; the placement says only where a parameter may be cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import ShardingError
from shardwise.layout.box import Box


def even_intervals(size: int, ranks: int) -> list[tuple[int, int]]:
    """Return [begin, end) for each rank, as even as possible; like `tensor_split`, the first are larger."""
    quotient, remainder = divmod(size, ranks)
    return list(pairwise(rank * quotient + min(rank, remainder) for rank in range(ranks + 1)))


@dataclass(frozen=True)
class EvenShard:
    """Chunks of `ceil(size / ranks)` along `dim`, the last ones short or empty."""

    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ShardingError(f"EvenShard: expected a dim of at least 0, got dim {self.dim}")

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

    For optimizers and quantisation that work on tiles: `RaggedShard(128)` keeps 128 x 128 tiles whole, since
    each lies in one block of 128 rows.
    """

    block: int = 1

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ShardingError(f"RaggedShard: expected a block of at least 1 row, got {self.block}")


@dataclass(frozen=True)
class Owned:
    """A placement on one rank: `rank` of the shard axis, or any if None. For optimizers of whole matrices."""

    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 0:
            raise ShardingError(f"Owned: expected a rank of at least 0, got rank {self.rank}")


Placement = EvenShard | RaggedShard | Owned
