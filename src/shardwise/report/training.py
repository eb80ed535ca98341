"""The page about one training run: did it learn, what did each rank hold, what did ranks say.

`TrainingReport` holds the numbers; `training.html` beside this file is the whole look of the
page. Nothing here measures anything or communicates: rank 0 fills one in and writes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardwise.report.charts import human_bytes, line_chart


class CollectiveTotal(TypedDict):
    """All of one step's collectives of one kind on one rank."""

    kind: str
    calls: int
    bytes: int  # of the full, unsharded buffers


@dataclass(frozen=True)
class TrainingReport:
    """Memory tables map a part ("parameters", "gradients", "optimizer", ...) to bytes."""

    title: str
    ranks: int
    parameters: int  # elements of the whole model
    losses: Sequence[float]  # of step 1, 2, ..., mean over the global batch
    baseline: float  # unigram entropy, the losses' unit
    held_out_loss: float
    memory: Sequence[dict[str, int]]  # held by each rank, in rank order
    unsharded_memory: dict[str, int]  # what one process would hold without sharding
    collectives: Sequence[CollectiveTotal]
    unit: str = "nats/byte"
    settings: dict[str, str] = field(default_factory=dict)
    sample: str = ""

    def render(self) -> str:
        """The page as one HTML document that loads nothing else."""
        templates = Environment(
            loader=PackageLoader("shardwise.report", "."),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        templates.filters["human_bytes"] = human_bytes
        per_rank = [sum(parts.values()) for parts in self.memory]
        unsharded = sum(self.unsharded_memory.values())
        return templates.get_template("training.html").render(
            report=self,
            chart=line_chart(self.losses, rules={"unigram": self.baseline, "held-out": self.held_out_loss}),
            bars=[(f"rank {rank}", parts) for rank, parts in enumerate(self.memory)],
            parts=list(self.unsharded_memory),
            per_rank=per_rank,
            unsharded=unsharded,
            widest=max([unsharded, *per_rank, 1]),
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Render to `path`, whose folder is made if needed; returns it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.render(), encoding="utf-8")
        return path
