"""One rank of a verification, on ranks that all tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock


def on_this_rank(target: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.object(sys, "argv", sys.argv):  # loading a case sets it
        return target(lambda: None, *args)
