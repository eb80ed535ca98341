"""A small model and its data, the same for every client."""

import json
import os
from collections.abc import Callable, Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=98,  # even: torch gives ranks with uneven DTensors each other's compiled graphs
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
    """Batches `first` to `last` of a rank."""
    for number in range(first, last):
        generator = torch.Generator().manual_seed(1000 * rank + number)
        start = torch.randint(1, 97, (2, 1), generator=generator)
        ids = (start * 5 ** torch.arange(12)) % 97  # each token tells the next
        yield {"input_ids": ids, "labels": ids}


def check_resuming(
    train: Callable[[int, int], list[float]], save: Callable[[], object], load: Callable[[], object]
) -> None:
    """Train on 12 batches; the last six again from a saved state, to the same losses."""
    losses = train(0, 6)
    save()
    rest = train(6, 12)
    load()
    assert train(6, 12) == rest, "training did not go on from the saved state"
    report(losses + rest)


def report(losses: list[float]) -> None:
    """Print a rank's losses for `compare.py`."""
    line = json.dumps({"rank": int(os.environ["RANK"]), "losses": losses})
    print(f"LOSSES {line}", flush=True)
