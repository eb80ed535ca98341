"""Fine-tune a sharded Llama with LoRA, and read it back with transformers.

    torchrun --standalone --nproc-per-node 4 examples/finetune.py        # or: make finetune

To avoid a download, the script first builds a tiny sharded Llama from its config, trains it a little on
Python's source and saves it: this folder stands for a published model. The rest is as for a large model.
Weights go from the files straight into shards, with adapters added. Only the adapters train, on the text of
Python's documentation. After a merge, the model is saved as a plain checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from run_log import progress_bar
from shardwise import hf
from train_gpt import read_text, say, windows

SEQ = 96  # bytes; each byte is a token
BATCH = 8  # windows per rank and step
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


def documentation() -> tuple[Tensor, Tensor]:
    """Return training and held-out bytes of the text that `help()` shows."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def loss_of(model: nn.Module, text: Tensor, seed: int) -> Tensor:
    """Return mean nats per byte over windows drawn by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    ids, _ = windows(text, torch.randint(len(text) - SEQ, (BATCH,), generator=generator), SEQ)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def train(model: nn.Module, text: Tensor, *, steps: int, lr: float) -> None:
    """Train the parameters that are not frozen, each rank on its own windows."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, fused=True)
    with progress_bar(0, steps) as advance:
        for step in range(steps):
            loss = loss_of(model, text, step * dist.get_world_size() + dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            advance(f"loss {loss.item():.3f}")
    model.eval()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor) -> float:
    return sum(loss_of(model, text, seed).item() for seed in range(8)) / 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a Llama with LoRA, sharded over ranks.")
    parser.add_argument("--layout", choices=["interleaved", "contiguous"], default="interleaved")
    parser.add_argument("--base-steps", type=int, default=100, help="training steps of the base model")
    parser.add_argument("--steps", type=int, default=100, help="fine-tuning steps")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        shutil.rmtree(args.out, ignore_errors=True)
    dist.barrier()

    model: Any = hf.load(CONFIG, model_class=LlamaForCausalLM, layout=args.layout)
    train(model, read_text(None, SEQ)[0], steps=args.base_steps, lr=3e-3)
    base = hf.save(model, args.out / "base", max_shard_size="1MB")

    text, held_out = documentation()
    model = hf.load(base, layout=args.layout, adapt=lambda whole: get_peft_model(whole, LORA))
    memory, (trained, parameters) = hf.host_memory(model), model.get_nb_trainable_parameters()
    say(f"{memory.whole:,} bytes of weights, at most {memory.peak:,} in this rank's memory while loading")
    say(f"{trained:,} of {parameters:,} parameters train")
    say(f"held-out documentation: {held_out_loss(model, held_out):.3f} nats/byte before")
    train(model, text, steps=args.steps, lr=3e-3)
    say(f"held-out documentation: {held_out_loss(model, held_out):.3f} nats/byte after")

    tuned = hf.save(hf.merge(model), args.out / "tuned")
    prompt = torch.frombuffer(bytearray(b"The "), dtype=torch.uint8).long()[None]
    with torch.no_grad():
        logits = model(input_ids=prompt).logits  # of the merged model, sharded
    if dist.get_rank() == 0:
        read = AutoModelForCausalLM.from_pretrained(tuned)
        with torch.no_grad():
            assert torch.equal(read(input_ids=prompt).logits, logits), "what was read back is another model"
        written = read.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=160,
            do_sample=True,
            temperature=0.7,
        )
        print(f"read back by transformers from {tuned}, with equal logits. It writes:\n")
        print(bytes(written[0].tolist()).decode(errors="replace"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
