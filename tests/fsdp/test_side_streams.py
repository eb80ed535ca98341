"""Modules that run on streams of the user's own, beside others."""

from __future__ import annotations

from unittest import mock

import pytest

from mutants.side_streams import modules_on_streams
from shardwise.fsdp.schedule import Schedule
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import simulated


def findings(streams: int, layout: str) -> list[str]:
    with noop_world(2), simulated() as found:
        modules_on_streams(streams, layout=layout)
    return [str(one) for one in found.findings]


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_gathered_memory_is_given_back_after_the_stream_that_read_it(layout: str, streams: int) -> None:
    assert findings(streams, layout) == []


def test_without_the_stream_that_it_ran_on_its_memory_is_given_back_too_early() -> None:
    nowhere = property(lambda self: None, lambda self, stream: None)
    with mock.patch.object(Schedule, "left_on", nowhere):
        assert any("gathered memory of module 'third'" in one for one in findings(1, "contiguous"))
