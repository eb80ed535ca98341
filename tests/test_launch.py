"""What a newcomer sees where ranks cannot start or torch will not do: one line, once."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardwise import launch
from shardwise.errors import RankMismatchError, ShardingError


def raised(error: BaseException) -> BaseException:
    """`error` with a traceback that ends in this file."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Let a rank of two fail as under torchrun; what it prints."""
    (tmp_path / "attempt_0").mkdir()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(launch.TRACEBACK, raising=False)

    def fail(rank: int, error: BaseException) -> str:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / str(rank) / "error.json"))
        error = raised(error)
        launch._show(type(error), error, error.__traceback__)
        return capfd.readouterr().err

    return fail


def test_a_mistake_is_one_line_with_its_place_from_the_first_rank_that_says_it(show: Any) -> None:
    told = show(1, ShardingError("no layout of that name"))
    assert told.startswith("rank 1: tests/test_launch.py:")
    assert told.endswith(": ShardingError: no layout of that name\n")
    assert told.count("\n") == 1
    assert show(0, ShardingError("no layout of that name")) == ""
    assert "another" in show(0, ShardingError("another"))


def test_what_ranks_say_alike_but_for_their_numbers_is_printed_once(show: Any) -> None:
    errors = [
        RankMismatchError(f"rank {rank}: could not {task}: they differ\nOnly on rank {rank}:\n  a gather")
        for rank, task in ((0, "gather"), (1, "gather"), (1, "reduce"))
    ]
    assert show(0, errors[0]).endswith("could not gather: they differ\nOnly on rank 0:\n  a gather\n")
    assert show(1, errors[1]) == ""
    assert show(1, errors[2]).endswith(": rank 1: could not reduce: they differ\n")
    other = RankMismatchError("rank 0: could not gather: they differ\nOnly on rank 0:\n  a reduction")
    assert show(0, other).endswith("they differ\nOnly on rank 0:\n  a reduction\n")
    assert show(0, ShardingError("rank 1: seen from rank 0")).count("rank 1: seen") == 1
    assert show(1, ShardingError("rank 0: seen from rank 1")).count("rank 0: seen") == 1


def test_other_errors_keep_their_traceback_once_and_what_follows_from_them_is_short(show: Any) -> None:
    assert "Traceback (most recent call last)" in show(0, ZeroDivisionError("of the user"))
    assert show(1, ZeroDivisionError("of the user")) == ""
    assert show(1, RuntimeError("Connection closed by peer\nand more")).endswith(
        "RuntimeError: Connection closed by peer\n"
    )
    assert show(1, KeyboardInterrupt()) == ""


class WordlessError(Exception):
    def __str__(self) -> str:
        raise KeyError("its text")


def test_errors_without_a_text_that_can_be_read_are_shown_too(show: Any) -> None:
    assert show(0, WordlessError()).endswith("WordlessError: <exception str() failed>\n")
    assert show(1, WordlessError()) == ""
    assert show(1, ShardingError("no file \udcff")).endswith("ShardingError: no file \\udcff\n")


def test_a_note_is_printed_by_one_rank_and_shortens_no_traceback_after_it(
    show: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "Traceback" in show(0, ZeroDivisionError("of the user"))  # and its place is known to ranks
    for printed in ("three modules\n", ""):
        launch.note("three modules")
        assert capfd.readouterr().err == printed


def test_a_traceback_begins_at_the_script_and_not_at_the_command_that_runs_it(
    tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(launch.TRACEBACK, raising=False)
    command, script = tmp_path / "bin" / "shardwise", tmp_path / "train.py"
    command.parent.mkdir()
    command.write_text(f"import runpy\nrunpy.run_path({str(script)!r})\n")
    script.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        runpy.run_path(str(command))
    assert caught.tb.tb_next is not None
    launch._show(ZeroDivisionError, caught.value, caught.tb.tb_next)
    told = capfd.readouterr().err
    assert f'File "{script}", line 1' in told
    assert told.count("File ") == 1


def test_a_script_that_python_cannot_read_is_shown_without_the_frames_that_read_it(
    tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(launch.TRACEBACK, raising=False)
    script = tmp_path / "train.py"
    script.write_text("def x(:\n")
    with pytest.raises(SyntaxError) as caught:
        runpy.run_path(str(script))
    assert caught.tb.tb_next is not None
    launch._show(SyntaxError, caught.value, caught.tb.tb_next)
    told = capfd.readouterr().err.splitlines()
    assert told[0] == f'File "{script}", line 1'
    assert [line.strip() for line in told[1:]] == ["def x(:", "^", "SyntaxError: invalid syntax"]


def test_every_traceback_is_shown_where_that_is_asked_for(show: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(launch.TRACEBACK, "1")
    for rank in range(2):
        assert "Traceback (most recent call last)" in show(rank, ShardingError("wrong"))


def test_a_script_without_a_launcher_is_told_how_to_start_it(show: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK") as caught:
        dist.init_process_group("gloo")
    told = launch.one_line(caught.value)
    assert launch.is_mistake(caught.value)
    assert "shardwise run --ranks N SCRIPT" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("exitcode", "status", "told"),
    [(1, 1, ""), (3, 3, "rank 1 exited with status 3\n"), (-9, 137, "rank 1 was killed by SIGKILL\n")],
)
def test_the_status_is_that_of_the_first_rank_to_fail(
    exitcode: int, status: int, told: str, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Any) -> None:
        assert args.training_script_args == ["--n", "4"]  # torchrun has options that begin so
        later = ProcessFailure(local_rank=0, pid=1, exitcode=-15, error_file="")
        first = ProcessFailure(local_rank=1, pid=2, exitcode=exitcode, error_file="")
        object.__setattr__(first, "timestamp", 0)
        raise ChildFailedError("train.py", {0: later, 1: first})

    monkeypatch.setattr("torch.distributed.run.run", fail)
    monkeypatch.setattr("logging.disable", lambda level: None)
    assert launch.launch(["train.py", "--n", "4"], ranks=2) == status
    assert capfd.readouterr().err == told


def test_the_status_is_0_where_no_rank_fails(monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.distributed.run.run", lambda args: None)
    monkeypatch.setattr("logging.disable", lambda level: None)
    assert launch.launch(["train.py"], ranks=2) == 0


def test_the_status_tells_the_signal_that_ended_the_launcher(monkeypatch: Any) -> None:
    def ended(args: Any) -> None:
        raise SignalException("ended", signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.run.run", ended)
    monkeypatch.setattr("logging.disable", lambda level: None)
    assert launch.launch(["train.py"], ranks=2) == 143  # as a shell says it


STUBS = {
    "": "has none: pip install 'torch>=2.12,<2.16'",
    "2.11.0": "needs torch 2.12 to 2.15, found 2.11.0",
    "2.99.0": "needs torch 2.12 to 2.15, and 2.99.0 is too new",
}


@pytest.mark.parametrize("version", STUBS)
def test_a_torch_that_will_not_do_is_one_line(version: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = {version!r}")
    if not version:
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None")
    path = os.pathsep.join([str(tmp_path), str(Path(launch.__file__).parents[1])])
    for command in (["-m", "shardwise", "doctor"], ["-c", "import shardwise"]):
        ended = subprocess.run(
            [sys.executable, *command],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 1
        *above, told = ended.stderr.splitlines()
        assert STUBS[version] in told
        assert (above == []) == (command[0] == "-m")
