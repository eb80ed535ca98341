"""Public names and where they are defined: `__init__.py` imports each when it is first asked for."""

from .advice import advise
from .calibrate import calibrate, to_toml
from .code import python
from .devices import Hardware, hardware_of
from .found import Point, Search
from .models import Model
from .page import page, trace
from .picture import picture
from .plan import Plan, plan
from .search import search
from .setup import Setup, from_json, to_json
from .sharding import recompute
from .tensor import with_positions

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
