"""Load Hugging Face transformers models straight into shards, and save them from shards."""

from __future__ import annotations

from shardwise.hf.adapters import merge
from shardwise.hf.experts import cut_experts
from shardwise.hf.load import HostMemory, host_memory, load
from shardwise.hf.save import save
from shardwise.hf.sequence import cut_sequences

__all__ = ["HostMemory", "cut_experts", "cut_sequences", "host_memory", "load", "merge", "save"]
