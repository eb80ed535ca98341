"""What only some need: not imported before it is asked for, and named where it is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from architecture import ORDER, ROOT, every_source
from shardwise.errors import ShardwiseError
from shardwise.files.stores import location
from shardwise.hf.load import library
from shardwise.planner.models import model_of
from shardwise.tensor_parallel import choose
from shardwise.tensor_parallel.pretrained import build_model

CLIENTS = {f"shardwise.{name}" for name in ORDER[ORDER.index("adapters") + 1 :]}
IMPORT_THE_CORE = """
import importlib, sys
import shardwise
for name in set(shardwise.__all__) - {"plan"}:
    getattr(shardwise, name)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sys.modules)
"""


def test_the_core_imports_no_extra_no_client_and_no_compiler() -> None:
    modules = [file.module for file in every_source()]
    core = [name for name in modules if ".".join(name.split(".")[:2]) not in CLIENTS]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    ended: Any = subprocess.run([sys.executable, "-c", IMPORT_THE_CORE, *core], **options)
    loaded = set(ended.stdout.split())
    assert {"shardwise.tensor_parallel.auto", "shardwise.files.stores"} <= loaded
    assert loaded & (CLIENTS | {"scipy", "matplotlib", "transformers", "fsspec"}) == set()
    assert loaded & {"torch._dynamo", "torch._inductor"} == set()  # the compiler: half a second


def chosen() -> object:
    return choose(torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)), 2)


@pytest.mark.parametrize(
    ("use", "missing", "extra"),
    [
        (chosen, "scipy.optimize", "tp"),
        (lambda: location("memory://run"), "fsspec.core", "stores"),
        (library, "transformers", "hf"),
        (lambda: build_model(None), "transformers", "hf"),
        (lambda: model_of("config.json", sequence=8), "transformers", "hf"),
    ],
)
def test_what_needs_an_extra_names_it_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use: Callable[[], object], missing: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"model_type": "gpt2"}')
    needs = rf"needs {missing.split('.')[0]}: pip install 'shardwise\[{extra}\]'"
    with pytest.raises(ShardwiseError, match=needs):
        use()


def test_every_extra_that_an_error_names_exists() -> None:
    named = {e for file in ROOT.rglob("*.py") for e in re.findall(r'from_extra\("(\w+)"', file.read_text())}
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert named <= project["optional-dependencies"].keys()
    assert len(named) >= 4
