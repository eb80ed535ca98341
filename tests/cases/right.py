"""Cases that agree with one process, on any mesh."""

from __future__ import annotations

import model

from shardwise.verify import Case


def verify_case() -> Case:
    return Case(
        build=model.build, shard=model.shard, optimizer=model.adam, batch=model.batch, loss=model.loss
    )


def with_sgd() -> Case:
    return Case(build=model.build, shard=model.shard, optimizer=model.sgd, batch=model.batch, loss=model.loss)


def with_layout() -> Case:
    """Fails unless asked for the contiguous layout."""

    def shard(module, mesh, layout="interleaved") -> None:
        assert layout == "contiguous"
        model.shard(module, mesh, layout)

    return Case(build=model.build, shard=shard, optimizer=model.sgd, batch=model.batch, loss=model.loss)
