"""Streams and events of a device's own kind, as `torch.cuda.Stream` is, given to a sharded module."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from fuzz.streams_part.train import findings
from shardwise.fsdp import schedule, settings

OPTIMIZER = {"stream": "optimizer", "post_optim_event": True, "layout": "contiguous", "strategy": "zero1"}
HOOK = {"reduce_hook": "stream", "micro": 2, "gradients_read": True}
OWN, PLAIN = 1, 0  # seeds: the parity says which kind a case uses


@pytest.mark.parametrize("seed", [OWN, PLAIN])
@pytest.mark.parametrize("case", [OPTIMIZER, HOOK], ids=["optimizer", "hook"])
def test_what_waits_for_a_users_stream_waits_for_either_kind(case: dict[str, Any], seed: int) -> None:
    assert findings(case | {"seed": seed}) == []


def test_an_own_kind_that_is_not_converted_races() -> None:
    with mock.patch.object(schedule, "wait_for", lambda event, stream: stream.wait_event(event)):
        assert findings(OPTIMIZER | {"seed": PLAIN}) == []
        assert any("copy_in" in one or "gather" in one for one in findings(OPTIMIZER | {"seed": OWN}))
    with mock.patch.object(settings, "as_torch_stream", lambda stream: stream):
        assert findings(HOOK | {"seed": PLAIN}) == []
        assert findings(HOOK | {"seed": OWN})
