"""Check, without an accelerator, that operations on its streams wait for what they need.

clocks.py records which operation runs after which, memory.py which memory each touches. streams.py, device.py
and collectives.py are a simulated device that reports to them. check.py runs code on it, training.py a
script's `Case`. values.py runs everything again in another order; on real ranks, peers.py coordinates this
with the other ranks.
"""

from .check import Finding, Findings, simulated
from .clocks import Order, all_orders
from .device import NAME as DEVICE
from .training import StreamsResult, check_streams
from .values import Difference

__all__ = [
    "DEVICE",
    "Difference",
    "Finding",
    "Findings",
    "Order",
    "StreamsResult",
    "all_orders",
    "check_streams",
    "simulated",
]
