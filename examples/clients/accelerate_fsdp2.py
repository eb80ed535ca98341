"""accelerate's FSDP2 plugin: efficient loading, accumulation, clipping, resume, `generate`, saved whole."""

import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import broadcast_object_list
from accelerate_on_cpu import use_fsdp_plugin_on_cpu
from common import batches, check_resuming, report, tiny_llama
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import LlamaForCausalLM


def main() -> None:
    use_fsdp_plugin_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
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
    losses = check_resuming(
        model, train, lambda: accelerator.save_state(folder), lambda: accelerator.load_state(folder)
    )

    register_fsdp_forward_method(model, "generate")
    model.eval()
    prompt = next(batches(99, 100, rank=0))["input_ids"][:, :4]
    written = model.generate(prompt, max_new_tokens=8, do_sample=False)
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(f"{folder}/saved", state_dict=whole)
        loaded = LlamaForCausalLM.from_pretrained(f"{folder}/saved")
        assert torch.equal(loaded.generate(prompt, max_new_tokens=8, do_sample=False), written)
    report([*losses, *map(float, written.flatten())], model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
