"""Tensor parallelism for exported programs: cut one program into a program for each rank."""

from shardwise.tensor_parallel.aot import compile_package, load_compiled
from shardwise.tensor_parallel.auto import ChosenPlan, Prices, choose
from shardwise.tensor_parallel.explain import counts, explain
from shardwise.tensor_parallel.materialize import materialize, missing_weights
from shardwise.tensor_parallel.package import bind, load, merge, save
from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split
from shardwise.tensor_parallel.pretrained import strategies_of
from shardwise.tensor_parallel.rules import rule
from shardwise.tensor_parallel.serving import cut_steps, export_steps, generate, greedy, scores_of
from shardwise.tensor_parallel.styles import ColwiseParallel, Replicate, RowwiseParallel, SequenceParallel
from shardwise.tensor_parallel.trainable import trainable
from shardwise.tensor_parallel.transform import tensor_parallel_transformation

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "ChosenPlan",
    "ColwiseParallel",
    "Partition",
    "Prices",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Split",
    "bind",
    "choose",
    "compile_package",
    "counts",
    "cut_steps",
    "explain",
    "export_steps",
    "generate",
    "greedy",
    "load",
    "load_compiled",
    "materialize",
    "merge",
    "missing_weights",
    "rule",
    "save",
    "scores_of",
    "strategies_of",
    "tensor_parallel_transformation",
    "trainable",
]
