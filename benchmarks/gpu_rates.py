"""Rates that this device reaches: matmuls by shape, attention, elementwise operators, the host's issuing.

python benchmarks/gpu_rates.py --out build/gpu/rates.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

DEVICE = "cuda"
REPEATS, LEAST_SECONDS = 7, 0.02
TOKENS, WIDTHS = (1024, 2048, 4096, 8192, 16384), (1024, 2048, 4096, 5120, 8192)


def seconds(work: Callable[[], Any]) -> float:
    """The median of some runs, each long enough, by the device's events."""
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(times: int) -> float:
        begin.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / times

    times = max(1, min(200, int(LEAST_SECONDS / max(run(2), 1e-6))))
    return statistics.median(run(times) for _ in range(REPEATS))


def matmuls() -> list[dict[str, Any]]:
    """bf16 products of a linear layer: forward (rows x in) @ (in x out), as a Llama's block has them."""
    found = []
    for rows, width in itertools.product(TOKENS, WIDTHS):
        for to in (width, 7 * width // 2):
            x = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)
            w = torch.randn(to, width, device=DEVICE, dtype=torch.bfloat16)
            g = torch.randn(rows, to, device=DEVICE, dtype=torch.bfloat16)
            flops = 2 * rows * width * to
            times = [
                seconds(lambda: F.linear(x, w)),  # noqa: B023
                seconds(lambda: g @ w),  # noqa: B023 - the input's gradient
                seconds(lambda: g.T @ x),  # noqa: B023 - the weight's
            ]
            found.append({"rows": rows, "in": width, "out": to, "tflops": [flops / t / 1e12 for t in times]})
    return found


def sustained(least: float = 4.0) -> dict[str, float]:
    """A large product for so many seconds: the clock falls as the board gets to its power limit."""
    x, w = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    flops, found, start = 2 * 8192**3, [], time.monotonic()
    while time.monotonic() - start < least:
        begin = time.monotonic()
        for _ in range(100):
            x @ w
        torch.cuda.synchronize()
        found.append(100 * flops / (time.monotonic() - begin) / 1e12)
    return {"first": found[1], "last": statistics.median(found[-5:]), "seconds": least}


def attention() -> list[dict[str, Any]]:
    """Causal attention in one kernel; half of the square is counted as work."""
    found = []
    for heads, width in ((32, 128), (64, 64), (32, 64)):
        for length in (1024, 2048, 4096, 8192):
            batch = max(1, 8192 // length)
            q, k, v = (
                torch.randn(
                    batch, heads, length, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True
                )
                for _ in range(3)
            )
            flops = 2 * batch * heads * length**2 * width * 2 / 2
            forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))  # noqa: B023
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            grad = torch.randn_like(out)
            backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))  # noqa: B023
            found.append(
                {
                    "heads": heads, "width": width, "length": length, "batch": batch,
                    "forward tflops": flops / forward / 1e12,
                    "backward tflops": 2.5 * flops / backward / 1e12,
                }
            )  # fmt: skip
    return found


def elementwise() -> list[dict[str, Any]]:
    """GB/s, each byte that is read or written counted once."""
    found = []
    for count in (1 << 20, 1 << 24, 1 << 28):
        x, y = (torch.randn(count, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        one = torch.randn(count, device=DEVICE)
        low = torch.empty(count, device=DEVICE, dtype=torch.bfloat16)
        for name, nbytes, work in (
            ("copy bf16", 4, lambda: y.copy_(x)),  # noqa: B023
            ("add bf16", 6, lambda: torch.add(x, y, out=low)),  # noqa: B023
            ("cast fp32 to bf16", 6, lambda: low.copy_(one)),  # noqa: B023
            ("silu bf16", 4, lambda: F.silu(x)),  # noqa: B023
        ):
            found.append({"what": name, "elements": count, "GB/s": count * nbytes / seconds(work) / 1e9})
    rows = torch.randn(8192, 4096, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    took = seconds(lambda: F.rms_norm(rows, (4096,), weight))
    found.append(
        {"what": "rms_norm 8192 x 4096 bf16", "elements": rows.numel(), "GB/s": rows.numel() * 4 / took / 1e9}
    )
    logits = torch.randn(4096, 128256, device=DEVICE)
    targets = torch.zeros(4096, dtype=torch.int64, device=DEVICE)
    took = seconds(lambda: F.cross_entropy(logits, targets))
    found.append(
        {
            "what": "cross_entropy 4096 x 128256 fp32",
            "elements": logits.numel(),
            "GB/s": logits.numel() * 12 / took / 1e9,
        }
    )
    params = [torch.randn(1 << 26, device=DEVICE, requires_grad=True) for _ in range(4)]
    for p in params:
        p.grad = torch.randn_like(p)
    for how in ("fused", "foreach"):
        step = torch.optim.AdamW(params, lr=1e-3, **{how: True}).step
        took = seconds(step)
        found.append(
            {"what": f"AdamW {how}, 2^28 fp32", "elements": 1 << 28, "GB/s": (1 << 28) * 28 / took / 1e9}
        )
    return found


def host() -> dict[str, float]:
    """Microseconds of the host for one small operator, forward and with autograd."""
    x = torch.randn(64, device=DEVICE, requires_grad=True)
    found = {}
    for name, work in (("operator", lambda: x.detach() + 1), ("operator with autograd", lambda: x + 1)):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(2000):
            work()
        found[name] = (time.perf_counter() - begin) / 2000 * 1e6
        torch.cuda.synchronize()
    a, b = (
        torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True),
        torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE),
    )
    found["host to device GB/s"] = (1 << 28) / seconds(lambda: b.copy_(a, non_blocking=True)) / 1e9
    found["device to host GB/s"] = (1 << 28) / seconds(lambda: a.copy_(b, non_blocking=True)) / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    free, total = torch.cuda.mem_get_info()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "memory": total,
        "context": total - free,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for part in (sustained, matmuls, attention, elementwise, host):
        begin = time.monotonic()
        try:
            found[part.__name__] = part()
        except Exception as error:
            found[part.__name__] = {"raised": f"{type(error).__name__}: {error}"[:300]}
        print(part.__name__, f"{time.monotonic() - begin:.1f} s", flush=True)
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
