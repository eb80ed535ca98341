"""What the memory of a plan errs by, as a share: one standard deviation, on runs that it was not fitted to.

Written by `benchmarks/plan.py --write`; not set by hand.
"""

MEMORY_ERROR = 0.0388
SOURCE = "37 published figures of 5 families, each of one weight: benchmarks/TABLES.md, plan"
