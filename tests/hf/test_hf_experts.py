"""Mixtures of transformers with experts cut over ranks, against themselves on one, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from ranks import on_ranks
from shardwise import ShardingError, fully_shard
from shardwise.dimensions import Dimensions, data_ranks, dense_mesh, expert_mesh
from shardwise.hf import cut_experts

close = {"rtol": 1e-5, "atol": 1e-7}  # the loss is float32 whatever the model is, and so are its gradients
SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=8, head_dim=4, decoder_sparse_step=1
    ),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.router_jitter_noise = 0.0
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()


@on_ranks(4)
def test_loss_and_gradients_are_those_of_all_experts_on_one_rank() -> None:
    rank = dist.get_rank()
    mesh = Dimensions("dp2,ep2").mesh("cpu")
    for kind, layout in (("mixtral", "interleaved"), ("qwen3", "contiguous")):
        rows = torch.randint(1, 37, (4, 7), generator=torch.Generator().manual_seed(1))
        whole = made(kind)
        expected = whole(input_ids=rows, labels=rows).loss
        expected.backward()
        model = made(kind)
        for experts in cut_experts(model, mesh["ep"]):
            assert all(param.to_local().shape[0] == 2 for param in experts.parameters())
            fully_shard(experts, mesh=expert_mesh(mesh), layout=layout)
            experts.set_gradient_divide_factor(data_ranks(mesh))
        fully_shard(model, mesh=dense_mesh(mesh), layout=layout)
        loss = model(input_ids=rows[rank : rank + 1], labels=rows[rank : rank + 1]).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 4, expected.detach(), **close)
        gradients = {name: param.grad for name, param in whole.named_parameters()}
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), gradients[name], **close)


@on_ranks(1)
def test_a_model_without_experts_is_refused() -> None:
    mesh = Dimensions("dp1").mesh("cpu")
    with pytest.raises(ShardingError, match=r"Linear has no module of experts that takes \(hidden_states"):
        cut_experts(torch.nn.Linear(2, 2), mesh["dp"])
