"""The training page holds every number it was given and loads nothing."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from training_report import TrainingReport, human_bytes, line_chart, nice_ticks, smoothed

MIB = 2**20


def report(**changes: object) -> TrainingReport:
    numbers: dict[str, object] = {
        "title": "A <small> model & its run",
        "ranks": 2,
        "parameters": 1_234_567,
        "losses": [5.5, 4.0, 3.0, 2.5],
        "baseline": 3.2368,
        "held_out_loss": 2.4321,
        "memory": [
            {"parameters": 3 * MIB, "gradients": 3 * MIB, "optimizer": 6 * MIB},
            {"parameters": 2 * MIB, "gradients": 2 * MIB, "optimizer": 4 * MIB},
        ],
        "unsharded_memory": {"parameters": 5 * MIB, "gradients": 5 * MIB, "optimizer": 10 * MIB},
        "collectives": [
            {"kind": "all_gather", "calls": 10, "bytes": 26_000_000},
            {"kind": "reduce_scatter", "calls": 5, "bytes": 13_000_000},
        ],
        "settings": {"seed": "17", "layout": "interleaved"},
        "sample": "def f(x):\n    return x < 3",
    }
    return TrainingReport(**{**numbers, **changes})  # type: ignore[arg-type]


class Page(HTMLParser):
    """What a page says, section by section, and every address in it."""

    VOID = frozenset({"meta", "link", "img", "br", "input", "source"})
    LINKS = frozenset({"src", "href", "xlink:href", "data", "poster", "srcset"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.section = ""
        self.texts: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.points: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        given = dict(attrs)
        if tag == "section":
            self.section = given["id"] or ""
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")
        ]
        self.points += [given["points"] or ""] if "points" in given else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.setdefault(self.section, []).append(" ".join(data.split()))


def test_the_page_holds_the_numbers_it_was_given() -> None:
    page = Page(report().render())
    assert "1,234,567 parameters over 2 ranks, 4 steps" in page.texts[""]
    assert "unigram 3.237" in page.texts["loss"]
    assert "held-out 2.432" in page.texts["loss"]
    memory = page.texts["memory"]
    start = memory.index("rank 0")
    assert memory[start:] == [
        *("rank 0", "3.00 MiB", "3.00 MiB", "6.00 MiB", "12.0 MiB"),
        *("rank 1", "2.00 MiB", "2.00 MiB", "4.00 MiB", "8.00 MiB"),
        *("unsharded", "5.00 MiB", "5.00 MiB", "10.0 MiB", "20.0 MiB"),
    ]
    assert any("60.0% of the unsharded model" in text for text in memory)
    assert page.texts["collectives"][-6:] == [
        "all-gather",
        "10",
        "24.8 MiB",
        "reduce-scatter",
        "5",
        "12.4 MiB",
    ]
    assert "17" in page.texts["settings"]


def test_the_page_loads_nothing() -> None:
    html = report().render()
    page = Page(html)
    assert page.addresses == []
    assert "://" not in html
    assert "@import" not in html
    assert "url(" not in html
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object"})


def test_text_from_the_run_is_escaped() -> None:
    html = report(sample="<script>alert(1)</script>").render()
    assert "<script>" not in html
    assert "A &lt;small&gt; model &amp; its run" in html


def test_both_curves_have_a_point_per_step_inside_the_chart() -> None:
    html = report().render()
    raw, smooth = (line.split() for line in Page(html).points)
    assert len(raw) == len(smooth) == 4
    svg = html[html.index("<svg") : html.index("</svg>") + len("</svg>")]
    _, _, width, height = map(float, ElementTree.fromstring(svg).attrib["viewBox"].split())
    ys = []
    for x, y in (map(float, point.split(",")) for point in raw):
        assert 0 <= x <= width
        assert 0 <= y <= height
        ys.append(y)
    assert ys == sorted(ys)  # losses fall, SVG's y grows downwards


@pytest.mark.parametrize("losses", [[], [2.0], [math.nan, 2.0], [2.0, math.inf]])
def test_a_run_without_a_curve_still_has_a_page(losses: list[float]) -> None:
    page = Page(report(losses=losses, collectives=[], sample="", settings={}).render())
    assert "nan" not in " ".join(page.points)
    assert "inf" not in " ".join(page.points)
    assert "none" in page.texts["collectives"]
    assert "sample" not in page.texts


def test_write_makes_the_folder_and_returns_the_page(tmp_path: Path) -> None:
    path = report().write(tmp_path / "deep" / "page.html")
    assert path.read_text(encoding="utf-8") == report().render()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (3 * MIB, "3.00 MiB"),
        (1000 * MIB, "0.98 GiB"),
        (2**44, "16.0 TiB"),
    ],
)
def test_bytes_are_shown_with_three_digits(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_ticks_are_round_and_within_range() -> None:
    assert nice_ticks(2.1, 5.6) == [3, 4, 5]
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert nice_ticks(4, 4) == [4]


def test_smoothing_is_the_mean_of_what_came_before() -> None:
    assert smoothed([4.0, 2.0, 0.0, 8.0], span=2) == [4.0, 3.0, 1.0, 4.0]


def test_rules_lie_inside_the_chart_even_away_from_the_curve() -> None:
    chart = line_chart([1.0, 1.1], rules={"far": 9.0})
    assert chart.top <= chart.rules[0].at <= chart.bottom
