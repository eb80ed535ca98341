"""Plans: facts that any planner must reproduce, real runs, JSON, what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.plan_real import SEQUENCE, compare, decoder, gpt, learned, llama, setup_of
from torch import nn
from typer.testing import CliRunner

import shardwise
from fake_ranks import as_one_of
from planner.models import Even, TwoLists
from ranks import on_ranks
from shardwise import planner
from shardwise.cli import app
from shardwise.errors import LifecycleError, ShardingError
from shardwise.planner.measure import Moment
from shardwise.planner.models import model_of
from shardwise.planner.plan import plan_of, recording_of
from shardwise.planner.setup import Setup

GIB = 2**30


# ---------------------------------------------------------------- facts


def test_llama_3_8b_over_8_ranks_takes_what_is_known_of_it() -> None:
    made = shardwise.plan("llama3-8b", ranks=8, sequence=64, hardware="h100")
    assert made.parameters == 8_030_261_248
    assert not made.whole
    alive = made.moments[-1].alive
    assert alive["parameters"] / GIB == pytest.approx(3.74, abs=0.005)
    assert alive["optimizer"] == pytest.approx(2 * alive["parameters"], rel=1e-3)
    counts = {(one.kind, one.nbytes): one.count for one in made.sent}
    block = 218_112_000 * 2  # bytes of a block in bfloat16
    gathers = sum(n for (kind, size), n in counts.items() if kind == "all_gather" and size < 1.01 * block)
    reductions = sum(
        n for (kind, size), n in counts.items() if kind == "reduce_scatter" and size < 2.02 * block
    )
    assert (gathers, reductions) == (2 * 32, 32)

    kept = shardwise.plan("llama3-8b", ranks=8, sequence=64, reshard_after_forward=False)

    def gathered(plan: planner.Plan) -> int:
        """At the end of forward."""
        return [one for one in plan.moments if one.phase == "forward"][-1].alive["gathered"]

    assert gathered(kept) - gathered(made) == 32 * block + 128_256 * 4096 * 2  # and the embedding
    assert 31 * block / GIB == pytest.approx(12.59, abs=0.005)


@pytest.mark.parametrize(
    ("strategy", "printed"), [("ddp", "120.0"), ("zero1", "31.4"), ("zero2", "16.6"), ("fsdp", "1.9")]
)
def test_stages_divide_what_the_table_of_zeros_paper_says(strategy: str, printed: str) -> None:
    """Rajbhandari et al., 2020: 7.5e9 parameters on 64 ranks; 2, 2 and 12 bytes of each."""
    asked: dict[str, Any] = {"layout": "contiguous", "strategy": strategy, "param_dtype": "float32"}
    made = shardwise.plan(Even, ranks=64, sequence=8, **asked)
    alive = made.moments[-1].alive
    parameters = alive["parameters"] / (4 * made.parameters)
    moments = alive["optimizer"] / (8 * made.parameters)
    left = {"all_reduce": 1, "reduce_scatter": 1 / 64}  # of gradients, on each rank
    reduced = sum(left.get(one.kind, 0) * one.count * one.nbytes for one in made.sent)
    gradients = reduced / (4 * made.parameters)
    held = 2 * parameters + 2 * gradients + 12 * moments
    assert f"{7.5 * held:.1f}" == printed


@pytest.mark.parametrize(
    ("model", "hardware", "setup", "least"),
    [
        # a parameter and its two moments in float32: 96 GB
        ("llama3-8b", "h100", {"sequence": 64, "ranks": 1}, 12 * 8.03e9),
        # twice llm-foundry's largest micro-batch, 6: states, and of each token and block its hidden units
        # before and after GELU, and four times its width, in bfloat16: 87 GB
        (
            "mpt-7b",
            "a100-80gb",
            {"micro_batch": 12, "loss": "chunked"},
            12 * 6.65e9 / 8 + 12 * 2048 * 32 * 2 * (2 * 16384 + 4 * 4096),
        ),
    ],
    ids=["states", "activations"],
)
def test_what_cannot_fit_by_what_it_must_keep_is_told_not_to_fit(
    model: str, hardware: str, setup: dict[str, Any], least: float
) -> None:
    made = shardwise.plan(model, hardware=hardware, **setup)
    assert made.hardware is not None
    assert least > made.hardware.usable_bytes
    assert not made.fits
    assert made.reserved_bytes >= least
    assert made.free_bytes == made.hardware.usable_bytes - made.needed_bytes < 0


def test_what_is_needed_is_less_than_what_is_reserved_where_the_allocator_can_give_back() -> None:
    setup, of = Setup(ranks=2, sequence=256, micro_batch=4), model_of("gpt2", sequence=256)
    recording, _ = recording_of(of, setup)  # once for all devices
    made = plan_of(recording, of, setup, planner.hardware_of("a100-40gb"))
    tight = replace(made.hardware, memory_bytes=made.reserved_bytes + made.hardware.context_bytes - 2**20)
    again = plan_of(recording, of, setup, tight)
    assert again.fits
    assert again.given_back
    assert again.peak_bytes <= again.needed_bytes < made.reserved_bytes
    small = replace(made.hardware, memory_bytes=made.peak_bytes // 2 + made.hardware.context_bytes)
    short = plan_of(recording, of, setup, small)
    assert short.needed_bytes < 1.03 * again.needed_bytes
    # What a plan reserves that does not fit is no requirement.
    assert (again.taken, again.taken_bytes) == ("reserved", again.reserved_bytes)
    assert (short.taken, short.taken_bytes) == ("needed", short.needed_bytes)
    assert "  reserved  " in str(again)
    assert "  needed  " in str(short)
    assert "reserved" not in str(short)


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_a_few_blocks_stand_for_all_with_moments_in_8_bits(layout: str) -> None:
    asked: dict[str, Any] = {"ranks": 2, "sequence": 8, "optimizer": "AdamW 8 bits", "layout": layout}
    assert not shardwise.plan(lambda layers=10: Even(layers), **asked).whole


# ---------------------------------------------------------------- real runs


@pytest.mark.parametrize(
    ("factory", "changes"),
    [
        (gpt, {"checkpointing": "selective", "optimizer": "Muon", "accumulation": 2}),
        (gpt, {"checkpointing": "alternate", "loop_holds": "logits"}),
        (gpt, {"optimizer": "AdamW 8 bits", "layout": "contiguous"}),
        (llama, {"layout": "contiguous", "loss": "chunked"}),
        (llama, {"checkpointing": "full", "optimizer": "AdamW 8 bits"}),  # too small for any
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value.values())),
)
@on_ranks(2)
def test_a_plan_is_what_a_real_step_allocates_and_sends(factory: Any, changes: dict[str, Any]) -> None:
    found = compare(factory, setup_of(2, **changes))
    if dist.get_rank() == 0:  # a plan is of it; others may hold another share
        assert found.measured_alive == found.planned_alive
    assert found.measured_sent == found.planned_sent
    assert found.same_order


@pytest.mark.parametrize(
    ("factory", "changes"),
    [
        (llama, {"tensor": 2}),
        (llama, {"tensor": 2, "tensor_plan": "torchtitan"}),
        (learned, {"tensor": 2, "tensor_plan": "torchtitan"}),
        (decoder, {"tensor": 2, "sequence_parallel": False, "loss_parallel": True}),
        (decoder, {"tensor": 2, "layout": "contiguous", "loss": "chunked"}),
    ],
    ids=["tensor parallel", "its sequence", "its positions", "its logits", "its head"],
)
@as_one_of(4, rank=0)
def test_a_plan_is_what_four_ranks_allocate_and_send(factory: Any, changes: dict[str, Any]) -> None:
    found = compare(factory, setup_of(4, **changes))
    assert found.measured_alive == pytest.approx(found.planned_alive, rel=0.01)
    assert found.measured_sent == found.planned_sent
    assert found.same_order


# ---------------------------------------------------------------- what users meet


def test_a_plan_is_json_both_ways_and_says_whether_it_fits() -> None:
    made = shardwise.plan(gpt, ranks=4, sequence=SEQUENCE, hardware="a100-40gb")
    assert planner.from_json(planner.Plan, planner.to_json(made)) == made
    assert made.fits
    assert made.peak_bytes < made.reserved_bytes < made.hardware.memory_bytes
    assert 0 < made.mfu < 1
    assert f"{made.parameters:,} parameters" in str(made)
    assert "efficiencies are assumed" in str(made)
    assert made.likely > 0.99
    assert "too close to call" not in str(made)
    tight = replace(made.hardware, memory_bytes=made.needed_bytes + made.hardware.context_bytes)
    close = replace(made, hardware=tight)
    assert close.likely == 0.5
    assert "too close to call" in str(close)
    assert "50% likely to fit, 50% not to" in str(close)
    measured = replace(made.hardware, source="Measured by shardwise calibrate")
    assert "efficiencies were measured" in str(replace(made, hardware=measured))


def test_what_cannot_be_planned_is_refused_by_name(tmp_path: Path) -> None:
    def reads_values(layers: int = 2) -> nn.Module:
        model = gpt(layers)
        model.blocks[0].register_forward_hook(lambda module, args, output: output * output.sum().item())
        return model

    def returns_a_tuple(layers: int = 2) -> nn.Module:
        model = gpt(layers)
        model.register_forward_hook(lambda module, args, output: (output, None))
        return model

    with pytest.raises(ShardingError, match=r"must return its logits.*it returned a tuple$"):
        shardwise.plan(returns_a_tuple, sequence=SEQUENCE)
    with pytest.raises(ShardingError, match=r"no parameter that requires a gradient: nothing is trained$"):
        shardwise.plan(lambda: gpt().requires_grad_(False), sequence=SEQUENCE)
    with pytest.raises(ShardingError, match="replicas=3 does not divide 8 ranks:"):
        Setup(ranks=8, replicas=3)
    with pytest.raises(ShardingError, match=r"tensor=3 does not divide 8 ranks"):
        Setup(ranks=8, tensor=3)
    with pytest.raises(ShardingError, match="tensor=4 does not divide its 2 heads of keys; choose one of"):
        shardwise.plan(llama, tensor=4, sequence=SEQUENCE)
    with pytest.raises(ShardingError, match=r"tensor=2 does not divide the 33 tokens of a sequence"):
        shardwise.plan(llama, tensor=2, sequence=33, tensor_plan="torchtitan")
    smaller: dict[str, Any] = {"layout": "contiguous", "reshard_after_forward": 2}
    with pytest.raises(LifecycleError, match=r"smaller mesh after forward: it is tensor-parallel"):
        shardwise.plan(decoder, tensor=2, sequence=SEQUENCE, **smaller)
    with pytest.raises(ShardingError, match=r"GPT has no plan for tensor parallelism.*tensor_plan"):
        shardwise.plan(gpt, tensor=2, sequence=SEQUENCE)
    with pytest.raises(ShardingError, match="checkpointing must be one of"):
        Setup(checkpointing="some")
    with pytest.raises(ShardingError, match=r"unknown model 'llama9'.*llama3-8b"):
        shardwise.plan("llama9")
    with pytest.raises(ShardingError, match=r"unknown hardware 'abacus'.*h100"):
        shardwise.plan(gpt, sequence=SEQUENCE, hardware="abacus")
    with pytest.raises(ShardingError, match=r"reads_values cannot be run on fake tensors.*in 'blocks.0'"):
        shardwise.plan(reads_values, sequence=SEQUENCE)
    with pytest.raises(ShardingError, match="reshard_after_forward=3 does not divide the 8 ranks"):
        shardwise.plan(gpt, sequence=SEQUENCE, reshard_after_forward=3)
    with pytest.raises(
        ShardingError, match=r"in 'blocks.1' \(Doubled\).*planned.opaque.*a registered fake kernel"
    ):
        shardwise.plan(lambda layers=3: with_operator("opaque", layers), sequence=SEQUENCE)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ShardingError, match=r"expected a language model's config: .* from ViTConfig"):
        shardwise.plan(str(tmp_path / "config.json"), sequence=SEQUENCE)
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(ShardingError, match=r"has no model_type 'no such'; .*CONFIG_MAPPING$"):
        shardwise.plan(str(tmp_path / "config.json"))
    with pytest.raises(ShardingError, match="function that returns a module, not a Even"):
        shardwise.plan(Even())
    with pytest.raises(ShardingError, match="'nowhere:gpt' cannot be imported"):
        shardwise.plan("nowhere:gpt")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"ranks": "8"}, "ranks must be of type int, got '8'"),
        ({"ranks": 10**9}, "ranks must be at most 10,000,000, got 1,000,000,000"),
        ({"sequence": 10**8}, "sequence must be at most 10,000,000, got 100,000,000"),
        ({"micro_batch": 1.5}, "micro_batch must be of type int, got 1.5"),
        ({"clip_norm": 1}, "clip_norm must be of type bool, got 1"),
        ({"reshard_after_forward": "no"}, r"must be of type bool \| int \| None, got 'no'"),
        ({"param_dtype": "bf16"}, r"param_dtype must be one of .*'bfloat16'.*, got 'bf16'"),
        ({"rank": 8}, "Setup has no field rank: its fields are ranks, "),
    ],
)
def test_a_field_of_a_setup_that_is_unknown_or_of_another_type_is_named(
    fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ShardingError, match=told):
        planner.from_json(Setup, json.dumps(fields))
    with pytest.raises(ShardingError, match=told):
        shardwise.plan(gpt, **fields)


def test_json_that_is_no_plan_is_told_what_it_lacks() -> None:
    with pytest.raises(ShardingError, match="Setup cannot be read: this is no JSON"):
        planner.from_json(Setup, "{")
    with pytest.raises(ShardingError, match=r"object of its fields, got \[\]"):
        planner.from_json(Setup, "[]")
    with pytest.raises(ShardingError, match="Plan needs layers, parameters"):
        planner.from_json(planner.Plan, '{"model": "gpt"}')
    moment = json.dumps({"phase": "forward", "layer": "first", "alive": {}})
    with pytest.raises(ShardingError, match=r"Moment: layer must be of type int \| None, got 'first'"):
        planner.from_json(Moment, moment)


def test_of_two_lists_of_blocks_the_longest_is_cut_and_the_plan_says_so() -> None:
    made = shardwise.plan(TwoLists, ranks=2, sequence=8)
    assert made.layers == 12
    assert not made.whole
    assert {group.name for group in made.groups} == {"blocks 0 to 10", "block 11", "the root"}
    (assumed,) = made.assumed
    assert (
        "the 12 of 'blocks', the longest ModuleList; the modules of 'vision' (10) are no groups of" in assumed
    )
    assert assumed in str(made)


def test_a_mamba_is_planned_from_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "state_size": 4, "expand": 2}
    config = transformers.Mamba2Config(
        hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, n_groups=1, chunk_size=8, **sizes
    )
    path = tmp_path / "mamba.json"
    path.write_text(config.to_json_string())  # with an infinity; its kinds of blocks cannot be set
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    made = shardwise.plan(str(path), ranks=2, sequence=8)
    assert made.parameters == sum(p.numel() for p in model.parameters())
    path.write_text(config.to_json_string().replace('"hidden_size": 32', '"hidden_size": 33'))
    with pytest.raises(ShardingError, match=r"mamba.json is no transformers config: (?s:.*)hidden_size"):
        shardwise.plan(str(path), ranks=2, sequence=8)


class Doubled(nn.Module):
    def __init__(self, block: nn.Module, operator: Any) -> None:
        super().__init__()
        self.block, self.operator = block, operator

    def forward(self, x: torch.Tensor) -> Any:
        return self.operator(self.block(x))


def with_operator(name: str, layers: int = 3) -> nn.Module:
    model = gpt(layers)
    model.blocks[1] = Doubled(model.blocks[1], getattr(torch.ops.planned, name))
    return model


@pytest.fixture(autouse=True, scope="module")
def operators() -> Any:
    """One operator with a fake kernel, one without."""
    library = torch.library.Library("planned", "DEF")
    for name in ("shaped", "opaque"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: 2 * x, "CPU")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("planned::shaped", torch.empty_like, lib=library)
    yield
    library._destroy()


def test_an_operator_without_a_formula_is_named_with_what_is_assumed_of_it() -> None:
    made = shardwise.plan(lambda layers=3: with_operator("shaped", layers), sequence=SEQUENCE)
    (assumed,) = made.assumed
    assert assumed.startswith("planned.shaped has no formula of its operations: none are counted")
    assert assumed in str(made)


def test_a_transformers_config_is_planned_as_the_model_that_it_makes(tmp_path: Path) -> None:
    model = llama()
    path = tmp_path / "config.json"
    path.write_text(model.config.to_json_string())
    made = shardwise.plan(str(path), ranks=4, sequence=SEQUENCE, ends_apart=False)
    beside = shardwise.plan(llama, ranks=4, sequence=SEQUENCE, ends_apart=False)
    assert made.parameters == sum(p.numel() for p in model.parameters())
    assert (made.model, made.layers) == ("config", 2)
    assert (made.moments, made.sent) == (beside.moments, beside.sent)


def test_a_factory_that_casts_is_stored_as_the_setup_says_and_the_code_converts_it() -> None:
    def cast() -> nn.Module:
        return Even().bfloat16()

    made = shardwise.plan(cast, ranks=1, sequence=8)
    assert made.moments[-1].alive["parameters"] == 4 * made.parameters
    assert "makes parameters in bfloat16: they are converted to stored_dtype, float32" in str(made)
    assert "model.float()" in planner.python(cast, made.setup)
    assert "model.float()" not in planner.python(cast, Setup(stored_dtype="bfloat16"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("memory_bytes = 0", "memory_bytes must be a number above 0"),
        ("extra = 1", "it has unknown extra"),
        ("memory_bytes_per_s = 3.35", "is bytes a second, at least 1,000,000, got 3.35"),
        ("network_latency_s = 12", "is in seconds, at most 1, got 12"),
        ("matmul_efficiency = 7.2", "share of the peak, at most 1"),
        ("devices_per_host = 2.5", "a whole number"),
        ("context_bytes = 1e12", "context_bytes must be less than memory_bytes"),
        ("[[", "no profile"),
        ("source = 3", "source must be text, got 3"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named(tmp_path: Path, line: str, told: str) -> None:
    text = (Path(planner.__file__).parent / "hardware" / "h100.toml").read_text()
    kept = [one for one in text.splitlines() if one.split(" =")[0] != line.split(" =")[0]]
    mine = tmp_path / "peak_flops.toml"  # a name that says nothing
    mine.write_text("\n".join([line, *kept]))
    with pytest.raises(ShardingError, match=told):
        planner.hardware_of(str(mine))


def test_a_profile_may_be_in_the_home_folder_and_one_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(planner.__file__).parent / "hardware" / "h100.toml").read_text()
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert planner.hardware_of("~/mine.toml") == planner.hardware_of("h100")
    with pytest.raises(ShardingError, match=r"^~/other.toml: no such file; give a profile .* h100"):
        planner.hardware_of("~/other.toml")


@pytest.mark.parametrize(("times", "unit"), [(2**-10, "KiB"), (1, "MiB"), (2**10, "GiB")])
def test_memory_is_printed_in_the_unit_that_shows_it(times: float, unit: str) -> None:
    made = shardwise.plan(Even, ranks=2, sequence=8, hardware="h100")
    alive = {name: int(nbytes * times) for name, nbytes in made.peak.alive.items()}
    made = replace(made, moments=[replace(made.peak, alive=alive)], reserved_bytes=int(6e6 * times))
    printed = str(made)
    assert f"Memory of a rank, {unit}: " in printed
    rows = dict(re.findall(r"^  (\w[\w ]*?) {3,}(\d+\.\d\d)", printed, re.MULTILINE))
    size = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert {name: float(value) for name, value in rows.items()} == pytest.approx(
        {name: nbytes / size for name, nbytes in {**alive, "reserved": made.reserved_bytes}.items()},
        abs=0.005,
    )
    assert re.search(r"fits, with \d\d\.\d\d GiB on H100", printed)
    assert re.search(r"Sent by a rank: \d+\.\d\d MiB a step", printed)


def raises() -> nn.Module:
    raise ValueError("no such file")


def test_an_error_of_the_factory_is_one_line_and_not_the_status_of_a_plan_that_does_not_fit() -> None:
    result = CliRunner().invoke(app, ["plan", "test_plan:raises"])
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: \S*test_plan\.py:\d+: ValueError: no such file\n", result.stderr)
    result = CliRunner().invoke(app, ["plan", "test_plan:raises", "--traceback"])
    assert 'raise ValueError("no such file")' in result.stderr
    with pytest.raises(ShardingError, match=r"a module, not a int: 3"):
        shardwise.plan(lambda: 3)


def test_what_is_unused_or_frozen_costs_no_gradient() -> None:
    def last_alone() -> nn.Module:
        model = gpt()
        model.token.requires_grad_(False)
        model.position.requires_grad_(False)
        model.blocks[:-1].requires_grad_(False)
        model.unused = nn.Linear(8, 8)
        return model

    setup = Setup(ranks=2, sequence=SEQUENCE)
    made, whole = (shardwise.plan(of, setup) for of in (last_alone, gpt))
    assert made.model_flops == made.computed_flops < 0.7 * whole.model_flops
    again = shardwise.plan(last_alone, setup, checkpointing="full")
    assert again.model_flops == made.model_flops < again.computed_flops


def test_the_command_says_what_to_change_until_it_fits(tmp_path: Path) -> None:
    takes = shardwise.plan(gpt, ranks=2, sequence=SEQUENCE, micro_batch=512).reserved_bytes
    profile = tmp_path / "small.toml"
    text = (Path(planner.__file__).parent / "hardware" / "h100.toml").read_text()
    text = text.replace("memory_bytes = 85017493504", f"memory_bytes = {takes * 2 // 3}")
    profile.write_text(text.replace("context_bytes = 2147483648", "context_bytes = 0"))
    asked = ["plan", "test_plan:gpt", "--ranks", "2", "--sequence", str(SEQUENCE), "--micro-batch", "512"]
    result = CliRunner().invoke(app, [*asked, "--hardware", str(profile)])
    assert result.exit_code == 1, result.output
    assert "does not fit: short of" in result.output
    assert "fits, with" in result.output.splitlines()[-1]
