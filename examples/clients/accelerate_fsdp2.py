"""accelerate's FSDP2 plugin: efficient loading, accumulation, clipping, save and load."""

import sys
import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import broadcast_object_list
from common import batches, check_resuming, tiny_llama


def main(precision: str) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, fsdp_plugin=plugin, gradient_accumulation_steps=2
    )
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(first: int, last: int) -> list[float]:
        losses = []
        for batch in batches(first, last, rank=accelerator.process_index):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    check_resuming(train, lambda: accelerator.save_state(folder), lambda: accelerator.load_state(folder))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["no"])
