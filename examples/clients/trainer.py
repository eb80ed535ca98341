"""Hugging Face Trainer: 20 steps of accumulation and clipping, resume, evaluation, `save_pretrained`."""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate_on_cpu import use_fsdp_plugin_on_cpu
from common import batches, report, tiny_llama
from torch.utils.data import Dataset, Subset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

STEPS = 20


class Tokens(Dataset):
    def __init__(self) -> None:
        self.rows = [row for batch in batches(0, 4 * STEPS, rank=0) for row in batch["input_ids"]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(folder: str, *, resume: str | None = None) -> tuple[Trainer, list[float]]:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=STEPS // 2,
        eval_strategy="steps",
        eval_steps=STEPS // 4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    held_out = Subset(Tokens(), range(6))
    trainer = Trainer(tiny_llama(), arguments, train_dataset=Tokens(), eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=resume)
    shown = ("loss", "grad_norm", "eval_loss")
    return trainer, [entry[name] for entry in trainer.state.log_history for name in shown if name in entry]


def main() -> None:
    use_fsdp_plugin_on_cpu()
    folder = tempfile.gettempdir() + f"/clients_{os.environ['MASTER_PORT']}"
    trainer, losses = train(folder)
    _, resumed = train(folder, resume=f"{folder}/checkpoint-{STEPS // 2}")
    assert resumed == losses, "the resumed run went another way"
    trainer.save_model(f"{folder}/final")
    whole = trainer.accelerator.get_state_dict(trainer.model)
    if dist.get_rank() == 0:
        loaded = LlamaForCausalLM.from_pretrained(f"{folder}/final").state_dict()
        assert all(torch.equal(whole[name], value) for name, value in loaded.items())
    report(losses, trainer.model)


if __name__ == "__main__":
    main()
