"""Run a transformer with tensor parallelism: export it, cut the program, compare it with the whole model.

    torchrun --standalone --nproc-per-node 2 examples/tp_inference.py llama
    python examples/tp_inference.py mixtral --ranks 4 --layers 4      # the same: starts torchrun itself

Needs `pip install transformers`. Models are built from a config with random weights, so nothing is
downloaded. Read from top to bottom, the script has the model (`MODELS`), how its layers are cut (`PLANS`),
the export, the cut, and the check. With --package it writes every rank's program to a folder, and each rank
runs the program that it reads from there.

stdout has output that the seed and the number of ranks determine, and the speed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from shardwise.errors import ShardwiseError
from shardwise.launch import on_ranks
from shardwise.tensor_parallel import ColwiseParallel, RowwiseParallel, tensor_parallel_transformation
from shardwise.tensor_parallel.explain import counts, explain
from shardwise.tensor_parallel.package import load, save

VOCABULARY, IMAGE, PATCH = 512, 32, 8
HEAD = 16  # elements of a head

# Column, then row: no communication in between, and one all-reduce per pair.
PLANS: dict[str, dict[str, Any]] = {
    "llama": {
        "*.q_proj": ColwiseParallel,
        "*.k_proj": ColwiseParallel,
        "*.v_proj": ColwiseParallel,
        "*.o_proj": RowwiseParallel,
        "*.gate_proj": ColwiseParallel,
        "*.up_proj": ColwiseParallel,
        "*.down_proj": RowwiseParallel,
        "*.embed_tokens": RowwiseParallel,
        "*.lm_head": ColwiseParallel,
    },
    "gpt2": {
        "*.attn.c_attn": ColwiseParallel,
        "*.attn.c_proj": RowwiseParallel,
        "*.mlp.c_fc": ColwiseParallel,
        "*.mlp.c_proj": RowwiseParallel,
        "*.lm_head": ColwiseParallel,  # also cuts the embedding's table, which is the same tensor
    },
    "bert": {
        "*.self.query": ColwiseParallel,
        "*.self.key": ColwiseParallel,
        "*.self.value": ColwiseParallel,
        "*.attention.output.dense": RowwiseParallel,
        "*.intermediate.dense": ColwiseParallel,
        "*.layer.*[0-9].output.dense": RowwiseParallel,
    },
    "vit": {
        "*.q_proj": ColwiseParallel,
        "*.k_proj": ColwiseParallel,
        "*.v_proj": ColwiseParallel,
        "*.o_proj": RowwiseParallel,
        "*.mlp.fc1": ColwiseParallel,
        "*.mlp.fc2": RowwiseParallel,
    },
    "mixtral": {
        "*.q_proj": ColwiseParallel,
        "*.k_proj": ColwiseParallel,
        "*.v_proj": ColwiseParallel,
        "*.o_proj": RowwiseParallel,
        "*.experts.gate_up_proj": ColwiseParallel,
        "*.experts.down_proj": RowwiseParallel,
        "*.embed_tokens": RowwiseParallel,
        "*.lm_head": ColwiseParallel,
    },
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a transformer cut over ranks.")
    add = parser.add_argument
    add("family", choices=list(PLANS))
    add("--ranks", type=int, help="ranks to start when torchrun did not start this script (default: 2)")
    add("--layers", type=int, default=2)
    add("--hidden", type=int, default=64, help=f"width of the model, in heads of {HEAD}")
    add("--batch", type=int, default=2)
    add("--seq", type=int, default=32, help="tokens of each sequence")
    add("--runs", type=int, default=5, help="calls to time")
    add("--seed", type=int, default=0)
    add("--strict", action="store_true", help="raise for operations that must gather their inputs")
    add("--explain", action="store_true", help="print what rank 0 holds and sends")
    add(
        "--package",
        type=Path,
        help="write all ranks' programs to this folder, then read and run them",
    )
    args = parser.parse_args(argv)
    if args.hidden % HEAD or args.hidden <= 0:
        parser.error(f"--hidden must be a multiple of {HEAD}")
    return args


# --------------------------------------------------------------------------------------- models


class Whole(nn.Module):
    """A transformers model that takes one tensor and returns one."""

    def __init__(self, model: nn.Module, takes: str) -> None:
        super().__init__()
        self.model, self.takes = model, takes

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.model(**{self.takes: inputs}).logits
        return result


def make_model(family: str, *, layers: int, hidden: int) -> nn.Module:
    """Make a model of `family` with random weights, in eval mode."""
    import transformers as hf

    heads = hidden // HEAD
    usual = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    text = {"vocab_size": VOCABULARY, **usual, "intermediate_size": 4 * hidden}
    grouped = {**text, "num_key_value_heads": max(1, heads // 2), "use_cache": False}
    if family == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))
    elif family == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**grouped, num_local_experts=4))
    elif family == "gpt2":
        config = hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=hidden, n_layer=layers, n_head=heads, use_cache=False
        )
        model = hf.GPT2LMHeadModel(config)
    elif family == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**text))
    else:
        config = hf.ViTConfig(
            **usual, intermediate_size=4 * hidden, image_size=IMAGE, patch_size=PATCH, num_labels=10
        )
        model = hf.ViTForImageClassification(config)
    return Whole(model.eval(), "pixel_values" if family == "vit" else "input_ids")


def make_inputs(args: argparse.Namespace) -> tuple[Tensor, int]:
    """Make a batch, equal on every rank; return it with its number of tokens."""
    torch.manual_seed(args.seed + 1)
    if args.family == "vit":
        return torch.randn(args.batch, 3, IMAGE, IMAGE), args.batch * ((IMAGE // PATCH) ** 2 + 1)
    return torch.randint(VOCABULARY, (args.batch, args.seq)), args.batch * args.seq


# ------------------------------------------------------------------------------------------ cut


def cut(program: ExportedProgram, args: argparse.Namespace) -> ExportedProgram:
    """Return this rank's program."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("once" if rank == 0 else "ignore")
        made = tensor_parallel_transformation(
            program, rank, ranks, "cpu", PLANS[args.family], strict=args.strict
        )
    if args.package is None:
        return made
    save(made, args.package, overwrite=True)
    return load(args.package)


@torch.no_grad()
def run(args: argparse.Namespace) -> float:
    """Run everything between joining and leaving the process group; return the largest difference."""
    torch.manual_seed(args.seed)  # every rank builds the same model, then keeps its share
    model = make_model(args.family, layers=args.layers, hidden=args.hidden)
    inputs, tokens = make_inputs(args)
    expected = model(inputs)
    program = cut(export(model, (inputs,), strict=False), args)
    del model

    found = explain(program)
    say(f"{args.family}: {found.bytes_whole:,} bytes of weights over {found.world_size} ranks")
    say(f"rank 0 holds {found.bytes_here:,} bytes ({found.bytes_here / found.bytes_whole:.1%})")
    say("a call sends " + ", ".join(f"{count} {kind}" for kind, count in counts(program).items()))
    if args.explain:
        say(str(found))
    module = program.module()
    difference = (module(inputs) - expected).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    say(
        f"largest difference to the unsharded model: {difference:.2e}"
        f" (its largest output: {expected.abs().max():.2e})"
    )

    dist.barrier()
    began = time.perf_counter()
    for _ in range(args.runs):
        module(inputs)
    dist.barrier()
    say(f"{args.runs * tokens / (time.perf_counter() - began):,.0f} tokens/s")
    return float(difference / expected.abs().max())


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    args = parse_arguments()
    on_ranks(args.ranks or 2)
    dist.init_process_group("gloo")
    difference = run(args)
    dist.destroy_process_group()
    if not difference < 1e-4:
        raise ShardwiseError("the ranks compute something else than the unsharded model")


if __name__ == "__main__":
    main()
