"""Every benchmark, one after another, then the plot. Tables go to TABLES.md, figures to a folder.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --only memory steps

A benchmark that fails is reported at the end, in the exit status too; the others still run.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from plot import OUT, PANELS

HERE = Path(__file__).parent
BENCHMARKS: dict[str, list[str]] = {  # by name: script, arguments
    "host_cost": ["host_cost.py", "--world", "8", "64"],
    "instructions": ["host_cost.py", "--instructions", "--world", "8"],
    "memory": ["memory.py"],
    "steps": ["steps.py"],
    "padding": ["padding.py", "--write"],
    "plan": ["plan.py", "--write"],
    "plan_ranks": ["plan_ranks.py", "--write"],
    "plan_models": ["plan_models.py", "--write"],
    "beside_fsdp2": ["beside_fsdp2.py"],
    "scale": ["scale.py", "--write"],
    "reshard": ["reshard.py", "--vs", "torch", "--write"],
    "checkpoint": ["checkpoint.py", "--write"],
    "compiled_step": ["compiled_step.py", "--world", "2", "--blocks", "4"],
    "overlap": ["overlap.py", "--write"],
    "gloo_transport": ["gloo_transport.py", "--write"],
}


def why_not(name: str) -> str:
    """Why a benchmark cannot run here; empty if it can."""
    script = HERE / BENCHMARKS[name][0]
    if not script.exists():
        return f"there is no {script.name}"
    if name == "instructions" and shutil.which("valgrind") is None:
        return "valgrind is not installed"
    return ""


def command(name: str, *, figures: Path) -> list[str]:
    script, *arguments = BENCHMARKS[name]
    if name in PANELS:
        arguments += ["--json", str(figures / f"{name}.json")]
    return [sys.executable, str(HERE / script), *arguments]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--figures", type=Path, default=Path("runs/bench"), help="folder for JSON figures")
    parser.add_argument("--plot", type=Path, default=OUT, help="the SVG file to write")
    options = parser.parse_args()
    options.figures.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only:
        if reason := why_not(name):
            print(f"leaving out {name}: {reason}", file=sys.stderr)
            continue
        begin = time.perf_counter()
        done = subprocess.run(command(name, figures=options.figures), check=False)
        print(f"{name}: {time.perf_counter() - begin:.0f} s, exit status {done.returncode}", flush=True)
        failed += [name] if done.returncode else []
    plot = [sys.executable, str(HERE / "plot.py"), str(options.figures), "--out", str(options.plot)]
    if subprocess.run(plot, check=False).returncode:
        failed.append("plot")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
