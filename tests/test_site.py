"""What the documentation site makes from the code, and the checks of its links and recipes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import errors
import links
import pictures
import pytest
import recipes
import sources
import stream_pictures
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import ShardwiseError
from shardwise.fsdp.schedule import Schedule

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))


@pytest.fixture(scope="module")
def package() -> list[sources.Source]:
    return sources.read(ROOT, ["src"])


# ---------------------------------------------------------------- pages about source files


@pytest.fixture
def project(tmp_path: Path) -> sources.Index:
    """A package of two files and a test of one of them."""
    files = {
        "src/shardwise/__init__.py": '"""A package."""\n',
        "src/shardwise/wheel/spoke.py": (
            '"""Spokes carry rims::\n\n    hub - rim\n\nLightly."""\n'
            "import torch\n\nWIDTH, HEIGHT = 1, 2\n\n\n"
            'def bend(spoke, *, angle):\n    """Bend a spoke. Gently."""\n'
        ),
        "src/shardwise/wheel/hub.py": '"""Hubs."""\nfrom shardwise.wheel.spoke import bend\n',
        "tests/wheel/test_long_spoke.py": '"""Spokes bend."""\n',
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return sources.Index(sources.read(tmp_path))


def test_a_files_page_has_its_purpose_symbols_relations_and_tests(project: sources.Index) -> None:
    page = dict(sources.pages(project))["source/src/shardwise/wheel/spoke.py.md"]
    assert "Spokes carry rims:\n\n    hub - rim" in page
    assert "| function | `bend(spoke, *, angle)` | [11](#__codelineno-0-11) | Bend a spoke. |" in page
    assert "`HEIGHT`" in page
    assert "From outside: `torch`." in page
    assert "## Imported by\n\n- [`src/shardwise/wheel/hub.py`](hub.py.md)" in page
    assert "## Tests\n\n- [`tests/wheel/test_long_spoke.py`]" in page
    assert 'def bend(spoke, *, angle):\n    """Bend' in page


def test_a_words_files_are_found_by_folder_and_in_the_index(project: sources.Index) -> None:
    pages = dict(sources.pages(project))
    assert "rim" in pages["source/src/shardwise/wheel/index.md"].split("**Keywords:**")[1].splitlines()[0]
    assert "**hubs**: [`wheel/hub.py`](src/shardwise/wheel/hub.py.md)" in pages["source/keywords.md"]


def test_every_file_of_the_package_says_what_it_is_for_and_has_keywords(
    package: list[sources.Source],
) -> None:
    index = sources.Index(package)
    assert [source.path for source in package if not source.purpose] == []
    assert [source.path for source in package if not index.keywords(source)] == []


# ---------------------------------------------------------------- errors


def test_the_index_of_errors_has_every_kind_and_every_message_that_the_guide_explains(
    package: list[sources.Source],
) -> None:
    guide = (ROOT / "docs" / "fsdp.md").read_text()
    page = errors.page(package, guide)

    def below(kind: type) -> Iterator[str]:
        for sub in kind.__subclasses__():
            yield sub.__name__
            yield from below(sub)

    assert [name for name in below(ShardwiseError) if f"\n## {name}\n" not in page] == []
    assert [says for says, _, _ in errors.explained(guide) if says not in page] == []
    assert len(errors.raised(package)) > 300


def test_a_message_is_read_from_the_code_with_both_ways_of_a_condition() -> None:
    text = (
        "class Odd(ShardwiseError):\n    '''Odd.'''\n\n\n"
        "def check(param):\n"
        "    raise Odd(f\"{here()}: '{param.name}' is {'odd' if param else 'even'}; make it\" + ' prime')\n"
    )
    source = sources.Source("src/shardwise/a.py", "", (), (), (), sources.Counter(), text, ast.parse(text))
    found = [one.message for one in errors.raised([source])]
    assert found == ["rank R: '{name}' is {param}; make it prime"]
    assert errors.page([source], "\n## Errors\n").count("make it prime") == 1


# ---------------------------------------------------------------- links


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("b/", False),
        ("b/#there", False),
        ("b/#nowhere", True),
        ("c/", True),
        ("#here", False),
        ("https://example.org", False),
    ],
)
def test_a_link_leads_to_a_page_and_an_anchor_or_is_broken(link: str, broken: bool, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text("<p id=there>")
    (tmp_path / "index.html").write_text(f'<p id="here"><a href="{link}">x</a>')
    found, elsewhere = links.check(tmp_path)
    assert found == ([f"index.html -> {link}"] if broken else [])
    assert elsewhere == ([link] if ":" in link else [])


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_can_be_run_as_far_as_is_seen_without_a_cluster(page: Path) -> None:
    assert list(recipes.problems(page)) == []


@pytest.mark.parametrize(
    ("language", "body", "said"),
    [
        ("bash", "if true; then\n", "syntax error"),
        ("bash", "#SBATCH --nodez=2\n", "not an option of sbatch"),
        ("bash", 'torchrun --nodes "$n" \\\n    train.py\n', "torchrun does not take it"),
        ("console", "$ torchrun --nproc train.py\n", "torchrun does not take it"),
        ("console", "$ torchrun -m shardwise.run --layout diagonal train.py\n", "diagonal"),
        ("console", "$ shardwise verify case.py --rank 2\n", "--rank"),
        ("console", "$ shardwise prove case.py\n", "no command 'prove'"),
        ("python", "from shardwise import half_shard\n", "has no ['half_shard']"),
        ("yaml", "kind: TrainJob\n", "without"),
        ("ruby", "puts\n", "nothing checks"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_noticed(language: str, body: str, said: str, tmp_path: Path) -> None:
    page = tmp_path / "recipe.md"
    page.write_text(f"```{language}\n{body}```\n")
    assert said in "\n".join(recipes.problems(page))


def test_a_field_that_a_train_job_does_not_have_is_noticed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "recipes" / "kubernetes.md").read_text()
    page = tmp_path / "recipe.md"
    page.write_text(text.replace("numNodes: 2", "nodes: 2"))
    assert "nodes" in "\n".join(recipes.problems(page))


# ---------------------------------------------------------------- pictures


def test_the_pictures_show_every_rank_and_every_module() -> None:
    assert all(f"shard of rank {rank}" in pictures.layouts() for rank in range(pictures.RANKS))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=pictures.RANKS)
    try:
        step, tree = pictures.step(), pictures.tree()
    finally:
        dist.destroy_process_group()
    assert step.count("<title>reduce blocks.1</title>") == 1
    assert step.count("<title>gather blocks.1</title>") == 2
    assert step.count("<title>gather blocks.2</title>") == 1  # the last of forward stays until backward
    assert all(f"rank {rank}" in tree for rank in range(pictures.RANKS))
    assert "2: a group of 33,536 bytes" in tree


def waits(of: list[stream_pictures.Box]) -> set[tuple[str, str]]:
    """Who waits for whom, as the pictures show it by arrows."""
    return {(one.words, box.words) for box in of for one in box.after}


def test_a_block_is_gathered_beside_the_forward_before_it_and_used_after_its_gather() -> None:
    interleaved = waits(stream_pictures.steps(of="forward"))
    contiguous = waits(stream_pictures.steps(of="forward", layout="contiguous"))
    assert {("copy in 1", "gather 1"), ("gather 1", "copy out 1"), ("copy out 0", "copy in 2")} <= interleaved
    assert {("gather 1", "forward 1"), ("forward 0", "cast 2")} <= contiguous
    assert not any(
        ("forward 0", f"{how} 1") in interleaved | contiguous for how in ("copy in", "cast", "gather")
    )


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("interleaved", {("stage 2", "reduce 2"), ("reduce 2", "stage 1")}),
        ("contiguous", {("backward 2", "stage 2"), ("reduce 2", "backward 0")}),
    ],
)
def test_gradients_are_reduced_beside_backward_and_the_optimizer_waits_for_the_last(
    layout: str, expected: set[tuple[str, str]]
) -> None:
    found = waits(stream_pictures.steps(of="backward and optimizer", layout=layout))
    assert {*expected, ("cast 0", "optimizer")} <= found
    assert not {("reduce 2", "backward 1"), ("reduce 1", "backward 0")} & found


def test_without_the_wait_at_the_end_of_backward_its_arrow_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Schedule, "wait_for_reductions", lambda self: self.reduce_inputs.clear())
    with pytest.raises(AssertionError, match="not ordered"):
        stream_pictures.steps(of="backward and optimizer")
    found = waits(stream_pictures.steps(of="backward and optimizer", races=True))
    assert ("stage 0", "reduce 0") in found
    assert not any(box == "optimizer" for _, box in found)


def test_sums_over_replicas_and_earlier_gradients_come_after_the_reduction() -> None:
    once = {"micro_batches": 2, "all_reduce_once": True}
    accumulated = stream_pictures.steps(of="backward", micro_batches=2)
    assert ("reduce 0", "all-reduce 0") in waits(stream_pictures.steps(of="backward", hsdp=True))
    assert ("add 0", "all-reduce 0") in waits(stream_pictures.steps(of="backward", hsdp=True, **once))
    assert {box.stream for box in accumulated if box.words.startswith("add")} == {"the reduce-scatter stream"}


def test_the_next_gather_follows_the_optimizer_wherever_it_ran() -> None:
    phases = "optimizer and averages and next forward"
    assert ("averages", "copy in 0") in waits(stream_pictures.steps(of=phases, after=True))
    assert ("optimizer", "copy in 0") in waits(stream_pictures.steps(of=phases, after=True, event=True))
    in_backward = stream_pictures.steps(of="backward and next forward", in_backward=True)
    assert ("step", "copy in 0") in waits(in_backward)


def test_the_pictures_of_streams_have_a_line_for_each_and_an_arrow_for_each_wait() -> None:
    drawn = stream_pictures.draw()
    assert drawn.keys() == set(stream_pictures.NAMES) < set(pictures.NAMES)
    picture = drawn["streams_hsdp.svg"]
    assert all(f">{name}</text>" in picture for name in stream_pictures.STREAMS)
    found = stream_pictures.steps(of="backward", hsdp=True)
    assert picture.count('class="wait"') == sum(len(box.after) for box in found)
