"""Sharded tensors in safetensors files: each rank reads and writes only its own boxes.

    8 bytes      length of the header, little-endian
    header       JSON: dtype, shape and place of every tensor; spaces up to a multiple of 8 bytes
    data         tensors one after the other, each row by row; wide dtypes first, so that all are aligned

A file is written under another name beside its own: one rank writes the header and makes room, every rank
writes its boxes at their places, and one rename publishes it. So no rank ever holds a whole tensor, and what
has the file's name is always whole. All ranks see one file system.

Nothing in these files is code: they are JSON and numbers, also those that others wrote.
"""

from __future__ import annotations

from shardwise.checkpoint.slices.read import load_slices
from shardwise.checkpoint.slices.write import save_slices

__all__ = ["load_slices", "save_slices"]
