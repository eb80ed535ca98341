"""PEFT LoRA on a frozen base: adapters train, merge and are saved."""

import torch
import torch.distributed as dist
from common import batches, report, tiny_llama
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

STEPS = 12


def main() -> None:
    dist.init_process_group("gloo")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), lora)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in batches(0, STEPS, rank=dist.get_rank()):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    adapter = get_peft_model_state_dict(model, state_dict=whole) if dist.get_rank() == 0 else {}

    # The adapters, merged into an unsharded base, compute what the sharded model does.
    batch = next(batches(99, 100, rank=0))
    with torch.no_grad():
        expected = model(**batch).logits
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        merged = get_peft_model(tiny_llama(), lora)
        merged.load_state_dict(whole)
        assert adapter
        assert set(adapter) <= {name.replace(".default", "") for name in whole}
        logits = merged.merge_and_unload()(**batch).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    report(losses, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
