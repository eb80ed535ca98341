"""The Hugging Face Trainer: 20 steps, resume, save_pretrained."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import batches, report, tiny_llama
from torch.utils.data import Dataset
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
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp="full_shard",
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    trainer = Trainer(tiny_llama(), arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    folder = tempfile.gettempdir() + f"/clients_{os.environ['MASTER_PORT']}"
    trainer, losses = train(folder)
    _, resumed = train(folder, resume=f"{folder}/checkpoint-{STEPS // 2}")
    assert resumed == losses, "the resumed run went another way"
    trainer.save_model(f"{folder}/final")
    if dist.get_rank() == 0:
        LlamaForCausalLM.from_pretrained(f"{folder}/final")
        assert list(Path(folder, "final").glob("*.safetensors"))
    report([round(loss, 6) for loss in losses])


if __name__ == "__main__":
    main()
