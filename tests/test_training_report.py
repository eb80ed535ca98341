"""The training page holds every number it was given and loads nothing."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from training_report import (
    Curve,
    Run,
    byte_ticks,
    charts,
    human_bytes,
    line_chart,
    main,
    nice_ticks,
    render,
    smoothed,
    thinned,
)

MIB = 2**20


def steps(losses: list[float]) -> list[dict[str, float]]:
    return [
        {
            "step": i + 1,
            "loss": loss,
            "seconds": 0.5,
            "tokens_per_s": 3000.0,
            "memory_bytes": MIB,
            "peak_bytes": MIB,
        }
        for i, loss in enumerate(losses)
    ]


def run(losses: tuple[float, ...] = (5.5, 4.0, 3.0, 2.5), *, name: str = "one", **notes: object) -> Run:
    facts: dict[str, object] = {
        "parameters": 1_234_567,
        "baseline": 3.2368,
        "held_out_loss": 2.4321,
        "unit": "nats/byte",
        "memory": [
            {"parameters": 3 * MIB, "gradients": 3 * MIB, "optimizer": 6 * MIB},
            {"parameters": 2 * MIB, "gradients": 2 * MIB, "optimizer": 4 * MIB},
        ],
        "unsharded_memory": {"parameters": 5 * MIB, "gradients": 5 * MIB, "optimizer": 10 * MIB},
        "collectives": [
            {"kind": "all_gather", "calls": 10, "bytes": 26_000_000},
            {"kind": "reduce_scatter", "calls": 5, "bytes": 13_000_000},
        ],
        "sample": "def f(x):\n    return x < 3",
    }
    begun = {"ranks": 2, "device": "cpu (made up)", "torch": "2.13.0", "shardwise": "0.1.0", "host": "here"}
    sitting = {"begins": 0, **begun, "settings": {"seed": "17", "layout": "interleaved"}}
    return Run(name, steps(list(losses)), [sitting], facts | notes)


def page_of(*runs: Run, **options: object) -> str:
    return render(runs, title="A <small> model & its run", **options)  # type: ignore[arg-type]


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
        self.hover: list[list[dict[str, Any]]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        given = dict(attrs)
        if tag == "section":
            self.section = given.get("id") or ""
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")
        ]
        self.points += [given["points"] or ""] if "points" in given else []
        self.hover += [json.loads(given["data-curves"] or "")] if "data-curves" in given else []

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
    page = Page(page_of(run()))
    assert "1,234,567 parameters over 2 ranks on cpu (made up), 4 steps." in " ".join(page.texts[""])
    for fact in ("2.432", "3,000", "500 ms", "12.0 MiB", "37.2 MiB"):
        assert fact in page.texts[""]
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
    sent = ["all-gather", "10", "24.8 MiB", "reduce-scatter", "5", "12.4 MiB"]
    assert page.texts["collectives"][-6:] == sent
    assert page.texts["sittings"][-6:] == ["0", "2", "cpu (made up)", "2.13.0", "0.1.0", "here"]
    assert "17" in page.texts["settings"]


def test_the_page_loads_nothing() -> None:
    html = page_of(run(), running=True)
    page = Page(html)
    assert page.addresses == []
    assert "://" not in html
    assert "@import" not in html
    assert "url(" not in html
    assert page.tags.isdisjoint({"link", "img", "iframe", "object"})
    assert html.count("<script") == 1


def test_text_from_the_run_is_escaped() -> None:
    html = page_of(run(name="'<b>", sample="<script>alert(1)</script>"))
    assert "<script>alert" not in html
    assert "'<b>" not in html
    assert "A &lt;small&gt; model &amp; its run" in html


def test_a_running_page_loads_itself_anew_and_a_finished_one_does_not() -> None:
    for running in (True, False):
        html = page_of(run(), steps=10, running=running)
        assert ("location.reload" in html) is ("Running;" in html) is running
        assert "4 of 10 steps" in html


def test_the_pointer_reads_each_step_at_its_place_in_the_chart() -> None:
    page = Page(page_of(run()))
    (curve,) = page.hover[0]
    assert [(at, value) for at, _, _, value in curve["at"]] == [
        *(("step 1", "5.5"), ("step 2", "4"), ("step 3", "3"), ("step 4", "2.5"))
    ]
    drawn = [tuple(map(float, point.split(","))) for point in page.points[0].split()]
    assert [(x, y) for _, x, y, _ in curve["at"]] == drawn
    xs, ys = zip(*drawn, strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys)  # losses fall, SVG's y grows downwards


def test_runs_stand_beside_each_other_with_their_differences() -> None:
    other = run((5.0, 4.5), name="two", held_out_loss=2.9)
    other.sittings[0]["settings"]["layout"] = "contiguous"
    html = page_of(run(), other)
    page = Page(html)
    table = page.texts["runs"]
    assert table[table.index("two") :][:3] == ["two", "2", "4.500"]
    assert html.count('class="differs"') == 1
    assert [curve["name"] for curve in page.hover[0]] == ["one", "two"]
    assert "memory1" in page.texts


@pytest.mark.parametrize("losses", [(), (2.0,), (math.nan, 2.0), (2.0, math.inf)])
def test_a_run_without_a_curve_still_has_a_page(losses: tuple[float, ...]) -> None:
    bare = Run("bare", steps(list(losses)))
    page = Page(page_of(bare, running=True))
    assert "nan" not in " ".join(page.points)
    assert "inf" not in " ".join(page.points)
    assert "none" in page.texts["collectives"]
    assert "sample" not in page.texts


def test_where_a_run_went_on_is_marked_in_its_charts() -> None:
    again = run()
    again.sittings.append({"begins": 2, "ranks": 3})  # type: ignore[attr-defined]
    made = charts([again])
    assert {chart.title: len(chart.marks) for chart in made}["Step time"] == 1
    assert "resumed from a checkpoint" in page_of(again)


def test_several_folders_become_one_page_and_one_without_a_log_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    asked = [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "deep" / "page.html")]
    main(asked)
    page = Page((tmp_path / "deep" / "page.html").read_text())
    assert [curve["name"] for curve in page.hover[0]] == ["a", "b"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing"), *asked])
    assert "no metrics.jsonl with steps" in capsys.readouterr().err


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


def test_thinning_keeps_every_spike() -> None:
    points = [(float(i), 100.0 if i == 777 else 1.0 + i % 3) for i in range(1000)]
    kept = thinned(points, most=50)
    assert len(kept) <= 50
    assert (777.0, 100.0) in kept
    assert kept == sorted(kept)
    assert thinned(points[:50], most=50) == points[:50]


def test_ticks_of_bytes_are_round_as_they_are_shown() -> None:
    assert [human_bytes(tick) for tick in byte_ticks(0, 390 * MIB, count=4)[:3]] == [
        "0 B",
        "100 MiB",
        "200 MiB",
    ]


def test_a_rare_high_value_does_not_flatten_the_rest() -> None:
    points = [(1.0, 60.0), (2.0, 1.0), (3.0, 1.0), (4.0, 1.2)]
    chart = line_chart("time", [Curve("one", 0, "smooth", points)], from_zero=True)
    ys = [float(point.split(",")[1]) for point in chart.lines[0][1].split()]
    assert ys[0] >= chart.top
    assert ys[1] < chart.bottom - 50
    assert '"60"' in chart.hover


def test_rules_lie_inside_the_chart_even_away_from_the_curve() -> None:
    chart = line_chart("loss", [Curve("one", 0, "raw", [(1, 1.0), (2, 1.1)])], rules={"far": 9.0})
    assert chart.top <= chart.rules[0].at <= chart.bottom
