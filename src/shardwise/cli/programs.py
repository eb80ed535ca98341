"""Commands on exported programs that are cut over ranks: `shardwise tp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwise.errors import ShardwiseError

OK, FOUND, NOT_RUN = 0, 1, 2


def print_failure(error: Exception, trace: str) -> None:
    """Print an error to stderr, after its traceback if there is one."""
    console = Console(stderr=True, emoji=False)
    if trace:
        console.print(trace.rstrip(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Error: {error}", markup=False, highlight=False, soft_wrap=True, style="red")


app = typer.Typer(help="Tensor parallelism for exported programs.", no_args_is_help=True)


@app.command(
    "export", epilog="Exit status: 0 written; 2 a program or strategies that cannot be read or do not fit."
)
def export(
    model: Annotated[Path, typer.Argument(help="A .pt2 file by torch.export.save.")],
    out: Annotated[Path, typer.Option(help="Folder to write every rank's program to.")],
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks will run it.")] = 2,
    strategies: Annotated[
        str, typer.Option(help="JSON file of {module or pattern: colwise|rowwise|replicate}, or auto.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Kind of device that will run it.")] = "cpu",
    strict: Annotated[bool, typer.Option(help="Refuse operations without a rule.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder that is there.")] = False,
    aot: Annotated[bool, typer.Option(help="Also compile each to machine code, by AOTInductor.")] = False,
) -> None:
    """Cut an exported program over ranks: one program a rank, in one folder."""
    from shardwise.tensor_parallel.aot import compile_package
    from shardwise.tensor_parallel.package import export_command

    try:
        printed = export_command(
            model,
            out,
            ranks=ranks,
            strategies=strategies,
            device_type=device,
            strict=strict,
            overwrite=overwrite,
        )
        if aot:
            compile_package(out)
            printed += f"Compiled {ranks} programs\n"
    except ShardwiseError as error:
        print_failure(error, "")
        raise typer.Exit(NOT_RUN) from None
    Console(emoji=False).print(printed, markup=False, highlight=False, soft_wrap=True)


@app.command(
    "merge", epilog="Exit status: 0 written; 2 a rank's file is missing or damaged, or ranks differ."
)
def merge(
    folder: Annotated[
        Path, typer.Argument(help="Of every rank's program, as `shardwise tp export` writes it.")
    ],
    out: Annotated[Path, typer.Option(help="Safetensors file to write.")],
    strip: Annotated[str, typer.Option(help="A beginning of names to leave out: `model.`, say.")] = "",
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
) -> None:
    """Put ranks' weights together to one model's again."""
    from shardwise.tensor_parallel.package import merge_command

    try:
        printed = merge_command(folder, out, strip=strip, overwrite=overwrite)
    except ShardwiseError as error:
        print_failure(error, "")
        raise typer.Exit(NOT_RUN) from None
    Console(emoji=False).print(printed, end="", markup=False, highlight=False, soft_wrap=True)


@app.command("generate", epilog="Exit status: 0 generated; 2 a model, prompt or plan that cannot be used.")
def generate(
    folder: Annotated[
        Path, typer.Argument(help="Of transformers: a config, with weights or for random ones.")
    ],
    ids: Annotated[str, typer.Option(help="The prompt as token ids, with spaces between.")] = "",
    text: Annotated[str | None, typer.Option(help="The prompt, for the tokenizer in the folder.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many to generate at most.")] = 16,
    ranks: Annotated[int, typer.Option(min=1, help="Local processes, unless torchrun started this.")] = 2,
    strategies: Annotated[
        str | None,
        typer.Option(help="JSON file of styles by module, or auto. Default: the model's own plan."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds without progress that count as a hang.")
    ] = 600.0,
) -> None:
    """Generate greedily by a language model cut over ranks, with the cache cut by heads."""
    import torch.distributed as dist

    from shardwise.hf.generate import generate_command
    from shardwise.tensor_parallel.package import read_strategies
    from shardwise.verify.processes import RankError, run_ranks

    started = dist.is_torchelastic_launched()
    try:
        plan = strategies if strategies in (None, "auto") else read_strategies(strategies)
        asked: tuple[Any, ...] = (str(folder), ids, text, tokens, seed, plan)
        if started:
            dist.init_process_group("gloo")
            printed = generate_command(lambda: None, *asked)
            printed = printed if dist.get_rank() == 0 else ""
            dist.destroy_process_group()
        else:
            printed, *_ = run_ranks(generate_command, *asked, world_size=ranks, timeout=timeout)
    except ShardwiseError as error:
        print_failure(error, error.traceback if isinstance(error, RankError) else "")
        raise typer.Exit(NOT_RUN) from None
    Console(emoji=False).print(printed, end="", markup=False, highlight=False, soft_wrap=True)
