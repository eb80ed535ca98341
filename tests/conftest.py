"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ranks import RankPool
from shardwise._compat.dtensors import RUNS_OWN_DTENSORS

NO_CONTIGUOUS_LAYOUT = f"torch {torch.__version__} runs operations on rows as DTensor's own"
REFUSED = 'layout="contiguous" needs torch'  # how fully_shard says so
OF_THE_LAYOUT = ("tests/fsdp/contiguous/", "tests/optim/test_flat.py", "tests/sharded_tensor/rows/")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(fn, *args, world_size=N, timeout=120, **kwargs)`: return values of `fn` by rank."""
    pool = RankPool()
    yield pool
    pool.close()


if not RUNS_OWN_DTENSORS:

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        for item in items:
            if item.nodeid.startswith(OF_THE_LAYOUT):
                item.add_marker(pytest.mark.skip(reason=NO_CONTIGUOUS_LAYOUT))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
        """Skip what `fully_shard` refuses on this release, and nothing else."""
        try:
            return (yield)
        except (Exception, pytest.fail.Exception) as error:
            if REFUSED not in str(error):
                raise
        pytest.skip(NO_CONTIGUOUS_LAYOUT)
