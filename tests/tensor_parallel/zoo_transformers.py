"""Tiny models of `transformers` with random weights, and the plans by which they are cut.

One layer each, or two: two all-reduces a layer, one more where the embedding is cut by vocabulary. Nothing is
gathered but logits that are cut by vocabulary.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from zoo import COL, ROW, case

transformers.logging.set_verbosity_error()

VOCABULARY = 50
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Plain(nn.Module):
    """A model called with tensors by name, without a cache; returns its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> Tensor:
        arguments = {"input_ids": input_ids, "attention_mask": attention_mask}
        arguments |= {"decoder_input_ids": decoder_input_ids, "pixel_values": pixel_values}
        present = {name: value for name, value in arguments.items() if value is not None}
        return self.call({**present, "return_dict": False})[0]

    def call(self, arguments: dict[str, Any]) -> Any:
        return self.model(**arguments, use_cache=False)


class Encoder(Plain):
    """The same for a model that has no cache."""

    def call(self, arguments: dict[str, Any]) -> Any:
        return self.model(**arguments)


def ids(*names: str, batch: int = 2, length: int = 6) -> dict[str, Tensor]:
    made = {}
    for name in names:
        mask = "mask" in name
        made[name] = (
            torch.ones(batch, length, dtype=torch.long)
            if mask
            else torch.randint(3, VOCABULARY, (batch, length))
        )
        if mask:
            made[name][0, -2:] = 0
    return made


def family(
    name: str,
    make: Callable[[], nn.Module],
    plan: dict[str, Any],
    *inputs: str,
    reduces: int,
    gathers: int = 0,
    dynamic: bool = False,
    **fields: Any,
) -> None:
    wrapper = fields.pop("wrapper", Plain)
    make_inputs = fields.pop("given", None) or (lambda: ids(*inputs))
    if dynamic:
        batch, length = Dim("batch", max=64), Dim("length", max=32)
        fields["dynamic"] = {argument: {0: batch, 1: length} for argument in inputs}
        fields["others"] = lambda: ((), ids(*inputs, batch=3, length=9))

    def build() -> Any:
        return wrapper(make()), (), make_inputs()

    plan = {f"model.{module}": style for module, style in plan.items()}
    case(name, plan=plan, reduces=reduces, gathers=gathers, tolerance=1e-4, **fields)(build)


def lm(kind: str, *, head: str = "ForCausalLM", **changed: Any) -> Callable[[], nn.Module]:
    """A causal language model of a family, from its config alone."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**(_SMALL | changed))
        return getattr(transformers, f"{kind}{head}")(config)

    return make


def _attention(prefix: str, *columns: str, row: str) -> dict[str, Any]:
    return {f"{prefix}.{name}": COL for name in columns} | {f"{prefix}.{row}": ROW}


_L = "model.layers.*"
LLAMA = _attention(f"{_L}.self_attn", "q_proj", "k_proj", "v_proj", row="o_proj") | _attention(
    f"{_L}.mlp", "gate_proj", "up_proj", row="down_proj"
)
VOCAB = {"model.embed_tokens": ROW, "lm_head": COL}
GQA = {"num_key_value_heads": 2}
TWO = {"num_hidden_layers": 2}  # Gemma 2 has layers of two kinds

family("Llama, grouped keys", lm("Llama", **GQA), LLAMA, "input_ids", "attention_mask", reduces=2)
family("Llama, by vocabulary", lm("Llama", **GQA), LLAMA | VOCAB, "input_ids", reduces=3, gathers=1)
family("Llama, dynamic", lm("Llama", **GQA), LLAMA, "input_ids", reduces=2, dynamic=True)
family("Llama, eager", lm("Llama", **GQA, **TWO, attn_implementation="eager"), LLAMA, "input_ids", reduces=4)
family("Qwen2", lm("Qwen2", **GQA), LLAMA, "input_ids", reduces=2)
family("Qwen3", lm("Qwen3", num_key_value_heads=3, head_dim=8), LLAMA, "input_ids", reduces=2)
family("Mistral", lm("Mistral", **GQA, sliding_window=4), LLAMA, "input_ids", "attention_mask", reduces=2)
TIED = VOCAB | {"lm_head": COL}
family(
    "Gemma, tied",
    lm("Gemma", num_key_value_heads=1, head_dim=8),
    LLAMA | TIED,
    "input_ids",
    reduces=3,
    gathers=1,
)
family("Gemma 2", lm("Gemma2", **GQA, **TWO, head_dim=8, sliding_window=4), LLAMA, "input_ids", reduces=4)
PHI3 = {f"{_L}.self_attn.qkv_proj": COL, f"{_L}.self_attn.o_proj": ROW}
PHI3 |= {f"{_L}.mlp.gate_up_proj": COL, f"{_L}.mlp.down_proj": ROW}
family("Phi 3, grouped and fused", lm("Phi3", **GQA), PHI3, "input_ids", reduces=2)
PHI = _attention(f"{_L}.self_attn", "q_proj", "k_proj", "v_proj", row="dense") | {
    f"{_L}.mlp.fc1": COL,
    f"{_L}.mlp.fc2": ROW,
}
family("Phi", lm("Phi"), PHI, "input_ids", reduces=2)
NEOX = {"query_key_value": COL, "attention.dense": ROW, "dense_h_to_4h": COL, "dense_4h_to_h": ROW}
NEOX = {
    f"gpt_neox.layers.*.{'mlp.' if '4h' in k else '' if '.' in k else 'attention.'}{k}": v
    for k, v in NEOX.items()
}
family("GPT-NeoX", lm("GPTNeoX"), NEOX, "input_ids", reduces=2)
OPT = _attention("model.decoder.layers.*.self_attn", "q_proj", "k_proj", "v_proj", row="out_proj")
OPT |= {"model.decoder.layers.*.fc1": COL, "model.decoder.layers.*.fc2": ROW}
family("OPT", lm("OPT", ffn_dim=40, word_embed_proj_dim=48), OPT, "input_ids", "attention_mask", reduces=2)
GPT2 = {"attn.c_attn": COL, "attn.c_proj": ROW, "mlp.c_fc": COL, "mlp.c_proj": ROW}
GPT2 = {f"transformer.h.*.{name}": style for name, style in GPT2.items()}
_GPT2_SIZES: dict[str, Any] = {
    "head": "LMHeadModel",
    "n_embd": 48,
    "n_layer": 1,
    "n_head": 6,
    "n_positions": 32,
}
_WHOLE = {"reduces": 2, "decomposes": False}  # torch cannot decompose its fused attention for a view
family("GPT-2", lm("GPT2", **_GPT2_SIZES), GPT2, "input_ids", "attention_mask", **_WHOLE)
family("GPT-2, dynamic", lm("GPT2", **_GPT2_SIZES), GPT2, "input_ids", dynamic=True, **_WHOLE)
family(
    "GPT-2, tied by vocabulary",
    lm("GPT2", **_GPT2_SIZES, attn_implementation="eager"),
    GPT2 | {"transformer.wte": ROW, "lm_head": COL},
    "input_ids",
    reduces=3,
    gathers=1,
)
BLOOM = {"self_attention.query_key_value": COL, "self_attention.dense": ROW}
BLOOM |= {"mlp.dense_h_to_4h": COL, "mlp.dense_4h_to_h": ROW}
family(
    "Bloom",
    lm("Bloom", n_layer=1, n_head=6),
    {f"transformer.h.*.{name}": style for name, style in BLOOM.items()},
    "input_ids",
    reduces=2,
)
FALCON = {f"transformer.h.*.{name}": style for name, style in BLOOM.items()}
family("Falcon, one key head", lm("Falcon", ffn_hidden_size=40), FALCON, "input_ids", reduces=1, gathers=1)
MIXTRAL = _attention(f"{_L}.self_attn", "q_proj", "k_proj", "v_proj", row="o_proj")
family(
    "Mixtral, attention cut",
    lm("Mixtral", **GQA, num_local_experts=4, num_experts_per_tok=2),
    MIXTRAL,
    "input_ids",
    reduces=1,
)
EXPERTS = {f"{_L}.mlp.experts.gate_up_proj": COL, f"{_L}.mlp.experts.down_proj": ROW}
family(
    "Mixtral, experts cut",
    lm("Mixtral", **GQA, num_local_experts=4, num_experts_per_tok=2),
    MIXTRAL | EXPERTS,
    "input_ids",
    reduces=2,
)


def _bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**_SMALL))


BERT = _attention("encoder.layer.*.attention.self", "query", "key", "value", row="none")
BERT.pop("encoder.layer.*.attention.self.none")
BERT |= {"encoder.layer.*.attention.output.dense": ROW}
BERT |= {"encoder.layer.*.intermediate.dense": COL, "encoder.layer.*.output.dense": ROW}
family("BERT", _bert, BERT, "input_ids", "attention_mask", reduces=2, wrapper=Encoder)
family("BERT, dynamic", _bert, BERT, "input_ids", reduces=2, wrapper=Encoder, dynamic=True)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(**_SMALL, image_size=16, patch_size=8, num_channels=3)
    return transformers.ViTForImageClassification(config)


VIT = _attention("vit.layers.*.attention", "q_proj", "k_proj", "v_proj", row="o_proj")
VIT |= {"vit.layers.*.mlp.fc1": COL, "vit.layers.*.mlp.fc2": ROW}
family(
    "ViT", _vit, VIT, reduces=2, wrapper=Encoder, given=lambda: {"pixel_values": torch.randn(2, 3, 16, 16)}
)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=8,
        d_ff=40,
        num_layers=1,
        num_heads=6,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


T5 = {f"*.{name}": COL for name in ("q", "k", "v", "wi")} | {"*.o": ROW, "*.wo": ROW}
family("T5", _t5, T5, "input_ids", "decoder_input_ids", reduces=2 + 3)


def _bart() -> nn.Module:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _BART_SIZES.items()}
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=48, max_position_embeddings=32, pad_token_id=0, **sizes
    )
    return transformers.BartForConditionalGeneration(config)


_BART_SIZES = {"layers": 1, "attention_heads": 6, "ffn_dim": 40}
BART = {f"*.{name}": COL for name in ("q_proj", "k_proj", "v_proj", "fc1")} | {
    "*.out_proj": ROW,
    "*.fc2": ROW,
}
family("BART", _bart, BART, "input_ids", "decoder_input_ids", reduces=2 + 3)
