"""The inference example: ranks together compute what the whole model does, and say so."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from examples import tp_inference

from ranks import on_ranks
from shardwise import launch
from shardwise.tensor_parallel.styles import plan_of

SMALL = ["--layers", "1", "--hidden", "32", "--seq", "8", "--runs", "1"]
SCRIPT = Path(tp_inference.__file__)


@on_ranks(2)
def test_the_example_runs_what_it_read_from_a_package_and_prints_how_far_off_it_is(tmp_path: Path) -> None:
    args = tp_inference.parse_arguments(["gpt2", *SMALL, "--package", str(tmp_path / "parts"), "--explain"])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        difference = tp_inference.run(args)
    assert 0 <= difference < 1e-5
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [
        "manifest.json",
        "rank-0.pt2",
        "rank-1.pt2",
    ]
    text = printed.getvalue()
    if dist.get_rank():
        assert text == ""
        return
    (told,) = re.findall(r"largest difference to the unsharded model: (\S+) ", text)
    assert float(told) < 1e-4
    assert "a call sends 3 all_reduce, 1 all_gather" in text  # the table is the head too
    assert re.search(r"rank 0 holds [\d,]+ bytes \(7\d\.\d%\)", text)  # whole: a table of 1,024 places
    assert "Parameters of rank 0 of 2" in text
    assert re.search(r"^[\d,]+ tokens/s$", text, re.MULTILINE)


def test_the_example_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started = mock.Mock(return_value=5)
    monkeypatch.setattr(launch, "launch", started)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "bert", "--ranks", "3"])
    with pytest.raises(SystemExit, match="5"):
        tp_inference.main()
    started.assert_called_once_with(sys.argv, ranks=3)


@pytest.mark.parametrize("family", list(tp_inference.PLANS))
def test_every_family_has_a_model_inputs_that_it_takes_and_a_plan_that_fits_it(family: str) -> None:
    args = tp_inference.parse_arguments([family, *SMALL])
    torch.manual_seed(0)
    model = tp_inference.make_model(family, layers=args.layers, hidden=args.hidden)
    inputs, tokens = tp_inference.make_inputs(args)
    with torch.no_grad():
        assert model(inputs).shape[0] == args.batch
    assert tokens >= args.batch
    assert plan_of(tp_inference.PLANS[family], dict(model.named_parameters(remove_duplicate=False))).styles


def test_a_width_that_heads_do_not_fill_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tp_inference.parse_arguments(["llama", "--hidden", "33"])
    assert "--hidden must be a multiple of 16" in capsys.readouterr().err
