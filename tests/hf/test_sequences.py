"""Models of transformers on sequences cut over ranks, against themselves on whole ones, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from ranks import on_ranks
from shardwise import LifecycleError, ShardingError, fully_shard
from shardwise.hf import cut_sequences

close = {"rtol": 1e-5, "atol": 1e-7}  # the loss is float32 whatever the model is, and so are its gradients
SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=3),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=4),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=37, n_embd=24, n_layer=2, n_head=6, n_positions=32),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, name, 0.0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()


def batch(*, padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 37, (2, 11), generator=generator)
    given = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][0, -4:] = 0
        given["labels"][0, -4:] = -100
    return given


@on_ranks(2, 3, 4)
def test_loss_logits_and_gradients_are_those_of_whole_sequences() -> None:
    for number, kind in enumerate(CONFIGS, start=dist.get_world_size()):
        whole = made(kind)
        model = copy.deepcopy(whole)
        cut = cut_sequences(model, dist.group.WORLD)
        given = batch(padded=number % 2 == 0)  # on 3 ranks those that are not on 2 and 4
        expected = whole(**given)
        found = model(**given)
        torch.testing.assert_close(found.logits, cut(expected.logits), **close)
        loss = found.loss.detach().clone()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / cut.ranks, expected.loss.detach(), **close)
        expected.loss.backward()
        found.loss.backward()
        for (name, param), of in zip(model.named_parameters(), whole.parameters(), strict=True):
            dist.all_reduce(param.grad)
            torch.testing.assert_close(param.grad / cut.ranks, of.grad, **close, msg=f"{kind} {name}")


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@on_ranks(4)
def test_beside_fully_shard_training_is_that_of_one_process(layout: Any) -> None:
    """Two ranks share a sequence, two another: two dims of one mesh, over both of which it is sharded."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    everywhere = mesh._flatten("all")
    whole = made("llama")
    model = copy.deepcopy(whole)
    cut_sequences(model, mesh["sp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=everywhere, layout=layout)
    fully_shard(model, mesh=everywhere, layout=layout)
    given = batch(padded=False)
    mine = {name: each[mesh["dp"].get_local_rank()][None] for name, each in given.items()}
    for trained, rows in ((whole, given), (model, mine)):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
        for _ in range(3):
            trained(**rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), of in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), of, **close, msg=name)


@on_ranks(2)
def test_what_cannot_be_cut_is_said() -> None:
    model = made("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ShardingError, match="attention 'eager'"):
        cut_sequences(model, dist.group.WORLD)
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    bert = transformers.BertForMaskedLM(config)
    with pytest.raises(ShardingError, match=r"BertForMaskedLM has .* the loss ForMaskedLMLoss"):
        cut_sequences(bert, dist.group.WORLD)
    model = made("llama")
    cut_sequences(model, dist.group.WORLD)
    ids = batch(padded=False)["input_ids"]
    with pytest.raises(ShardingError, match="LlamaForCausalLM was given position_ids"):
        model(input_ids=ids, position_ids=torch.arange(11)[None])
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(LifecycleError, match="1 of 2 layers of LlamaForCausalLM"):
        model(input_ids=ids)
