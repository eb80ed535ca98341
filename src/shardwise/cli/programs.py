"""The `shardwise tp` commands: exported programs cut over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from shardwise.errors import ShardwiseError

OK, FOUND, NOT_RUN = 0, 1, 2


def show(text: str, *, stderr: bool = False, **options: Any) -> None:
    """Print a text as it is."""
    Console(stderr=stderr, emoji=False).print(text, markup=False, highlight=False, soft_wrap=True, **options)


def print_failure(error: Exception, trace: str) -> None:
    """Print an error to stderr, preceded by its traceback if there is one."""
    if trace:
        show(trace.rstrip(), stderr=True)
    text = str(error).removeprefix("this process: ")  # there is only one here
    show(f"Error: {text}", stderr=True, style="red")


@contextmanager
def reporting() -> Iterator[None]:
    """Print an error of the library, and exit with the status of what could not be run."""
    try:
        yield
    except ShardwiseError as error:
        print_failure(error, getattr(error, "traceback", ""))
        raise typer.Exit(NOT_RUN) from None


app = typer.Typer(help="Tensor parallelism for exported programs.", no_args_is_help=True)


@app.command(
    "export", epilog="Exit status: 0 written; 2 the program or strategies cannot be read or do not fit."
)
def export(
    model: Annotated[str, Argument(help="A .pt2 file written by torch.export.save.")],
    out: Annotated[str, Option(help="Folder to write every rank's program to.")],
    ranks: Annotated[int, Option(min=1, help="Number of ranks that will run the program.")] = 2,
    strategies: Annotated[
        str, Option(help="JSON file of {module or pattern: colwise|rowwise|replicate}, or auto.")
    ] = "auto",
    device: Annotated[str, Option(help="Device type that will run the program.")] = "cpu",
    strict: Annotated[bool, Option(help="Raise for operations that have no sharding rule.")] = False,
    overwrite: Annotated[bool, Option(help="Replace an existing folder of programs.")] = False,
    aot: Annotated[bool, Option(help="Also compile each program with AOTInductor.")] = False,
) -> None:
    """Cut an exported program over ranks; one folder holds one program per rank."""
    from shardwise.tensor_parallel.aot import compile_package
    from shardwise.tensor_parallel.package import export_command

    with reporting():
        output = export_command(
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
            output += f"Compiled {ranks} programs\n"
        show(output)


@app.command(
    "merge", epilog="Exit status: 0 written; 2 a rank's file is missing or damaged, or ranks differ."
)
def merge(
    folder: Annotated[
        str, Argument(help="Folder of every rank's program, written by `shardwise tp export`.")
    ],
    out: Annotated[str, Option(help="Safetensors file to write.")],
    strip: Annotated[str, Option(help="Prefix to remove from names, such as `model.`.")] = "",
    overwrite: Annotated[bool, Option(help="Replace an existing file.")] = False,
) -> None:
    """Merge the ranks' weights back into one model's."""
    from shardwise.tensor_parallel.package import merge_command

    with reporting():
        show(merge_command(folder, out, strip=strip, overwrite=overwrite), end="")


@app.command("generate", epilog="Exit status: 0 generated; 2 the model, prompt or plan cannot be used.")
def generate(
    folder: Annotated[
        Path, Argument(help="Folder with a transformers config; random weights if it has none.")
    ],
    ids: Annotated[str, Option(help="The prompt as token ids separated by spaces.")] = "",
    text: Annotated[str | None, Option(help="The prompt as text, for the folder's tokenizer.")] = None,
    tokens: Annotated[int, Option(min=1, help="Maximum number of tokens to generate.")] = 16,
    ranks: Annotated[int, Option(min=1, help="Number of local processes, unless torchrun started this.")] = 2,
    strategies: Annotated[
        str | None, Option(help="JSON file of styles by module, or auto. Default: the model's own plan.")
    ] = None,
    seed: Annotated[int, Option(help="Seed of random weights.")] = 0,
    timeout: Annotated[float, Option(min=1.0, help="Seconds without progress that count as a hang.")] = 600.0,
) -> None:
    """Generate greedily with a language model cut over ranks; its cache is cut by heads."""
    import torch.distributed as dist

    from shardwise.files.stores import on_disk
    from shardwise.hf.generate import generate_command, read_prompt
    from shardwise.tensor_parallel.package import read_strategies
    from shardwise.verify.processes import run_ranks

    with reporting():
        plan: Any = strategies if strategies in (None, "auto") else read_strategies(strategies)
        place = str(on_disk(folder))
        prompt, tokenizer = read_prompt(
            place, ids, text, tokens=tokens, strategies=plan
        )  # before ranks start
        arguments: tuple[Any, ...] = (place, prompt, tokens, seed, plan)
        is_first = True
        if dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
            generated, line, notes = generate_command(lambda: None, *arguments)
            is_first = dist.get_rank() == 0
            dist.destroy_process_group()
        else:
            (generated, line, notes), *_ = run_ranks(
                generate_command, *arguments, world_size=ranks, timeout=timeout
            )
        decoded = [] if tokenizer is None else [tokenizer.decode(generated, skip_special_tokens=True)]
        if is_first:
            for note in notes:
                show(f"Warning: {note}", stderr=True, style="yellow")
            show("\n".join([" ".join(map(str, generated)), *decoded, line]))
