"""A folder of ranks' programs is one model again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_tp_package import Model, parts, program_of
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.errors import CheckpointError
from shardwise.tensor_parallel import Split, merge, save
from shardwise.tensor_parallel.package import _merge_part
from shardwise.tensor_parallel.state import shard_of

# torch's own decompositions copy what it calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")


def test_ranks_together_are_the_model_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    save(parts(program_of(model), ranks=3), tmp_path / "cut")
    merged = merge(tmp_path / "cut")
    assert merged.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, merged[name]), name
    assert merged["head.weight"] is merged["embed.weight"]
    command = ["tp", "merge", str(tmp_path / "cut"), "--out", str(tmp_path / "new" / "model.safetensors")]
    result = CliRunner().invoke(app, [*command, "--strip", "up."])
    assert result.exit_code == 0, result.output
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("weight"), model.up.weight)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "already exists" in result.output
    (tmp_path / "cut" / "rank-1.pt2").unlink()
    result = CliRunner().invoke(app, [*command, "--overwrite"])
    assert result.exit_code == 2
    assert "rank-1.pt2" in result.output
    result = CliRunner().invoke(app, ["tp", "merge", "no/cut", "--out", "model.safetensors"])
    assert (result.exit_code, result.stderr[:41]) == (2, "Error: no/cut: no such folder; expected o")


def test_ranks_that_differ_in_what_both_have_are_not_one_model(tmp_path: Path) -> None:
    programs = parts(program_of(Model()))
    programs[1].state_dict["down.bias"].data[0] += 1
    save(programs, tmp_path / "cut")
    with pytest.raises(CheckpointError, match=r"rank-1.pt2: its values of down.bias differ"):
        merge(tmp_path / "cut")


def test_rows_that_several_ranks_have_are_put_together_once_and_compared() -> None:
    at = Split(0, (((0, 4),), ((0, 8),), ((4, 8),)))  # two key heads of four rows for six of queries
    given = torch.arange(16.0).view(8, 2)
    whole = torch.empty_like(given)
    for rank in range(3):
        assert _merge_part(whole, shard_of(given, at, rank), at, rank)
    assert torch.equal(whole, given)
    assert not _merge_part(whole, shard_of(given + 1, at, 2), at, 2)
