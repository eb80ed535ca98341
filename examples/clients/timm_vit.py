"""timm: a vision transformer with stochastic depth under accelerate's FSDP2 plugin: clipping, resume."""

# ruff: noqa: E402 - most imports need torchvision
from torchvision_on_cpu import declare_operators

declare_operators()

import tempfile
from collections.abc import Iterator

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import broadcast_object_list, set_seed
from accelerate_on_cpu import use_fsdp_plugin_on_cpu
from common import check_resuming, report
from timm import create_model
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from torch import Tensor


def images(first: int, last: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield noise images with one of ten places bright; the place is the class."""
    for number in range(first, last):
        generator = torch.Generator().manual_seed(1000 * rank + number)
        labels = torch.randint(10, (4,), generator=generator)
        pixels = torch.randn(4, 3, 32, 32, generator=generator)
        for image, label in zip(pixels, labels.tolist(), strict=True):
            image[:, 3 * label : 3 * label + 3] += 2
        yield pixels, labels


def main() -> None:
    use_fsdp_plugin_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    set_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10}
    model = create_model("vit_tiny_patch16_224", drop_path_rate=0.1, **sizes)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_of = LabelSmoothingCrossEntropy()

    def train(first: int, last: int) -> list[float]:
        figures = []
        for pixels, labels in images(first, last, rank=accelerator.process_index):
            loss = loss_of(model(pixels), labels)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            figures += [loss.item(), float(norm)]
        return figures

    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    figures = check_resuming(
        model, train, lambda: accelerator.save_state(folder), lambda: accelerator.load_state(folder)
    )
    report(figures, model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
