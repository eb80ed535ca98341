"""Small models with random weights of several families of transformers, and folders of them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_SMALL: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
}
_HEADS = {"num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0}


def make(family: str) -> Any:
    """A model of `family`, the same on every rank."""
    torch.manual_seed(1)
    match family:
        case "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, **_HEADS))
        case "gpt2":  # tied, and weights of `Conv1D`
            config = transformers.GPT2Config(vocab_size=70, n_embd=12, n_layer=2, n_head=2, n_positions=16)
            return transformers.GPT2LMHeadModel(config)
        case "mixtral":  # experts stacked and fused in the model, one by one in files
            return transformers.MixtralForCausalLM(
                transformers.MixtralConfig(**_SMALL, **_HEADS, num_local_experts=3)
            )
        case "t5":  # tied between encoder, decoder and head
            config = transformers.T5Config(
                vocab_size=70, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3
            )
            return transformers.T5ForConditionalGeneration(config)
        case _:  # buffers, biases tied, older names in files
            assert family == "bert"
            return transformers.BertForMaskedLM(
                transformers.BertConfig(**_SMALL, num_hidden_layers=2, max_position_embeddings=16)
            )


def write(family: str, folder: Path, *, max_shard_size: str = "50GB") -> Path:
    """The folder of a model as `save_pretrained` writes it; of BERT with the names of old files."""
    make(family).save_pretrained(folder, max_shard_size=max_shard_size)
    if family == "bert":
        file = folder / "model.safetensors"
        weights = load_file(file)
        for old, new in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
            weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def assert_equal(found: Any, expected: Any) -> None:
    """Parameters, gathered, and buffers are equal bit for bit, by name."""
    for named in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, named)()), dict(getattr(expected, named)())
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert whole.dtype == theirs[name].dtype, name
            assert torch.equal(whole, theirs[name]), name
