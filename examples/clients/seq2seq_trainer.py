"""Hugging Face Seq2SeqTrainer: T5, accumulation, clipping, resume, evaluation by `generate`."""

import os
import tempfile
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from accelerate_on_cpu import use_fsdp_plugin_on_cpu
from common import batches, report
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

STEPS = 8
LENGTH = 8


def rows(count: int) -> list[dict[str, Any]]:
    found = [row for batch in batches(0, (count + 1) // 2, rank=0) for row in batch["input_ids"]]
    return [{"input_ids": row[:6], "labels": row[6:]} for row in found[:count]]


def tiny_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=98,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config)
    model.encoder.embed_tokens = deepcopy(
        model.shared
    )  # accelerate shards the embedding separately from its ties
    model.decoder.embed_tokens = deepcopy(model.shared)
    return model


def train(folder: str, *, resume: str | None = None) -> tuple[Seq2SeqTrainer, list[float]]:
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=STEPS // 2,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        predict_with_generate=True,
        generation_max_length=LENGTH,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["T5Block"]},
    )
    trainer = Seq2SeqTrainer(
        tiny_t5(),
        arguments,
        train_dataset=rows(8 * STEPS),
        eval_dataset=rows(6),
        compute_metrics=lambda found: {"tokens": float(np.sum(found.predictions))},
    )
    trainer.train(resume_from_checkpoint=resume)
    shown = ("loss", "grad_norm", "eval_loss", "eval_tokens")
    return trainer, [entry[name] for entry in trainer.state.log_history for name in shown if name in entry]


def main() -> None:
    use_fsdp_plugin_on_cpu()
    folder = tempfile.gettempdir() + f"/clients_{os.environ['MASTER_PORT']}"
    trainer, losses = train(folder)
    _, resumed = train(folder, resume=f"{folder}/checkpoint-{STEPS // 2}")
    assert resumed == losses, "the resumed run went another way"
    trainer.save_model(f"{folder}/final")
    written = trainer.predict(rows(6)).predictions
    loaded = T5ForConditionalGeneration.from_pretrained(f"{folder}/final")
    prompts = torch.stack([row["input_ids"] for row in rows(6)])
    again = loaded.generate(prompts, max_length=LENGTH).numpy()
    assert np.array_equal(again, written[: len(prompts), :LENGTH])  # ranks got equal numbers of batches
    report(losses, trainer.model)


if __name__ == "__main__":
    main()
