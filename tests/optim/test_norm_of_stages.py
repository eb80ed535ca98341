"""One norm over the stages of a pipeline, which have parameters of their own each."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import on_ranks
from shardwise.optim import clip_grad_norm_, get_total_norm

TIGHT = {"rtol": 1e-12, "atol": 1e-14}


@on_ranks(4)
def test_stages_with_parameters_of_their_own_are_clipped_by_the_norm_of_all() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    for norm_type in (2.0, math.inf):
        for empty in (False, True):  # a stage without gradients
            params = [nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(1 + 2 * stage)]
            for param in params:
                param.grad = torch.full((4,), 3.1 + stage, dtype=torch.float64)
            mine = [] if empty and stage == 1 else params
            of_all = [3.1] * 4 + ([] if empty else [4.1] * 12)
            expected = torch.linalg.vector_norm(torch.tensor(of_all, dtype=torch.float64), norm_type)
            found = get_total_norm([p.grad for p in mine], norm_type, stages=mesh["pp"])
            assert found.dtype == torch.float64  # of the stage without gradients too
            torch.testing.assert_close(found, expected, **TIGHT)
            clip_grad_norm_(mine, 1.0, norm_type, stages=mesh["pp"])
            for param in mine:
                torch.testing.assert_close(param.grad, (3.1 + stage) / (expected + 1e-6).expand(4), **TIGHT)
