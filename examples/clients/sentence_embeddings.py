"""sentence-transformers: contrastive training of a BERT under accelerate, embeddings.

Its trainer saves no checkpoints here: it hands DTensors to safetensors, which refuses FSDP2's too.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from accelerate_on_cpu import use_fsdp_plugin_on_cpu
from common import report
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

STEPS = 8
WORDS = 40


def make_bert(folder: str) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    special = {"pad": 0, "unknown": 1, "begin": 2, "end": 3}
    vocabulary = special | {f"w{word}": word + len(special) for word in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="unknown"))
    tokenizer.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="pad", unk_token="unknown")
    made.save_pretrained(folder)


def train(bert: str, folder: str) -> SentenceTransformerTrainer:
    model = SentenceTransformer(modules=[Transformer(bert), Pooling(32)], device="cpu")
    numbers = range(8 * STEPS)
    pairs = {
        "anchor": [f"w{n % WORDS} w{n * 7 % WORDS} w{n * 3 % WORDS}" for n in numbers],
        "positive": [f"w{n * 7 % WORDS} w{n % WORDS}" for n in numbers],
    }
    arguments = SentenceTransformerTrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
    )
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_dict(pairs), loss=MultipleNegativesRankingLoss(model)
    )
    trainer.train()
    return trainer


def losses_of(trainer: SentenceTransformerTrainer) -> list[float]:
    shown = ("loss", "grad_norm")
    return [entry[name] for entry in trainer.state.log_history for name in shown if name in entry]


def main() -> None:
    use_fsdp_plugin_on_cpu()
    folder = tempfile.gettempdir() + f"/clients_{os.environ['MASTER_PORT']}"
    if int(os.environ["RANK"]) == 0:
        make_bert(f"{folder}/bert")
    dist.init_process_group("gloo")
    dist.barrier()
    trainer = train(f"{folder}/bert", folder)
    features = trainer.model.tokenize(["w1 w2", "w3"])
    embeddings = trainer.model(features)["sentence_embedding"]
    report(losses_of(trainer) + embeddings.norm(dim=1).tolist(), trainer.model)


if __name__ == "__main__":
    main()
