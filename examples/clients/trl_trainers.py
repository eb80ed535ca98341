"""TRL: supervised fine-tuning of LoRA adapters, then DPO against a sharded reference model."""

import os
import tempfile
from typing import Any

import torch
from accelerate_on_cpu import use_fsdp_plugin_on_cpu
from common import batches, report, tiny_llama
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

STEPS = 6


def words() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one word per token of the model."""
    model = WordLevel({"pad": 0, "end": 97} | {f"w{token}": token for token in range(1, 97)}, unk_token="pad")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="pad", eos_token="end")


def texts(count: int) -> list[str]:
    rows = [row for batch in batches(0, count, rank=0) for row in batch["input_ids"].tolist()]
    return [" ".join(f"w{token}" for token in row) for row in rows]


def common_arguments(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": STEPS // 2,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": 16,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }


def losses_of(trainer: Trainer) -> list[float]:
    shown = ("loss", "grad_norm")
    return [entry[name] for entry in trainer.state.log_history for name in shown if name in entry]


def fine_tuned(folder: str, *, resume: str | None = None) -> SFTTrainer:
    torch.manual_seed(0)
    trainer = SFTTrainer(
        tiny_llama(),
        SFTConfig(**common_arguments(folder)),
        train_dataset=Dataset.from_dict({"text": texts(4 * STEPS)}),
        processing_class=words(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def preferred(folder: str) -> DPOTrainer:
    rows = texts(4 * STEPS)
    halves = {"prompt": [row[:12] for row in rows], "chosen": [row[12:] for row in rows]}
    trainer = DPOTrainer(
        tiny_llama(),
        tiny_llama(),
        DPOConfig(**common_arguments(folder)),
        train_dataset=Dataset.from_dict(halves | {"rejected": [row[:8] for row in rows]}),
        processing_class=words(),
    )
    trainer.train()
    return trainer


def main() -> None:
    use_fsdp_plugin_on_cpu()
    folder = tempfile.gettempdir() + f"/clients_{os.environ['MASTER_PORT']}"
    tuned = fine_tuned(f"{folder}/sft")
    resumed = fine_tuned(f"{folder}/sft", resume=f"{folder}/sft/checkpoint-{STEPS // 2}")
    assert losses_of(resumed) == losses_of(tuned), "the resumed run went another way"
    aligned = preferred(f"{folder}/dpo")
    models = torch.nn.ModuleList([tuned.model, aligned.model, aligned.ref_model])
    report(losses_of(tuned) + losses_of(aligned), models)


if __name__ == "__main__":
    main()
