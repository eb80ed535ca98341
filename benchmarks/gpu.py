"""Whether shardwise works on the devices of this machine, and what it takes: checks, figures, a verdict.

    make gpu                    # every accelerator that is there, under ten minutes
    make gpu DEVICE=sim         # the simulated one, a few minutes: streams are checked, times mean nothing

First the tests marked `gpu`, then one process for each device: equality with FSDP2 and with the unsharded
model (`gpu_checks.py`), checkpoints, time and memory of a step, bandwidth (`gpu_figures.py`). The page is
printed and written to `build/gpu/report.md`. The exit status is 0 where every check has passed, 1 where one
has not, and 2 where there is no accelerator.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_figures
import torch
import torch.distributed as dist
from gpu_place import DEVICE, SIMULATED, Check, Place
from results import Table, machine_facts, ratio, with_spread
from subjects import PEER

from shardwise import launch

ROOT = Path(__file__).parents[1]
OUT, TOLD = ROOT / "build" / "gpu", "ranks.json"
RANKS_SIMULATED = 4
NO_DEVICE = (
    "no accelerator on this machine (torch.accelerator finds none). On a simulated one, all of it:\n"
    "    make gpu DEVICE=sim\n"
    "    python benchmarks/gpu.py --device sim"
)
NO_MEANING = "Times and rates are the simulation's own and say nothing of any device."


# ---------------------------------------------------------------- each rank


def on_rank(options: argparse.Namespace) -> None:
    place = join(options.device, seconds=options.seconds)
    cases = options.cases or list(gpu_checks.CASES)
    everything(place, options.out, cases, measures=options.figures)
    dist.destroy_process_group()


def everything(place: Place, out: Path, cases: Sequence[str], *, measures: bool = True) -> None:
    """All that needs a process group; rank 0 writes down what was found, as it is found."""
    found: dict[str, Any] = {"running": "", "checks": [], "figures": {"repeats": {}}}

    def write(running: str) -> None:
        found["running"] = running
        if place.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            (out / TOLD).write_text(json.dumps(found, indent=1))

    figures = found["figures"]
    for name in cases:
        write(name)
        for check in gpu_checks.all_checks(place, [name]):
            _tell(place, check)
            found["checks"].append(check.as_dict())
    write("checkpoints")
    figures["checkpoints"] = {}
    for check in gpu_figures.checkpoints(place, out / "checkpoints", figures["checkpoints"]):
        _tell(place, check)
        found["checks"].append(check.as_dict())
    if measures:
        write("steps")
        shape = gpu_figures.sized(place)
        figures["shape"] = {**vars(shape), "parameters": shape.parameters}
        now = time.monotonic()
        figures["steps"] = gpu_figures.steps(place, shape, now + 0.7 * (place.until - now))
        write("bandwidth")
        figures["bandwidth"] = gpu_figures.bandwidth(place, place.until)
    if place.is_simulated:
        found["checks"].append(waits(place).as_dict())
    write("")


def join(device: str, *, seconds: float) -> Place:
    """Join the process group, on this rank's device."""
    if device == SIMULATED:
        dist.init_process_group("gloo")
        return Place(torch.device(DEVICE, 0), time.monotonic() + seconds)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products may differ from run to run
    index = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(index)
    backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120))
    return Place(torch.device(device, index), time.monotonic() + seconds)


def waits(place: Place) -> Check:
    """Did every operation on the simulated device wait for what it needs?"""
    mine = [f"{what}: {text}" for what, texts in place.findings.items() for text in texts]
    everyone: list[Any] = [None] * place.ranks
    dist.all_gather_object(everyone, mine)
    found = sorted({text for texts in everyone for text in texts})
    for text in found if place.rank == 0 else ():
        print(f"  does not wait: {text}", file=sys.stderr)
    text = "every one" if not found else f"{len(found)} do not, the first of them in {found[0]}"
    return Check("operations wait for what they need, on every stream", not found, text)


def _tell(place: Place, check: Check) -> None:
    if place.rank == 0:
        print(f"{'ok' if check.passed else 'FAILED'}: {check.name} ({check.found})", flush=True)


# ---------------------------------------------------------------- the machine


def find(device: str) -> tuple[str, int, str]:
    """The type of device, how many there are, and what they are called."""
    if device == SIMULATED:
        return SIMULATED, RANKS_SIMULATED, "simulated device"
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None or device not in ("", there.type):
        found = "" if there is None else f"no {device}; torch.accelerator finds {there.type} here. "
        print(found or NO_DEVICE, file=sys.stderr)
        sys.exit(2)
    module = torch.get_device_module(there)
    named = module.get_device_name(0) if hasattr(module, "get_device_name") else there.type
    return there.type, torch.accelerator.device_count(), named


def tests(device: str, out: Path, *, limit: float) -> list[Check]:
    """The tests marked `gpu`, or their bodies on the simulated device; a check each."""
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    chosen = ["-k", SIMULATED] if device == SIMULATED else ["-m", "gpu"]
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *map(str, tests), *chosen, f"--junitxml={report}"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, timeout=limit, check=False)
    return checks_of(report)


def checks_of(report: Path) -> list[Check]:
    """The checks that pytest's report holds; a skipped test has not passed."""
    if not report.exists():
        return [Check("tests", False, "pytest was ended or wrote no report")]
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [one for kind in ("failure", "error", "skipped") for one in case.findall(kind)]
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        text = "; ".join(f"{one.tag}: {one.get('message', '')}".partition("\n")[0] for one in wrong)
        found.append(Check(f"test: {name}", not wrong, text or "passed"))
    return found or [Check("tests", False, "none was found")]


def ranks(options: argparse.Namespace, device: str, count: int, *, limit: float) -> dict[str, Any]:
    """What the ranks found. One that was ended, or ended by itself, is a check that failed."""
    (options.out / TOLD).unlink(missing_ok=True)
    command = [sys.executable, __file__, "--on-ranks", str(count), "--device", device]
    command += ["--out", str(options.out), "--seconds", str(options.seconds)]
    command += [] if options.figures else ["--no-figures"]
    command += ["--cases", *options.cases] if options.cases else []
    process = subprocess.Popen(command)
    try:
        status: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
        process.terminate()  # torchrun ends its ranks
        process.wait()
    if status is None:
        return told_by(options.out, f"were ended after {limit:.0f} s")
    return told_by(options.out, f"ended with status {status}" if status else "")


def told_by(out: Path, failed: str = "") -> dict[str, Any]:
    """What rank 0 wrote down: `checks` and `figures`."""
    told = out / TOLD
    found: dict[str, Any] = {"checks": [], "figures": {}, "running": "the start"}
    if told.exists():
        found = json.loads(told.read_text())
    found["checks"] = [Check(**check) for check in found["checks"]]
    if failed or found["running"]:
        at = f"{failed or 'ended'}, in: {found['running'] or 'the end'}"
        found["checks"].append(Check("every rank comes to its end", False, at))
    return found


# ---------------------------------------------------------------- the page


def verdict(checks: Sequence[Check], where: str) -> str:
    failed = [check.name for check in checks if not check.passed]
    if not checks:
        return f"verdict: nothing was checked on {where}"
    if not failed:
        return f"verdict: all {len(checks)} checks passed on {where}"
    return f"verdict: {len(failed)} of {len(checks)} checks failed on {where}: {'; '.join(failed)}"


def page(checks: Sequence[Check], figures: dict[str, Any], where: str, *, means_nothing: bool) -> str:
    """All of it as Markdown; the last line is the verdict."""
    facts = "; ".join(f"{fact} {value}" for fact, value in machine_facts().items())
    parts = [f"# shardwise on {where}", facts]
    rows = [("passed" if check.passed else "**FAILED**", check.name, check.found) for check in checks]
    parts.append(
        Table("Checks", ("", "check", "found"), [[_cell(c) for c in row] for row in rows]).markdown()
    )
    if means_nothing and figures:
        parts.append(NO_MEANING)
    parts += [table.markdown() for table in figure_tables(figures)]
    return "\n\n".join([*parts, verdict(checks, where)]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def figure_tables(figures: dict[str, Any]) -> list[Table]:
    """Those of which there are figures."""
    tables = []
    if steps := figures.get("steps"):
        shape, peer = figures["shape"], steps.get(PEER)
        header = ["implementation", "step ms", f"/ {PEER}", "host ms", f"/ {PEER}", "peak allocated GiB"]
        header += [f"/ {PEER}", "reserved GiB", "steps timed"]
        rows = []
        for name, one in steps.items():
            row = [name]
            for key in ("wall_ms", "host_ms"):
                row += [with_spread(one[key]), ratio(one[key][0], peer[key][0]) if peer else "-"]
            row += [
                f"{one['allocated'] / 2**30:.3f}",
                ratio(one["allocated"], peer["allocated"]) if peer else "-",
            ]
            rows.append([*row, f"{one['reserved'] / 2**30:.3f}", str(one["repeats"])])
        title = (
            f"A step of a transformer of {shape['parameters'] / 1e6:,.1f} M parameters, {shape['blocks']}"
            f" blocks of width {shape['width']}, {shape['batch']} x {shape['length']} tokens a rank, bf16"
            " reduced in fp32, fused AdamW: median [least..greatest]; host ms until the calls return"
        )
        tables.append(Table(title, header, rows))
    if rates := figures.get("bandwidth"):
        header = [name for name in rates[0] if name != "bytes"]
        rows = [[f"{r['bytes']:,}", *(f"{r[name]:,.2f}" for name in header)] for r in rates]
        title = "GB/s, of whole buffers: collectives alone; unshard() and reshard() of a group"
        tables.append(Table(title, ["bytes", *header], rows))
    if saved := figures.get("checkpoints"):
        names = list(next(iter(saved.values()))["seconds"])
        rows = [
            [n, f"{o['bytes'] / 1e6:,.1f}", *(f"{o['seconds'][k]:.3f}" for k in names)]
            for n, o in saved.items()
        ]
        title = "Checkpoints of a model and its AdamW moments, in seconds: a by save, b by save_async"
        tables.append(Table(title, ["layout", "MB", *names], rows))
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="", help="a type, or sim; default: the accelerator that is there")
    parser.add_argument("--ranks", type=int, help="processes; default: one for each device, 4 on sim")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="a shorter time repeats less, and checks as much"
    )
    parser.add_argument(
        "--cases", nargs="+", help="only these of gpu_checks.py, and no tests; for trying out"
    )
    parser.add_argument("--figures", action=argparse.BooleanOptionalAction, default=True, help="of speed too")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--on-ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_ranks:
        launch.on_ranks(options.on_ranks)
        on_rank(options)
        return
    begin = time.monotonic()
    device, count, named = find(options.device)
    if device != SIMULATED and (options.ranks or 0) > count:
        # NCCL refuses; over gloo torch's functional collectives on CUDA tensors end the process (2.11, 2.13).
        parser.error(f"--ranks {options.ranks} takes as many devices, and there are {count}")
    count = options.ranks or count
    options.out.mkdir(parents=True, exist_ok=True)
    # Times are not what the simulation is for: it may take as long as it does.
    limit = 60 * options.minutes + 45 if device != SIMULATED else 3600
    checks = [] if options.cases else tests(device, options.out, limit=limit / 2)
    options.seconds = max(0.0, 60 * options.minutes - (time.monotonic() - begin))
    found = ranks(options, device, count, limit=max(60.0, limit - (time.monotonic() - begin)))
    checks += found["checks"]
    where = f"{count} x {named}"
    text = page(checks, found["figures"], where, means_nothing=device == SIMULATED)
    (options.out / "report.md").write_text(text)
    print(
        f"\n{text}\n(written to {options.out / 'report.md'}, after {time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    print(verdict(checks, where))
    sys.exit(0 if checks and all(check.passed for check in checks) else 1)


if __name__ == "__main__":
    main()
