"""Does every operation on an accelerator's streams wait for what it needs? Found out without one."""

from .check import Finding, Findings, simulated
from .device import NAME as DEVICE

__all__ = ["DEVICE", "Finding", "Findings", "simulated"]
