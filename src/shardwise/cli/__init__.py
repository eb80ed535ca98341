"""The `shardwise` command: argument parsing and printing. The modules it calls do the work.

Exit status of every command: 0 success, 1 the command ran and found a problem, 2 it could not run.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import platform
import traceback
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from shardwise.cli import programs
from shardwise.cli.programs import FOUND, NOT_RUN, OK, print_failure, reporting, show
from shardwise.errors import ShardwiseError, from_extra
from shardwise.files.stores import on_disk

if TYPE_CHECKING:
    from shardwise.planner.setup import Setup

app = typer.Typer(
    help="Sharded training for PyTorch models too large for one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(programs.app, name="tp")


LayoutName = StrEnum("LayoutName", ["interleaved", "contiguous"])
Layout = StrEnum("Layout", ["interleaved", "contiguous", "both"])
Precision = StrEnum("Precision", ["float64", "float32", "float16", "bfloat16"])


def _print_version(enabled: bool) -> None:
    if enabled:
        import torch

        from shardwise import __version__

        print(f"shardwise {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


def _show_tracebacks(enabled: bool) -> bool:
    if enabled:
        from shardwise.launch import TRACEBACK

        os.environ[TRACEBACK] = "1"  # in the ranks too
    return enabled


Traceback = Annotated[
    bool, Option("--traceback", callback=_show_tracebacks, help="Show the traceback of every error.")
]


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print versions.")
    ] = False,
) -> None:
    """Sharded training for PyTorch models too large for one device."""


@app.command(
    epilog="Exit status: 0 everything is within tolerance; 1 a loss, gradient or parameter is beyond it; "
    "2 the case could not be run (no such script or verify_case, or a rank raised, died or hung)."
)
def verify(
    case: Annotated[
        str,
        Argument(help="script.py[:FUNCTION] or package.module[:FUNCTION]. Default FUNCTION: verify_case."),
    ],
    ranks: Annotated[int, Option(min=1, help="Number of local processes to shard over.")] = 2,
    steps: Annotated[int, Option(min=1, help="Number of training steps to compare.")] = 5,
    tolerance: Annotated[
        float | None,
        Option(min=0.0, help="Largest difference relative to a tensor's scale. Default: derived."),
    ] = None,
    dtype: Annotated[
        Precision | None,
        Option(
            help="Derive the tolerance from this dtype. Default: the coarsest of parameters and gradients."
        ),
    ] = None,
    hsdp: Annotated[int, Option(min=1, help="Number of replicas R in a (R, ranks / R) mesh.")] = 1,
    mesh: Annotated[
        str | None,
        Option(help="Mesh dimensions and sizes, such as pp2,dp2,tp2; replaces --ranks and --hsdp."),
    ] = None,
    layout: Annotated[
        Layout | None,
        Option(help="Layout to pass to the case's shard function. Default: the function's own."),
    ] = None,
    seed: Annotated[int, Option(help="Random seed of every process.")] = 0,
    timeout: Annotated[float, Option(min=1.0, help="Seconds without progress that count as a hang.")] = 120.0,
    json_path: Annotated[
        Path | None, Option("--json", help="Also write every difference to this file.")
    ] = None,
    streams: Annotated[
        bool,
        Option(
            "--streams", help="Train on a simulated accelerator instead, and report missing stream waits."
        ),
    ] = False,
    show_tracebacks: Traceback = False,
) -> None:
    """Compare training on one process with the same training sharded over local ranks, step by step."""
    if streams and (mesh, tolerance, dtype) != (None, None, None):
        raise typer.BadParameter("--streams takes --ranks and --hsdp, and no --mesh, --tolerance or --dtype")
    if json_path is not None:
        with reporting():
            json_path = _writable(json_path)
    import torch

    from shardwise import verify as verification
    from shardwise.verify.streams import check_streams

    console = Console(emoji=False)
    layouts: list[str | None] = [layout.value if layout else None]
    if layout is Layout.both:
        layouts = ["interleaved", "contiguous"]
    results: list[Any] = []
    options: dict[str, Any] = {"ranks": ranks, "steps": steps, "replicas": hsdp, "seed": seed}
    try:
        for name in layouts:
            if streams:
                results.append(check_streams(case, layout=name, **options))
                print(results[-1].describe())
                continue
            result = verification.verify(
                case,
                tolerance=tolerance,
                dtype=getattr(torch, dtype.value) if dtype else None,
                mesh=mesh,
                layout=name,
                timeout=timeout,
                **options,
            )
            console.print(verification.table(result))
            tolerated = result.tolerance
            console.print(f"Tolerance: {tolerated.base:.2g} ({tolerated.reason})", highlight=False)
            show(verification.verdict(result))
            results.append(result)
    except verification.CaseError as error:
        if json_path is not None:
            failure = {"verdict": "not run", "case": case, "error": str(error), "traceback": error.traceback}
            json_path.write_text(json.dumps(failure, indent=1) + "\n")
        print_failure(error, error.traceback)
        raise typer.Exit(NOT_RUN) from None
    if json_path is not None:
        verification.write_json(json_path, results)
    raise typer.Exit(OK if all(result.ok for result in results) else FOUND)


@app.command(
    epilog="Exit status: 0 it fits; 1 it does not (changes that help are printed); 2 it could not be planned."
)
def plan(
    context: typer.Context,
    model: Annotated[
        str, Argument(help="Published model (llama3-8b), transformers config (or folder) or module:factory.")
    ],
    ranks: Annotated[int, Option(min=1, help="Total number of ranks.")] = 8,
    hardware: Annotated[str, Option(help="Profile: h100, a100-80gb, ..., or a .toml file.")] = "h100",
    replicas: Annotated[int, Option(min=1, help="Number of replicas R in a mesh of R x S ranks.")] = 1,
    pipeline: Annotated[
        int, Option(min=1, help="Pipeline ranks; they run --accumulation micro-batches per step.")
    ] = 1,
    schedule: Annotated[str, Option(help="GPipe, 1F1B or Interleaved1F1B.")] = "1F1B",
    stages: Annotated[int, Option(min=1, help="Stages per rank, for Interleaved1F1B.")] = 1,
    ulysses: Annotated[int, Option(min=1, help="Ranks that share each sequence.")] = 1,
    experts: Annotated[int, Option(min=1, help="Ranks that share a layer's experts.")] = 1,
    expert_load: Annotated[
        float, Option(min=1.0, help="Tokens of the busiest rank's experts over an even share.")
    ] = 1.0,
    tensor: Annotated[
        int, Option(min=1, help="Adjacent ranks T that are tensor parallel; the mesh is R x S x T.")
    ] = 1,
    tensor_plan: Annotated[str, Option(help="auto, torchtitan or transformers.")] = "auto",
    sequence_parallel: Annotated[bool | None, Option(help="Override --tensor-plan.")] = None,
    loss_parallel: Annotated[bool | None, Option(help="Override --tensor-plan.")] = None,
    async_tensor: Annotated[bool, Option(help="Overlap TP collectives with matmuls.")] = False,
    layout: Annotated[LayoutName, Option(help="Layout of `fully_shard`.")] = LayoutName.interleaved,
    strategy: Annotated[str | None, Option(help="Strategy, for --layout contiguous.")] = None,
    checkpointing: Annotated[
        str, Option(help="Activation checkpointing: none, selective, alternate or full.")
    ] = "none",
    compiled: Annotated[bool, Option("--compile", help="Compile the blocks.")] = False,
    compile_loss: Annotated[bool, Option(help="Compile the loss of whole logits.")] = False,
    float8: Annotated[bool, Option("--float8", help="Use float8 matmuls in compiled blocks.")] = False,
    float8_scales: Annotated[str, Option(help="Float8 scales: one per tensor, or one per row.")] = "tensor",
    nvfp4: Annotated[bool, Option("--nvfp4", help="Use NVFP4 matmuls in compiled blocks.")] = False,
    optimizer: Annotated[
        str, Option(help="Optimizer: AdamW, AdamW fused, AdamW flat, AdamW 8 bits, Muon or SGD.")
    ] = "AdamW fused",
    loss: Annotated[str, Option(help="Loss of whole logits, or chunked.")] = "whole",
    loop_holds: Annotated[str, Option(help="Held in backward: nothing, or logits.")] = "nothing",
    micro_batch: Annotated[int, Option(min=1, help="Sequences per micro-batch.")] = 1,
    sequence: Annotated[int | None, Option(min=1, help="Tokens per sequence; by default 2048.")] = None,
    accumulation: Annotated[int, Option(min=1, help="Micro-batches per optimizer step.")] = 1,
    search: Annotated[
        bool,
        Option(
            "--search",
            help="Compare meshes, layouts, checkpointing, micro-batches and so on. Options given hold for"
            " all; --accumulation as the number of sequences of a step.",
        ),
    ] = False,
    json_path: Annotated[
        Path | None, Option("--json", help="Also write the plan or search results to this file.")
    ] = None,
    html_path: Annotated[Path | None, Option("--html", help="Also write a self-contained HTML page.")] = None,
    trace_path: Annotated[
        Path | None, Option("--trace", help="Also write a trace of the streams for ui.perfetto.dev.")
    ] = None,
    png_path: Annotated[
        Path | None, Option("--png", help="Also write a picture for slides (needs matplotlib).")
    ] = None,
    show_tracebacks: Traceback = False,
) -> None:
    """Predict training's memory per rank, its communication and its step time."""
    given = {**locals(), "layout": layout.value, "compile": compiled}
    from shardwise.planner.setup import Setup

    try:
        if tensor == 1 and not search:
            _refuse_unused(tensor_plan, sequence_parallel, loss_parallel)
        setup = Setup(**{field.name: given[field.name] for field in fields(Setup) if field.name in given})
        paths = (json_path, html_path, trace_path, png_path)  # fail before a search, not after it
        json_path, html_path, trace_path, png_path = (path and _writable(path) for path in paths)
        _check_plan(model, setup, hardware)
        if png_path is not None:
            from_extra("plan", "matplotlib.figure", feature="a PNG of a plan")
    except ShardwiseError as error:  # takes a third of a second: torch is not imported yet
        print_failure(error, traceback.format_exc() if show_tracebacks else "")
        raise typer.Exit(NOT_RUN) from None
    gc.disable()  # collecting over the imports takes two seconds and frees nothing
    atexit.register(gc.freeze)  # nor does it when the process ends
    from shardwise import planner
    from shardwise.launch import place
    from shardwise.planner.advice import lines

    try:
        explicit = {name for name in given if _is_explicit(context, name)} & vars(setup).keys()
        changes = {name: getattr(setup, name) for name in explicit}
        results = planner.search(model, setup, hardware=hardware, **changes) if search else None
        best = planner.plan(model, setup, hardware=hardware) if results is None else results.chosen
        show(str(results or best))
        if json_path is not None:
            json_path.write_text(planner.to_json(results or best) + "\n")
        for path, write in ((html_path, planner.page), (trace_path, planner.trace)):
            if path is not None:
                path.write_text(write(best) + "\n")
        if png_path is not None:
            png_path.write_bytes(planner.picture(best))
        if best.fits:
            return
        for line in lines(model, best, hardware):
            show(line)
    except (
        Exception
    ) as error:  # from the user's factory, files and so on; status 1 would mean that it does not fit
        position = f"{line}: " if (line := place(error)) else ""
        failure = error if isinstance(error, ShardwiseError) else f"{position}{type(error).__name__}: {error}"
        print_failure(ShardwiseError(str(failure)), traceback.format_exc() if show_tracebacks else "")
        raise typer.Exit(NOT_RUN) from None
    finally:
        gc.enable()
    raise typer.Exit(FOUND)


@app.command(
    epilog="On several machines: torchrun --nnodes 2 ... -m shardwise calibrate OUT. "
    "Exit status: 0 the file is written; 1 a rank failed; 2 the machine could not be measured."
)
def calibrate(
    out: Annotated[Path, Argument(help=".toml file to write, for `shardwise plan --hardware`.")],
    ranks: Annotated[
        int | None,
        Option(min=1, help="Number of local processes. Default: one per accelerator, or 2 on CPU."),
    ] = None,
    like: Annotated[
        str | None, Option(help="Profile, such as h100, that supplies the peaks and any link not measured.")
    ] = None,
    small: Annotated[
        bool, Option("--small", help="Measure small sizes only: takes seconds, less exact.")
    ] = False,
    show_tracebacks: Traceback = False,
) -> None:
    """Measure this machine's matmuls, memory, host and links for `shardwise plan`."""
    import torch

    from shardwise import launch, planner
    from shardwise.planner.calibrate import SMALL

    count = ranks or torch.accelerator.device_count() or 2
    is_first = os.environ.get("RANK", "0") == "0"
    with reporting():
        if is_first:
            out = _writable(out)
        if out.suffix != ".toml":
            raise ShardwiseError(f"{out}: expected a name that ends in .toml, which `plan --hardware` takes")
        base = planner.hardware_of(like) if like else None
        if "RANK" not in os.environ and count > 1:
            options = [*(["--like", like] if like else []), *(["--small"] if small else [])]
            raise typer.Exit(launch.launch(["-m", "shardwise", "calibrate", str(out), *options], ranks=count))
        profile = planner.calibrate(like=base, sizes=SMALL if small else None)
    if is_first:
        out.write_text(planner.to_toml(profile))
        show(f"{out}:\n{planner.to_toml(profile)}")


@app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    epilog="On several machines: torchrun ... -m shardwise.run [OPTIONS] train.py ARGS. "
    "Exit status: the script's, from the first rank that fails; 2 if there is no such script.",
)
def run_command(
    target: Annotated[str, Argument(metavar="SCRIPT", help="Script to run, or a module with -m.")],
    arguments: Annotated[list[str] | None, Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    is_module: Annotated[bool, Option("-m", help="SCRIPT is the name of a module.")] = False,
    layout: Annotated[
        LayoutName, Option(help="Layout for fully_shard calls that do not pass one.")
    ] = LayoutName.interleaved,
    strategy: Annotated[
        str | None, Option(help="Strategy for such calls in the contiguous layout, such as zero2.")
    ] = None,
    interleave: Annotated[
        list[str] | None,
        Option(metavar="CLASS", help="Always give modules of this class the interleaved layout."),
    ] = None,
    ranks: Annotated[
        int | None, Option(min=1, help="Number of local ranks to start. Default: run in this process.")
    ] = None,
    show_tracebacks: Traceback = False,
) -> None:
    """Run an unchanged script on local ranks, with shardwise in place of torch's FSDP2."""
    from shardwise import launch
    from shardwise.adapters.script import check_script, run_script
    from shardwise.fsdp.strategy import NAMED

    try:
        if strategy is not None and strategy not in NAMED:
            raise ShardwiseError(f"--strategy is one of {', '.join(NAMED)}; got {strategy!r}")
        check_script(target, is_module=is_module)
    except ShardwiseError as error:
        launch.say(f"Error: {error}")
        raise typer.Exit(NOT_RUN) from None
    defaults = {"layout": layout.value} | ({"strategy": strategy} if strategy else {})
    if ranks is None or "RANK" in os.environ:
        run_script(target, arguments or [], is_module=is_module, interleave=interleave or (), **defaults)
        return
    options = [text for name, value in defaults.items() for text in (f"--{name}", value)]
    options += [text for name in interleave or () for text in ("--interleave", name)]
    command = ["-m", "shardwise.run", *options, *(["-m"] if is_module else []), target, *(arguments or [])]
    raise typer.Exit(launch.launch(command, ranks=ranks))


@app.command(
    epilog="On several machines: torchrun --nnodes 2 ... -m shardwise doctor. "
    "Exit status: 0 everything required works; 1 something required is broken, or reports were read; "
    "2 there are no reports."
)
def doctor(
    reports: Annotated[
        str | None,
        Argument(
            help="Folder or URL of the ranks' reports (SHARDWISE_REPORTS): say which rank waited for which."
        ),
    ] = None,
    checkpoints: Annotated[str, Option(help="Where checkpoints will be saved: a folder or a URL.")] = ".",
) -> None:
    """Check that this machine (under torchrun: every rank's) can run sharded training; or explain a hang."""
    from shardwise import doctor as checks
    from shardwise.comm.report import read_reports, verdict
    from shardwise.doctor import Status, table

    if reports is not None:
        with reporting():
            show("\n".join(verdict(*read_reports(reports))))
        raise typer.Exit(FOUND)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    results = (checks.examine_ranks if ranks > 1 else checks.examine)(checkpoints)
    if results:
        Console(emoji=False).print(table(results))
    raise typer.Exit(FOUND if any(result.status is Status.BROKEN for result in results) else OK)


def _refuse_unused(tensor_plan: str, sequence_parallel: bool | None, loss_parallel: bool | None) -> None:
    options = {"tensor-plan": tensor_plan != "auto", "sequence-parallel": sequence_parallel is not None}
    options |= {"loss-parallel": loss_parallel is not None}
    if names := ", ".join(f"--{name}" for name, is_set in options.items() if is_set):
        raise ShardwiseError(f"{names} cannot be used without tensor parallelism: give --tensor")


def _check_plan(model: str, setup: Setup, hardware: str) -> None:
    """Raise if the plan is impossible, as far as that can be known without torch."""
    from shardwise.planner.devices import check_narrow, check_rate, hardware_of
    from shardwise.planner.setup import check_filled
    from shardwise.planner.shapes import check_cut, check_source

    check_filled(setup)
    device = hardware_of(hardware)
    check_narrow(device, setup.narrow)
    check_rate(device, setup.param_dtype)
    check_source(model)
    check_cut(model, setup)


def _is_explicit(context: typer.Context, name: str) -> bool:
    """Return whether the command line has this option, if only with its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _writable(path: Path) -> Path:
    """Return the path of a file to write, which may begin with `~`."""
    path = on_disk(path)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ShardwiseError(f"{path} cannot be written: give a file in a folder that you may write to")
    return path


if __name__ == "__main__":
    app()
