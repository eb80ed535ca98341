"""What the memory of a plan errs by, as a share: one standard deviation, of families that were not seen.

Written by `benchmarks/plan.py --write`; not set by hand.
"""

MEMORY_ERROR = 0.05
SOURCE = ""
