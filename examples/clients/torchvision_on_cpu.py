"""Enable timm to import torchvision with a CPU build of torch.

PyPI's torchvision is built for CUDA, so its operators do not load. torchvision continues without them, but
registers fake kernels of two that torch then does not know. This module declares both; a vision transformer
calls neither.
"""

import importlib.metadata

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def declare_operators() -> None:
    """Declare the operators; call this before anything imports torchvision."""
    files = importlib.metadata.files("torchvision") or []
    try:
        for file in files:
            if file.match("torchvision/_C*.so"):
                torch.ops.load_library(str(file.locate()))
    except OSError:
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
