"""The `Case` that a script provides for verification: one training step as functions, and how to find it.

A `Case` holds the five functions of a training step, so that the same step can run unsharded in one
process and sharded on many. A spec names where it comes from:

    train.py                       verify_case() of that file
    train.py:small_case            another function of that file
    package.module                 verify_case() of an importable module
    package.module:small_case      another function of that module
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError

DEFAULT_FACTORY = "verify_case"


class CaseError(ShardwiseError):
    """A case that cannot be found, built or run.

    `traceback` is the traceback, stack or log of the process that failed, or empty if the message
    is enough.
    """

    def __init__(self, message: str, *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


@dataclass(frozen=True)
class Case:
    """One training step in five functions. Every process calls them with the same arguments.

    `build` must return the same weights in every process. `shard` applies `fully_shard` in place over the
    mesh; if it has a parameter named `layout`, a layout can be requested. `batch` returns the *global*
    batch of a step, counted from 0: tensors whose dim 0 is split evenly over the ranks. `loss` returns a
    scalar, the mean over the samples it is given. The step must not mix samples (batch statistics) or draw
    random numbers (dropout); otherwise several ranks cannot reproduce it.

    If the sharded step is not a call of `loss` and its backward, as in a pipeline, `shard` returns the module
    that this rank trains, with the whole model's names, and `backward` computes that module's gradients for
    this rank's rows. `backward` returns the mean loss of those rows, or None if another stage has it.
    """

    build: Callable[[], nn.Module]
    shard: Callable[..., nn.Module | None]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    loss: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]
    backward: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor | None] | None = None


def split_spec(spec: str) -> tuple[str, str]:
    """Split a case spec into its file or module and the name of its factory."""
    target, colon, factory = spec.rpartition(":")
    if not colon or not factory.isidentifier():
        return spec, DEFAULT_FACTORY
    return target, factory


def load_case(spec: str) -> Case:
    """Import the module that `spec` names, in this process, and call its factory.

    The script sees its own directory and the current one on `sys.path`, and no command-line arguments, as
    when it runs directly. Raises `CaseError` if there is no such case; exceptions from the script itself
    propagate.
    """
    target, name = split_spec(spec)
    if target.endswith(".py"):
        module = _import_script(Path(target))
    else:
        _put_on_path(os.getcwd())
        try:
            module = importlib.import_module(target)
        except ModuleNotFoundError as error:
            if error.name is None or not (target == error.name or target.startswith(f"{error.name}.")):
                raise
            raise CaseError(
                f"No module named {error.name!r}. Give a .py file, or a module that can be imported from"
                " here."
            ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        raise CaseError(
            f"{target} has no function `{name}()`. Define it at module level and return a "
            f"shardwise.verify.Case, or name another function: `{target}:FUNCTION`."
        )
    case = factory()
    if not isinstance(case, Case):
        raise CaseError(
            f"`{name}()` of {target} returned {type(case).__name__}; expected a shardwise.verify.Case."
        )
    return case


def apply_shard(case: Case, module: nn.Module, mesh: Any, *, layout: str | None) -> nn.Module:
    """Call `case.shard`, with `layout` unless it is None, and return the module to train.

    Raises `CaseError` if a layout is given and `case.shard` does not accept one.
    """
    if layout is None:
        return case.shard(module, mesh) or module
    parameters = inspect.signature(case.shard).parameters.values()
    if not any(p.name == "layout" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise CaseError(
            f"layout {layout!r} was requested, but this case's shard function takes no `layout`. "
            "Define it as `def shard(module, mesh, layout='interleaved')` and pass layout to fully_shard."
        )
    return case.shard(module, mesh, layout=layout) or module


def _import_script(path: Path) -> ModuleType:
    if not path.is_file():
        raise CaseError(f"No such file: {path}")
    _put_on_path(str(path.resolve().parent), os.getcwd())
    name = f"shardwise_case_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CaseError(f"{path} cannot be imported as a Python file.")
    sys.argv = [str(path)]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _put_on_path(*folders: str) -> None:
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def local_batch(
    batch: tuple[torch.Tensor, ...], step: int, ranks: int, rank: int
) -> tuple[torch.Tensor, ...]:
    """Split a global batch evenly over ranks, and return one rank's part.

    Raises:
        CaseError: if its samples cannot be split evenly.
    """
    length = batch[0].shape[0]
    if length % ranks or length == 0:
        raise CaseError(
            f"batch({step}) has {length} samples, which cannot be split evenly over {ranks} ranks. "
            f"Return a multiple of {ranks}, or choose another number of ranks."
        )
    size = length // ranks
    return tuple(entry[rank * size : (rank + 1) * size] for entry in batch)
