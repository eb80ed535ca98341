"""Benchmark tables as text: the machine's facts, and one marked section per benchmark in TABLES.md.

A section is replaced where it stands whenever its benchmark runs, so the file holds the latest figures of
each.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

RESULTS = Path(__file__).with_name("TABLES.md")


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def show(self) -> None:
        table = RichTable(title=escape(self.title), title_justify="left")
        for index, name in enumerate(self.header):
            table.add_column(name, justify="left" if index < 2 else "right")
        for row in self.rows:
            table.add_row(*map(escape, row))
        Console(width=max(Console().width, 170)).print(table)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1] if name else platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine_facts() -> dict[str, str]:
    """What the figures depend on, as text."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "load": f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and greatest."""
    return [statistics.median(values), min(values), max(values)]


def with_spread(value: Sequence[float], *, digits: int = 2) -> str:
    middle, low, high = (f"{number:.{digits}f}" for number in value)
    return f"{middle} [{low}..{high}]"


def ratio(value: float, reference: float) -> str:
    return f"{value / reference:.3f}" if reference > 0 else "-"


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the Markdown file to update")


def report(name: str, figures: dict[str, Any], tables: Sequence[Table], options: argparse.Namespace) -> None:
    """Show the tables, write them and the facts into section `name`, and the figures where --json says."""
    for table in tables:
        table.show()
    facts = "; ".join(f"{fact} {value}" for fact, value in figures["facts"].items())
    body = "\n\n".join([f"## {name}", facts, *(table.markdown() for table in tables)])
    write_section(name, body, path=options.results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1))


def write_section(name: str, body: str, *, path: Path = RESULTS) -> None:
    """Replace section `name` of `path`, or add it at the end; other sections stay as they are."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{body.strip()}\n{end}\n"
    text = path.read_text() if path.exists() else "# Benchmark results\n"
    head, found, rest = text.partition(begin)
    if found:
        after = rest.partition(end)[2].lstrip("\n")
        text = head + section + (f"\n{after}" if after else "")
    else:
        text = f"{text.rstrip()}\n\n{section}"
    path.write_text(text)
