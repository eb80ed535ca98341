"""Models to cut over ranks, plans, and what each should cost: `python tests/tensor_parallel/zoo.py --all`.

Every model is exported, cut for every rank and run in lock step in this process, beside the whole model;
for training, forward and backward. Weights are random and all models tiny; those of `transformers` are made
from configs, without any network. The matrix of one model is

    exported, and cut, with strict or without   x   decomposed or as exported   x   2, 3, 4 ranks
    x   for inference or for training

    zoo.py                      as exported, on 2 ranks, for both
    zoo.py --all                the whole matrix; about 25 minutes on a quiet core
    zoo.py --all Llama BERT     that of models with these words in their names
    zoo.py --all --part=2/4     the second of four parts
    zoo.py --ranks=24 --trace   these numbers of ranks; tracebacks

The last line says how many points of it are right; the exit status is 1 unless all are.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lockstep import backward, parts, run, run_each
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from shardwise.errors import ShardingError
from shardwise.tensor_parallel import ColwiseParallel, RowwiseParallel, counts
from shardwise.tensor_parallel.canonical import functionalize
from shardwise.tensor_parallel.placement import REPLICATE, Split
from shardwise.tensor_parallel.state import placement_from_json, record_of, shard_of

COL, ROW = ColwiseParallel, RowwiseParallel
Form = tuple[bool, bool]  # strict, decomposed
FORMS: list[Form] = list(itertools.product((False, True), (False, True)))
RANKS = (2, 3, 4)


@dataclass(frozen=True)
class Case:
    """A model and what it should cost.

    Attributes:
        build: the model and its inputs, equal whenever it is called.
        plan: styles by module.
        reduces: how many all-reduces; None for any number.
        gathers: how many all-gathers.
        share: the most that a rank may have of all parameters, on 2 ranks; None for any.
        others: other inputs that the exported program takes too, where sizes are dynamic.
        tolerance: of outputs, and of gradients, relative to the largest.
        warned: are there operations without a rule?
        strict: can torch.export's strict mode trace it?
        decomposes: can torch decompose it?
    """

    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    plan: dict[str, Any]
    reduces: int | None = None
    gathers: int | None = 0
    share: float | None = None
    dynamic: Any = None
    others: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    tolerance: float = 1e-10
    warned: bool = False
    strict: bool = True
    decomposes: bool = True

    @property
    def forms(self) -> list[Form]:
        """The forms in which torch gives a program of it."""
        return [form for form in FORMS if form[0] <= self.strict and form[1] <= self.decomposes]


@dataclass
class Result:
    """What one case came to on so many ranks."""

    error: float
    counts: dict[str, int]
    share: float
    messages: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    gradient: tuple[float, str] = (0.0, "")
    backward: dict[str, int] = field(default_factory=dict)


@dataclass
class Exported:
    """A case's program in one form, its model and inputs."""

    case: Case
    form: Form
    program: ExportedProgram
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


CASES: dict[str, Case] = {}


def case(name: str, **fields: Any) -> Callable[[Any], Any]:
    """Register the function that builds a model and its inputs (args, or args and kwargs)."""

    def register(build: Callable[[], Any]) -> Any:
        def seeded() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
            torch.manual_seed(0)
            model, args, *kwargs = build()
            return model.eval(), args, (kwargs[0] if kwargs else {})

        CASES[name] = Case(build=seeded, **fields)
        return build

    return register


# ------------------------------------------------------------ one point of the matrix


def export(case: Case, form: Form) -> Exported:
    """Export the case's model in this form."""
    strict, decomposed = form
    model, args, kwargs = case.build()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, args, kwargs, dynamic_shapes=case.dynamic, strict=strict)
        program = program.run_decompositions() if decomposed else functionalize(program)
    return Exported(case, form, program, model, args, kwargs)


def cut(
    program: ExportedProgram, plan: dict[str, Any], ranks: int, **options: Any
) -> tuple[list[ExportedProgram], list[str]]:
    """Every rank's program, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        programs = parts(program, plan, ranks=ranks, **options)
    return programs, sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)})


def measure(exported: Exported, ranks: int, *, strict: bool, training: bool = False) -> Result:
    """Cut the case over so many ranks, run them, compare with the whole model.

    By strict it is cut where that allows for ranks that have nothing of a weight, and for operations without
    a rule.
    """
    case = exported.case
    try:
        programs, messages = cut(exported.program, case.plan, ranks, strict=strict, training=training)
        refused = False
    except ShardingError as error:
        refused = ("no tensor-parallel rule" if case.warned else "would hold no part of") in str(error)
        refused = refused or (case.gathers != 0 and "that no style asks for" in str(error))
        if not refused or not strict:
            raise
        programs, messages = cut(exported.program, case.plan, ranks, training=training)
    if case.warned and strict and not refused:
        messages.append("strict does not refuse an operation without a rule")
    whole = sum(t.numel() for t in _unique(exported.program))
    share = max(sum(t.numel() for t in _unique(p)) for p in programs) / max(1, whole)
    result = Result(0.0, counts(programs[0]), share, messages, _wrong_sizes(exported.program, programs))
    if training:
        _train(exported, programs, result)
        return result
    inputs = [(exported.args, exported.kwargs)] + ([case.others()] if case.others else [])
    with torch.no_grad():
        for args, kwargs in inputs:
            expected = _tensors(exported.model(*args, **kwargs))
            for results in run(programs, *args, **kwargs):
                result.error = max(result.error, _largest_distance(_tensors(results), expected))
    return result


def _train(exported: Exported, programs: list[ExportedProgram], result: Result) -> None:
    """Forward and backward of the whole model and of all ranks: outputs, and every gradient."""
    model = exported.model
    whole, *inputs = [_leaves(exported.args, exported.kwargs) for _ in range(1 + len(programs))]
    model.zero_grad(set_to_none=True)
    expected = _tensors(model(*whole[0], **whole[1]))
    expected_loss = _loss(expected)
    outputs = [_tensors(x) for x in run_each(programs, inputs)]
    result.error = max(_largest_distance(x, expected) for x in outputs)
    losses = [_loss(x) for x in outputs]
    assert all(loss.requires_grad == expected_loss.requires_grad for loss in losses)
    if expected_loss.requires_grad:
        expected_loss.backward()
        result.backward = backward(losses)
    gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    scale = max((float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()), default=0)
    for rank, program in enumerate(programs):
        placements = record_of(program)["parameters"]
        for name, parameter in program.state_dict.items():
            if isinstance(parameter, nn.Parameter):
                placement = placement_from_json(placements[name]["placement"])
                grad = gradients[name]
                part = torch.zeros_like(parameter) if grad is None else shard_of(grad, placement, rank)
                local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                result.gradient = max(result.gradient, (_distance(local, part, scale), name))
        for local, x in zip(_tensors(inputs[rank]), _tensors(whole), strict=True):
            if x.grad is not None:
                assert local.grad is not None
                result.gradient = max(result.gradient, (_distance(local.grad, x.grad), "an input"))
    for buffer in model.buffers():
        buffer.detach_()  # what was written there has a history


def _leaves(args: Any, kwargs: Any) -> Any:
    """Inputs of one's own, of which gradients are asked."""

    def leaf(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x

    return pytree.tree_map(leaf, (args, kwargs))


def _loss(outputs: list[Tensor]) -> Tensor:
    """The outputs, weighed by random numbers that are equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output.is_floating_point() and output.requires_grad:
            finite = torch.where(output.isfinite(), output, 0)
            total = total + (finite * torch.rand(output.shape, generator=generator).to(output)).sum()
    return total


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _unique(program: ExportedProgram) -> list[Tensor]:
    return list(
        {(t.data_ptr(), id(t) if not t.numel() else 0): t for t in program.state_dict.values()}.values()
    )


def _largest_distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max([0.0, *(_distance(x, y) for x, y in zip(actual, expected, strict=True))])


def _distance(actual: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """The largest difference, relative to `scale`, or to the largest expected."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype
    a, b = actual.detach().double(), expected.detach().double()
    finite = b.isfinite()
    assert torch.equal(a[~finite], b[~finite])
    if not finite.any():
        return 0.0
    scale = max(1e-30, float(b[finite].abs().max()) if scale is None else scale)
    distance = float((a[finite] - b[finite]).abs().max()) / scale
    return math.inf if math.isnan(distance) else distance


def _wrong_sizes(whole: ExportedProgram, programs: list[ExportedProgram]) -> list[str]:
    """Entries of ranks' state dicts that are not, in shape and together, the whole one's."""
    faults = []
    for name, tensor in whole.state_dict.items():
        entry = record_of(programs[0])["parameters"].get(name)  # of buffers that the graph has not: none
        placement = REPLICATE if entry is None else placement_from_json(entry["placement"])
        shapes = [tuple(program.state_dict[name].shape) for program in programs]
        expected = [list(tensor.shape) for _ in programs]
        if isinstance(placement, Split):
            for rank, sizes in enumerate(expected):
                sizes[placement.dim] = placement.size(rank)
            intervals = sorted(interval for part in placement.ranges for interval in part)
            ends = itertools.accumulate((end for _, end in intervals), max, initial=0)
            if any(begin > end for (begin, _), end in zip(intervals, ends, strict=False)):
                faults.append(f"{name}: no rank has all of {intervals}")
            if max(end for _, end in intervals) != tensor.shape[placement.dim]:
                faults.append(f"{name}: no rank has its end")
        if shapes != [tuple(sizes) for sizes in expected]:
            faults.append(f"{name} of {tuple(tensor.shape)} is {shapes}")
        if any(program.state_dict[name].dtype != tensor.dtype for program in programs):
            faults.append(f"{name} has another dtype")
    if any(list(program.state_dict) != list(whole.state_dict) for program in programs):
        faults.append("other names in the state dict")
    return faults


def problems(case: Case, result: Result, ranks: int) -> list[str]:
    """What is not as it should be, in words."""
    faults = list(result.sizes)
    if not result.error <= case.tolerance:
        faults.append(f"error {result.error:.1e}")
    if not result.gradient[0] <= case.tolerance:
        faults.append(f"gradient of {result.gradient[1]} wrong by {result.gradient[0]:.1e}")
    reduces, gathers = result.counts.get("all_reduce", 0), result.counts.get("all_gather", 0)
    if case.reduces is not None and reduces != case.reduces:
        faults.append(f"{reduces} all-reduces, not {case.reduces}")
    if case.gathers is not None and gathers != case.gathers:
        faults.append(f"{gathers} all-gathers, not {case.gathers}")
    if ranks == 2 and case.share is not None and result.share > case.share:
        faults.append(f"{result.share:.2f} of the parameters, not {case.share}")
    if result.messages and not case.warned:
        faults.append("; ".join(result.messages))
    return faults


# ------------------------------------------------------------ the matrix


def main(arguments: list[str]) -> int:
    """Measure cases, print what is wrong in each form, and how many points of the matrix are right."""
    import zoo_blocks
    import zoo_transformers

    assert zoo_blocks.Block
    assert zoo_transformers.VOCABULARY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", help="of names of models")
    parser.add_argument("--all", action="store_true", help="the whole matrix")
    parser.add_argument("--ranks", help="such as 34; default: 2, or with --all 234")
    parser.add_argument("--part", default="1/1", help="such as 2/4")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    options = parser.parse_args(arguments)
    options.ranks = [int(digit) for digit in options.ranks or ("234" if options.all else "2")]
    names = [n for n in CASES if not options.words or any(word in n for word in options.words)]
    part, parts = map(int, options.part.split("/"))
    lines = [text for name in names[part - 1 :: parts] for text in _lines(name, options)]
    right = lines.count("ok")
    print(f"{right} of {len(lines)} right")
    return int(right < len(lines) or not lines)


def _lines(name: str, options: argparse.Namespace) -> Iterator[str]:
    case = CASES[name]
    for form in case.forms if options.all else case.forms[:1]:
        began, lines = time.perf_counter(), []
        points = list(itertools.product(options.ranks, (False, True)))
        try:
            exported = export(case, form)
        except Exception as error:
            lines = [f"export: {_short(error, options)}"] * len(points)
        for ranks, training in points if not lines else ():
            kind = f"{ranks} ranks, {'training' if training else 'inference'}: "
            try:
                faults = problems(case, measure(exported, ranks, strict=form[0], training=training), ranks)
                lines.append("ok" if not faults else kind + ", ".join(faults)[:300])
            except Exception as error:
                lines.append(kind + _short(error, options))
        text = " | ".join(dict.fromkeys(lines))
        label = f"{'strict' if form[0] else 'non-strict'} {'decomposed' if form[1] else 'as exported'}"
        print(f"{name:45} {label:24} {time.perf_counter() - began:5.1f} s  {text}", flush=True)
        yield from lines


def _short(error: Exception, options: argparse.Namespace) -> str:
    if options.trace:
        traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error)[:250]}"


if __name__ == "__main__":
    sys.modules["zoo"] = sys.modules["__main__"]
    raise SystemExit(main(sys.argv[1:]))
