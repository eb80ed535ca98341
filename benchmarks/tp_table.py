"""Which exported models are cut over ranks rightly: shardwise beside torch's experimental transformation.

    python benchmarks/tp_table.py             show the table
    python benchmarks/tp_table.py --write     and replace its sections of TABLES.md and README.md

The models and plans are those of tests/tensor_parallel/zoo.py. Each is exported once, cut with the same plan
by both, and run on local gloo ranks beside the whole model. A cell says what came of it: the collectives of
one call where all ranks' results are the whole model's, within the case's tolerance; otherwise the kind of
error; "-" where torch cannot make the program. Ranks are processes of their own for each cell, so that one
that hangs or aborts says nothing of the next.
"""

import argparse
import multiprocessing
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import RESULTS, Table, machine_facts, write_section
from torch.utils import _pytree as pytree

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("tensor_parallel", "")]

import zoo  # noqa: E402
import zoo_blocks  # noqa: E402 - these register models
import zoo_transformers  # noqa: E402

SECTION = "tensor_parallel"
MODELS = [
    "mlp",
    "mlp of 10, 3 and 2 features",
    "column only",
    "conv net",
    "block",
    "block, dynamic",
    "block of 6 heads",
    "qkv by chunk",
    "2 key heads for 6 by gqa",
    "language by vocabulary",
    "language, tied",
    "Llama, grouped keys",
    "Qwen3",
    "Mistral",
    "GPT-2",
    "OPT",
    "GPT-NeoX",
    "BERT",
    "ViT",
    "T5",
    "Mixtral, attention cut",
]
FORMS = {"as exported": (False, False), "decomposed": (False, True)}
SECONDS = 90.0
README = Path(__file__).parents[1] / "README.md"
assert zoo_blocks.Block
assert zoo_transformers.VOCABULARY


def torchs(program: Any, rank: int, ranks: int, plan: dict[str, Any]) -> Any:
    from torch.distributed.tensor.experimental._tp_transform import tensor_parallel_transformation
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    theirs = {zoo.COL: ColwiseParallel, zoo.ROW: RowwiseParallel}
    return tensor_parallel_transformation(
        program, rank, ranks, "cpu", {name: theirs[style] for name, style in plan.items()}
    )


def ours(program: Any, rank: int, ranks: int, plan: dict[str, Any]) -> Any:
    return zoo.tensor_parallel_transformation(program, rank, ranks, "cpu", plan)


CUTS = {"torch": torchs, "shardwise": ours}


def on_rank(exported: zoo.Exported, which: str, rank: int, ranks: int, folder: str) -> None:
    """Write what came of it on one rank: counts of collectives, or the kind of error."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks
    )
    case, args, kwargs = exported.case, exported.args, exported.kwargs
    try:
        mine = CUTS[which](exported.program, rank, ranks, case.plan)
        with torch.no_grad():
            expected, found = (
                [x for x in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(x, torch.Tensor)]
                for model in (exported.model, mine.module())
            )
        error = max(
            float((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-30))
            for x, y in zip(found, expected, strict=True)
        )
        said = _shown(zoo.counts(mine)) if error <= case.tolerance else f"wrong by {error:.0e}"
    except Exception as problem:
        said = type(problem).__name__
    Path(folder, f"said{rank}").write_text(said)


def _shown(counts: dict[str, int]) -> str:
    short = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
    found = [f"{counts[name]} {text}" for name, text in short.items() if name in counts]
    return "right: " + (", ".join(found) or "none")


def outcome(exported: zoo.Exported, which: str, ranks: int) -> str:
    """What all ranks say of one case, or the first that failed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=on_rank, args=(exported, which, rank, ranks, folder))
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(SECONDS)
            if worker.is_alive():
                worker.kill()
        said = [p.read_text() for rank in range(ranks) if (p := Path(folder, f"said{rank}")).exists()]
    wrong = [text for text in said if not text.startswith("right")]
    return wrong[0] if wrong else said[0] if len(said) == ranks else "hangs or dies"


def measure(ranks: int, models: list[str]) -> dict[tuple[str, str, str], str]:
    """What came of each model, form and cut."""
    found = {}
    for name in models:
        for form, kind in FORMS.items():
            exported = zoo.export(zoo.CASES[name], kind) if kind in zoo.CASES[name].forms else None
            for which in CUTS:
                said = "-" if exported is None else outcome(exported, which, ranks)
                found[name, form, which] = said
                print(f"{name}, {form}, {which}: {said}", file=sys.stderr, flush=True)
    return found


def table(ranks: int, models: list[str], found: dict[tuple[str, str, str], str]) -> Table:
    columns = [(form, which) for which in CUTS for form in FORMS]
    rows = [[name, *(found[name, form, which] for form, which in columns)] for name in models]
    told = {which: [text for (_, _, cut), text in found.items() if cut == which] for which in CUTS}
    told = {which: [text for text in texts if text != "-"] for which, texts in told.items()}
    right = {which: sum(text.startswith("right") for text in texts) for which, texts in told.items()}
    shown = (text for which in CUTS for text in (f"{right[which]} of {len(told[which])}", ""))
    rows.append(["**right**", *shown])
    header = ["model", *(f"{which}, {form}" for form, which in columns)]
    return Table(f"{ranks} ranks; AR all-reduce, AG all-gather, RS reduce-scatter in one call", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=list(zoo.CASES))
    parser.add_argument("--write", action="store_true", help="replace sections of TABLES.md and README.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results file to update")
    parser.add_argument("--readme", type=Path, default=README, help="the page with the same table")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has no other threads
    shown = table(options.ranks, options.models, measure(options.ranks, options.models))
    shown.show()
    if options.write:
        facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
        write_section(SECTION, "\n\n".join([f"## {SECTION}", facts, shown.markdown()]), path=options.results)
        write_section(SECTION, shown.markdown(), path=options.readme)


if __name__ == "__main__":
    main()
