"""What `shardwise.hf.load` takes of each rank's memory: as it says beforehand, and as it is.

    python benchmarks/hf_load.py            # a table; about 3 minutes
    python benchmarks/hf_load.py --write    # into TABLES.md too

Counted are bytes of tensors that are alive at a time, beside mapped files. Sampled is the anonymous memory of
the process, every 2 ms, over what it was before: Python's objects are in it, memory not written yet is not.
A row of stacked experts is an expert, which the contiguous layout does not cut: 4 ranks pad 8 of them.
"""

import argparse
import itertools
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from results import Table, machine_facts, write_section
from storages import AllocatedBesideFiles

from shardwise import hf

MIB = 2**20


def models() -> dict[str, Any]:
    """Configs by name, of classes that they name."""
    heads = {"vocab_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 0}
    llama = transformers.LlamaConfig(**heads, hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    mixtral = transformers.MixtralConfig(
        **heads, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_local_experts=8
    )
    llama.architectures, mixtral.architectures = ["LlamaForCausalLM"], ["MixtralForCausalLM"]
    return {"Llama": llama, "Mixtral": mixtral}


class Sampled(threading.Thread):
    """The most anonymous memory of the process while this runs, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.before = self.most = self._now()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._now())

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.most - self.before

    def _now(self) -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def measure(rank: int, ranks: int, source: Any, layout: str, folder: str) -> None:
    """On every rank: load, and leave the figures in `folder`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29520")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hf.load(source)  # what is imported and made once
    sampled = Sampled()
    sampled.start()
    model = hf.load(source, layout=layout)
    anonymous = sampled.end()
    memory = hf.host_memory(model)
    del model
    with AllocatedBesideFiles() as allocated, allocated.peak("load"):
        hf.load(source, layout=layout)
    figures = [memory.whole, memory.shards, memory.buffers + memory.tensor, memory.peak]
    Path(folder, f"{rank}.json").write_text(json.dumps([*figures, allocated.peaks["load"], anonymous]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--write", action="store_true", help="rewrite the section of TABLES.md too")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in models().items():
            torch.manual_seed(0)
            getattr(transformers, config.architectures[0])(config).save_pretrained(f"{folder}/{name}")
        sources = [(f"{name}, from files", f"{folder}/{name}") for name in models()]
        sources += [("Llama, from its config", models()["Llama"])]
        cases = itertools.product(sources, options.ranks, ("interleaved", "contiguous"))
        for (name, source), ranks, layout in cases:
            mp.spawn(measure, args=(ranks, source, layout, folder), nprocs=ranks)
            found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
            most = [f"{max(each) / MIB:.1f}" for each in zip(*found, strict=True)]
            rows.append([name, str(ranks), layout, *most])
            print(*rows[-1], flush=True)
    header = ["model", "ranks", "layout", "whole", "shards", "beside", "predicted", "counted", "sampled"]
    table = Table("MiB of host memory, on the rank that has most", header, rows)
    table.show()
    if options.write:
        facts = "; ".join(f"{fact} {value}" for fact, value in machine_facts().items())
        about = " ".join((__doc__ or "").split("\n\n")[2].split())
        write_section("hf_load", "\n\n".join(["## hf_load", facts, about, table.markdown()]))


if __name__ == "__main__":
    main()
