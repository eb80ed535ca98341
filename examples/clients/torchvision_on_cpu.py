"""Lets timm import torchvision beside a CPU build of torch.

PyPI's torchvision is built for CUDA: its operators do not load there. torchvision goes on without them, but
describes two of them to torch, which does not know them then. They are declared here; a vision transformer
calls neither.
"""

import importlib.metadata

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def declare_operators() -> None:
    """Call it before anything imports torchvision."""
    files = importlib.metadata.files("torchvision") or []
    try:
        for file in files:
            if file.match("torchvision/_C*.so"):
                torch.ops.load_library(str(file.locate()))
    except OSError:
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
