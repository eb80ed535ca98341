"""A small model and its data, shared by all clients, and the report of a client's run."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=98,  # even: with uneven DTensors, torch gives ranks each other's compiled graphs
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def batches(first: int, last: int, rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches `first` to `last` of a rank."""
    for number in range(first, last):
        generator = torch.Generator().manual_seed(1000 * rank + number)
        start = torch.randint(1, 97, (2, 1), generator=generator)
        ids = (start * 5 ** torch.arange(12)) % 97  # each token determines the next
        yield {"input_ids": ids, "labels": ids}


def check_resuming(
    model: nn.Module,
    train: Callable[[int, int], list[float]],
    save: Callable[[], object],
    load: Callable[[], object],
) -> list[float]:
    """Train on 12 batches, then the last six again from a saved state; check and return the losses."""
    check_sharded(model)
    losses = train(0, 6)
    save()
    rest = train(6, 12)
    load()
    assert train(6, 12) == rest, "training did not go on from the saved state"
    return losses + rest


def check_sharded(model: nn.Module) -> dict[str, Any]:
    """Count `model`'s sharded modules, and parameters per layout; say which implementation sharded them.

    Raises `AssertionError` unless it is the one that `torch.distributed.fsdp` currently has.
    """
    from shardwise import ShardedParameter

    by = Counter(who for module in model.modules() if (who := implementation(type(module))))
    expected = implementation(torch.distributed.fsdp.FSDPModule)
    assert set(by) == {expected}, f"modules are to be sharded by {expected}, are by {dict(by) or 'nobody'}"
    layouts = Counter(
        "contiguous" if isinstance(param, ShardedParameter) else "interleaved"
        for param in model.parameters()
        if isinstance(param, DTensor)
    )
    return {"by": expected, "modules": by[expected], "layouts": dict(layouts)}


def implementation(kind: type) -> str | None:
    """Return `torch` or `shardwise` for a class of sharded modules; both have an FSDPModule."""
    return next((one.__module__.split(".")[0] for one in kind.__mro__ if one.__name__ == "FSDPModule"), None)


def report(losses: list[float], model: nn.Module) -> None:
    """Print a rank's losses and the implementation that sharded the model, for `compare.py`."""
    said = {"rank": int(os.environ["RANK"]), "losses": losses, "sharded": check_sharded(model)}
    print(f"REPORT {json.dumps(said)}", flush=True)
