"""The training example on two ranks, a model of a few thousand weights."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import train_gpt
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from typer.testing import CliRunner

from ranks import on_ranks
from shardwise import launch
from shardwise.cli import app
from shardwise.errors import ShardwiseError
from training_report import read_run

SCRIPT = Path(train_gpt.__file__)
OURS = "from shardwise import MixedPrecisionPolicy, fully_shard\n"
TORCHS = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
SIZES = "--batch 8 --seq 16 --width 12 --depth 2 --heads 2 --eval-windows 8 --sample 12"
TINY = f"--steps 6 --save-every 3 --log-every 1 --out run {SIZES}".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        (folder / f"{i:02d}.txt").write_text(f"the {i} cats sat on the {i * i} mats; " * 40)
    return folder


def train_here(*flags: str, text: Path, cwd: Path, script: Any = train_gpt) -> str:
    """What this rank of an existing process group prints."""
    printed = io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))  # as launchers do
        args = script.parse_arguments([*TINY, "--data", str(text), *flags])
        script.run(args, torch.device("cpu"))
    return printed.getvalue()


def train_copy_here(copy: Path, *, text: Path, cwd: Path) -> str:
    """The same with a changed copy of the script."""
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.fully_shard is torch_fully_shard
    return train_here(text=text, cwd=cwd, script=script)


@pytest.fixture(scope="module")
def run(ranks: Any, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """stdout and folder of one uninterrupted run on two ranks."""
    cwd = tmp_path_factory.mktemp("straight")
    printed, silent = ranks(train_here, "--profile", "1", text=text, cwd=cwd, world_size=2)
    assert silent == ""
    return printed, cwd / "run"


@pytest.mark.usefixtures("launcher")
def test_ranks_under_a_launcher_train_alike_and_say_once_what_is_wrong(
    run: tuple[str, Path],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(launch.TRACEBACK, raising=False)
    Path("train.py").write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import contextlib, train_gpt, shardwise\n"
        "with contextlib.suppress(SystemExit): train_gpt.main()\n"
        "raise shardwise.ShardwiseError('too many')\n"
    )
    ended = CliRunner().invoke(app, ["run", "--ranks", "2", "train.py", *TINY, "--data", str(text)])
    assert (ended.exit_code, ended.output) == (1, "")
    out, err = capfd.readouterr()
    assert out == run[0]
    assert "Traceback" not in err
    assert err.count("too many") == 1  # and nothing of the launcher
    assert re.search(r"\nrank [01]: train.py:4: ShardwiseError: too many\n$", err)


def test_torchs_fully_shard_in_the_same_script_prints_the_same(
    run: tuple[str, Path], ranks: Any, text: Path, tmp_path: Path
) -> None:
    source = SCRIPT.read_text()
    assert source.count(OURS) == 1
    copy = tmp_path / "train_gpt_with_torchs.py"
    copy.write_text(source.replace(OURS, TORCHS))
    printed, silent = ranks(train_copy_here, copy, text=text, cwd=tmp_path, world_size=2)
    assert silent == ""
    assert printed == run[0]


def test_a_run_prints_every_loss_the_baseline_and_a_sample(run: tuple[str, Path]) -> None:
    out = run[0]
    losses = [float(found) for found in re.findall(r"^step +\d+  loss (\d+\.\d{6})$", out, flags=re.M)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] < math.log(256) + 0.5
    assert re.search(r"unigram baseline \d\.\d{6} nats/byte", out)
    assert re.search(r"^held-out loss \d\.\d{6} nats/byte", out, flags=re.M)
    assert "sample:\ndef " in out
    assert out.endswith("page: run/report.html\n")


def stopped_and_resumed(*, text: Path, cwd: Path) -> list[str]:
    """What two runs print: one that a signal on the last rank stops, and one that goes on."""
    rate = train_gpt.set_learning_rate

    def signalled(*args: Any, step: int, **options: Any) -> float:
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(signal.SIGTERM)
        return rate(*args, step=step, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "set_learning_rate", signalled)
        first = train_here("--save-every", "6", "--keep", "9", text=text, cwd=cwd)
    return [
        first,
        train_here("--keep", "9", text=text, cwd=cwd),
        train_here("--step", "3", text=text, cwd=cwd),
    ]


def test_a_signal_saves_and_the_run_goes_on_to_the_same_bits(
    run: tuple[str, Path], ranks: Any, text: Path, tmp_path: Path
) -> None:
    out, folder = run
    first, second, third = ranks(stopped_and_resumed, text=text, cwd=tmp_path, world_size=2)[0]
    assert first.endswith("stopped at step 3, saved; the same command goes on\n")
    for resumed in (second, third):
        assert "resumed at step 3, 24 windows into the text\n" in resumed
        assert [line for line in resumed.splitlines() if not line.startswith("resumed")] == [
            line for line in out.splitlines() if not re.match(r"step +[123] ", line)
        ]
    assert losses_of(first) == losses_of(out)[:3]
    last = Path("checkpoints", "step-00000006", "manifest.json")
    files, expected = (json.loads((at / last).read_text())["files"] for at in (tmp_path / "run", folder))
    assert {name for name in files if files[name] == expected[name]} >= files.keys() - {".metadata"}


def test_the_page_holds_what_was_printed(run: tuple[str, Path]) -> None:
    out, folder = run
    page = (folder / "report.html").read_text()
    baseline = re.search(r"unigram baseline (\d\.\d{6})", out)
    assert baseline is not None
    assert f"unigram {float(baseline[1]):.3f}" in page
    assert "all-gather" in page
    assert "reduce-scatter" in page
    assert "rank 1" in page
    losses = [row["loss"] for row in read_run(folder).steps]
    assert losses == pytest.approx(losses_of(out), abs=1e-6)


def test_a_trace_has_the_names_of_modules(run: tuple[str, Path]) -> None:
    trace = (run[1] / "trace" / "rank-1.json").read_text()
    assert "blocks.1" in trace


def test_tensorboard_is_asked_for_by_name_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train_gpt.parse_arguments(["--tensorboard"])
    assert capsys.readouterr().err.endswith("needs the package: pip install tensorboard\n")


def test_other_meshes_and_dtypes_train_alike(
    run: tuple[str, Path], ranks: Any, text: Path, tmp_path: Path
) -> None:
    flags = "--hsdp", "--dtype", "bfloat16"
    out = ranks(train_here, *flags, text=text, cwd=tmp_path, world_size=4)[0]
    assert losses_of(out)[-1] == pytest.approx(losses_of(run[0])[-1], abs=0.02)


CONTIGUOUS = ["--layout", "contiguous"]


def test_the_contiguous_layout_trains_alike(
    run: tuple[str, Path], ranks: Any, text: Path, tmp_path: Path
) -> None:
    """Zero-2 trains alike below, after a resume."""
    flags = [*CONTIGUOUS, "--strategy", "hierarchical_fsdp", "--flat"]
    out = ranks(train_here, *flags, text=text, cwd=tmp_path, world_size=4)[0]
    assert losses_of(out) == pytest.approx(losses_of(run[0]), abs=1e-4)  # sums over 4 ranks, not 2
    assert "4 ranks (cpu), contiguous layout" in out
    assert "reduce-scatter" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("first", "resumptions"),
    [
        ([], [(3, CONTIGUOUS)]),
        (CONTIGUOUS, [(4, []), (1, [*CONTIGUOUS, "--flat"])]),
        ([*CONTIGUOUS, "--flat"], [(4, [*CONTIGUOUS, "--strategy", "zero2"])]),
    ],
)
def test_a_run_resumes_in_another_layout_on_another_number_of_ranks(
    run: tuple[str, Path],
    ranks: Any,
    text: Path,
    tmp_path: Path,
    first: list[str],
    resumptions: list[tuple[int, list[str]]],
) -> None:
    saved = tmp_path if first else run[1].parent
    if first:
        ranks(train_here, "--steps", "3", *first, text=text, cwd=saved, world_size=2)
    halfway = Path("run", "checkpoints", "step-00000003")
    for world_size, flags in resumptions:
        cwd = tmp_path / f"on-{world_size}"
        shutil.copytree(saved / halfway, cwd / halfway)
        resumed = ranks(train_here, *flags, text=text, cwd=cwd, world_size=world_size)[0]
        assert "resumed at step 3, 24 windows into the text\n" in resumed
        # Windows are drawn by number, and a batch of 8 shared by 3 ranks is one of 9: another mean.
        near = 1e-4 if 8 % world_size == 0 else 0.1
        assert losses_of(resumed) == pytest.approx(losses_of(run[0])[3:], abs=near)


def losses_of(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step +\d+  loss (\S+)$", out, flags=re.M)]


def test_strategies_need_the_contiguous_layout(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--strategy", "zero2"], ["--flat"]):
        with pytest.raises(SystemExit):
            train_gpt.parse_arguments(flags)
        assert "need --layout contiguous" in capsys.readouterr().err


@on_ranks(2)
def test_without_resume_an_older_run_is_dropped(text: Path, tmp_path: Path) -> None:
    train_here("--steps", "2", text=text, cwd=tmp_path)
    out = train_here("--steps", "1", "--no-resume", text=text, cwd=tmp_path)
    assert "resumed" not in out
    dist.barrier()
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_the_same_windows_are_drawn_whatever_the_batch_size() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    whole = train_gpt.training_batch(text, position=4, batch=6, seq=8, seed=3)
    halves = [train_gpt.training_batch(text, position=p, batch=3, seq=8, seed=3) for p in (4, 7)]
    for i in range(2):
        assert torch.equal(whole[i], torch.cat([half[i] for half in halves]))
    inputs, targets = whole
    assert torch.equal(targets, inputs + 1)  # the text counts upwards
    other = train_gpt.training_batch(text, position=4, batch=6, seq=8, seed=4)
    assert not torch.equal(other[0], inputs)


def test_the_unigram_baseline_is_the_entropy_of_byte_frequencies() -> None:
    even = torch.tensor([7, 8, 9, 10] * 5, dtype=torch.uint8)
    assert train_gpt.unigram_entropy(even) == pytest.approx(math.log(4))
    assert train_gpt.unigram_entropy(torch.full((9,), 65, dtype=torch.uint8)) == 0


def test_the_standard_library_is_read_without_tests_or_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt.sysconfig, "get_path", lambda name: str(tmp_path / name))
    for name in ("abc.py", "json/decoder.py", "test/test_abc.py", "site-packages/peer.py", "readme.txt"):
        file = tmp_path / "stdlib" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {name}\n" * 40)
    train, held_out = train_gpt.read_text(None, 16)
    assert bytes(torch.cat([train, held_out]).numpy()) == b"# abc.py\n" * 40 + b"# json/decoder.py\n" * 40
    assert len(train) == 9 * len(held_out)


def test_a_folder_with_too_little_text_ends_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ShardwiseError, match="do not fill one window of 128"):
        train_gpt.read_text(tmp_path, 128)


def test_embedding_and_head_are_one_parameter() -> None:
    model = train_gpt.GPT(width=16, depth=1, heads=2, seq=8)
    assert model.head.weight is model.token.weight
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 256)


def test_the_model_sees_no_later_byte() -> None:
    torch.manual_seed(0)
    model = train_gpt.GPT(width=16, depth=2, heads=2, seq=8)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1
    same = torch.isclose(model(tokens), model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_verify_case_offers_a_small_copy_of_the_model() -> None:
    case = train_gpt.verify_case()
    first, second = case.build(), case.build()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    loss = case.loss(first, case.batch(0))
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)
    assert case.optimizer(first).param_groups[0]["params"]


def test_the_readme_says_how_large_the_model_is() -> None:
    args = train_gpt.parse_arguments([])
    with torch.device("meta"):
        model = train_gpt.GPT(width=args.width, depth=args.depth, heads=args.heads, seq=args.seq)
    size = sum(parameter.numel() for parameter in model.parameters())
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert f"\n{size:,} parameters over 4 ranks (cpu), interleaved layout, float32\n" in readme
