"""The kinds of collectives: which operators issue them, and how many bytes each moves.

One table serves code that counts collectives as they are issued (`comm.count`) or finds them in a compiled
graph or an exported program (`graph.nodes`). Bytes are those of the full buffer: all shards of a gather or
scatter together. The kind determines the fraction that a rank must send at least:

    all_gather, reduce_scatter, all_to_all, gather, scatter     (n-1)/n on n ranks
    all_reduce                                                  twice that
    broadcast, reduce, send                                     all; nothing if there is only one rank
    recv, barrier                                               nothing
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"

NATIVE = "c10d"
FUNCTIONAL = "_c10d_functional"
NAMESPACES = (NATIVE, FUNCTIONAL, "_c10d_functional_autograd", "c10d_functional", "_dtensor")
WAIT = "wait_tensor"
# In the same namespaces, but they move nothing: a counted wait would count its collective twice.
_NOT_COLLECTIVE = (WAIT, "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group")


class Form(NamedTuple):
    """The form in which an operator issues a collective."""

    kind: str
    argument: int | None  # position of the tensors that hold the bytes
    per_rank: bool = False  # those tensors are one rank's share of the full buffer


_NATIVE = {  # operators of torch.ops.c10d
    "allreduce_": Form(REDUCE, 0),
    "allreduce_coalesced_": Form(REDUCE, 0),
    # The full buffer of an all-gather is its output, argument 0; of a reduce-scatter its input, argument 1.
    "_allgather_base_": Form(GATHER, 0),
    "allgather_": Form(GATHER, 0),
    "allgather_coalesced_": Form(GATHER, 0),
    "allgather_into_tensor_coalesced_": Form(GATHER, 0),
    "_reduce_scatter_base_": Form(SCATTER, 1),
    "reduce_scatter_": Form(SCATTER, 1),
    "reduce_scatter_tensor_coalesced_": Form(SCATTER, 1),
    "broadcast_": Form("broadcast", 0),
    "reduce_": Form("reduce", 0),
    # Only one rank has the list of all shards. Every rank has the other argument, its own share.
    "gather_": Form("gather", 1, per_rank=True),
    "scatter_": Form("scatter", 0, per_rank=True),
    "alltoall_": Form("all_to_all", 1),
    "alltoall_base_": Form("all_to_all", 1),
    "send": Form("send", 0),
    "recv_": Form("recv", 0),
    "recv_any_source_": Form("recv", 0),
    "barrier": Form("barrier", None),
    "monitored_barrier_": Form("barrier", None),
}

# operators of torch.ops._c10d_functional and the like, without "_coalesced", "_out" and a last "_"
_FUNCTIONAL = {
    "all_reduce": Form(REDUCE, 0),
    # The full buffer is the result: among the arguments, only this rank's share gives its size.
    "all_gather_into_tensor": Form(GATHER, 0, per_rank=True),
    "reduce_scatter_tensor": Form(SCATTER, 0),
    "all_to_all_single": Form("all_to_all", 0),
    "broadcast": Form("broadcast", 0),
    "isend": Form("send", 0),
    "irecv": Form("recv", 0),
    "shard_dim_alltoall": Form("all_to_all", 0),  # of torch.ops._dtensor
}


def form_of(namespace: str, name: str) -> Form | None:
    """Return the form of the operator `namespace::name`, without overload; None if it is no collective.

    An unknown collective, which torch may add later, has its own name as kind.
    """
    if namespace not in NAMESPACES or name in _NOT_COLLECTIVE:
        return None
    if namespace == NATIVE:
        form = _NATIVE.get(name)
    else:
        form = _FUNCTIONAL.get(name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced"))
    return form or Form(name.strip("_"), 0)


def sent_bytes(kind: str, full_bytes: int, *, ranks: int) -> int:
    """Return the bytes that each rank sends in the ideal ring algorithm, rounded up."""
    # No algorithm can send less (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    # workstations", 2009; nccl-tests' PERFORMANCE.md has the factors for the other kinds).
    ring, whole = Fraction(ranks - 1, ranks), Fraction(ranks > 1)
    shares = dict.fromkeys((GATHER, SCATTER, "all_to_all", "gather", "scatter"), ring)
    shares |= {REDUCE: 2 * ring, "broadcast": whole, "reduce": whole, "recv": Fraction(0)}
    sent = full_bytes * shares.get(kind, Fraction(1))
    return -(-sent.numerator // sent.denominator)
