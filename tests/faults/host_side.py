"""The example, on a rank that waits for others as many seconds as the first argument says, not 30 minutes."""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_gpt

if __name__ == "__main__":
    patience = timedelta(seconds=float(sys.argv.pop(1)))
    dist.init_process_group = functools.partial(dist.init_process_group, timeout=patience)
    train_gpt.main()
