"""Graphs of compiled sharded models: inspect, move and check their collectives."""

from __future__ import annotations

from shardwise.graph.inspect import inspect_graph
from shardwise.graph.measure import graph_report
from shardwise.graph.record import Recorded, Recorder, record
from shardwise.graph.reports import CollectiveReport, Counts, GraphReport, ModelReport, Saved

__all__ = [
    "CollectiveReport",
    "Counts",
    "GraphReport",
    "ModelReport",
    "Recorded",
    "Recorder",
    "Saved",
    "graph_report",
    "inspect_graph",
    "record",
]
