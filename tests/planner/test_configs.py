"""Plans from transformers' configs: encoders, encoders with decoders, what takes no tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.plan_real import SEQUENCE, compare, setup_of
from torch import nn

import shardwise
from fake_ranks import as_one_of
from planner.models import Even
from shardwise import planner
from shardwise.errors import ShardingError
from shardwise.planner.measure import moments
from shardwise.planner.models import model_of
from shardwise.planner.record import record
from shardwise.planner.setup import Setup

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 96}


def written(path: Path, kind: str, **values: Any) -> str:
    transformers = pytest.importorskip("transformers")
    file = path / f"{kind}-{os.getpid()}.json"  # each rank's own: one would read what another has begun
    transformers.AutoConfig.for_model(kind, **values).to_json_file(file)
    return str(file)


@as_one_of(2, rank=0)
def test_a_plan_of_an_encoder_with_its_decoder_is_what_a_real_step_takes(tmp_path: Path) -> None:
    found = compare(written(tmp_path, "t5", num_layers=1, num_decoder_layers=2, **T5), setup_of(2))
    if dist.get_rank() == 0:
        assert found.measured_alive == found.planned_alive
    assert found.measured_sent == found.planned_sent
    assert found.same_order


def test_blocks_of_an_encoder_and_of_its_decoder_are_groups(tmp_path: Path) -> None:
    config = written(tmp_path, "t5", num_layers=5, num_decoder_layers=5, **T5)
    made = shardwise.plan(config, ranks=2, sequence=SEQUENCE)
    assert made.layers == 10
    assert made.whole == "block 1 has something else than block 0"  # which has its biases of positions
    assert [one.name for one in made.groups if one.groups > 1] == ["blocks 1 to 4", "blocks 6 to 9"]
    assert made.assumed == [
        "It is planned as a T5ForConditionalGeneration",
        "Its encoder reads as many tokens as its decoder",
    ]
    assert "blocks = [*model.encoder.block, *model.decoder.block]" in planner.python(config, made.setup)


def test_what_has_no_logits_of_tokens_alone_is_refused_in_chunks_and_over_sequences(tmp_path: Path) -> None:
    config = written(tmp_path, "t5", num_layers=1, num_decoder_layers=1, **T5)
    with pytest.raises(ShardingError, match=r"has its own loss, which cannot be chunked: plan with"):
        shardwise.plan(config, ranks=2, sequence=SEQUENCE, loss="chunked")
    with pytest.raises(ShardingError, match="does not say how its sequences are cut"):
        shardwise.plan(config, ranks=2, sequence=SEQUENCE, ulysses=2)


def test_sequences_of_a_deep_config_are_cut_and_leave_the_config_as_it_is(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 10, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = written(tmp_path, "llama", intermediate_size=64, vocab_size=96, **sizes)
    model = model_of(config, sequence=SEQUENCE)
    made = shardwise.plan(model, ranks=2, sequence=SEQUENCE, ulysses=2)
    assert (made.layers, made.whole) == (10, "")
    built: Any = model.build(2)
    assert built.config._attn_implementation == "sdpa"
    setup = Setup(ranks=2, sequence=SEQUENCE)
    again, anew = (record(one, setup, layers=2) for one in (model, model_of(config, sequence=SEQUENCE)))
    assert moments(again) == moments(anew)


def test_a_quantized_config_is_planned_as_what_it_quantizes_and_the_plan_says_so(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    quantized = {"quant_method": "gptq", "bits": 4}
    config = written(tmp_path, "llama", vocab_size=96, quantization_config=quantized, **sizes)
    made = shardwise.plan(config, ranks=2, sequence=SEQUENCE)
    assert made.assumed == [
        "Its quantization_config is not planned: all parameters are in stored_dtype, and trained"
    ]


def test_an_encoder_is_planned_as_what_its_config_names(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 96}
    for name, said in {
        "BertForMaskedLM": ["It is planned as a BertForMaskedLM"],
        "BertLMHeadModel": [],
        "": ["It is planned as a BertForMaskedLM"],
        "BertForSequenceClassification": [
            "It is planned as a BertForMaskedLM, not as the BertForSequenceClassification that its"
            " architectures name"
        ],
    }.items():
        layers = 10 if name == "BertForMaskedLM" else 1  # one depth of which few blocks are run is enough
        named = [name] if name else None
        config = written(tmp_path, "bert", num_hidden_layers=layers, architectures=named, **sizes)
        made = shardwise.plan(config, ranks=2, sequence=SEQUENCE)
        assert (made.layers, made.whole) == (layers, "")
        assert made.assumed == said


def test_a_block_that_runs_several_times_is_planned_as_often_as_it_runs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "embedding_size": 16, "num_attention_heads": 4, "intermediate_size": 64}
    found = {}
    for layers in (2, 5):
        config = written(tmp_path, "albert", num_hidden_layers=layers, vocab_size=96, **sizes)
        found[layers] = shardwise.plan(config, ranks=2, sequence=SEQUENCE)
        assert found[layers].layers == 1
    # Of each run: four projections, scores and their product with values, and two layers between.
    of_a_run = 3 * 2 * SEQUENCE * (4 * 32 * 32 + 2 * SEQUENCE * 32 + 2 * 32 * 64)
    assert found[5].model_flops - found[2].model_flops == 3 * of_a_run
    assert found[5].peak_bytes > found[2].peak_bytes
    # Of the last run too, what is kept for backward is no logits.
    assert found[5].peak.alive["activations"] > found[2].peak.alive["activations"]
    assert found[5].peak.alive["logits and loss"] == found[2].peak.alive["logits and loss"]


def test_attention_of_kernels_that_the_cpu_has_not_is_planned_as_sdpa(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
    config = json.loads(Path(written(tmp_path, "llama", intermediate_size=64, **sizes)).read_text())
    peaks = []
    for asked in ("sdpa", "flash_attention_2", "flex_attention"):
        file = tmp_path / f"{asked}.json"
        file.write_text(json.dumps(config | {"attn_implementation": asked}))
        made = shardwise.plan(str(file), ranks=2, sequence=64)
        peaks.append(made.peak_bytes)
        said = [] if asked == "sdpa" else [f"Its attn_implementation, {asked}, is planned as sdpa"]
        assert made.assumed == said
    assert len({*peaks}) == 1


def test_attention_with_dropout_or_values_of_their_own_width_has_no_scores_in_memory(tmp_path: Path) -> None:
    length, heads = 512, 4
    scores = heads * length * length * 2  # of a block, in bfloat16
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": heads, "vocab_size": 96}
    rest = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    peaks = []
    for dropout in (0.0, 0.1):
        config = written(tmp_path, "gpt2", attn_pdrop=dropout, **rest, **sizes)
        peaks.append(shardwise.plan(config, ranks=2, sequence=length).peak_bytes)
    assert peaks[0] == peaks[1]
    on_cpu = shardwise.plan(config, ranks=2, sequence=length, device="cpu")  # which has no such kernel
    assert on_cpu.peak_bytes > peaks[0] + 2 * scores

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": heads, "vocab_size": 96}
    sizes |= {"num_key_value_heads": heads, "intermediate_size": 64, "first_k_dense_replace": 2}
    sizes |= {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    of = {}
    for width in (16, 24):
        config = written(tmp_path, "deepseek_v2", v_head_dim=width, **sizes)
        of[width] = shardwise.plan(config, ranks=2, sequence=length)
    assert of[16].peak_bytes < of[24].peak_bytes < of[16].peak_bytes + scores
    # Narrower values: their projection, the product of scores with them, and the projection of the result.
    narrower = 3 * 2 * 2 * length * heads * 8 * (16 + length + 64)
    assert of[24].model_flops - of[16].model_flops == narrower


def test_a_model_that_takes_other_than_tokens_is_refused_by_what_it_takes(tmp_path: Path) -> None:
    speech = written(tmp_path, "whisper", architectures=["WhisperForConditionalGeneration"])
    with pytest.raises(
        ShardingError, match=r"WhisperForConditionalGeneration takes input_features; expected"
    ):
        shardwise.plan(speech, sequence=SEQUENCE)
    with pytest.raises(ShardingError, match="makes only a WhisperForCausalLM; to plan that, name it"):
        shardwise.plan(written(tmp_path, "whisper"), sequence=SEQUENCE)
    config = written(tmp_path, "perceiver")
    with pytest.raises(ShardingError, match=r"takes inputs; expected a model that takes tokens$"):
        shardwise.plan(config, sequence=SEQUENCE)


@pytest.mark.parametrize("first", [0, 1], ids=["in all", "in all but the first"])
def test_a_few_blocks_with_buffers_stand_for_all(first: int) -> None:
    def biased(layers: int = 12) -> nn.Module:
        model = Even(layers)
        for block in model.blocks[first:]:
            block.register_buffer("load", torch.zeros(16))
        return model

    assert not shardwise.plan(biased, ranks=2, sequence=8).whole
