"""torchtune: a Llama as its recipes train it, saved whole and loaded into a new model and optimizer."""

import os
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import batches, check_resuming, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.models.llama3 import llama3
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer
from torchtune.modules.loss import CEWithChunkedOutputLoss

ACCUMULATED = 2
CPU = torch.device("cpu")


def llama() -> TransformerDecoder:
    sizes = {"vocab_size": 98, "embed_dim": 32, "intermediate_dim": 48, "max_seq_len": 64}
    return llama3(num_layers=2, num_heads=4, num_kv_heads=2, **sizes)


def build(saved: dict[str, Any]) -> tuple[TransformerDecoder, torch.optim.Optimizer, CEWithChunkedOutputLoss]:
    """Build the model, optimizer and loss as in `full_finetune_distributed`, from a saved state."""
    with torch.device("meta"):
        model = llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    is_sharded = partial(training.get_shard_conditions, names_to_match=["tok_embeddings", "output"])
    training.shard_model(model, [is_sharded], cpu_offload=False, dp_mesh=mesh["dp"])
    for module in model.modules():
        if hasattr(module, "rope_init"):  # no state dict has its buffers
            with CPU:
                module.rope_init()
    training.load_from_full_model_state_dict(model, saved[training.MODEL_KEY], CPU, strict=True)
    training.validate_no_params_on_meta_device(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if state := saved.get(training.OPT_KEY):
        training.load_from_full_optimizer_state_dict(model, optimizer, state, CPU)
    loss = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss.num_output_chunks)
    return model, optimizer, loss


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer, loss_of = build({training.MODEL_KEY: llama().state_dict()})
    file = f"{tempfile.gettempdir()}/torchtune_{os.environ['MASTER_PORT']}.pt"

    def train(first: int, last: int) -> list[float]:
        figures = []
        running, tokens = torch.tensor(0.0), torch.tensor(0)
        for number, batch in enumerate(batches(first, last, rank=dist.get_rank()), 1):
            none = torch.full((len(batch["labels"]), 1), loss_of.ignore_index)
            labels = torch.hstack((batch["labels"][:, 1:], none))
            counted = (labels != loss_of.ignore_index).sum()
            loss = loss_of(model(batch["input_ids"]), labels) * counted
            loss.backward()
            running += loss.detach()
            tokens += counted
            if number % ACCUMULATED == 0:
                dist.all_reduce(running)
                dist.all_reduce(tokens)
                training.scale_grads(model, dist.get_world_size() / tokens)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                optimizer.step()
                optimizer.zero_grad()
                figures += [(running / tokens).item(), norm.item()]
                running, tokens = torch.tensor(0.0), torch.tensor(0)
        return figures

    def save() -> None:
        is_first = dist.get_rank() == 0
        whole = {
            training.MODEL_KEY: training.gather_cpu_state_dict(model, is_first, CPU),
            training.OPT_KEY: training.get_full_optimizer_state_dict(model, optimizer, is_first, CPU),
        }
        if is_first:
            torch.save(whole, file)
        dist.barrier()

    def load() -> None:
        nonlocal model, optimizer, loss_of
        model, optimizer, loss_of = build(torch.load(file, mmap=True))

    figures = check_resuming(model, train, save, load)
    report(figures, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
