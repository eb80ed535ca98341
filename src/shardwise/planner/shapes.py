"""Published shapes of language models, and the names that identify a model. Imported without torch."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.errors import ShardingError
from shardwise.files.stores import on_disk
from shardwise.planner.setup import Setup, check_stages


@dataclass(frozen=True)
class Shape:
    """A model's shape, by default of Llama's kind: rotary, RMSNorm, gated units, no biases, untied head."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    rotary: bool = True  # else positions are learned, as many as the sequence has tokens
    gated: bool = True
    bias: bool = False
    tied: bool = False
    dropout: float | None = None  # of attention in separate kernels, with scores in memory; None: one kernel
    wide_heads: int = 0  # width of a head, if it is not `width` over the heads
    norm_heads: bool = False  # of queries and keys

    @property
    def head_width(self) -> int:
        return self.wide_heads or self.width // self.heads


def _gpt(vocabulary: int, width: int, layers: int, heads: int, dropout: float | None = None) -> Shape:
    """Make a shape of GPT-2's kind: learned positions, LayerNorm, GELU, biases, the embedding as head."""
    return Shape(vocabulary, width, layers, heads, heads, 4 * width, False, False, True, True, dropout)


def _qwen3(width: int, layers: int, heads: int, ffn: int, *, tied: bool = False) -> Shape:
    """Make a shape of Qwen3: 8 heads of keys, all heads 128 wide and normalised."""
    return Shape(151936, width, layers, heads, 8, ffn, tied=tied, wide_heads=128, norm_heads=True)


def _megatron(width: int, layers: int, heads: int) -> Shape:
    """Make a shape of Megatron-LM's paper (2021), from before attention was one kernel."""
    return _gpt(51200, width, layers, heads, dropout=0.1)


PUBLISHED = {
    "llama3-8b": Shape(128256, 4096, 32, 32, 8, 14336),
    "llama3-70b": Shape(128256, 8192, 80, 64, 8, 28672),
    "llama3-405b": Shape(128256, 16384, 126, 128, 8, 53248),
    "llama2-7b": Shape(32000, 4096, 32, 32, 32, 11008),
    "llama2-13b": Shape(32000, 5120, 40, 40, 40, 13824),
    "llama2-70b": Shape(32000, 8192, 80, 64, 8, 28672),
    "llama-30b": Shape(32000, 6656, 60, 52, 52, 17920),
    "llama-65b": Shape(32000, 8192, 80, 64, 64, 22016),
    "llama3.2-1b": Shape(128256, 2048, 16, 32, 8, 8192, tied=True),
    "llama3.2-3b": Shape(128256, 3072, 28, 24, 8, 8192, tied=True),
    "mistral-7b": Shape(32000, 4096, 32, 32, 8, 14336),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "gpt2": _gpt(50257, 768, 12, 12),
    "gpt2-medium": _gpt(50257, 1024, 24, 16),
    "gpt2-large": _gpt(50257, 1280, 36, 20),
    "gpt2-xl": _gpt(50257, 1600, 48, 25),
    "gpt3-175b": _gpt(50257, 12288, 96, 96),
    "mpt-1b": _gpt(50368, 2048, 24, 16),
    "mpt-3b": _gpt(50368, 2560, 32, 20),
    "mpt-7b": _gpt(50368, 4096, 32, 32),
    "mpt-13b": _gpt(50368, 5120, 40, 40),
    "mpt-30b": _gpt(50368, 7168, 48, 64),
    "mpt-70b": _gpt(50368, 8192, 80, 64),
    "megatron-1.7b": _megatron(2304, 24, 24),
    "megatron-3.6b": _megatron(3072, 30, 32),
    "megatron-7.5b": _megatron(4096, 36, 32),
    "megatron-18b": _megatron(6144, 40, 48),
    "megatron-39b": _megatron(8192, 48, 64),
    "megatron-76b": _megatron(10240, 60, 80),
    "megatron-145b": _megatron(12288, 80, 96),
    "megatron-175b": _megatron(12288, 96, 96),
    "megatron-310b": _megatron(16384, 96, 128),
    "megatron-530b": _megatron(20480, 105, 128),
    "megatron-1008b": _megatron(25600, 128, 160),
}


def config_of(source: str) -> Path | None:
    """Return the path of the transformers config that text names: a .json file, or a folder that has it."""
    path = on_disk(source)
    inside = path / "config.json"
    return inside if inside.is_file() else path if source.endswith(".json") else None


def read_config(path: Path) -> dict[str, Any]:
    """Read a transformers config, as much as can be known without transformers."""
    if not path.is_file():
        raise ShardingError(f"{path} is no file: give the path of a transformers config")
    try:
        values = json.loads(path.read_text(), object_hook=_float)
    except ValueError as error:
        raise ShardingError(f"{path} is no transformers config: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        actual = "one without" if isinstance(values, dict) else f"a {type(values).__name__}"
        raise ShardingError(
            f"{path} is no transformers config: expected an object with model_type, found {actual}"
        )
    return values


def _float(value: dict[str, Any]) -> Any:
    """Read a float that transformers writes as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def check_source(source: str) -> None:
    """Raises ShardingError unless text is a published model's name, config or factory; imports nothing."""
    if source in PUBLISHED:
        return
    if path := config_of(source):
        read_config(path)
        return
    module, _, name = source.partition(":")
    if not all(part.isidentifier() for path in (module, name) for part in path.split(".")):
        near, path = difflib.get_close_matches(source, PUBLISHED), on_disk(source)
        names = f"{', '.join(near)} or another published one" if near else f"one of {', '.join(PUBLISHED)}"
        problem = f"unknown model {source!r}"
        if path.exists() or ("/" in source and ":" not in source):
            actual = "is no .json file" if path.exists() else "does not exist"
            problem = f"{path} {'has no config.json' if path.is_dir() else actual}"
            names = "a published model's name"
        raise ShardingError(
            f"{problem}: give {names}, a transformers config (.json, or its folder) or"
            " package.module:factory, a function without arguments that returns a module of tokens to logits"
        )
    package, first, loaded = module.partition(".")[0], name.partition(".")[0], sys.modules.get(module)
    if package not in sys.modules and find_spec(package) is None:
        raise ShardingError(f"{source!r} cannot be imported: no module named {package!r}")
    if loaded is not None and not hasattr(loaded, first):
        raise ShardingError(f"{source!r} cannot be imported: module {module!r} has no attribute {first!r}")


def check_cut(source: str, setup: Setup) -> None:
    """Raises ShardingError for a published model that cannot be cut like this; others are not known yet."""
    if source not in PUBLISHED:
        return
    shape = PUBLISHED[source]
    if setup.experts > 1:
        raise ShardingError(
            f"{source} has no experts to cut, but experts={setup.experts}: give 1, or a mixture's config"
            " (.json)"
        )
    check_stages(source, shape.layers, setup)
    sizes = {"heads": shape.heads, "heads of keys": shape.kv_heads, "outputs of blocks.0.ffn.up": shape.ffn}
    check_divided(source, sizes, setup.tensor)


def undivided(sizes: Mapping[str, int], degree: int) -> list[str]:
    """List descriptions of the sizes that the degree does not divide."""
    return [f"{size:,} {label}" for label, size in sizes.items() if size % degree]


def check_divided(name: str, sizes: Mapping[str, int], degree: int) -> None:
    """Raises ShardingError if the degree does not divide the cut sizes; names degrees that do."""
    if wrong := undivided(sizes, degree):
        divisor = math.gcd(*sizes.values())
        fit = ", ".join(str(n) for n in range(1, divisor + 1) if divisor % n == 0)
        raise ShardingError(
            f"{name}: tensor={degree} does not divide its {' and '.join(wrong[:3])}; choose one of {fit}"
        )


def check_positions(needed: int, learned: int) -> None:
    if needed > learned:
        raise ShardingError(
            f"the model looks up {needed} positions, but its table has only {learned} learned ones; plan a"
            " shorter sequence, or a model with more positions"
        )
