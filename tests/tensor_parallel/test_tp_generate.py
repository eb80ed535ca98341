"""Language models generate over ranks as they do whole, each rank with its heads of one cache."""

from __future__ import annotations

import os
import re
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import lockstep
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from typer.testing import CliRunner

from fake_ranks import as_one_of
from ranks import RankPool, on_ranks
from shardwise.cli import app
from shardwise.errors import RankMismatchError, ShardingError, here
from shardwise.files.tensors import StoredTensor
from shardwise.hf.generate import cut_folder, generate_command
from shardwise.tensor_parallel import counts, cut_steps, export_steps, generate, strategies_of
from shardwise.tensor_parallel.canonical import functionalize
from shardwise.tensor_parallel.pretrained import resolve_strategies
from shardwise.tensor_parallel.serving import Programs, check_positions, describe_choice, greedy, scores_of
from shardwise.verify.processes import RankError, run_ranks

transformers.logging.set_verbosity_error()

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")

TOKENS = 5
TEXT: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 40,
}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**TEXT, num_hidden_layers=1),
    "mistral": lambda: transformers.MistralConfig(**TEXT, num_hidden_layers=1, sliding_window=4),
    "mixtral": lambda: transformers.MixtralConfig(**TEXT, num_hidden_layers=1, num_local_experts=4),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **TEXT, num_hidden_layers=1, intermediate_size_mlp=40, num_local_experts=4, head_dim=8
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**TEXT, "num_key_value_heads": 6},
        num_hidden_layers=1,
        first_k_dense_replace=0,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=50, n_embd=48, n_layer=1, n_head=6, n_positions=32),
    "t5": lambda: transformers.T5Config(
        vocab_size=50, d_model=48, d_kv=8, d_ff=40, num_layers=1, num_heads=6, decoder_start_token_id=0
    ),
}


def model_and_prompt(kind: str) -> tuple[nn.Module, Tensor]:
    """A model with random weights, and a prompt."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    name = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    return getattr(transformers, name).from_config(config).eval(), torch.randint(3, 50, (2, 6))


@cache
def exported(kind: str) -> tuple[nn.Module, Tensor, Programs]:
    """The same, with its programs: to export one, and to make it functional, takes longer than to cut it."""
    model, prompt = model_and_prompt(kind)
    prefill, decode = export_steps(model, prompt, TOKENS)
    return model, prompt, (functionalize(prefill), functionalize(decode))


def generate_whole(model: Any, prompt: Tensor) -> Tensor:
    """What the model generates by itself."""
    tokens: Tensor = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return tokens[:, -TOKENS:]


@torch.no_grad()
def generate_in_lockstep(ranks: list[Programs], prompt: Tensor) -> Tensor:
    """What the ranks generate, in this process, where their two programs do not write to one tensor."""
    tokens, cache = [], None
    for step in range(TOKENS):
        programs = [x[step > 0] for x in ranks]
        for program, constants in zip(programs, cache or [], strict=False):
            program.constants.update(
                {name: constants[name] for name in program.constants if name in constants}
            )
        results = lockstep.run(programs, tokens[-1] if tokens else prompt)
        assert all(torch.equal(results[0][0], x[0]) for x in results)
        cache = [program.constants for program in programs]
        tokens.append(results[0][0].argmax(-1, keepdim=True))
    return torch.cat(tokens, 1)


@pytest.mark.parametrize(
    ("kind", "reduces", "ranks"),
    [
        ("mistral", 2, 3),  # a window shorter than what it generates
        ("mixtral", 2, 2),  # experts
        ("gpt2", 2, 2),  # queries, keys and values by one weight
        ("t5", 3, 2),  # an encoder, and a cache of what it made
        ("llama4_text", 2, 2),  # experts of [in, out], rotations as complex numbers
        ("deepseek_v3", 1, 2),  # a cache of latents, whole on every rank; attention is not in its plan
    ],
)
def test_tokens_are_the_whole_models_and_a_token_takes_the_fewest_collectives(
    kind: str, reduces: int, ranks: int
) -> None:
    model, prompt, steps = exported(kind)
    programs = [cut_steps(steps, rank, ranks, strategies_of(model)) for rank in range(ranks)]
    for prefill, decode in programs:
        # two in each layer, one where the vocabulary is looked up, and the logits
        assert counts(decode) == {"all_reduce": reduces + 1, "all_gather": 1}
        shared = prefill.state_dict | prefill.constants
        stores = decode.state_dict | decode.constants
        assert all(x is shared[name] for name, x in stores.items() if name in shared)
    heads = sum(decode.constants["cache_keys_0"].shape[1] for _, decode in programs)
    # of 2 heads over 3 ranks, each is on two
    assert heads == (6 if kind in ("gpt2", "t5") else 2 if ranks == 2 else 4)
    assert torch.equal(generate_in_lockstep(programs, prompt), generate_whole(model, prompt))


@on_ranks(2)
def test_prompts_that_differ_between_ranks_are_refused_before_anything_runs() -> None:
    prompt = torch.full((1, 3 + torch.distributed.get_rank()), 1)
    with pytest.raises(RankMismatchError, match="what to generate"):
        generate(nn.Linear(1, 1), prompt, TOKENS)


def on_this_rank(target: Any, *args: Any) -> Any:
    return target(lambda: None, *args)


def test_the_command_generates_by_the_weights_of_a_folder(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_pooled(target: Any, *args: Any, world_size: int, timeout: float) -> list[Any]:
        return ranks(on_this_rank, target, *args, world_size=world_size)

    monkeypatch.setattr("shardwise.verify.processes.run_ranks", run_pooled)
    model, prompt = model_and_prompt("llama")
    plain = generate_whole(model, prompt[:1])
    model.generation_config.suppress_tokens = plain[0, :1].tolist()
    assert not torch.equal(generate_whole(model, prompt[:1]), plain)
    model.save_pretrained(tmp_path)
    ids = " ".join(map(str, prompt[0].tolist()))
    command = ["tp", "generate", str(tmp_path), "--ids", ids, "--tokens", str(TOKENS)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    tokens, text = result.output.strip().splitlines()
    assert tokens == " ".join(map(str, generate_whole(model, prompt)[0].tolist()))
    bytes_here = 2 * 11 * 8 * 4  # keys and values, tokens, a head's width, float32
    assert text == f"A token: 3 all_reduce, 1 all_gather; {bytes_here:,} bytes of cache on rank 0"


def test_what_the_command_was_given_wrong_is_named_in_one_line_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.verify.processes.run_ranks", mock.Mock(side_effect=AssertionError))
    kinds = ("llama", "gpt2", "vit", "heads", "pickled", "beams", "clock", "words")
    folders = {kind: str(tmp_path / kind) for kind in kinds}
    for kind in ("llama", "gpt2"):
        CONFIGS[kind]().save_pretrained(folders[kind])
    for kind in kinds[3:]:
        CONFIGS["llama"]().save_pretrained(folders[kind])
    config = tmp_path / "heads" / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 6', '"num_attention_heads": 5'))
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    transformers.GenerationConfig(guidance_scale=2.0).save_pretrained(folders["beams"])
    transformers.GenerationConfig(max_time=1, guidance_scale=1).save_pretrained(folders["clock"])
    transformers.GenerationConfig(bad_words_ids=[[70]]).save_pretrained(folders["words"])
    vit = transformers.ViTConfig(architectures=["ViTForImageClassification"])
    vit.save_pretrained(folders["vit"])
    (tmp_path / "vit" / "model.safetensors").touch()
    (tmp_path / "plan.json").write_text('{"lm_haed": "colwise"}')
    folder, vocabulary = folders["llama"], "expected at least one, from 0 to 49"
    for command, message in (
        ([folder], "expected one prompt, --ids or --text, found neither; give one of them"),
        ([folder, "--ids", "1", "--text", "a"], "expected one prompt, --ids or --text, found both; give one"),
        ([folder, "--ids", "1 x"], "--ids takes token ids separated by spaces, found '1 x'"),
        ([folder, "--ids", " "], f"the prompt has the tokens []; {vocabulary}"),
        ([folder, "--ids", "-1"], f"the prompt has the tokens [-1]; {vocabulary}"),
        ([folder, "--ids", "1 50"], f"the prompt has the tokens [1, 50]; {vocabulary}"),
        (["no/lm", "--ids", "1"], "no/lm: no such folder; expected one with a transformers config"),
        ([folder, "--text", "a"], f"cannot read the tokenizer in {folder}: "),
        (
            [folder, "--ids", "1", "--strategies", str(tmp_path / "plan.json")],
            "the strategy for 'lm_haed' matches no parameter of the program; did you mean lm_head?",
        ),
        (
            [folders["pickled"], "--ids", "1"],
            f"{folders['pickled']}: expected a folder with model.",
        ),
        (
            [folders["vit"], "--ids", "1"],
            "ViTForImageClassification generates no text; use a causal",
        ),
        ([folders["heads"], "--ids", "1"], f"cannot read the config in {folders['heads']}: Class validation"),
        (
            [folders["gpt2"], "--ids", "1 2", "--tokens", "32"],
            "GPT2LMHeadModel looks up 33 positions, but its table transformer.wpe has only 32;",
        ),
        (
            [folders["beams"], "--ids", "1"],
            "the generation config of LlamaForCausalLM sets guidance_scale=2.0, which greedy generation",
        ),
        (
            [folders["clock"], "--ids", "1"],
            "the generation config of LlamaForCausalLM sets max_time=1, which",
        ),
        ([folders["words"], "--ids", "1"], "LlamaForCausalLM cannot generate with its generation config ("),
    ):
        result = CliRunner().invoke(app, ["tp", "generate", *command])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert result.stderr.startswith(f"Error: {message}")


def refuse(alive: Any) -> None:
    raise ShardingError(f"{here()}: there is nothing to cut")


def test_the_message_of_a_rank_that_refuses_names_it_once() -> None:
    with pytest.raises(RankError, match=r"^rank: \S+: ShardingError: there is nothing to cut$"):
        run_ranks(refuse, world_size=1, timeout=60)


def test_warnings_of_the_ranks_reach_the_terminal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ([7], "A token: nothing", ["the weights are random"])
    monkeypatch.setattr("shardwise.verify.processes.run_ranks", lambda *_, **__: [result, result])
    CONFIGS["llama"]().save_pretrained(tmp_path)
    ran = CliRunner().invoke(app, ["tp", "generate", str(tmp_path), "--ids", "1"])
    assert (ran.stdout, ran.stderr) == ("7\nA token: nothing\n", "Warning: the weights are random\n")


@as_one_of(2, rank=0)
def test_weights_drawn_at_random_and_what_auto_leaves_whole_are_said(tmp_path: Path) -> None:
    transformers.BloomConfig(vocab_size=50, hidden_size=48, n_layer=1, n_head=6).save_pretrained(tmp_path)
    _, _, notes = generate_command(lambda: None, tmp_path, [1, 2], 2, 7, None)
    random, plan, *choices = notes
    assert random == f"{tmp_path} has no weights: they are random, from seed 7"
    assert plan.startswith("BloomForCausalLM has no tensor-parallel plan")
    assert len(choices) == (dist.get_rank() == 0)  # which alone says it
    for choice in choices:
        assert choice.startswith("strategies='auto' chose")
        assert "rank 0 holds" in choice


def test_positions_end_with_the_table_that_has_them() -> None:
    prompt = torch.ones(1, 3, dtype=torch.long)
    for kind, longest in (("gpt2", 30), ("llama", 300), ("t5", 300)):  # others are rotated, or biased
        check_positions(model_and_prompt(kind)[0], prompt, longest)
    bart = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, max_position_embeddings=8
    )
    model = transformers.BartForConditionalGeneration(bart)  # its table has two rows more
    check_positions(model, prompt, 8)
    with pytest.raises(ShardingError, match=r"looks up 9 positions, .*embed_positions has only 8;"):
        check_positions(model, prompt, 9)


def test_a_window_that_the_size_of_the_cache_would_move_is_refused() -> None:
    config = transformers.GPTNeoConfig(
        vocab_size=50,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    )
    torch.manual_seed(0)
    model, prompt = transformers.GPTNeoForCausalLM(config).eval(), torch.tensor([[4, 9, 7]])
    steps = export_steps(model, prompt, TOKENS)
    assert torch.equal(greedy(cut_steps(steps, 0, 1, {}), prompt, TOKENS), generate_whole(model, prompt))
    with pytest.raises(ShardingError, match=r"windows of 8 tokens by the size of its cache, .* for 9 "):
        check_positions(model, prompt, TOKENS + 1)


SETTINGS = {
    "repetition_penalty": 2.0,
    "min_new_tokens": TOKENS - 1,
    "suppress_tokens": [7],
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "forced_bos_token_id": 9,
    "num_beams": 3,  # this and the next ones count for other ways to generate
    "temperature": 0.5,
    "do_sample": True,
}


@pytest.mark.parametrize("kind", ["mistral", "t5"])
def test_settings_of_a_generation_config_that_change_greedy_tokens_are_applied(kind: str) -> None:
    model, prompt, steps = exported(kind)
    settings = transformers.GenerationConfig(**SETTINGS, decoder_start_token_id=11)
    plain = generate_whole(model, prompt)
    ends = [int(plain[0, 1]), int(plain[1, 1])]
    with mock.patch.object(model, "generation_config", settings):
        if model.config.is_encoder_decoder:  # which begins with another token
            steps = export_steps(model, prompt, TOKENS)
        programs = cut_steps(steps, 0, 1, {})
        expected = model.generate(  # type: ignore[operator]
            prompt, max_new_tokens=TOKENS, do_sample=False, num_beams=1, eos_token_id=ends
        )[:, -TOKENS:]
        scores = scores_of(model, prompt, TOKENS, ends=ends)
    assert not torch.equal(expected, plain)
    assert torch.equal(greedy(programs, prompt, TOKENS, ends=ends, scores=scores), expected)


@as_one_of(2)
def test_of_a_model_that_cannot_be_cut_a_rank_says_what_it_found(tmp_path: Path) -> None:
    folder = tmp_path / str(torch.distributed.get_rank())
    CONFIGS["llama"]().save_pretrained(folder)
    with pytest.raises(ShardingError, match=r"^the strategy for 'lm_haed' .*; did you mean lm_head\?$"):
        generate_command(lambda: None, folder, [1], 2, 0, {"lm_haed": "colwise"})


def test_a_rank_reads_from_a_folder_just_what_it_holds(tmp_path: Path) -> None:
    model, prompt, steps = exported("mixtral")
    model.save_pretrained(tmp_path)  # each expert by itself, as this model does not have them
    expected = cut_steps(steps, 1, 2, strategies_of(model))
    read, elements = StoredTensor.read, 0

    def counted(self: StoredTensor, begins: Any, ends: Any) -> Tensor:
        nonlocal elements
        part = read(self, begins, ends)
        elements += part.numel()
        return part

    with mock.patch.object(StoredTensor, "read", counted):
        part = cut_folder(tmp_path, prompt, TOKENS, 1, 2)
    weights = part[1].state_dict
    assert elements == sum(tensor.numel() for tensor in weights.values())
    for name, tensor in (expected[1].state_dict | expected[1].constants).items():
        assert torch.equal((weights | part[1].constants)[name], tensor), name


def test_a_word_or_a_model_without_a_meaning_here_is_named() -> None:
    model, _ = model_and_prompt("llama")
    model._tp_plan["model.layers.*.mlp"] = "ep_dispatch_experts"
    with pytest.raises(ShardingError, match=r"'ep_dispatch_experts' for 'model.layers.\*.mlp'"):
        strategies_of(model)
    with pytest.raises(ShardingError, match="Linear has no tensor-parallel plan"):
        strategies_of(nn.Linear(2, 2))


def test_a_plan_that_leaves_most_of_a_model_whole_warns_with_the_way_out() -> None:
    model, _ = model_and_prompt("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategies_of(model)
    model._tp_plan = {"lm_head": "colwise"}
    with pytest.warns(UserWarning, match=r"cuts only \d+% of its [\d,]+ bytes \(lm_head\).*'auto'"):
        assert resolve_strategies(model, None) == {"lm_head": "colwise"}


def test_a_model_without_a_plan_is_cut_by_auto_and_says_so() -> None:
    model, _ = model_and_prompt("llama")
    model._tp_plan = {}
    with pytest.warns(UserWarning, match="LlamaForCausalLM has no .* plan, so strategies='auto' chooses"):
        assert resolve_strategies(model, None) == "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_strategies(model, "auto") == "auto"
        assert resolve_strategies(model, {"lm_head": "colwise"}) == {"lm_head": "colwise"}


def test_what_auto_chose_is_said_with_the_bytes_that_it_leaves() -> None:
    _, _, steps = exported("mistral")  # so small that sending takes longer than computing
    message = r"'auto' chose to cut nothing, which is fastest .*; rank 0 holds ([\d,]+) of \1 bytes"
    with pytest.warns(UserWarning, match=message):
        cut_steps(steps, 0, 2, "auto")
    columns = dict.fromkeys(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"], "colwise")
    prefill, _ = cut_steps(steps, 1, 2, columns)
    modules = r"colwise: (?:model.layers.\*.mlp.(?:gate|up)_proj(?:, |; )){2}"
    match = re.search(modules + r"rank 1 holds ([\d,]+) of ([\d,]+) bytes", describe_choice(prefill))
    assert match is not None
    local, whole = (int(number.replace(",", "")) for number in match.groups())
    assert whole - local == 2 * 4 * 48 * 40 // 2


ROTATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dynamic": (transformers.LlamaConfig, {"factor": 2.0}),
    "longrope": (
        transformers.Phi3Config,
        {"factor": 2.0, "short_factor": [1.5] * 4, "long_factor": [4.0] * 4},
    ),
}


@pytest.mark.parametrize("kind", ROTATIONS)
def test_positions_that_change_with_the_length_are_as_for_short_texts_and_refused_for_long(
    kind: str, tmp_path: Path
) -> None:
    config, rotation = ROTATIONS[kind]
    fields = {**TEXT, "pad_token_id": 0, "num_hidden_layers": 1, "max_position_embeddings": 16}
    fields["original_max_position_embeddings"] = 16
    torch.manual_seed(0)
    rotations = {"rope_type": kind, "rope_theta": 100.0, **rotation}
    model = transformers.AutoModelForCausalLM.from_config(config(**fields, rope_parameters=rotations)).eval()
    model.save_pretrained(tmp_path)
    prompt = torch.randint(3, 50, (2, 6))
    with torch.no_grad():  # after a long text the model has other frequencies
        model(torch.randint(3, 50, (1, 24)))
    if kind == "dynamic":
        programs = cut_steps(export_steps(model, prompt, TOKENS), 0, 1, {})
    else:
        programs = cut_folder(tmp_path, prompt, TOKENS, 0, 1, {})
    assert torch.equal(generate_in_lockstep([programs], prompt), generate_whole(model, prompt))
    limit = f"model.rotary_emb of {type(model).__name__} \\({kind}\\) .* after 16 tokens.* are 17"
    with pytest.raises(ShardingError, match=limit):
        export_steps(model, prompt, 11)
    with pytest.raises(ShardingError, match=r"tokens=0: .* at least 1"):
        export_steps(model, prompt, 0)


def test_a_model_that_cannot_be_exported_with_a_cache_is_named() -> None:
    """Falcon's config tells six key heads, where its attention has one."""
    config = transformers.FalconConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, multi_query=True
    )
    model = transformers.FalconForCausalLM(config).eval()
    with pytest.raises(
        ShardingError, match="FalconForCausalLM cannot be exported with a cache of fixed size"
    ):
        export_steps(model, torch.ones(1, 3, dtype=torch.long), TOKENS)


@pytest.mark.filterwarnings("ignore:the plan of")
def test_every_word_of_transformers_is_known_or_refused() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    model, _ = model_and_prompt("llama")
    refused = set()
    for word in ALL_PARALLEL_STYLES:
        model._tp_plan = {"lm_head": word}
        try:
            assert strategies_of(model).get("lm_head") in ("colwise", "rowwise", "sequence_parallel", None)
        except ShardingError:
            refused.add(word)
    assert refused == {"ep_dispatch_experts", "grouped_gemm"}
