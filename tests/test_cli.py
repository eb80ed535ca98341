"""The `shardwise` command: what it prints and the status it leaves with."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

import shardwise
from shardwise import cli, doctor, launch, planner, verify
from shardwise.cli import app
from shardwise.doctor import CheckResult, Status
from shardwise.planner.setup import Setup
from shardwise.verify import START, CaseError, Difference, VerifyResult
from shardwise.verify.compare import fixed_tolerance

CASES = Path(__file__).parent / "cases"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def result_with(*differences: Difference) -> VerifyResult:
    return VerifyResult(
        spec="case.py",
        ranks=4,
        replicas=2,
        steps=2,
        seed=0,
        layout="contiguous",
        tolerance=fixed_tolerance(0.01),
        differences=differences,
    )


@pytest.fixture
def outcome(monkeypatch):
    """Set what the next verification returns or raises; holds the arguments it was called with."""
    seen = {}

    def set_outcome(value) -> dict:
        def stand_in(spec, **arguments):
            seen.update(arguments, spec=spec)
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(verify, "verify", stand_in)
        return seen

    return set_outcome


def test_a_verification_within_tolerance_exits_0_with_a_row_per_step(outcome):
    seen = outcome(
        result_with(
            Difference(kind="parameter", step=START, name="a.weight"),
            Difference(kind="loss", step=0, name="loss", absolute=0.125, relative=0.005, used=0.5),
            Difference(kind="gradient", step=1, name="b.weight", absolute=0.25, relative=0.0075, used=0.75),
        )
    )
    result = run("verify", "case.py", "--ranks", "4", "--hsdp", "2", "--layout", "contiguous")
    assert result.exit_code == 0
    assert seen["spec"] == "case.py"
    assert (seen["ranks"], seen["replicas"], seen["layout"], seen["steps"]) == (4, 2, "contiguous", 5)
    assert (seen["tolerance"], seen["dtype"]) == (None, None)
    lines = [line for line in result.output.splitlines() if line.startswith("│")]
    assert len(lines) == 3 * 2  # absolute over relative
    assert "start" in lines[0]
    assert "1.2e-01" in lines[2]
    assert "5.0e-03" in lines[3]
    assert "gradient b.weight: 75%" in lines[4]
    assert "Within tolerance" in result.output


def test_a_mesh_and_a_tolerance_reach_the_verification_and_not_the_simulated_accelerator(outcome):
    seen = outcome(result_with())
    assert run("verify", "case.py", "--mesh", "dp2,tp2").exit_code == 0
    assert seen["mesh"] == "dp2,tp2"
    for other in (("--mesh", "dp2"), ("--tolerance", "0")):
        ended = run("verify", "case.py", *other, "--streams")
        assert ended.exit_code == 2
        assert "--streams takes --ranks and --hsdp" in ended.output


@pytest.mark.parametrize("broken", ["interleaved", "contiguous", None])
def test_both_layouts_are_compared_one_after_the_other(monkeypatch, tmp_path, broken):
    asked = []

    def stand_in(spec, *, layout, **arguments):
        asked.append(layout)
        problem = "none on rank 1" if layout == broken else ""
        return replace(
            result_with(Difference(kind="gradient", step=0, name="b.weight", problem=problem)), layout=layout
        )

    monkeypatch.setattr(verify, "verify", stand_in)
    result = run("verify", "case.py", "--layout", "both", "--json", str(tmp_path / "report.json"))
    assert asked == ["interleaved", "contiguous"]
    assert result.exit_code == (0 if broken is None else 1)
    for layout in asked:
        told = "Beyond tolerance" if layout == broken else "Within tolerance"
        assert any(told in line and f"({layout} layout)" in line for line in result.output.splitlines())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == ("within tolerance" if broken is None else "beyond tolerance")
    assert [each["layout"] for each in report["results"]] == asked


def test_a_difference_beyond_tolerance_exits_1_and_names_parameter_and_step(outcome, tmp_path):
    outcome(
        result_with(
            Difference(kind="loss", step=0, name="loss", absolute=0.5, relative=0.25, used=25.0),
            Difference(kind="gradient", step=0, name="b.weight", problem="none on rank 1"),
            Difference(
                kind="parameter", step=1, name="c.weight", absolute=9.0, relative=float("inf"), used=7.0
            ),
        )
    )
    result = run("verify", "case.py", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    assert (
        "Beyond tolerance (contiguous layout). First difference: step 0: the loss differs by 0.5"
        in result.output
    )
    assert (
        "First parameter beyond tolerance: step 0: the gradient of b.weight: none on rank 1" in result.output
    )
    assert "2 parameters are beyond tolerance" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["differences"][2]["relative"] == "inf"
    assert report["first_parameter"]["name"] == "b.weight"


@pytest.mark.parametrize("streams", [[], ["--streams"]], ids=["numbers", "streams"])
def test_a_report_that_cannot_be_written_is_refused_before_the_run(streams, tmp_path):
    result = run("verify", "no_such_case.py", "--json", str(tmp_path / "none" / "report.json"), *streams)
    assert result.exit_code == 2
    assert "report.json cannot be written" in result.stderr
    assert "no_such_case" not in result.stderr


def test_a_case_that_cannot_be_run_exits_2_with_its_traceback(outcome, tmp_path):
    outcome(CaseError("case.py could not be run: rank 1: it [broke]", traceback="the [stack]"))
    result = run("verify", "case.py", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 2
    assert "the [stack]" in result.output
    assert "rank 1: it [broke]" in result.output
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "not run"


@pytest.mark.parametrize(
    "arguments", [["--ranks", "0"], ["--layout", "diagonal"], ["--tolerance", "-1"], ["--timeout", "-5"], []]
)
def test_arguments_that_mean_nothing_exit_2(arguments):
    ended = run("verify", *(["case.py", *arguments] if arguments else []))
    assert ended.exit_code == 2
    assert ended.stderr.startswith("Usage: ")


WRONG = """
    --ranks 0; --ranks 8.5; --hardware b7; --hardware none.toml; --replicas 3; --pipeline 3; --stages 2
    --schedule 2F2B; --ulysses 5; --experts 0; --experts 2; --expert-load 0.5; --tensor 3
    --expert-load inf; --experts 2 --expert-load 3
    --tensor-plan megatron; --async-tensor; --pipeline 4; --float8 --compile --hardware a100-80gb
    --pipeline 2 --ulysses 2; --pipeline 2 --schedule Interleaved1F1B; --tensor 2 --loss chunked --ulysses 2
    --layout diagonal; --strategy zero9; --strategy ddp; --strategy hsdp --layout contiguous
    --strategy ddp --layout contiguous --replicas 2; --checkpointing half; --compile-loss --tensor 2; --float8
    --compile-loss --loss chunked; --tensor 8; --micro-batch 99999999; --accumulation 99999999
    --pipeline 8 --accumulation 8 --schedule Interleaved1F1B --stages 2
    --float8-scales row; --float8 --compile --float8-scales nvfp4; --nvfp4
    --nvfp4 --compile; --nvfp4 --float8 --compile
    --pipeline 2 --accumulation 5 --schedule Interleaved1F1B --stages 2
    --optimizer Adam; --loss half; --loop-holds loss; --micro-batch 0; --sequence 0; --sequence 99999999
    --accumulation 0; --json /none/a; --html /none/a; --trace /none/a; --png /none/a; --unknown
"""
ASKS = """
import json, sys
from typer.main import get_command
from shardwise.cli import app
command = get_command(app)
sys.modules["matplotlib.figure"] = None
for arguments in json.loads(sys.argv[1]):
    try:
        command.main(["plan", *arguments], "shardwise")
    except SystemExit as ended:
        print(json.dumps([arguments, ended.code, "torch" in sys.modules]))
"""


def test_every_wrong_argument_of_a_plan_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    wrong = [["gpt2", *one.split()] for line in WRONG.split("\n") for one in line.split(";") if one.strip()]
    options = [one for one in typer.main.get_command(app).commands["plan"].params if one.name != "model"]
    with_values = {one.opts[0] for one in options if not getattr(one, "is_flag", False)}
    assert with_values <= {word for one in wrong for word in one}
    wrong += [[], ["no_such_model"], ["no/such.json"]]
    for number, text in enumerate(["", "{", "[]", "{}"]):
        (tmp_path / f"{number}.json").write_text(text)
        wrong.append([str(tmp_path / f"{number}.json")])
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes("name = 'é'".encode("latin1"))
    wrong += [["gpt2", "--hardware", str(tmp_path / f"{name}.toml")] for name in ("folder", "latin")]
    h100 = Path(planner.__file__).parent / "hardware" / "h100.toml"
    (tmp_path / "rates.toml").write_text(re.sub("\nbfloat16.*", "", h100.read_text()))
    wrong += [
        ["gpt2", "--hardware", str(tmp_path / "rates.toml")],
        ["gpt2", "--png", str(tmp_path / "a.png")],
    ]
    wrong += [["no_such_module:factory"], ["no_such_package.module:factory"], ["os:nope"]]
    asked = [*wrong, ["torch:nope"]]
    ended = subprocess.run(
        [sys.executable, "-c", ASKS, json.dumps(asked)], capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert found == [[one, 2, one == asked[-1]] for one in asked]


def test_a_search_is_told_which_options_were_given(monkeypatch) -> None:
    search = mock.Mock(side_effect=shardwise.errors.ShardwiseError("enough"))
    monkeypatch.setattr(planner, "search", search)
    assert run("plan", "gpt2", "--search", "--layout", "interleaved", "--tensor", "1").exit_code == 2
    search.assert_called_once_with("gpt2", Setup(), hardware="h100", layout="interleaved", tensor=1)


def test_a_file_to_write_may_be_in_the_home_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(planner, "plan", mock.Mock(return_value=mock.Mock(fits=True)))
    monkeypatch.setattr(planner, "to_json", lambda made: "{}")
    assert run("plan", "gpt2", "--json=~/made.json").exit_code == 0
    assert (tmp_path / "made.json").read_text() == "{}\n"


def test_help_says_what_the_exit_status_means():
    output = " ".join(run("verify", "--help").output.split())
    assert (
        "0 everything is within tolerance; 1 a loss, gradient or parameter is beyond it; 2 the case" in output
    )


@pytest.mark.parametrize(("status", "code"), [(Status.OK, 0), (Status.WARNING, 0), (Status.BROKEN, 1)])
def test_doctor_fails_only_where_something_needed_is_broken(monkeypatch, status, code):
    monkeypatch.setattr(doctor, "examine", lambda folder: [CheckResult("gloo", status, "seen", "fix it")])
    result = run("doctor")
    assert result.exit_code == code
    assert status in result.output
    assert "fix it" in result.output


@pytest.mark.usefixtures("pooled")
def test_the_command_finds_a_wrong_gradient_in_a_real_run():
    ended = run("verify", f"{CASES / 'wrong.py'}:scaled_gradient", "--ranks", "2", "--steps", "2")
    assert ended.exit_code == 1, ended.stderr
    assert "First difference: step 1: the gradient of blocks.1.output.weight differs by" in ended.stdout


def test_the_command_says_that_a_script_has_no_case():
    ended = run("verify", str(CASES / "no_case.py"))
    assert ended.exit_code == 2, ended.stdout
    assert "no_case.py has no function `verify_case()`" in ended.stderr
    assert ended.stdout == ""


def test_tp_export_writes_a_program_for_every_rank_and_says_what_is_where(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), tmp_path / "model.pt2")
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"0": "colwise", "2": "rowwise"}))
    asked = ["tp", "export", str(tmp_path / "model.pt2"), "--out", str(tmp_path / "cut"), "--ranks", "3"]
    done = run(*asked, "--strategies", str(plan))
    assert done.exit_code == 0, done.output
    assert "all_reduce" in done.output
    assert sorted(path.name for path in (tmp_path / "cut").glob("*.pt2")) == [
        f"rank-{r}.pt2" for r in range(3)
    ]
    again = run(*asked, "--strategies", str(plan))
    assert again.exit_code == 2
    assert "already exists" in again.output


def test_the_version_is_the_packages_own() -> None:
    told = run("--version").output
    assert told.startswith(f"shardwise {shardwise.__version__}, torch {torch.__version__}, Python 3.")
    assert shardwise.__version__ == metadata.version("shardwise")


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in run("--help").output


def test_a_script_that_is_not_there_is_said_before_ranks_are_started(monkeypatch) -> None:
    started = mock.Mock(return_value=7)
    monkeypatch.setattr(launch, "launch", started)
    monkeypatch.delenv("RANK", raising=False)
    for arguments in (["nothing.py"], [str(CASES)], ["-m", "nothing.at.all"]):
        ended = run("run", "--ranks", "3", *arguments)
        assert ended.exit_code == 2
        kind = "module" if "-m" in arguments else "script"
        assert ended.stderr.startswith(f"Error: No such {kind}: {arguments[-1]}")
        assert ended.stderr.count("\n") == 1
    started.assert_not_called()
    case = str(CASES / "no_case.py")
    assert run("run", "--ranks", "3", "--layout", "contiguous", case, "--steps", "1").exit_code == 7
    command = ["-m", "shardwise.run", "--layout", "contiguous", case, "--steps", "1"]
    started.assert_called_once_with(command, ranks=3)


def test_a_strategy_that_is_none_is_said_before_the_script_is_run(monkeypatch) -> None:
    started = mock.Mock()
    monkeypatch.setattr(launch, "launch", started)
    monkeypatch.delenv("RANK", raising=False)
    for ranks in ([], ["--ranks", "2"]):
        ended = run("run", *ranks, "--strategy", "zero9", str(CASES / "no_case.py"))
        assert ended.exit_code == 2
        assert ended.stderr.startswith("Error: --strategy is one of ddp, zero1, zero2, fsdp")
    started.assert_not_called()


def test_what_plan_takes_has_the_defaults_of_a_setup() -> None:
    assert CliRunner().invoke(app, ["plan", "no-such-model"]).exit_code == cli.NOT_RUN
    given = inspect.signature(cli.plan).parameters
    same = {field.name: field.default for field in fields(Setup) if field.name in given}
    assert {"ranks", "replicas", "tensor", "micro_batch", "sequence", "accumulation"} < set(same)
    assert {name: given[name].default for name in same} == same
