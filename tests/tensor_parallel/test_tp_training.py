"""Gradients of programs that were cut over ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fake_ranks import as_one_of
from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    operators,
    tensor_parallel_transformation,
)
from shardwise.tensor_parallel.state import placement_from_json, record_of, shard_of

COL, ROW = ColwiseParallel, RowwiseParallel


class Mlp(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 14), nn.Linear(14, 12, bias=bias)
        self.register_buffer("scale", torch.rand(14))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))) * self.scale)


class Block(nn.Module):
    """Attention and MLP; `keys` heads of keys, each of which serves several of the 6 heads of queries."""

    def __init__(
        self, *, keys: int = 6, fused: bool = False, width: int = 4, norm_heads: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.keys, self.width = 6, keys, width
        size, kv = 6 * width, keys * width
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        if fused:
            self.qkv = nn.Linear(size, size + 2 * kv)
        else:
            self.q, self.k, self.v = nn.Linear(size, size), nn.Linear(size, kv), nn.Linear(size, kv)
        self.o = nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.of_heads = nn.LayerNorm(width) if norm_heads else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        kv = self.keys * self.width
        if hasattr(self, "qkv"):
            parts = self.qkv(h).split([h.shape[-1], kv, kv], -1)
        else:
            parts = self.q(h), self.k(h), self.v(h)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        if self.of_heads is not None:
            q, k = self.of_heads(q), self.of_heads(k)
        if self.keys != self.heads:
            k, v = (each.repeat_interleave(self.heads // self.keys, 1) for each in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


BLOCK = {"o": ROW, "up": COL, "down": ROW}
APART = {"q": COL, "k": COL, "v": COL, **BLOCK}
FUSED = {"qkv": COL, **BLOCK}


class Language(nn.Module):
    """Ids to the loss of predicting the next; the head's weight is the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 24)
        self.places = nn.Embedding(5, 24)
        self.block = Block()
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Scaled(nn.Module):
    """Scaled by what layers give that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 14).requires_grad_(False), nn.Linear(14, 12).requires_grad_(False)
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.down(self.up(x.detach()))


LANGUAGE = {"embed": ROW, **{f"block.{name}": style for name, style in APART.items()}}

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {  # on 2 ranks; those of SEVERAL on 3
    "an MLP with a cut buffer": (Mlp, {"up": COL, "down": ROW}),
    "a row layer whose outputs are scattered": (
        lambda: Mlp(bias=False),
        {"up": COL, "down": RowwiseParallel(output_layouts=Shard(-1))},
    ),
    "scaled by layers that are not trained": (Scaled, {"up": COL, "down": ROW}),
    "a transformer block": (Block, APART),
    "a fused projection, norms of heads": (lambda: Block(fused=True, norm_heads=True), FUSED),
    "key heads that ranks share": (lambda: Block(keys=2), APART),
    "shared key heads, fused": (lambda: Block(keys=2, fused=True), FUSED),
    "one key head, fused": (lambda: Block(keys=1, fused=True), FUSED),
}


SEVERAL = (
    "a row layer whose outputs are scattered",
    "a transformer block",
    "key heads that ranks share",
    "shared key heads, fused",
)


def whole_and_local(
    build: Any, plan: dict[str, Any], x: Tensor, *, decomposed: bool = False
) -> tuple[nn.Module, nn.Module, Any]:
    """The whole model, this rank's module, and by parameter what this rank has of it."""
    torch.manual_seed(1)
    model = build().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (x,))
        program = program.run_decompositions() if decomposed else program
        local = tensor_parallel_transformation(
            program, dist.get_rank(), dist.get_world_size(), "cpu", plan, training=True
        )
    return model, local.module(), record_of(local)["parameters"]


def check_gradients(model: nn.Module, local: nn.Module, parameters: Any) -> None:
    """Is every gradient of this rank's the part of the whole model's that it should be?"""
    whole = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    checked = 0
    for name, parameter in local.named_parameters():
        if name not in whole:
            assert parameter.grad is None, name
            continue
        expected = whole[name].grad
        assert expected is not None, name
        assert parameter.grad is not None, name
        part = shard_of(expected, placement_from_json(parameters[name]["placement"]), dist.get_rank())
        torch.testing.assert_close(
            parameter.grad, part, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
        checked += 1
    assert checked == len(whole)


@on_ranks(2, 3)
def test_every_gradient_is_that_of_the_whole_model():
    for name, (build, plan) in MODELS.items():
        if (dist.get_world_size() > 2) != (name in SEVERAL):
            continue
        torch.manual_seed(0)
        x = torch.randn(2, 5, 24 if "o" in plan else 12, dtype=torch.float64)
        model, local, parameters = whole_and_local(build, plan, x)
        weights = torch.randn_like(x)
        x_whole, x_local = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, actual = model(x_whole), local(x_local)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        (expected * weights).sum().backward()
        (actual * weights).sum().backward()
        try:
            torch.testing.assert_close(x_local.grad, x_whole.grad, rtol=1e-10, atol=1e-10)
            check_gradients(model, local, parameters)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@on_ranks(2, 3)
def test_a_step_of_a_language_model_with_a_tied_vocabulary_is_the_whole_models():
    ids = torch.randint(17, (3, 5), generator=torch.Generator().manual_seed(0))
    model, local, parameters = whole_and_local(Language, LANGUAGE, ids)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, local)]
    for _ in range(2):
        losses = [m(ids) for m in (model, local)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        check_gradients(model, local, parameters)
    whole = dict(model.named_parameters())
    for name, parameter in local.named_parameters():
        part = shard_of(
            whole[name].detach(), placement_from_json(parameters[name]["placement"]), dist.get_rank()
        )
        torch.testing.assert_close(parameter.detach(), part, rtol=1e-10, atol=1e-10)


class Statistics(nn.Module):
    """Norms of batches, of cut channels and of whole ones, and a scale that fades."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.up, self.down = (
            *(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)),
            *(nn.Linear(16, 7), nn.Linear(7, 3)),
        )
        self.cut2d, self.whole2d = nn.BatchNorm2d(5), nn.BatchNorm2d(4)
        self.cut1d, self.whole1d = nn.BatchNorm1d(7), nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.rand(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.whole2d(self.b(self.cut2d(self.a(x)).relu())).relu().flatten(1)
        y = self.cut1d(self.up(x)) * self.scale[None]
        self.scale = self.scale * 0.9
        return self.whole1d(self.down(y))


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch copies what it calls deprecated
@on_ranks(2)
def test_steps_with_buffers_that_the_program_writes_are_the_whole_models_also_compiled():
    x, weights = torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    model, local, parameters = whole_and_local(Statistics, {"a": COL, "b": ROW, "up": COL, "down": ROW}, x)
    other = copy.deepcopy(local)
    runs = model, local, torch.compile(other, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, local, other)]
    for _ in range(3):
        for run, optimizer in zip(runs, optimizers, strict=True):
            optimizer.zero_grad()
            (run(x) * weights).sum().backward()
            optimizer.step()
        for each in (local, other):
            check_gradients(model, each, parameters)
    for buffers in (dict(local.named_buffers()), dict(other.named_buffers())):
        for name, expected in model.named_buffers():
            torch.testing.assert_close(buffers[name], expected, rtol=1e-10, atol=1e-10)


@as_one_of(2)
def test_a_block_reduces_twice_forward_and_twice_backward():
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    for build, plan, decomposed in ((Block, APART, True), (lambda: Block(fused=True), FUSED, False)):
        _, local, _ = whole_and_local(build, plan, x, decomposed=decomposed)
        with CommCounter() as forward:
            y = local(x.clone().requires_grad_())
        with CommCounter() as backward:
            y.sum().backward()
        for counted in (forward, backward):
            assert [call.kind for call in counted.calls] == ["all_reduce"] * 2
            assert counted.bytes() == 2 * x.numel() * x.element_size()


@on_ranks(2)
def test_backward_through_a_program_cut_for_inference_raises():
    torch.manual_seed(1)
    x = torch.randn(2, 12)
    program = torch.export.export(Mlp(), (x,))
    for cut, raises in (({"up": COL, "down": ROW}, True), ({}, False)):
        local = tensor_parallel_transformation(program, dist.get_rank(), 2, "cpu", cut).module()
        if raises:
            with pytest.raises(ShardingError, match="training=True"):
                local(x).sum().backward()
        else:
            local(x).sum().backward()
            assert all(p.grad is not None for p in local.parameters())


@on_ranks(2)
def test_the_operators_are_sound():
    group = dist.group.WORLD.group_name
    x, y = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    whole = torch.randn(8, 3)
    for op, args in (
        (operators.replicated, (x, group)),
        (operators.scattered, (whole.clone().requires_grad_(), y.detach(), 2, group)),
    ):
        assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}
    for op, args in (
        (operators.repeated, (x, 0, [0, 2, 1, 3, 1, 3], 4, group)),
        (operators.once, (x, dist.get_rank())),
        (operators.unwritten, (x,)),
        (operators.summed, (x, y.detach())),
        (operators.gathered, (x, whole, dist.get_rank())),
    ):
        quick = ("test_schema", "test_autograd_registration", "test_faketensor")
        assert set(torch.library.opcheck(op, args, test_utils=quick).values()) == {"SUCCESS"}
