"""What operations do on sharded tensors; importing a module here registers its operations."""

from shardwise.sharded_tensor.ops import (
    attributes,
    compare,
    elementwise,
    embedding,
    foreach,
    init,
    linear,
    losses,
    normalize,
    reduce,
    select,
    shape,
)

__all__ = [
    "attributes",
    "compare",
    "elementwise",
    "embedding",
    "foreach",
    "init",
    "linear",
    "losses",
    "normalize",
    "reduce",
    "select",
    "shape",
]
