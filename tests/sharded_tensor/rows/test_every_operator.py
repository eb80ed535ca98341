"""No operator answers for this rank's rows alone.

Every operator of torch that can be called with one tensor, or with a tensor and simple arguments made up
here, runs on the whole tensor and on its rows. It must do the same to both, or raise `ShardingError` on
every rank. Operators are taken from torch itself, so that those of a new version are tried too.

Sums are taken in another order: 1e-12 of fp64 values near 1. All else is equal bit for bit.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pieces import ANY_RANKS, FOUR_RANKS, Cut, gathered, local_rows, sharded
from torch import Tensor

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor.rows import Piece, ShardedRows

SHAPE = (7, 5)
UNDEFINED = ("empty", "resize", "new_empty", "_efficientzerotensor")  # memory that nobody has written
# Their subject is memory, devices or autograd of one tensor, not its values; or they wait for a debugger.
SKIPPED = (
    "set_", "_record_", "record_stream", "_backward", "_debug", "retain_grad", "requires_grad_", "_version",
    "set_data", "_nested", "_test", "_mkldnn", "mkldnn", "_cudnn", "cudnn", "miopen", "_assert", "_thnn",
    "_cslt", "_sparse", "sparse", "_fw_primal", "_make_dual", "_make_dep_token", "_print", "cuda", "vulkan",
    "xpu", "_coalesced", "_use_cudnn", "from_file", "_unpack_dual", "storage_offset", "fbgemm", "qint",
    "share_memory", "tolist", "batch_dim", "_convert_indices", "embedding_bag",
)  # fmt: skip


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    floats = torch.rand(SHAPE, generator=generator, dtype=torch.float64) * 1.8 - 0.9
    with_nan = floats.clone()
    with_nan[2, 3], with_nan[5, 1], with_nan[6] = torch.nan, torch.inf, -torch.inf
    return {
        "floats": floats,
        "not finite": with_nan,
        "ints": torch.randint(-4, 5, SHAPE, generator=generator),
        "bools": torch.rand(SHAPE, generator=generator) > 0.4,
    }


def operators() -> list[Any]:
    """Every overload of aten that takes a tensor, or a list of them, first."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not schema.arguments or any(word in name for word in SKIPPED):
            continue
        if str(schema.arguments[0].type) not in ("Tensor", "List[Tensor]"):
            continue
        needed = [argument for argument in schema.arguments if not argument.has_default_value()]
        if len(needed) > 3 or any(argument.is_out for argument in schema.arguments):
            continue
        overload = getattr(getattr(torch.ops.aten, name, None), schema.overload_name or "default", None)
        if overload is not None:
            found.append(overload)
    return sorted(set(found), key=str)


# What arguments without a default are tried with, by their type.
CHOICES: dict[str, list[Any]] = {
    "Tensor": ["same", "whole"],
    "Optional[Tensor]": [None],
    "List[Tensor]": [["same"]],
    "number": [2],
    "float": [0.5],
    "bool": [True, False],
    "List[int]": [[0], [1], [0, 1]],
    "Optional[List[int]]": [None, [0], [1], [0, 1]],
    "Optional[int]": [None, 0, 1],
    "int": [0, 1],
    "Optional[number]": [None, 1],
    "Optional[float]": [None],
    "ScalarType": [torch.float64],
    "Optional[ScalarType]": [None],
}
VARIED = ("dim", "keepdim", "correction", "unbiased")  # tried with more than their defaults


def calls(op: Any) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments after the first to try `op` with; none where one has no simple type."""
    positional, named = [], []
    for argument in op._schema.arguments[1:]:
        choices = CHOICES.get(str(argument.type))
        if argument.has_default_value():
            varied = choices if choices and argument.name in VARIED else []
            choices = [argument.default_value, *(c for c in varied if c != argument.default_value)]
        if choices is None:
            return
        (named if argument.kwarg_only else positional).append((argument.name, choices))
    for values in itertools.islice(itertools.product(*(c for _, c in positional + named)), 24):
        yield (
            list(values[: len(positional)]),
            dict(zip((name for name, _ in named), values[len(positional) :], strict=True)),
        )


def run(op: Any, make: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], list[Tensor]]:
    """What `op` returns, as a flat list, and its tensors afterwards."""
    first = make()
    tensors = [first]

    def argument(value: Any) -> Any:
        if isinstance(value, list) and "same" in value:
            return [argument(item) for item in value]
        if isinstance(value, str) and value == "same":
            tensors.append(make())
            return tensors[-1]
        return value

    torch.default_generator.manual_seed(5)  # torch.manual_seed asks every kind of device: a millisecond
    values = [argument(value) for value in args]
    listed = str(op._schema.arguments[0].type) == "List[Tensor]"
    result = op([first] if listed else first, *values, **kwargs)
    flat = []
    for value in result if isinstance(result, (tuple, list)) else [result]:
        flat += list(value) if isinstance(value, (tuple, list)) else [value]
    return flat, tensors


def same(found: Any, expected: Any, piece: Piece) -> bool:
    if not isinstance(expected, Tensor):
        return bool(type(found) is type(expected) and (found == expected or found != found))
    if isinstance(found, ShardedRows) and found.piece == piece and found.shape == expected.shape:
        found, expected = found.local, local_rows(expected, piece)  # all ranks' together are the whole
    found = gathered(found)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    tolerance = 1e-12 if expected.dtype in (torch.float64, torch.complex128) else 1e-6
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def wrong(op: Any, whole: Tensor, piece: Piece) -> tuple[list[str], int]:
    """What `op` gets wrong, and how many of its calls are right and not refused."""
    problems, right = [], 0
    for args, kwargs in calls(op):
        texts = [[whole.clone() if value == "whole" else value for value in args] for _ in range(2)]
        try:
            expected, after = run(op, whole.clone, texts[0], kwargs)
        except Exception:
            continue
        try:
            found, changed = run(op, lambda: sharded(whole, lambda _: piece), texts[1], kwargs)
        except ShardingError:
            continue
        except Exception as error:
            problems.append(f"{op} {args} {kwargs}: {type(error).__name__}: {str(error)[:150]}")
            continue
        if any(word in op.name() for word in UNDEFINED):
            good = all(
                f.shape == e.shape and f.dtype == e.dtype for f, e in zip(found, expected, strict=True)
            )
        else:
            pairs = zip([*found, *changed], [*expected, *after], strict=True)
            good = len(found) == len(expected) and all(same(f, e, piece) for f, e in pairs)
        right += good
        if not good:
            problems.append(f"{op} {args} {kwargs}: found {found}, expected {expected}")
    return problems, right


def sweep(cut: Cut, kind: str, *, of: slice = slice(None)) -> None:
    whole, piece = inputs()[kind], cut(SHAPE)
    problems: list[str] = []
    defined = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in list(operators())[of]:
            found, right = wrong(op, whole, piece)
            problems += found
            if right:
                defined.add(op.name())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(defined))
    assert not problems, "\n".join(problems)
    assert everyone == [everyone[0]] * len(everyone)
    least = {"floats": 300, "not finite": 300, "ints": 150, "bools": 60}[kind]
    assert len(defined) > least // (of.step or 1) * 0.9


@on_ranks(2, timeout=110)
@pytest.mark.parametrize("kind", ["floats", "not finite", "ints", "bools"])
def test_every_operator_answers_for_the_whole_tensor_or_refuses(kind: str) -> None:
    sweep(ANY_RANKS[1], kind, of=slice(0, None, 2) if kind == "not finite" else slice(None))


@on_ranks(3, timeout=110)
def test_every_operator_answers_for_the_whole_tensor_where_ranks_hold_nothing() -> None:
    sweep(ANY_RANKS[2], "floats", of=slice(1, None, 2))


@on_ranks(4, timeout=110)
@pytest.mark.parametrize("cut", [FOUR_RANKS[3], FOUR_RANKS[6]], ids=lambda cut: cut.__name__)
def test_every_operator_answers_for_the_whole_tensor_on_a_mesh(cut: Cut) -> None:
    sweep(cut, "floats", of=slice(FOUR_RANKS.index(cut) % 2, None, 2))  # each operator on one of the cuts
