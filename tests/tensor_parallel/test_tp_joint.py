"""Programs with their backward in them: cut before it was put in, and cut as they are."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lockstep
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_tp_training import APART, COL, FUSED, LANGUAGE, ROW, Block, Language
from torch import Tensor, nn
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import OutputKind

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.tensor_parallel import counts, tensor_parallel_transformation
from shardwise.tensor_parallel.state import placement_from_json, record_of, shard_of

Build = Callable[[], nn.Module]


class Llama(nn.Module):
    """RMS norms, rotated queries and keys, `keys` heads of keys for 8 of queries, a gated MLP."""

    def __init__(self, *, keys: int = 4, fused: bool = False) -> None:
        super().__init__()
        self.keys, size, kv = keys, 32, 4 * keys
        self.first, self.second = nn.RMSNorm(size), nn.RMSNorm(size)
        if fused:
            self.qkv = nn.Linear(size, size + 2 * kv, bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(size, n, bias=False) for n in (size, kv, kv))
        self.o = nn.Linear(size, size, bias=False)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.register_buffer("angles", torch.rand(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        h, kv = self.first(x), 4 * self.keys
        if hasattr(self, "qkv"):
            parts = self.qkv(h).split([32, kv, kv], -1)
        else:
            parts = self.q(h), self.k(h), self.v(h)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        q, k = self.rotated(q), self.rotated(k)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def rotated(self, x: Tensor) -> Tensor:
        a = self.angles[: x.shape[2]]
        left, right = x.chunk(2, -1)
        return x * a.cos() + torch.cat([-right, left], -1) * a.sin()


class Squared(nn.Module):
    """A block and a scalar of its outputs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()


class Untied(Language):
    """With a head of its own: torch gives no joint program of a model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


class Halves(nn.Module):
    """Eight heads of queries, of two projections, for two of keys: over 4 ranks, each has one of either."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.more, self.k, self.v = (nn.Linear(8, n) for n in (16, 16, 8, 8))
        self.o = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, more, k, v = (
            each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.more, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(torch.cat([q, more], 1), k, v, enable_gqa=True)
        return self.o(a.transpose(1, 2).flatten(2))


class ByHand(nn.Module):
    """Softmax of whole rows in heads, whose queries are normed, and of rows that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        a = (self.norm(q) @ k.mT).softmax(-1) @ v
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).softmax(-1))


def within(plan: dict[str, Any]) -> dict[str, Any]:
    return {f"block.{name}": style for name, style in plan.items()}


GATED = {"gate": COL, "up": COL, "down": ROW, "o": ROW}
SPLIT = {"q": COL, "k": COL, "v": COL, **GATED}
MODELS: dict[str, tuple[Build, dict[str, Any]]] = {
    "GPT": (lambda: Squared(Block(width=4)), within(APART)),
    "GPT, fused": (lambda: Squared(Block(fused=True)), within(FUSED)),
    "Llama, grouped heads": (lambda: Squared(Llama()), within(SPLIT)),
    "Llama, grouped heads, fused": (lambda: Squared(Llama(fused=True)), within({"qkv": COL, **GATED})),
    "Llama, key heads shared by ranks": (lambda: Squared(Llama(keys=2)), within(SPLIT)),
    "language model": (Untied, {**LANGUAGE, "head": COL}),
}
APART_HEADS = {"q": COL, "more": COL, "k": COL, "v": COL, "o": ROW}
BY_HAND = {"q": COL, "k": COL, "v": COL, "o": ROW, "up": COL, "down": ROW}


@functools.cache
def exported(name: str) -> tuple[nn.Module, tuple[Tensor, ...], ExportedProgram]:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    if name == "language model":
        args = (torch.randint(17, (3, 5)),)
    else:
        args = (torch.randn(2, 6, 32 if "Llama" in name else 24),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, args, torch.export.export(model, args)


def with_backward(program: ExportedProgram, *, core: bool = False) -> ExportedProgram:
    """The joint program; attention stays whole either way, for which torch's own function has no table."""
    table: dict[Any, Any] = dict(torch.export.default_decompositions()) if core else {}
    table.pop(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decompose: Any = exported_program._decompose_exported_program
        return decompose(
            program,
            cia_to_decomp={},
            python_decomp_table=table,
            joint_loss_index=0,
            decompose_custom_triton_ops=False,
        )


@functools.cache
def joint_of(name: str) -> ExportedProgram:
    return with_backward(exported(name)[2])


def cut(program: ExportedProgram, name: str, rank: int, ranks: int, **options: Any) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tensor_parallel_transformation(program, rank, ranks, "cpu", MODELS[name][1], **options)


def check(
    model: nn.Module, args: Any, program: ExportedProgram, returned: Sequence[Tensor], parts: Any
) -> None:
    """The loss, and of every gradient this rank's part."""
    loss = model(*args)
    names = [name for name, _ in model.named_parameters()]
    whole = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    checked = set()
    for spec, value in zip(program.graph_signature.output_specs, returned, strict=True):
        if spec.kind == OutputKind.LOSS_OUTPUT:
            torch.testing.assert_close(value, loss, rtol=1e-5, atol=1e-5)
        else:
            assert spec.kind == OutputKind.GRADIENT_TO_PARAMETER
            expected = shard_of(
                whole[spec.target], placement_from_json(parts[spec.target]["placement"]), parts["rank"]
            )
            torch.testing.assert_close(
                value, expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=spec.target: f"{n}: {m}"
            )
            checked.add(spec.target)
    assert checked == set(names)


def parts_of(program: ExportedProgram) -> dict[str, Any]:
    record = record_of(program)
    return {**record["parameters"], "rank": record["rank"]}


def all_reduces(name: str, ranks: int) -> dict[str, int]:
    """Two for a block and two for its backward, and two where ranks share heads of keys and values: their
    gradients' terms. A language model's loss takes two (maxima and sums), its embedding one, and one the
    gradient of the head's inputs."""
    shared = name == "Llama, key heads shared by ranks" and ranks > 2
    return {"all_reduce": 8 if name == "language model" else 4 + 2 * shared}


@pytest.mark.parametrize(("name", "ranks"), [*zip([*MODELS][1:], (3, 2, 2, 4, 3), strict=True)])
def test_a_joint_program_is_cut_forward_and_backward(name, ranks):
    model, args, _ = exported(name)
    programs = [cut(joint_of(name), name, rank, ranks) for rank in range(ranks)]
    for each, returned in zip(programs, lockstep.run(programs, *args), strict=True):
        check(model, args, each, returned, parts_of(each))
        assert counts(each) == all_reduces(name, ranks)


@pytest.mark.parametrize(
    ("block", "plan", "ranks"),
    [(Halves, APART_HEADS, 4), (ByHand, BY_HAND, 2)],
    ids=["heads that lie apart on a rank share keys with others", "softmax and norms of what is cut"],
)
def test_a_joint_program_of_less_common_parts_is_right(block, plan, ranks):
    torch.manual_seed(0)
    model, x = Squared(block()), torch.randn(2, 6, 8)
    joint = with_backward(torch.export.export(model, (x,)))
    programs = lockstep.parts(joint, within(plan), ranks=ranks)
    for each, returned in zip(programs, lockstep.run(programs, x), strict=True):
        check(model, (x,), each, returned, parts_of(each))


def test_a_table_cut_by_columns_has_its_gradient_without_communication():
    torch.manual_seed(0)
    model, ids = Squared(nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 4))), torch.randint(7, (3, 5))
    joint = with_backward(torch.export.export(model, (ids,)))
    programs = lockstep.parts(joint, within({"0": COL, "1": ROW}), ranks=2)
    for each, returned in zip(programs, lockstep.run(programs, ids), strict=True):
        check(model, (ids,), each, returned, parts_of(each))
        assert counts(each) == {"all_reduce": 1}


def test_ranks_without_a_head_compute_no_attention():
    model, args, _ = exported("GPT")
    programs = lockstep.parts(joint_of("GPT"), MODELS["GPT"][1], ranks=7)
    for each, returned in zip(programs, lockstep.run(programs, *args), strict=True):
        check(model, args, each, returned, parts_of(each))


@pytest.mark.parametrize("name", ["Llama, grouped heads", "language model"])
def test_a_decomposed_joint_program_is_cut_forward_and_backward(name):
    model, args, program = exported(name)
    joint = with_backward(program, core=True)
    programs = [cut(joint, name, rank, 2) for rank in range(2)]
    for each, returned in zip(programs, lockstep.run(programs, *args), strict=True):
        check(model, args, each, returned, parts_of(each))
        # sums of the loss's gradient in each row are not known to be what they are
        assert counts(each) == {"all_reduce": 9 if name == "language model" else 4}


@pytest.mark.parametrize("name", ["Llama, grouped heads", "language model"])
def test_a_program_cut_for_training_has_as_many_all_reduces_with_its_backward(name):
    model, args, program = exported(name)
    programs = [cut(program, name, rank, 2, training=True) for rank in range(2)]
    joint = [with_backward(each) for each in programs]
    for whole, each, returned in zip(programs, joint, lockstep.run(joint, *args), strict=True):
        check(model, args, each, returned, parts_of(whole))
        assert counts(each) == all_reduces(name, 2)


def test_training_changes_nothing_of_a_joint_program():
    plain, trained = (cut(joint_of("GPT"), "GPT", 0, 2, training=training) for training in (False, True))
    assert [str(node) for node in plain.graph.nodes] == [str(node) for node in trained.graph.nodes]


@on_ranks(2)
def test_a_joint_program_runs_over_gloo():
    model, args, program = exported("language model")
    part = cut(with_backward(program), "language model", dist.get_rank(), 2)
    store = {**part.constants, **part.state_dict}  # torch's own module of a joint program does not run
    inputs = [store[spec.target] for spec in part.graph_signature.input_specs if spec.target in store]
    with CommCounter() as counter, torch.no_grad():
        returned = part.graph_module(*inputs, *args)
    check(model, args, part, returned, parts_of(part))
    assert [call.kind for call in counter.calls] == ["all_reduce"] * 8
