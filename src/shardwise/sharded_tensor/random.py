"""Random values of a logical tensor that depend only on a seed and on each element's position in the tensor.

Element `i` (row-major, counted in the whole tensor) gets the 64-bit integer at step `i` of the stream that a
SplitMix64 generator seeded with `seed` splits off (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014; constants as in Java's `SplittableRandom`). A step is a sum and a finaliser of that
sum, so any element can be made without those before it. A rank fills only its own box, without communication
and with bounded temporary memory, and every sharding of a tensor holds the same global values.

The integers, `bernoulli` and `uniform_` are the same on all devices, threads and versions of torch. `normal_`
takes a logarithm, a root and a cosine in float64, whose last place devices may round differently: its float64
values agree to a few ulp, and float32 and narrower ones are equal except for about one in 10**7.

One seed gives one stream: two draws with the same seed are dependent, element by element, whatever the
functions. Use a separate seed for each tensor and each draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box

_WORD = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def uniform_(
    out: Tensor, *, box: Box, shape: Sequence[int], seed: int, low: float = 0.0, high: float = 1.0
) -> Tensor:
    """Fill `out` with the uniform values in [low, high) of `box` in a tensor of `shape`, and return it.

    `out` has the shape `box.sizes`, one of the dtypes float64, float32, float16 and bfloat16, any strides and
    any device. `seed` is taken modulo 2**64. float64 has 53 random bits, float32 the first 24 of these;
    float16 and bfloat16 are the float32 values rounded. Values reach `low` but not `high` in each of the
    dtypes; `low == high` fills with that value, as in torch. Local. Raises ShardingError for a box that
    leaves the shape, an `out` of another shape or dtype, and bounds with no number of the dtype between them.
    """
    _check_out(out, box, shape)
    least, most = _bounds(low, high, out.dtype)
    dtype, digits = (torch.float64, 53) if out.dtype == torch.float64 else (torch.float32, 24)
    scale, middle = high * 0.5**digits - low * 0.5**digits, low * 0.5 + high * 0.5
    # The finaliser's last step leaves the 31 highest bits as they are.
    for part, bits, _ in _random_bits(box, shape, seed, out.device, all_bits=digits > 31):
        signed = bits.bitwise_right_shift_(64 - digits)
        # Products and sums of their own kernels: fused, they would round differently from device to device.
        values = signed.to(dtype).mul_(scale).add_(middle).clamp_(least, most)
        out[part].copy_(values.view(out[part].shape))
    return out


@torch.no_grad()
def normal_(
    out: Tensor, *, box: Box, shape: Sequence[int], seed: int, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Fill `out` with the normal values of `box` in a tensor of `shape`, and return it.

    `out`, `seed` and errors are as for `uniform_`; a negative or infinite `std` is an error too. Each value
    is the cosine half of a pair by Box and Muller ("A note on the generation of random normal deviates",
    1958), with 40 bits for the radius and 24 for the angle, in float64, which the device must have. The tails
    are right up to their end at 7.44 standard deviations: one normal value in 10**13 lies beyond. Local.
    """
    _check_out(out, box, shape)
    if not (math.isfinite(mean) and 0 <= std < math.inf):
        raise ShardingError(f"{here()}: expected a finite mean and a finite std >= 0, got {mean} and {std}")
    for part, bits, spare in _random_bits(box, shape, seed, out.device, all_bits=True):
        torch.bitwise_right_shift(bits, 40, out=spare)
        cosine = spare.to(torch.float64).mul_(math.tau * 0.5**24).cos_()
        uniform = bits.bitwise_and_((1 << 40) - 1).add_(1).to(torch.float64).mul_(0.5**40)  # in (0, 1]
        radius = uniform.log_().mul_(-2).sqrt_()
        out[part].copy_(radius.mul_(cosine).mul_(std).add_(mean).view(out[part].shape))
    return out


@torch.no_grad()
def bernoulli(box: Box, *, shape: Sequence[int], seed: int, p: float, device: torch.device) -> Tensor:
    """Return bools of shape `box.sizes`, each True with probability `p`, for `box` in a tensor of `shape`.

    An element is True if its uniform value for that seed, taken to 64 bits, is less than `p`, so the True
    elements of a smaller `p` are a subset of those of a larger one. Local. Raises ShardingError for a box
    that leaves the shape and a `p` outside [0, 1].
    """
    _check_box(box, shape)
    if not 0 <= p <= 1:
        raise ShardingError(f"{here()}: expected a probability p in [0, 1], got {p}")
    if p in (0, 1):
        return torch.full(box.sizes, p == 1, device=device)
    out = torch.empty(box.sizes, dtype=torch.bool, device=device)
    limit = math.ceil(math.ldexp(p, 64)) - (1 << 63)
    for part, bits, _ in _random_bits(box, shape, seed, out.device, all_bits=True):
        torch.lt(bits.view(out[part].shape), limit, out=out[part])
    return out


def _check_box(box: Box, shape: Sequence[int]) -> None:
    if len(box.sizes) != len(shape) or any(end > size for end, size in zip(box.ends, shape, strict=True)):
        raise ShardingError(f"{here()}: expected a box within the tensor's shape {tuple(shape)}, got {box}")


def _check_out(out: Tensor, box: Box, shape: Sequence[int]) -> None:
    _check_box(box, shape)
    if tuple(out.shape) != box.sizes:
        raise ShardingError(f"{here()}: expected `out` of the shape of {box}, got {tuple(out.shape)}")
    if out.dtype not in _DTYPES:
        raise ShardingError(
            f"{here()}: expected `out` of one of {', '.join(map(str, _DTYPES))}, got {out.dtype};"
            " draw in one of these and convert"
        )


def _bounds(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the least and the largest number of `dtype` in [low, high)."""
    largest = torch.finfo(dtype).max
    if not -largest <= low <= high <= largest:
        raise ShardingError(
            f"{here()}: expected finite low <= high that {dtype} can hold, got {low} and {high}"
        )
    rounded = torch.tensor([low, high], dtype=dtype)
    inwards = torch.nextafter(rounded, torch.tensor([largest, -largest], dtype=dtype))
    least, most = rounded.tolist()
    if low == high:
        return least, least
    least = least if least >= low else inwards[0].item()
    most = most if most < high else inwards[1].item()
    if least > most:
        raise ShardingError(f"{here()}: {dtype} has no number in [{low}, {high}); widen the range")
    return least, most


def _random_bits(
    box: Box, shape: Sequence[int], seed: int, device: torch.device, *, all_bits: bool
) -> Iterator[tuple[tuple[slice, ...], Tensor, Tensor]]:
    """Yield slabs of `box`: their place in the box, their 64-bit integers, and scratch memory of equal size.

    The integers are flat int64. The caller may overwrite both tensors; the next slab reuses them. Without
    `all_bits` only the 31 highest bits are random.
    """
    if box.is_empty or device.type == "meta":
        return
    start, gamma = _stream(seed)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # A slab is a single run of the box in row-major order: as many of the last dims as fit, cut in the first.
    sizes, numel = list(box.sizes), 1
    for dim in reversed(range(len(sizes))):
        sizes[dim] = max(1, min(sizes[dim], _slab_numel(device) // numel))
        numel *= box.sizes[dim]
    cuts = [
        [slice(begin, min(begin + size, end)) for begin in range(0, end, size)]
        for size, end in zip(sizes, box.sizes, strict=True)
    ]
    # Slabs of one box differ by a constant, and a smaller last one is a prefix of the others.
    steps = _steps(sizes, [stride * gamma for stride in strides], device)
    buffer, scratch = torch.empty_like(steps), torch.empty_like(steps)
    for part in itertools.product(*cuts):
        numel = math.prod(extent.stop - extent.start for extent in part)
        bits, spare = buffer[:numel], scratch[:numel]
        first = sum((o + p.start) * s for o, p, s in zip(box.offsets, part, strides, strict=True))
        torch.add(steps[:numel], _to_signed(start + (first + 1) * gamma), out=bits)
        _xor_shift(bits, 30, spare).mul_(_to_signed(0xBF58476D1CE4E5B9))
        _xor_shift(bits, 27, spare).mul_(_to_signed(0x94D049BB133111EB))
        if all_bits:
            _xor_shift(bits, 31, spare)
        yield part, bits, spare


def _slab_numel(device: torch.device) -> int:
    """Return the number of elements to draw at once: those that fit each core's cache, or repay a launch."""
    return min(1 << 20, torch.get_num_threads() << 16) if device.type == "cpu" else 1 << 20


def _steps(sizes: Sequence[int], strides: Sequence[int], device: torch.device) -> Tensor:
    """Return, flat, each element's sum of indices times `strides` in a box of `sizes`, modulo 2**64."""
    steps = torch.zeros((), dtype=torch.int64, device=device)
    for size, stride in zip(sizes, strides, strict=True):
        steps = steps.unsqueeze(-1) + torch.arange(size, device=device).mul_(_to_signed(stride))
    return steps.reshape(-1)


def _xor_shift(bits: Tensor, shift: int, spare: Tensor) -> Tensor:
    """Compute `bits ^= bits >> shift` of unsigned integers; masks the sign, which torch's shift repeats."""
    torch.bitwise_right_shift(bits, shift, out=spare)
    return bits.bitwise_xor_(spare.bitwise_and_(_WORD >> shift))


def _stream(seed: int) -> tuple[int, int]:
    """Return start and increment of the stream of `seed`; by its own increment it is no other one shifted."""
    start = _mix_bits(seed + _GOLDEN_GAMMA, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    gamma = _mix_bits(seed + 2 * _GOLDEN_GAMMA, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)) | 1
    # Increments of long runs of equal bits make neighbours' sums too similar.
    regular = (gamma ^ (gamma >> 1)).bit_count() < 24
    return start, gamma ^ 0xAAAAAAAAAAAAAAAA if regular else gamma


def _mix_bits(word: int, shifts: tuple[int, int, int], factors: tuple[int, int]) -> int:
    word &= _WORD
    for shift, factor in zip(shifts, factors, strict=False):
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> shifts[2])


def _to_signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word
