"""Plans beside real steps on gloo ranks: the most bytes alive, bytes sent, the order of collectives."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from shardwise.adapters import uninstall
from shardwise.comm.count import Collective, CommCounter
from shardwise.planner.code import python
from shardwise.planner.decoder import Decoder
from shardwise.planner.events import Send
from shardwise.planner.measure import last_step, moments
from shardwise.planner.models import Model, chunked, loss_of_piece, model_of, of_shape, whole_loss
from shardwise.planner.pipeline import stage_of
from shardwise.planner.record import holding, record
from shardwise.planner.setup import Setup
from shardwise.planner.shapes import Shape
from shardwise.planner.sharding import optimizers_of, shard, split
from shardwise.planner.tensor import parallelize
from shardwise.planner.watch import seeing_random_states

if __package__:
    from benchmarks.storages import Allocated
else:  # run as a script
    from storages import Allocated

SEQUENCE, STEPS = 32, 4


@dataclass(frozen=True)
class Comparison:
    """Of one step; `sent` is what a rank sends, by the ideal ring."""

    planned_alive: int
    measured_alive: int
    planned_sent: int
    measured_sent: int
    same_order: bool

    @property
    def error(self) -> float:
        return self.planned_alive / self.measured_alive - 1


def gpt(layers: int = 3) -> nn.Module:
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import train_gpt

    return train_gpt.GPT(width=32, depth=layers, heads=4, seq=SEQUENCE)


def llama(layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=layers, use_cache=False))


def decoder(layers: int = 2) -> nn.Module:
    return Decoder(Shape(96, 32, layers, heads=4, kv_heads=2, ffn=64), layers=layers, positions=SEQUENCE)


def learned(layers: int = 2) -> nn.Module:
    shape = Shape(
        96, 32, layers, heads=4, kv_heads=4, ffn=64, rotary=False, gated=False, bias=True, tied=True
    )
    return Decoder(shape, layers=layers, positions=SEQUENCE)


def setup_of(ranks: int, **changes: Any) -> Setup:
    sizes: dict[str, Any] = {"sequence": SEQUENCE, "micro_batch": 2, "param_dtype": "float32"}
    return Setup(**({"ranks": ranks, "device": "cpu", "ends_apart": False} | sizes | changes))


def stages(layers: int = 4, first: bool = True, last: bool = True) -> nn.Module:
    shape = Shape(96, 32, layers, heads=4, kv_heads=2, ffn=64)
    return Decoder(shape, layers=layers, positions=SEQUENCE, first=first, last=last)


class Experts(nn.Module):
    """Four, in the form of transformers' modules of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 32, 32) / 32)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        every = torch.einsum("nw,ewv->nev", hidden_states, self.weight)
        picked = every.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
        return (picked * top_k_weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    """Tokens choose experts in turn, so that shares are even."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(32, 1), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        chosen = (torch.arange(len(tokens)) % self.experts.num_experts).unsqueeze(1)
        return x + self.experts(tokens, chosen, self.router(tokens)).view_as(x)


class Mixtures(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 32), nn.Linear(32, 96, bias=False)
        self.blocks = nn.ModuleList(Mixture() for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def mixtures(layers: int = 3) -> nn.Module:
    return Mixtures(layers)


def tiny() -> Model:
    """A built-in model, which knows how to be cut in all ways."""
    return of_shape("tiny", Shape(96, 32, 2, heads=4, kv_heads=2, ffn=64), SEQUENCE)


def compare(factory: Callable[..., Any], setup: Setup) -> Comparison:
    """On every rank of the default group: a plan, and then the step itself."""
    source: Any = tiny() if factory is tiny else factory
    model = model_of(source, sequence=setup.sequence)
    if setup.pipeline > 1:
        model = stage_of(model, setup, dist.get_rank() * setup.pipeline // setup.ranks)
    planned, issued = planned_step(model, setup, layers=model.layers)
    if setup.pipeline * setup.ulysses * setup.experts > 1:
        alive, calls = measured_on_mesh(source, model, setup)
    else:
        alive, calls = _measured(model, setup)
    return Comparison(
        planned_alive=planned,
        measured_alive=alive,
        planned_sent=sum(one.wire_bytes for one in issued),
        measured_sent=sum(one.wire_bytes for one in calls),
        same_order=calls == issued,
    )


def planned_step(model: Model, setup: Setup, *, layers: int) -> tuple[int, list[Collective]]:
    """The most bytes alive, and the collectives, by a plan that a stage's first rank makes. Collective."""
    found: list[Any] = [None] * setup.ranks
    of_a_stage = setup.ranks // setup.pipeline
    first = dist.get_rank() // of_a_stage * of_a_stage
    mine: Any = None
    if dist.get_rank() == first:
        recording = record(model, setup, layers=layers)
        issued = [event.collective for _, event, _ in last_step(recording, 1) if isinstance(event, Send)]
        mine = max(moment.alive_bytes for moment in moments(recording)), issued
    dist.all_gather_object(found, mine)
    made: tuple[int, list[Collective]] = found[first]
    return made


def measured_on_mesh(source: Any, model: Model, setup: Setup) -> tuple[int, Any]:
    """Of a step after the first of stages, sequences or experts over ranks, built by the Python of a plan."""
    names: dict[str, Any] = {}
    exec(python(source, setup), names)
    own = {}
    if setup.stages > 1:
        own = _stages_of(model_of(source, sequence=setup.sequence), setup, model.at.number)
    module: Any = nn.ModuleList(own.values()) if own else model.build(model.layers)
    tokens = torch.zeros(setup.micro_batch * model.at.micro_batches, setup.sequence, dtype=torch.int64)
    if setup.pipeline > 1:
        given = (own,) if own else (module, model.at.number)
        schedule, optimizer = names["build"](*given, whole_loss)
        ends: dict[str, Any] = {"target": tokens} if model.at.last else {}
        inputs = [tokens] if model.at.first else []
    else:
        optimizer = names["build"](module)

    def step() -> None:
        if setup.pipeline > 1:
            schedule.step(*inputs, return_outputs=False, **ends)
        elif setup.ulysses > 1:
            loss_of_piece(module(module.cut(tokens)), tokens, module.cut).backward()
        else:
            model.loss(module, tokens, tokens).backward()

    try:
        parallel: Any = loss_parallel() if setup.tensor > 1 else nullcontext()
        with Allocated() as storages, seeing_random_states(storages), parallel:
            parameters = [getattr(p, "_local_tensor", p) for p in module.parameters()]
            storages.see([parameters, list(module.buffers()), tokens])
            for number in range(STEPS):
                optimizer.zero_grad()
                with storages.peak(f"step {number}"), CommCounter() as counter:
                    step()
                    optimizer.step()
    finally:
        uninstall()
    return _least_peak(storages), counter.calls


def _least_peak(storages: Allocated) -> int:
    """Of the steps after the first: gloo's threads may hold a buffer for a moment after its collective."""
    return min(storages.peaks[f"step {number}"] for number in range(1, STEPS))


def _stages_of(model: Model, setup: Setup, rank: int) -> dict[int, nn.Module]:
    """A rank's stages by number, each an even share of the blocks."""
    count = setup.pipeline * setup.stages
    ends = [model.layers * i // count for i in range(count + 1)]
    make: Any = model.stage
    return {
        i: make(ends[i + 1] - ends[i], i == 0, i == count - 1) for i in range(rank, count, setup.pipeline)
    }


def _measured(model: Model, setup: Setup) -> tuple[int, Any]:
    """Of a step after the first: the most bytes alive, and the collectives."""
    model = chunked(model) if setup.loss == "chunked" else model
    module = model.build(model.layers)
    names, sizes = zip(*setup.axes.items(), strict=True)
    mesh, tensor = split(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    if tensor is not None:
        parallelize(module, model.name, tensor, setup)
    shard(module, model, setup, mesh)
    optimizers = optimizers_of(module, model, setup)
    tokens = torch.zeros(setup.micro_batch, setup.sequence, dtype=torch.int64)
    parallel: Any = loss_parallel() if tensor is not None else nullcontext()
    with Allocated() as storages, seeing_random_states(storages), parallel:
        storages.see([[getattr(p, "_local_tensor", p) for p in module.parameters()], list(module.buffers())])
        storages.see(tokens)
        for number in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with storages.peak(f"step {number}"), CommCounter() as counter:
                for _ in range(setup.accumulation):
                    with holding(setup.loop_holds) as held:
                        loss = model.loss(module, tokens, tokens)
                    loss.backward()
                    del loss, held
                for optimizer in optimizers:
                    optimizer.step()
    return _least_peak(storages), counter.calls


def rows() -> Iterator[list[str]]:
    """In the order of `HEADER`."""
    for ranks in (2, 4):
        for name, setup, one in _on_ranks(ranks):
            also = ", ".join(f"{k} {v}" for k, v in asdict(setup).items() if k in _ALSO and v != _ALSO[k])
            told = [name, str(ranks), setup.layout, setup.checkpointing, also]
            told += [f"{one.planned_alive:,}", f"{one.measured_alive:,}", f"{one.error:+.2%}"]
            told += [f"{one.planned_sent:,}", f"{one.measured_sent:,}"]
            yield [*told, "equal" if one.same_order else "differs"]


HEADER = ["model", "ranks", "layout", "checkpointing", "also"]
HEADER += ["alive planned", "measured", "error", "sent planned", "measured", "order of collectives"]
_ALSO = {"loss": "whole", "optimizer": "AdamW fused", "accumulation": 1, "replicas": 1, "tensor": 1}
_EACH: list[dict[str, Any]] = [
    {"layout": layout, "checkpointing": checkpointing}
    for layout in ("interleaved", "contiguous")
    for checkpointing in ("none", "selective", "full")
]
_EACH += [{"loss": "chunked"}, {"optimizer": "Muon"}, {"optimizer": "AdamW 8 bits"}, {"accumulation": 2}]


def _cases(ranks: int) -> Iterator[tuple[str, Any, Setup]]:
    for name, factory in (("train_gpt", gpt), ("transformers Llama", llama)):
        for changes in _EACH:
            yield name, factory, setup_of(ranks, **changes)
    if ranks == 4:
        for name, factory in (("planner's Llama", decoder), ("transformers Llama", llama)):
            for changes in (*_EACH[:6], {"loss": "chunked"}, {"layout": "contiguous", "replicas": 2}):
                yield name, factory, setup_of(ranks, **{"tensor": 2} | changes)


def _on_ranks(ranks: int) -> list[tuple[str, Setup, Comparison]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(ranks, folder), nprocs=ranks)
        found = torch.load(Path(folder, "found"), weights_only=False)
    return [(name, setup, one) for (name, _, setup), one in zip(_cases(ranks), found, strict=True)]


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = [compare(factory, setup) for _, factory, setup in _cases(ranks)]
    if rank == 0:
        torch.save(found, Path(folder, "found"))
    dist.destroy_process_group()
