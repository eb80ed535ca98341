"""benchmarks/CLAIMS.md against the documents it quotes, the checks it names and the figures it points to."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import shardwise
from shardwise.planner import Setup

ROOT = Path(__file__).parents[1]
CLAIMS, TABLES = ROOT / "benchmarks/CLAIMS.md", ROOT / "benchmarks/TABLES.md"
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def one_line(text: str) -> str:
    return " ".join(text.split())


def cells(line: str) -> list[str]:
    """Of a row of a table; a cell's own bars are written as `\\|`."""
    return [cell.replace(r"\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of CLAIMS.md."""
    section = CLAIMS.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [cells(line) for line in section.splitlines() if line.startswith("|")][2:]


def quoted_claims() -> list[tuple[str, str]]:
    """All claims, each with the page that makes it."""
    return [(row[0], row[1]) for heading in ("Checked", "Recorded", "Commands") for row in table(heading)]


def missing_checks(named: str) -> list[str]:
    """Those of the code spans of a cell that are no test, script or target of make."""
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [check for check in re.findall(r"`([^`]+)`", named) if not exists(check, targets)]


def exists(check: str, targets: list[str]) -> bool:
    if check.startswith("make "):
        return check.split()[1] in targets
    path, _, name = check.split()[0].partition("::")
    if not (ROOT / path).is_file():
        return False
    defined = ast.parse((ROOT / path).read_text()).body
    return not name or any(isinstance(node, ast.FunctionDef) and node.name == name for node in defined)


def recorded(where: str) -> list[float]:
    """Numbers of TABLES.md, by section, the beginning of a caption, a pattern of rows and a column."""
    section, caption, row, column = (part.strip() for part in where.split(";"))
    text = TABLES.read_text().split(f"<!-- begin {section} -->")[1].split(f"<!-- end {section} -->")[0]
    found = []
    for part in re.split(r"\n(?=\*\*)", text):
        lines = [line for line in part.splitlines() if line.startswith("|")]
        if not lines or (caption and not part.startswith(f"**{caption}")):
            continue
        header, _, *rows = [cells(line) for line in lines]
        named = [one for one in rows if fnmatch(one[0].strip("*"), row) or fnmatch(", ".join(one[:2]), row)]
        found += [NUMBER.findall(one[header.index(column)])[:1] for one in named if column in header]
    return [float(number.replace(",", "")) for numbers in found for number in numbers]


def measured(where: str) -> float:
    """One cell's number, the least, most or sum of several, or the ratio of two."""
    if " divided by " in where:
        one, other = where.split(" divided by ")
        return measured(one) / measured(other)
    for word, of in (("least of ", min), ("most of ", max), ("sum of ", sum)):
        if where.startswith(word):
            return of(recorded(where.removeprefix(word)))
    return recorded(where)[0]


def differing(figures: str, where: list[str]) -> list[str]:
    """The figures that are not those measured, rounded as the figures are."""
    found = [one.replace(",", "") for one in NUMBER.findall(figures)]
    return [
        f"{figure}, recorded {cell:g}"
        for figure, cell in zip(found, map(measured, where), strict=True)
        if figure != f"{cell + 1e-9:.{len(figure.partition('.')[2])}f}"
    ]


def test_every_claim_stands_word_for_word_in_its_page() -> None:
    assert [(c, page) for c, page in quoted_claims() if c not in one_line((ROOT / page).read_text())] == []


def test_every_check_that_is_named_exists() -> None:
    named = [row[2] for heading in ("Checked", "Commands") for row in table(heading)]
    assert [cell for cell in named if "`" not in cell] == []
    assert [missing for cell in named for missing in missing_checks(cell)] == []


def test_every_check_was_seen_to_fail() -> None:
    assert [row[0] for row in table("Checked") if len(row) != 4 or not row[3]] == []


@pytest.mark.parametrize("row", table("Recorded"), ids=lambda row: row[0])
def test_figures_are_those_recorded(row: list[str]) -> None:
    claim, page, figures, where, command = row
    text = one_line((ROOT / page).read_text())
    assert figures in text[text.index(claim) :][: len(claim) + 40]
    assert differing(figures, re.findall(r"`([^`]+)`", where)) == []
    assert missing_checks(command) == []


def test_tables_on_two_pages_are_equal() -> None:
    def section(page: str, name: str) -> list[str]:
        text = (ROOT / page).read_text().split(f"<!-- begin {name} -->")[1]
        return [line for line in text.split(f"<!-- end {name} -->")[0].splitlines() if line.startswith("|")]

    programs = section("README.md", "tensor_parallel")
    assert len(programs) > 20
    assert programs == section("benchmarks/TABLES.md", "tensor_parallel")
    assert section("README.md", "clients") == section("docs/tasks/other_code.md", "clients")


def test_what_does_not_exist_or_fit_is_noticed() -> None:
    assert missing_checks("`make nothing`, `tests/nowhere.py`, `make test`") == [
        "make nothing",
        "tests/nowhere.py",
    ]
    assert missing_checks("`tests/test_claims.py::test_no_such`") == ["tests/test_claims.py::test_no_such"]
    where = ["tensor_parallel;; right; torch, as exported"]
    assert differing("12", where) == []
    assert differing("13", where) == ["13, recorded 12"]
    gathers = "gloo_transport;; all-gather*, 33.600; ratio"
    assert differing("0.33 to 0.47", [f"least of {gathers}", f"most of {gathers}"]) == []
    assert len(differing("0.47 to 0.33", [f"least of {gathers}", f"most of {gathers}"])) == 2


def test_the_plan_of_llama_3_70b_in_the_guide_to_dimensions_is_what_the_planner_prints() -> None:
    """Of the first row; the others take as long again, and a minute."""
    lines = (ROOT / "docs/dimensions.md").read_text().splitlines()
    row = next(cells(line) for line in lines if line.startswith("| `dp64`"))
    setup = Setup(ranks=64, sequence=8192, checkpointing="full", layout="contiguous")
    plan = shardwise.plan("llama3-70b", setup, hardware="h100")
    reserved, sent = plan.reserved_bytes / 2**30, plan.wire_bytes / 2**30
    assert row[1:4] == [f"{reserved:.1f}", f"{sent:.0f}", f"{plan.tokens_per_s:,.0f}"]
