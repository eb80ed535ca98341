"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(fn, *args, world_size=N, timeout=120, **kwargs)`: return values of `fn` by rank."""
    pool = RankPool()
    yield pool
    pool.close()
