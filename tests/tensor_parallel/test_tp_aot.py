"""Ranks' programs compiled to machine code before a job, and run in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.export import export
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.errors import CheckpointError, ShardingError
from shardwise.tensor_parallel import compile_package, load_compiled, save, tensor_parallel_transformation

# torch's compiler uses what torch calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


# Two small files do not repay the compilation of headers for them, nor of a program for each vector unit.
CHEAPLY = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "cpp.vec_isa_ok": False,
}


def model_and_input() -> tuple[nn.Module, Tensor]:
    """Nothing but a product, so that the C++ compiler has no kernel to compile, only the calls."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6, bias=False)), torch.randn(4, 8)


def run(folder: Path, *, name: str) -> list[Any]:
    model, x = model_and_input()
    with pytest.warns(UserWarning, match="may hang over gloo"):
        compiled = load_compiled(folder)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    with pytest.raises(ShardingError, match="got rank 5, but it is"):
        load_compiled(folder, rank=5)
    with pytest.raises(ShardingError, match="compile_package found a process group"):
        compile_package(folder)
    with pytest.raises(ShardingError, match="was compiled for a default group, whose name is"):
        load_compiled(folder, group=dist.new_group([0, 1]))
    with pytest.raises(CheckpointError, match=f"{name}.*missing"):
        load_compiled(folder / name)
    dist.barrier()
    path = folder / f"rank-{dist.get_rank()}.aot.pt2"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"aot.pt2: damaged"):
        load_compiled(folder)
    return sorted(path.name for path in folder.iterdir())


def test_the_command_compiles_what_ranks_then_run(ranks: Any, tmp_path: Path) -> None:
    model, x = model_and_input()
    torch.export.save(export(model, (x,)), tmp_path / "model.pt2")
    (tmp_path / "plan.json").write_text('{"0": "rowwise"}')
    options = ["--out", str(tmp_path / "parts"), "--strategies", str(tmp_path / "plan.json"), "--aot"]
    with inductor.patch(CHEAPLY):
        ended = CliRunner().invoke(app, ["tp", "export", str(tmp_path / "model.pt2"), *options])
    assert ended.exit_code == 0, ended.output
    assert "Compiled 2 programs" in ended.output
    assert not dist.is_initialized()
    found = ranks(run, tmp_path / "parts", name="none", world_size=2)
    assert found[0] == [
        "manifest.json", "rank-0.aot.pt2", "rank-0.pt2", "rank-1.aot.pt2", "rank-1.pt2"
    ]  # fmt: skip


def test_programs_without_weights_are_not_compiled(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, x = model_and_input()
        program = export(model, (x,))
    plan = {"0": "rowwise"}
    save([tensor_parallel_transformation(program, rank, 2, "cpu", plan) for rank in range(2)], tmp_path / "p")
    with pytest.raises(ShardingError, match=r"rank 0 has no weights yet \(0.weight\)"):
        compile_package(tmp_path / "p")
    assert not dist.is_initialized()
