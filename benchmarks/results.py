"""Benchmark tables as text: the machine's facts, and one marked section per benchmark in RESULTS.md.

A section is replaced where it stands whenever its benchmark runs, so the file holds the latest figures of
each.
"""

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

RESULTS = Path(__file__).with_name("RESULTS.md")


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


def write_section(name: str, body: str, *, path: Path = RESULTS) -> None:
    """Replace section `name` of `path`, or add it at the end; other sections stay as they are."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{body.strip()}\n{end}\n"
    text = path.read_text() if path.exists() else "# Benchmark results\n"
    head, found, rest = text.partition(begin)
    if found:
        text = head + section + rest.partition(end)[2].lstrip("\n")
    else:
        text = f"{text.rstrip()}\n\n{section}"
    path.write_text(text)
