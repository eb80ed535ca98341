"""Does every operation on an accelerator's streams wait for what it needs? Found out without one."""

from .check import Finding, Findings, simulated

__all__ = ["Finding", "Findings", "simulated"]
