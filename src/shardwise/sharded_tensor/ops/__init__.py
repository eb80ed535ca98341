"""Operations on sharded tensors; importing a module here registers its operations."""

from shardwise.sharded_tensor.ops import attributes as attributes
from shardwise.sharded_tensor.ops import elementwise as elementwise
from shardwise.sharded_tensor.ops import embedding as embedding
from shardwise.sharded_tensor.ops import foreach as foreach
from shardwise.sharded_tensor.ops import functional as functional
from shardwise.sharded_tensor.ops import init as init
from shardwise.sharded_tensor.ops import linear as linear
from shardwise.sharded_tensor.ops import reduce as reduce
from shardwise.sharded_tensor.ops import select as select
from shardwise.sharded_tensor.ops import shape as shape
