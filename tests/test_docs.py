"""The documentation against the project: its examples run, and what it names exists."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pictures
import pytest
import recipes
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import shardwise
from ranks import RankPool
from shardwise import sharded_tensor, tensor_parallel
from shardwise.checkpoint import latest_step
from shardwise.cli import app
from shardwise.fsdp.lifecycle import TABLE, TrainingState

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"))
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"^<!-- not run: .{10,} -->\n```\w+\n.*?^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
DRAWN = pictures.NAMES
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", ".ci")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    """Those that run: all that no line before them says the reason why not."""
    return [body for language, body in FENCE.findall(NOT_RUN.sub("", text)) if language == "python"]


def code(text: str) -> list[str]:
    """What a page shows as code: the contents of fences and of code spans."""
    return [body for _, body in FENCE.findall(text)] + CODE_SPAN.findall(FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_links(page: str) -> list[str]:
    missing = []
    for link in LINK.findall(FENCE.sub("", read(page))):
        if re.match(r"\w+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        if path.parent.name == "pictures" and path.name in DRAWN:
            continue
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            missing.append(link)
    return missing


def missing_paths(page: str) -> list[str]:
    """Paths in code spans that begin with a folder of the repository, or stand in its root."""
    named = [word for span in CODE_SPAN.findall(FENCE.sub("", read(page))) for word in span.split()]
    paths = [word.split("::")[0] for word in named if word.split("/")[0] in FOLDERS and "/" in word]
    paths += [word for word in named if re.fullmatch(r"[A-Z]+(\.md)?|Makefile|[\w.-]+\.toml", word)]
    root_files = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"}
    checked = [path for path in paths if "/" in path or path in root_files or path.endswith(".toml")]
    return [path for path in checked if not any(ROOT.glob(path.rstrip("/"))) and not (ROOT / path).exists()]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_help_has_every_target_in_columns_with_the_values_of_its_variables() -> None:
    told = subprocess.run(
        ["make", "help", "RANKS=7"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split("\n\n")[0]
    lines = told.rstrip().split("\n")
    assert {line.split()[1] for line in lines if line.startswith("make ")} == make_targets()
    assert all(line[17] == " " != line[18] for line in lines)
    defaults = re.findall(r"^([A-Z]+) +\?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(defaults) == set(re.findall(r"\b([A-Z]+)=", told.replace("TORCH=2.15.0", "")))
    assert "RANKS=7" in told


def public_methods(cls: type) -> set[str]:
    """Of the class and of its bases in this package."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("shardwise.")]
    return {
        name
        for base in ours
        for name, value in vars(base).items()
        if not name.startswith("_") and inspect.isroutine(value)
    }


def test_the_pages_expected_are_there() -> None:
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= set(PAGES)
    guides = {"fsdp", "strategies", "sharded_parameter", "optim", "migrating", "checkpoint", "verify"}
    guides |= {"sharded_tensor", "tensor_parallel", "compile", "dimensions"}
    assert {f"docs/{name}.md" for name in guides} <= set(PAGES)
    licence = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def run_readme(number: int, folder: Path, *arguments: str) -> str:
    """What one of the README's scripts prints, in the group that a rank has already."""
    with (
        mock.patch.object(dist, "init_process_group") as init,
        mock.patch.object(sys, "argv", ["script.py", *arguments]),
    ):
        printed = run_blocks("README.md", folder, only=number)
    init.assert_called_once_with("gloo")
    return printed


def test_the_readmes_example_trains_as_it_stands(ranks: RankPool, tmp_path: Path) -> None:
    assert [len([x for x in block.splitlines() if x]) for block in python_blocks(read("README.md"))] == [
        15,
        15,
    ]
    for printed in ranks(run_readme, 1, tmp_path, world_size=2):
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
        assert len(losses) == 101
        assert losses[0] > 5
        assert sum(losses[-10:]) / 10 < 2
    assert latest_step(tmp_path / "run") == 101


def test_the_readmes_example_fine_tunes_a_folder_with_a_tokenizer(ranks: RankPool, tmp_path: Path) -> None:
    characters = {each: i for i, each in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=characters, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "from")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, pad_token_id=0, **shape))
    model.save_pretrained(tmp_path / "from")
    (tmp_path / "text").write_text("All work and no play makes Jack a dull boy. " * 120)
    ranks(run_readme, 2, tmp_path, "from", "text", "to", world_size=2)
    ids = torch.tensor(
        [PreTrainedTokenizerFast.from_pretrained(tmp_path / "from")("no play makes Jack" * 4).input_ids]
    )
    before, after = (
        LlamaForCausalLM.from_pretrained(tmp_path / folder)(input_ids=ids, labels=ids).loss.item()
        for folder in ("from", "to")
    )
    assert after < before - 0.01


def run_blocks(page: str, folder: Path, *, only: int | None = None) -> str:
    """Run the blocks of a page one after the other, or one of them; what they print."""
    module = sys.modules["example"] = ModuleType("example")  # compilers import it by name
    printed = io.StringIO()
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            for number, block in enumerate(python_blocks(read(page)), start=1):
                if only not in (None, number):
                    continue
                exec(compile(block, f"{page}, block {number}", "exec"), vars(module))
    finally:
        del sys.modules["example"]
    return printed.getvalue()


RUN = {  # on how many ranks; one after the other in the same folder where several are given
    "docs/fsdp.md": [4],
    "docs/checkpoint.md": [4],
    "docs/optim.md": [4],
    "docs/strategies.md": [4],
    "docs/dimensions.md": [4],
    "docs/sharded_tensor.md": [4],
    "docs/tensor_parallel.md": [4],
    "docs/compile.md": [1],  # which each rank compiles; on several, tests/graph does
    "docs/hf.md": [2],
    "docs/streams.md": [2],
    "docs/plan.md": [1],
    "docs/first_steps.md": [2],
    "docs/tasks/plan.md": [1],
    "docs/tasks/train.md": [2],
    "docs/tasks/resume.md": [2],
    "docs/tasks/reshard.md": [4, 2, 3],
    "docs/tasks/serve.md": [2],
    "docs/tasks/compile.md": [2],
    "docs/tasks/debug_a_hang.md": [2],
    "docs/tasks/check_parity.md": [1],
    "docs/tasks/other_code.md": [2],
    "docs/migrating/fsdp1.md": [2],
    "docs/migrating/ddp.md": [2],
    "docs/migrating/deepspeed.md": [2],
    "docs/migrating/sharded_tensor.md": [2],
    "docs/recipes/index.md": [2],
}
RUN_ELSEWHERE = {"README.md"}


@pytest.mark.parametrize("page", RUN)
def test_a_pages_examples_run_in_order(ranks: RankPool, page: str, tmp_path: Path) -> None:
    for world_size in RUN[page]:
        ranks(run_blocks, page, tmp_path, world_size=world_size)


def test_every_python_block_of_a_page_runs_or_says_why_not() -> None:
    pages = {page for page in PAGES if python_blocks(read(page))}
    assert pages == RUN.keys() | RUN_ELSEWHERE


@pytest.mark.parametrize("page", PAGES)
def test_everything_a_page_links_to_exists(page: str) -> None:
    assert missing_links(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_a_page_names_exists(page: str) -> None:
    assert missing_paths(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_a_page_names_exists(page: str) -> None:
    named = {target for text in code(read(page)) for target in re.findall(r"\bmake ([a-z]+)\b", text)}
    assert named <= make_targets()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_a_page_names_exists(page: str) -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    spans = CODE_SPAN.findall(FENCE.sub("", read(page)))
    assert {found[1] for span in spans if (found := re.match(r"shardwise ([a-z]+)", span))} <= known


@pytest.mark.parametrize("page", PAGES)
def test_every_command_a_page_shows_is_one_that_its_program_takes(page: str) -> None:
    shown = [line for _, body in FENCE.findall(read(page)) for line in body.splitlines()]
    commands = [line.removeprefix("$ ") for line in shown if line.startswith("$ ")]
    assert [problem for line in commands for problem in recipes.check_command(line)] == []


def test_every_public_name_is_in_the_guide_or_the_readme() -> None:
    text = read("docs/fsdp.md") + read("docs/compile.md") + read("README.md")
    assert [name for name in shardwise.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_every_name_of_sharded_tensor_is_in_its_guide() -> None:
    text = read("docs/sharded_tensor.md")
    assert [name for name in sharded_tensor.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_every_name_of_tensor_parallel_is_in_its_guide() -> None:
    text = read("docs/tensor_parallel.md")
    assert [name for name in tensor_parallel.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_every_method_of_a_sharded_module_is_in_the_guide_and_the_guide_invents_none() -> None:
    methods = public_methods(shardwise.FSDPModule)
    spans = CODE_SPAN.findall(FENCE.sub("", read("docs/fsdp.md")))
    named = {found[0] for span in spans if (found := re.match(r"\w+(?=\()", span))}
    assert sorted(methods - named) == []
    assert sorted(name for name in named if name.startswith("set_") and name not in methods) == []


def test_every_argument_of_fully_shard_has_a_section_in_the_guide() -> None:
    headings = re.findall(r"^### (\w+)$", read("docs/fsdp.md"), re.MULTILINE)
    assert headings == list(inspect.signature(shardwise.fully_shard).parameters)


def messages() -> list[str]:
    """Every string in the package's source, with "..." for what is filled in."""
    found = []
    for path in (ROOT / "src" / "shardwise").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            literal = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
            found.append("".join(text for text in literal if isinstance(text, str)))
    return found


def test_every_error_the_guide_explains_is_raised_somewhere() -> None:
    section = read("docs/fsdp.md").split("\n## Errors\n")[1]
    explained = re.findall(r"^\| ([^|]+?)(?: \(a warning\))? \|", section, re.MULTILINE)
    explained.remove("message says")
    known = messages()
    assert len(explained) > 5
    assert [text for text in explained if not any(text in message for message in known)] == []


def test_the_architecture_names_every_package_and_shows_the_lifecycle_table_as_it_is() -> None:
    text = read("ARCHITECTURE.md")
    packages = {path.stem for path in (ROOT / "src" / "shardwise").iterdir() if path.suffix == ".py"}
    packages |= {path.parent.name for path in (ROOT / "src" / "shardwise").glob("*/__init__.py")}
    assert [name for name in sorted(packages - {"__init__"}) if not re.search(rf"`{name}`", text)] == []
    (table,) = [body for _, body in FENCE.findall(text) if "PRE_BACKWARD" in body]
    states, *rows = [re.split(r"\s{2,}", line.strip()) for line in table.strip().splitlines()]
    expected = []
    for event, row in TABLE.items():
        words = event.name.lower().replace("_", " ").replace("pre ", "pre-").replace("post ", "post-")
        actions = [
            row[TrainingState[state]][0].name if TrainingState[state] in row else "-" for state in states
        ]
        expected.append([words, *[action.lower() for action in actions]])
    assert rows == expected


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](nowhere.md)", ["nowhere.md"]),
        ("[a](README.md#no-such-heading)", ["README.md#no-such-heading"]),
        ("[a](README.md) and [b](https://example.org)", []),
    ],
)
def test_a_broken_link_is_noticed(text: str, broken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "read", lambda page: text)
    assert missing_links("made-up.md") == broken


def test_a_wrong_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "`src/shardwise/nowhere.py`, `docs/*.md` and `pytest tests/nothing.py::test_x`"
    monkeypatch.setattr(sys.modules[__name__], "read", lambda page: text)
    assert missing_paths("made-up.md") == ["src/shardwise/nowhere.py", "tests/nothing.py"]
