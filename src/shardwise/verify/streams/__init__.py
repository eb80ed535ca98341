"""The check that operations on an accelerator's streams wait for what they need, without an accelerator.

clocks.py knows who runs after whom, memory.py who touches what; streams.py, device.py and collectives.py are
a simulated device that tells them; check.py runs code on it, training.py a script's `Case`. values.py
runs all of it again in another order (orders.py), on real ranks with the others' help (peers.py).
"""

from .check import Finding, Findings, simulated
from .device import NAME as DEVICE
from .orders import Order, all_orders
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
