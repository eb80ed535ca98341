"""Profiles of hardware: the rates that devices reach, and their connections. Imported without torch."""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from typing import Any

from shardwise.errors import ShardingError
from shardwise.files.stores import on_disk

SLOWEST = 1e6  # per second
LEAST_EFFICIENCY = 1e-6
_MAY_BE_ZERO = ("latency_s", "_half", "_half_flops", "host_seconds", "context_bytes")  # ends of names


@dataclass(frozen=True)
class Hardware:
    """A device and its connections; rates are those of one device, in one direction."""

    name: str
    source: str
    memory_bytes: int
    peak_flops: dict[str, float]
    memory_bytes_per_s: float
    devices_per_host: int
    host_link_bytes_per_s: float  # between devices of one host, as collectives reach it
    network_bytes_per_s: float  # of a host's connection to others, divided by its devices, likewise
    host_latency_s: float
    network_latency_s: float
    matmul_efficiency: float  # fraction of the peak that a large matmul reaches
    matmul_half_flops: float  # operations of a matmul that reaches half of that
    # Of attention over long sequences, all operations counted: up to 2 if a causal kernel skips half of them.
    attention_efficiency: float
    bandwidth_efficiency: float  # fraction of the memory bandwidth that an elementwise operator reaches
    host_seconds: float  # host time to issue one operator
    context_bytes: int  # of the driver and of communicators, outside the allocator
    attention_half: float = 0.0  # operations per byte of an attention that reaches half: half its length

    @property
    def usable_bytes(self) -> int:
        """The number of bytes that the allocator can use."""
        return self.memory_bytes - self.context_bytes


FLOAT8, NVFP4 = "float8_e4m3fn", "float4_e2m1fn_x2"
_DTYPES = (NVFP4, FLOAT8, "bfloat16", "float16", "float32", "float64")


def check_narrow(device: Hardware | None, narrow: str | None) -> None:
    """Raises ShardingError for a device that cannot multiply in the planned narrow dtype."""
    name, dtype = ("nvfp4", NVFP4) if narrow == "nvfp4" else ("float8", FLOAT8)
    if narrow is not None and device is not None and dtype not in device.peak_flops:
        raise ShardingError(
            f"{device.name} has no peak_flops of {dtype}, in which {name}=True multiplies: choose hardware"
            f" that has, or {name}=False"
        )


def check_rate(device: Hardware, dtype: str) -> None:
    """Raises ShardingError for a device whose rate in the dtype of computation is not known."""
    if dtype not in device.peak_flops:
        raise ShardingError(
            f"{device.name} has no peak_flops of {dtype}, in which the model computes: add {dtype}, in"
            " operations a second, to the profile's table [peak_flops]"
        )


def hardware_of(name: str) -> Hardware:
    """Return the profile with this name, or from this file (TOML)."""
    folder = resources.files("shardwise.planner") / "hardware"
    names = sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
    if name in names:
        path: Any = folder / f"{name}.toml"
    elif name.endswith(".toml"):
        path = on_disk(name)
    else:
        raise ShardingError(f"unknown hardware {name!r}: give one of {', '.join(names)}, or a file (.toml)")
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ShardingError(
            f"{name}: no such file; give a profile (.toml), or one of {', '.join(names)}"
        ) from error
    except (ValueError, OSError) as error:
        raise ShardingError(f"{name} is no profile of hardware: {error}") from error
    known = {field.name: field.default is MISSING for field in fields(Hardware)}  # whether it must be there
    lacking = {key for key, required in known.items() if required and key not in values}
    for problem, keys in (("lacks", lacking), ("has unknown", values.keys() - known)):
        if keys:
            raise ShardingError(f"{name} is no profile of hardware: it {problem} {', '.join(sorted(keys))}")
    hw = Hardware(**values)
    for key in ("name", "source"):
        if not isinstance(getattr(hw, key), str):
            raise ShardingError(f"{name}: {key} must be text, got {getattr(hw, key)!r}")
    if not isinstance(hw.peak_flops, dict) or not hw.peak_flops:
        raise ShardingError(f"{name}: peak_flops must be a table of dtypes, got {hw.peak_flops!r}")
    if unknown := sorted(hw.peak_flops.keys() - _DTYPES):
        raise ShardingError(
            f"{name}: peak_flops has {', '.join(unknown)}; its dtypes are {', '.join(_DTYPES)}"
        )
    numbers = {key: value for key, value in vars(hw).items() if key not in ("name", "source", "peak_flops")}
    for key, value in (numbers | {f"peak_flops.{key}": peak for key, peak in hw.peak_flops.items()}).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        may_be_zero = key.endswith(_MAY_BE_ZERO)
        if not is_number or value < 0 or (value == 0 and not may_be_zero):
            least = "of at least 0" if may_be_zero else "above 0"
            raise ShardingError(f"{name}: {key} must be a number {least}, got {value!r}")
        # No device can have these; they are probably in another unit.
        unit = "operations" if key.startswith("peak_flops.") else "bytes" if key.endswith("_per_s") else ""
        if unit and value < SLOWEST:
            raise ShardingError(f"{name}: {key} is {unit} a second, at least {SLOWEST:,.0f}, got {value!r}")
        if key.endswith(("latency_s", "host_seconds")) and value > 1:
            raise ShardingError(f"{name}: {key} is in seconds, at most 1, got {value!r}")
        limit = 2 if key == "attention_efficiency" else 1
        if key.endswith("_efficiency") and not LEAST_EFFICIENCY <= value <= limit:
            raise ShardingError(
                f"{name}: {key} is a share of the peak, at most {limit} and at least {LEAST_EFFICIENCY},"
                f" got {value!r}"
            )
    if not isinstance(hw.devices_per_host, int):
        raise ShardingError(f"{name}: devices_per_host must be a whole number, got {hw.devices_per_host!r}")
    if hw.usable_bytes <= 0:
        raise ShardingError(
            f"{name}: context_bytes must be less than memory_bytes, {hw.memory_bytes!r},"
            f" got {hw.context_bytes!r}"
        )
    return hw
