"""Every function of torch's own list does to sharded tensors what it does to whole ones, or is refused.

The functions and their arguments are torch's (`op_db`): as function, method and operator, and in place; of
fp64 with gradients, and of another dtype. All tensors of a call are cut, or one. Sums are taken in another
order: 1e-12 of fp64 values.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covers import agree, random_spec
from torch import Tensor
from torch.utils import _pytree as pytree

from ranks import RankPool
from sharded_tensor.rows.pieces import ANY_RANKS, FOUR_RANKS, Cut, gathered, local_rows, sharded
from shardwise.sharded_tensor import RaggedShardingSpec, ShardingSpec
from shardwise.sharded_tensor.registry import HANDLERS
from shardwise.sharded_tensor.rows import ShardedRows

OTHERS = torch.bfloat16, torch.int64, torch.bool
# Random, memory that nobody has written, or not dense.
UNDEFINED = "normal uniform rand dropout empty bernoulli cauchy exponential geometric multinomial sparse"
# What is refused of functions that are supported otherwise.
REFUSED = {
    "does not stay one box": "ravel reshape reshape_as view view_as flatten unflatten",
    "needs all elements of dim": "max min argmax argmin nn.functional.cross_entropy nn.functional.nll_loss",
    "logits must be sharded": "nn.functional.cross_entropy nn.functional.nll_loss",
    "is not supported": "norm linalg.norm argmax argmin",
    "has no cut": "new_zeros new_ones new_full",
    "an index is of ints": "__getitem__",
    "must be cut alike": "cat",
}

Call = tuple[str, Any, list[Any], Any, list[int]]


@functools.cache
def calls() -> list[Call]:
    """Name, function, arguments as a flat list and their structure, which of them have gradients."""
    from torch.testing._internal.common_methods_invocations import op_db

    torch.manual_seed(0)
    found: list[Call] = []
    for number, op in enumerate(op_db):
        forms: Iterable[Any] = (op.op, op.method_variant, op.operator_variant, op.inplace_variant)
        forms = [form for form in dict.fromkeys([*forms, op.inplace_operator_variant]) if is_named(form)]
        forms = [form for form in forms if form in HANDLERS] or forms[:1]
        if not forms or any(word in op.name for word in UNDEFINED.split()):
            continue
        others = [dtype for dtype in OTHERS if dtype in op.dtypes]
        dtypes = [torch.float64] * (torch.float64 in op.dtypes) + others[number % 3 :][:1]
        is_handled = forms[0] in HANDLERS
        for dtype in dtypes if is_handled else dtypes[:1]:
            has_grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            samples: Iterable[Any] = op.sample_inputs_func(op, "cpu", dtype, has_grad)
            samples = list(itertools.islice(samples, 50 if is_handled else 1))
            every = 1 + len(samples) // (2 + len(samples) // 5) if dtype == torch.float64 else 50
            for sample in samples[::every]:
                function = forms[(len(found) + number) % len(forms)]
                values, structure = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
                tensors = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
                leaves = [place for place in tensors if values[place].requires_grad]
                if function.__name__.endswith("_") and not op.supports_inplace_autograd:
                    leaves = []
                values = [value.detach() if isinstance(value, Tensor) else value for value in values]
                if tensors and works(bound(function, structure), values):
                    found.append((op.name, function, values, structure, leaves))
    return found


def is_named(function: Any) -> bool:
    """Can ranks find it?"""
    try:
        return bool(function.__name__ and pickle.dumps(function))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return False


def works(call: Callable[..., Any], values: list[Any]) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            call(*values)
    except Exception:
        return False
    return True


def bound(function: Any, structure: Any) -> Callable[..., Any]:
    """The function of a flat list of its arguments; in place it writes a copy."""
    name = function.__name__
    writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))

    def call(*values: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(list(values), structure)
        return function(*((args[0].clone(), *args[1:]) if writes else args), **kwargs)

    return call


def cuts(values: list[Any], number: int, rng: random.Random) -> dict[int, ShardingSpec]:
    """A cut of the largest tensor and of those that have its dim; or of tensors of its shape; or of one."""
    tensors = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
    ranks = range(dist.get_world_size())
    largest = max((values[place].shape for place in tensors), key=lambda shape: (shape.numel(), len(shape)))
    if largest and number % 3:
        dim = -rng.randint(1, len(largest))
        ends = sorted(rng.randint(0, largest[dim]) for _ in ranks[1:])
        sizes = [end - start for start, end in itertools.pairwise([0, *ends, largest[dim]])]
        placements = [f"rank:{rank}/cpu" for rank in rng.sample(ranks, len(ranks))]
        spec: ShardingSpec = RaggedShardingSpec(dim, sizes, placements)
        alike = [p for p in tensors if values[p].ndim >= -dim and values[p].shape[dim] == largest[dim]]
    else:
        spec = random_spec(rng, largest, ranks)
        alike = [place for place in tensors if values[place].shape == largest]
    return dict.fromkeys([rng.choice(alike)] if number % 2 else alike, spec)


def sharded_tensors(given: list[Call]) -> list[tuple[str, bool, str]]:
    """Of each call its function, whether that is supported, and its error, if any."""
    warnings.simplefilter("ignore")
    rng, found = random.Random(0), []
    for number, (name, function, values, structure, leaves) in enumerate(given):
        near = 1e-12 if any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in values) else 0.1
        cut, error = cuts(values, number, rng), ""
        try:
            call = bound(function, structure)
            agree(call, *values, cut=cut, leaves=leaves, of_gradients=near, rtol=near, atol=near)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        found.append((name, function in HANDLERS, error))
    return found


def is_expected(name: str, is_handled: bool, error: str) -> bool:
    if not error.startswith("ShardingError"):
        return not error
    written = "would write a sharded tensor into a plain Tensor" in error
    of_this = any(why in error and name in names.split() for why, names in REFUSED.items())
    return written or of_this if is_handled else "is not supported on a ShardedTensor" in error


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_function_answers_for_the_whole_tensor_or_refuses(ranks: RankPool, world_size: int) -> None:
    # What has no handler is refused at one place.
    given = [call for n, call in enumerate(calls()) if call[1] in HANDLERS or n % 3 == 0]
    given = given[::3] if world_size == 2 else [call for n, call in enumerate(given) if n % 3]
    found = list(zip(*ranks(sharded_tensors, given, world_size=world_size), strict=True))
    unexpected = {each for each in itertools.chain(*found) if not is_expected(*each)}
    assert not unexpected, "\n".join(f"{name}: {error}" for name, _, error in sorted(unexpected))
    assert all(len({bool(error) for *_, error in each}) == 1 for each in found)  # on every rank, or on none
    right = {name for (name, is_handled, error), *_ in found if is_handled and not error}
    assert len(right) > (170 if world_size == 2 else 200)


def rows(given: list[Call], cut: Cut) -> list[tuple[str, str]]:
    """Of each call with rows in place of tensors of the first one's shape, its function and its error."""
    warnings.simplefilter("ignore")
    piece_of, found = functools.cache(cut), []
    for name, function, values, structure, _ in given:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors[0].ndim:
            continue
        piece, call = piece_of(tensors[0].shape), bound(function, structure)

        def rows_of(value: Any, shape: Any = tensors[0].shape, piece: Any = piece) -> Any:
            is_cut = isinstance(value, Tensor) and value.shape == shape
            return sharded(value, lambda _: piece) if is_cut else value

        torch.default_generator.manual_seed(5)
        expected = pytree.tree_leaves(call(*values))
        torch.default_generator.manual_seed(5)
        error = ""
        try:
            for one, other in zip(pytree.tree_leaves(call(*map(rows_of, values))), expected, strict=True):
                if isinstance(one, ShardedRows) and one.piece == piece and one.shape == other.shape:
                    one, other = one.local, local_rows(other, piece)  # all ranks' together are the whole
                near = 1e-12 if isinstance(other, Tensor) and other.dtype == torch.float64 else 2e-2
                if isinstance(other, Tensor):
                    torch.testing.assert_close(gathered(one), other, rtol=near, atol=near, equal_nan=True)
                else:
                    assert one == other
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        found.append((name, error))
    return found


CUTS = [ANY_RANKS[1], FOUR_RANKS[3], FOUR_RANKS[6]]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_every_function_answers_for_the_whole_of_rows_or_refuses(ranks: RankPool, cut: Cut) -> None:
    given = calls()[CUTS.index(cut) :: 3]
    found = list(zip(*ranks(rows, given, cut, world_size=2 if cut in ANY_RANKS else 4), strict=True))
    wrong = {each for each in itertools.chain(*found) if each[1] and not each[1].startswith("ShardingError")}
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in sorted(wrong))
    assert all(len({bool(error) for _, error in each}) == 1 for each in found)
    release = torch.torch_version.TorchVersion(torch.__version__)
    least = 110 if "2.13" <= release < "2.15" else 95  # as torch's samples go
    assert len({name for (name, error), *_ in found if not error}) > least
