"""The cases."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from typing import Any
from torch import Tensor
from fuzz.campaign import draw_cases

Case = dict[str, Any]
Program = Callable[[], Sequence[Tensor] | None]

DRAWN = {f"drawn {case['drawn']}": case for case in draw_cases("streams", 1, 40)}
CASES: dict[str, Case | Program] = {**DRAWN}
