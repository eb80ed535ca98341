"""Compare two runs: allowed and actual differences. Pure functions over tensors.

    allowed difference of element i = tolerance * scale + slack[i]
    tolerance   relative; derived from the dtype and the number of terms summed, or given by the user
    scale       largest magnitude in the reference tensor, at least SCALE_FLOOR of the largest over
                all tensors of its kind in that step (a gradient that cancels to nearly nothing has
                the rounding of the terms that cancelled)
    slack       parameters only: the difference that the optimizer may make of an allowed gradient
                difference; Adam's first step is lr * sign(gradient), so an element whose gradient is
                rounding noise may move either way

docs/verify.md derives each term.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import attrgetter
from typing import Literal

import torch

Kind = Literal["loss", "gradient", "parameter"]
KINDS: tuple[Kind, ...] = ("loss", "gradient", "parameter")

START = -1  # the step number of the comparison before the first step
SCALE_FLOOR = 1e-3
SAFETY = 8.0
CHUNK_NUMEL = 1 << 20  # elements compared at once, so that float64 copies stay small


@dataclass(frozen=True)
class Tolerance:
    """Largest difference allowed, relative to the tensor's scale."""

    base: float  # at step 0 and before it
    growth: float  # added at every later step, as a fraction of base
    reason: str  # one line for the reader of a report

    def at(self, step: int) -> float:
        """Return the relative tolerance of a step; `START` counts as step 0."""
        return self.base * (1.0 + self.growth * max(step, 0))


def derived_tolerance(dtype: torch.dtype, *, terms: int, layers: int) -> Tolerance:
    """Return the largest difference that rounding can explain, times a safety factor.

    `dtype` is the coarsest dtype in which values are stored, `terms` the number of terms that a gradient
    element sums over the global batch, and `layers` the number of operations between input and loss.
    """
    stored = torch.finfo(dtype).eps / 2
    accumulated = min(stored, torch.finfo(torch.float32).eps / 2)
    base = SAFETY * (stored * math.sqrt(layers) + accumulated * math.sqrt(terms))
    name = str(dtype).removeprefix("torch.")
    return Tolerance(
        base=base, growth=1.0, reason=f"rounding in {name}: {layers} layers, {terms} terms, growing by step"
    )


def fixed_tolerance(value: float) -> Tolerance:
    """Return a tolerance that is the same at every step; 0 requires bitwise equality."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"tolerance must be a finite number >= 0, got {value}")
    return Tolerance(base=value, growth=0.0, reason="given")


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the floating-point dtype with the largest rounding error; float32 if there is none."""
    floating = {d for d in dtypes if d.is_floating_point}
    return max(floating, key=lambda d: (torch.finfo(d).eps, str(d)), default=torch.float32)


@dataclass(frozen=True)
class Difference:
    """The difference between one tensor (or the loss) of a step and the reference."""

    kind: Kind
    step: int  # START before the first step
    name: str  # fully qualified name of the parameter; "loss" for the loss
    absolute: float = 0.0  # largest |found - expected|
    relative: float = 0.0  # absolute over the tensor's scale
    used: float = 0.0  # largest share of its allowed difference that an element uses
    problem: str = ""  # description of a problem that numbers cannot express
    rank: int = 0  # the rank that found it

    @property
    def beyond(self) -> bool:
        """Whether this exceeds the tolerance, or is a problem at any tolerance."""
        return bool(self.problem) or not self.used <= 1.0

    @property
    def severity(self) -> tuple[bool, float, float]:
        """Sort key of differences, from harmless to worst."""
        used, relative = (math.inf if math.isnan(x) else x for x in (self.used, self.relative))
        return bool(self.problem), used, relative


def scale_of(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude in `tensor`; 0.0 if it is empty."""
    finite = (chunk.abs().nan_to_num(nan=0.0, posinf=0.0) for chunk in _chunks(tensor))
    return max((float(magnitudes.max()) for magnitudes in finite), default=0.0)


def floored_scales(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the scales for differences of all tensors of a kind, by name."""
    scales = {name: scale_of(tensor) for name, tensor in tensors.items()}
    floor = SCALE_FLOOR * max(scales.values(), default=0.0)
    return {name: max(scale, floor) for name, scale in scales.items()}


def compare_tensors(
    found: torch.Tensor,
    expected: torch.Tensor,
    at: Difference,
    *,
    scale: float,
    tolerance: float,
    slack: torch.Tensor | None = None,
) -> Difference:
    """Compare two tensors element by element, in float64. Return `at` with their difference.

    `slack` (shape of `expected`) is an absolute difference allowed on top of `tolerance * scale`.
    A shape mismatch, or a non-finite value on either side, is a problem at any tolerance.
    """
    if found.shape != expected.shape:
        return replace(at, problem=f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    absolute = used = 0.0
    broken_found = broken_expected = 0
    slacks = repeat(torch.zeros((), dtype=torch.float64)) if slack is None else _chunks(slack)
    for left, right, extra in zip(_chunks(found), _chunks(expected), slacks, strict=False):
        broken_found += int((~left.isfinite()).sum())
        broken_expected += int((~right.isfinite()).sum())
        distance = (left - right).abs().nan_to_num(nan=math.inf)
        allowed = tolerance * scale + extra
        share = torch.where(distance == 0, 0.0, distance / allowed)
        absolute = max(absolute, float(distance.max()))
        used = max(used, float(share.max()))
    relative = absolute and (absolute / scale if scale > 0.0 else math.inf)
    problem = " and ".join(
        f"{count} non-finite value{'s' if count > 1 else ''} {side}"
        for count, side in ((broken_found, "on the ranks"), (broken_expected, "in the reference"))
        if count
    )
    return replace(at, absolute=absolute, relative=relative, used=used, problem=problem)


def compare_losses(found: float, expected: float, *, step: int, tolerance: float) -> Difference:
    """Compare the mean loss over ranks with the reference's."""
    left, right = (torch.tensor([value], dtype=torch.float64) for value in (found, expected))
    at = Difference("loss", step, "loss")
    return compare_tensors(left, right, at, scale=scale_of(right), tolerance=tolerance)


def optimizer_slack(
    before: torch.Tensor, after: torch.Tensor, gradient: torch.Tensor | None, *, allowed_gradient: float
) -> torch.Tensor:
    """Bound what one optimizer step may add to a parameter's difference, per element, in its dtype.

    An element's update is at most proportional to its gradient (SGD, momentum, Adam and similar). A
    gradient that is off by the share d / |g| changes the update by at most that share of the tensor's
    largest update, and at most reverses it. Zero without a gradient.
    """
    if gradient is None or allowed_gradient == 0.0 or before.numel() == 0:
        return torch.zeros_like(after)
    largest = scale_of(after - before)
    magnitude = gradient.abs().to(after.dtype)
    share = torch.where(magnitude > allowed_gradient, allowed_gradient / magnitude, 1.0)
    return (2.0 * largest * share).to(after.dtype)


def first_beyond(differences: Iterable[Difference]) -> Difference | None:
    """Return the first difference beyond tolerance, in the order given."""
    return next((difference for difference in differences if difference.beyond), None)


def worst(differences: Iterable[Difference]) -> Difference | None:
    """Return the most severe difference, the earliest of equal ones."""
    return max(differences, key=attrgetter("severity"), default=None)


def merge_ranks(by_rank: Iterable[Iterable[Difference]]) -> list[Difference]:
    """Merge ranks' findings: the worst difference per (kind, name), in first-seen order."""
    merged: dict[tuple[Kind, str], Difference] = {}
    for difference in chain.from_iterable(by_rank):
        key = (difference.kind, difference.name)
        merged[key] = max(merged.get(key, difference), difference, key=attrgetter("severity"))
    return list(merged.values())


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `tensor` as flat float64 chunks on the CPU (complex numbers as pairs); nothing if it is empty."""
    flat = tensor.detach()
    flat = (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        yield flat[start : start + CHUNK_NUMEL].to(device="cpu", dtype=torch.float64)
