"""Reports of where each rank was when a run hung: one file per rank, and a verdict from all files.

Nothing is recorded for them during the run: a pass is a path in the tree that `comm.order` keeps anyway, from
which the last events, with modules and sizes, are read when a report is written.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.comm.order import Order, first_line
from shardwise.comm.stacks import calls_of
from shardwise.errors import ShardwiseError, here, placed
from shardwise.files.stores import location

FOLDER = "SHARDWISE_REPORTS"
_EVENTS = 200  # events of the last passes in a file
_SHOWN = 5  # events in a verdict
_NAME = "rank-{}.json"

Report = dict[str, Any]
_FIELDS: dict[str, Any] = {  # the fields that a verdict needs
    **dict.fromkeys(("rank", "pass", "event"), int),
    **dict.fromkeys(("ranks", "record"), list),
    **dict.fromkeys(("doing", "digest"), str),
    **dict.fromkeys(("left", "verdict"), (str, type(None))),
    "stacks": dict,
}


def write_report(order: Order, reason: str) -> None:
    """Write where this rank is to the folder named in the environment, if there is one. Local.

    A rank's file holds its latest report. A folder that cannot be written raises no further error.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    stacks = {}
    for thread in threading.enumerate():
        # None while torch compiles: the report then has no stack, since too little time may be left to wait.
        stacks[thread.name] = calls_of(thread.ident or 0) or []
    # RuntimeError: the watch thread runs this too, while the main thread may change `order.ended`.
    with suppress(OSError, RuntimeError):
        Path(folder).mkdir(parents=True, exist_ok=True)
        rank = order.ranks[order.rank]
        report = {"rank": rank, "at": time.time(), "why": reason, "ranks": order.ranks}
        # With their places in the mesh, which a reader of the files cannot know.
        report |= {"placed": [placed(member) for member in order.ranks], "timeout_s": order.timeout}
        report |= {"pass": order.passes, "event": order.latest.depth, "doing": order.doing()}
        report |= {"stacks": stacks, "digest": order.latest.digest.hex(), "left": order.left}
        report |= {
            "verdict": order.verdict,
            "record": [*islice(_record(order), _EVENTS)],
            "command": sys.argv,
        }
        new = Path(folder, f".{_NAME.format(rank)}.{os.getpid()}")
        new.write_text(json.dumps(report, indent=1))
        # Whole or not at all: others may read the folder meanwhile.
        new.rename(Path(folder, _NAME.format(rank)))


def _record(order: Order) -> Iterator[dict[str, Any]]:
    """Yield the events that this rank announced, latest first."""
    paths = [(order.passes, order.latest), *reversed(order.ended.items())]
    for number, node in paths:
        while node.parent is not None:
            yield {"pass": number, "event": node.depth, "what": node.event.text}
            node = node.parent


def check_folder() -> None:
    """Raise for a folder to which failing ranks could not write reports."""
    if "://" in (folder := os.environ.get(FOLDER, "")):
        raise ShardwiseError(
            f"{here()}: expected a folder in {FOLDER}, found {folder}: a store may not answer a rank that"
            " fails. Give a folder, and copy it there afterwards; `shardwise doctor` reads URLs too"
        )


def read_reports(folder: str | os.PathLike[str]) -> tuple[dict[int, Report], dict[str, str]]:
    """Read the reports that ranks wrote to a folder, which may have been copied to an `fsspec` URL.

    Returns:
        Reports by rank; and for those that cannot be used, the reason by file name.

    Raises:
        ShardwiseError: no report can be used.
    """
    root = location(folder)
    reports: dict[int, Report] = {}
    damaged: dict[str, str] = {}
    try:
        files = [file for file in root.iterdir() if fnmatch(file.name, _NAME.format("*"))]
    except FileNotFoundError:
        files = []
    except OSError as error:
        raise ShardwiseError(f"{folder}: reports cannot be read ({error})") from error
    for file in sorted(files, key=lambda file: file.name):
        try:
            report = json.loads(file.read_text())
            if wrong := _wrong(report):
                damaged[file.name] = wrong
            else:
                reports[report["rank"]] = report
        except (OSError, ValueError) as error:
            damaged[file.name] = str(error)
    if not reports:
        hint = "".join(f"; {name} cannot be used: {text}" for name, text in damaged.items()) or ", found none"
        raise ShardwiseError(f"{folder}: expected reports of ranks ({_NAME.format('R')}){hint}")
    return reports, damaged


def _wrong(report: Any) -> str:
    if not isinstance(report, dict):
        return "no JSON object"
    return ", ".join(
        f"{name} is missing" if name not in report else f"{name} is {report[name]!r}"
        for name, kind in _FIELDS.items()
        if not isinstance(report.get(name, ...), kind)
    )


def verdict(reports: Mapping[int, Report], damaged: Mapping[str, str] | None = None) -> list[str]:
    """Return lines that say who waits for whom; `damaged` maps unreadable reports to the reason."""
    # Passes are counted per process group, so only reports of the same group are compared.
    damaged = damaged or {}
    groups: dict[tuple[int, ...], dict[int, Report]] = {}
    for rank, report in reports.items():
        groups.setdefault(tuple(report["ranks"]), {})[rank] = report
    lines, last = [], []
    for ranks, members in sorted(groups.items()):
        if len(groups) > 1:
            lines.append(f"Of {_named(ranks, members)}:")
        silent = [rank for rank in ranks if rank not in reports and _NAME.format(rank) not in damaged]
        # If one of the group's files is missing, the others may wait for its rank.
        complete = not silent and not damaged and members.keys() >= set(ranks)
        details, waits = _of_group(members, silent, complete=complete)
        lines += details
        last += waits
    lines += [f"{name} cannot be used, so its rank may be anywhere: {why}" for name, why in damaged.items()]
    verdicts = dict.fromkeys(report["verdict"] for report in reports.values() if report["verdict"])
    lines += [f"Told to the ranks: {first_line(text)}" for text in verdicts]
    for rank in last:
        lines.append(f"The last of rank {rank}, the latest first:")
        for event in reports[rank]["record"][:_SHOWN]:
            lines.append(f"  pass {event['pass']}, event {event['event']}: {first_line(event['what'])}")
    return lines


def _of_group(
    reports: Mapping[int, Report], silent: list[int], *, complete: bool
) -> tuple[list[str], list[int]]:
    """Return lines about a group, and the ranks whose last events tell most; `silent` have no report."""
    places = {rank: (report["pass"], report["event"]) for rank, report in reports.items()}
    # No rank gets past a collective alone, so the ranks that came furthest wait for the others.
    latest = max(places.values())
    waiting = [rank for rank in reports if places[rank] == latest]
    behind = [rank for rank in reports if rank not in waiting]
    text, wait = _named(waiting, reports), "waits" if len(waiting) == 1 else "wait"
    task = reports[waiting[0]]["doing"]
    lines = [f"{text[0].upper()}{text[1:]} {wait} at pass {latest[0]}, event {latest[1]}: about to {task}"]
    if len({reports[rank]["digest"] for rank in waiting}) > 1:
        lines[0] = f"Ranks mean different things at pass {latest[0]}, event {latest[1]}:"
        lines += [f"  {_named([rank], reports)} was about to {reports[rank]['doing']}" for rank in waiting]
    for rank in behind:
        report = reports[rank]
        end = f"it {report['left']}" if report["left"] else f"it was about to {report['doing']}"
        place = f"at pass {places[rank][0]}, event {places[rank][1]}"
        lines.append(f"Waited for: {_named([rank], reports)}, {place}: {end}, at {_innermost_line(report)}")
    if silent:
        text = _named(silent, reports)
        lines.append(f"Waited for: {text}, without a report: ended, killed, stopped, or its host is gone")
    if complete and len(lines) == 1:
        lines.append("Nobody is behind: they wait in this, or in a collective outside of shardwise, at")
        lines += [f"  rank {rank}: {_innermost_line(report)}" for rank, report in sorted(reports.items())]
    return lines, [*behind[:1], *waiting[:1]]


def _named(ranks: Sequence[int], reports: Mapping[int, Report]) -> str:
    """Return `rank 1 (pp 1)`, or `ranks 0, 2`: with the places in the mesh that the report names."""
    report = next(iter(reports.values()))
    places = dict(zip(report["ranks"], report.get("placed") or report["ranks"], strict=False))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(places[rank]) for rank in ranks)}"


def _innermost_line(report: Report) -> str:
    """Return the innermost line of user code in the main thread, else its innermost line."""
    calls: list[str] = report["stacks"].get("MainThread") or ["?"]
    return next((c for c in calls if "site-packages" not in c and "/shardwise/" not in c), calls[0])
