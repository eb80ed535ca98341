"""Cases that cannot be run, each for another reason."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace

import torch.distributed as dist
from right import verify_case as right

from shardwise.verify import Case

locks = []  # that processes can share, as progress bars make them


def raises_on_rank_1() -> Case:
    return _misbehaving(_raise)


def dies_on_rank_1() -> Case:
    return _misbehaving(lambda: os._exit(3))


def hangs_on_rank_1() -> Case:
    return _misbehaving(lambda: time.sleep(600))


def odd_batch() -> Case:
    return replace(right(), batch=lambda step: tuple(entry[:5] for entry in right().batch(step)))


def loss_of_nothing() -> Case:
    return replace(right(), loss=lambda module, batch: 0.0 * right().loss(module, batch))


def returns_no_case() -> dict:
    return {}


def _raise() -> None:
    locks.append(multiprocessing.get_context("spawn").RLock())
    raise RuntimeError(f"rank 1 has had enough of {locks[0]._semlock.name}")


def _misbehaving(action) -> Case:
    def loss(module, batch):
        if dist.get_rank() == 1:
            action()
        return right().loss(module, batch)

    return replace(right(), loss=loss)
