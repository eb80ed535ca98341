"""Will it fit, and how fast? Memory, communication and time of a training step, before it is run.

What is predicted is what this library does: it is run on fake tensors, as one rank of a process group of
any size that does nothing (`record`). A few blocks stand for many, exactly (`unroll`). Memory alive and
bytes sent follow from that (`measure`), reserved memory by a model of a caching allocator (`allocator`),
time by a model of the hardware (`timing`). `page`, `picture` and `trace` show it; `search` compares
settings, and `code` is the Python of one; `calibrate` measures the machine at hand.
"""

from shardwise.planner.calibrate import calibrate, to_toml
from shardwise.planner.code import python
from shardwise.planner.found import Point, Search
from shardwise.planner.models import Model
from shardwise.planner.page import page, trace
from shardwise.planner.picture import picture
from shardwise.planner.plan import Plan, advise, plan
from shardwise.planner.search import search
from shardwise.planner.setup import Setup, from_json, to_json
from shardwise.planner.sharding import recompute
from shardwise.planner.tensor import with_positions
from shardwise.planner.timing import Hardware, hardware_of

__all__ = [
    "Hardware",
    "Model",
    "Plan",
    "Point",
    "Search",
    "Setup",
    "advise",
    "calibrate",
    "from_json",
    "hardware_of",
    "page",
    "picture",
    "plan",
    "python",
    "recompute",
    "search",
    "to_json",
    "to_toml",
    "trace",
    "with_positions",
]
