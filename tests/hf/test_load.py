"""Models loaded from files straight into shards."""

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from benchmarks.storages import AllocatedBesideFiles
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf.families import assert_equal, make, write
from ranks import on_ranks
from shardwise import CheckpointError, RankMismatchError, hf
from shardwise.files.tensors import StoredTensor
from shardwise.sharded_tensor.kinds import held_by_this_rank

LAYOUTS = ("interleaved", "contiguous")


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    return write(family, tmp_path)


@on_ranks(2)
@pytest.mark.parametrize("family", ["mixtral"])
def test_a_rank_reads_of_the_files_what_it_holds_and_keeps_their_dtype_or_the_one_asked_for(
    family: str, folder: Path
) -> None:
    read = 0

    def counted(self: StoredTensor, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        nonlocal read
        found = reading(self, begins, ends)
        read += found.numel()
        return found

    reading = StoredTensor.read
    for layout in LAYOUTS:
        read = 0
        with mock.patch.object(StoredTensor, "read", counted):
            model = hf.load(folder, layout=layout, dtype=torch.bfloat16)
        params: list[Any] = list(model.parameters())
        assert read == sum(part.numel() for p in params for _, part in held_by_this_rank(p))
        assert_equal(model, type(make(family)).from_pretrained(folder, dtype=torch.bfloat16))
        memory = hf.host_memory(model)
        assert memory.tensor == 0
        assert memory.peak < 0.7 * memory.whole  # of three experts one rank holds two


@on_ranks(2)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_config_gives_the_values_that_one_process_draws_from_the_seed(family: str) -> None:
    model = make(family)
    for layout in LAYOUTS:
        torch.manual_seed(3)
        expected = type(model).from_pretrained(None, config=model.config, state_dict={})
        torch.manual_seed(3)
        assert_equal(hf.load(model.config, model_class=type(model), layout=layout), expected)
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(RankMismatchError, match="the seed to initialise from"):
        hf.load(model.config, model_class=type(model))


@pytest.fixture
def wrong_folders(tmp_path: Path) -> Path:
    """Beside each other: weights of which one is missing, that do not fit, and that lie elsewhere."""
    write("llama", tmp_path / "less")
    file = "model.safetensors"
    weights = load_file(tmp_path / "less" / file)
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "less" / file, metadata={"format": "pt"})
    for name in ("wrong", "outside", "nothing"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "less" / "config.json", tmp_path / name)
    weights |= {"more": torch.ones(2), "model.norm.weight": torch.ones(3)}
    save_file(weights, tmp_path / "wrong" / file, metadata={"format": "pt"})
    index = {"weight_map": {"lm_head.weight": f"../less/{file}"}}
    (tmp_path / "outside" / f"{file}.index.json").write_text(json.dumps(index))
    return tmp_path


@on_ranks(2)
def test_ranks_that_load_otherwise_or_fail_alone_raise_on_every_rank(wrong_folders: Path) -> None:
    mine = torch.distributed.get_rank() == 1
    config = transformers.AutoConfig.from_pretrained(wrong_folders / "less")
    for other in (wrong_folders / "wrong", config):
        with pytest.raises(RankMismatchError, match="what to load"):
            hf.load(other if mine else wrong_folders / "less", strict=False)

    def adapt(model: Any) -> Any:
        if mine:
            raise ValueError("no adapter")
        return model

    with pytest.raises(CheckpointError, match="rank 1: ValueError: no adapter"):
        hf.load(wrong_folders / "less", strict=False, adapt=adapt)
    with pytest.raises(CheckpointError, match="weights have no values before the model is cut"):
        hf.load(
            config, adapt=lambda model: torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        )


@on_ranks(1)
def test_a_config_without_an_architecture_needs_a_model_class() -> None:
    with pytest.raises(CheckpointError, match="the config names no architecture; name a class of"):
        hf.load(transformers.GPT2Config())


@on_ranks(2)
def test_parameters_made_without_a_device_are_drawn_too() -> None:
    class Shifted(transformers.XLNetModel):
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if isinstance(module, nn.Linear):
                module.weight.data.add_(torch.ones(()), alpha=3)

    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16)
    torch.manual_seed(0)
    alone = Shifted.from_pretrained(None, config=config, state_dict={})
    torch.manual_seed(0)
    model = hf.load(config, model_class=Shifted)
    for (name, param), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected), name


@on_ranks(2)
def test_weights_that_do_not_fit_are_named_on_every_rank(wrong_folders: Path) -> None:
    folder = wrong_folders
    with pytest.raises(CheckpointError) as caught:
        hf.load(folder / "wrong")
    assert all(name in str(caught.value) for name in ("missing: lm_head", "unexpected: more", "found (3,)"))
    assert "strict=False" not in str(caught.value)  # which does not help where shapes differ
    with pytest.raises(CheckpointError, match=r"strict=False\), which initialises what is missing"):
        hf.load(folder / "less")
    with pytest.raises(
        CheckpointError,
        match=r"model\.norm\.weight: expected shape \(16,\), found \(3,\)\n.*config and class$",
    ):
        hf.load(folder / "wrong", strict=False)  # as transformers does
    with pytest.raises(CheckpointError, match="outside the folder"):
        hf.load(folder / "outside")
    with pytest.raises(CheckpointError, match=r"expected a folder with model\.safetensors"):
        hf.load(folder / "nothing")
    torch.manual_seed(0)
    model = hf.load(folder / "less", strict=False)
    torch.manual_seed(0)
    assert_equal(model, transformers.LlamaForCausalLM.from_pretrained(folder / "less"))


@on_ranks(2)
@pytest.mark.parametrize("family", ["mixtral"])
def test_loading_takes_the_memory_that_it_says(family: str, folder: Path) -> None:
    for layout in LAYOUTS:
        for source in (folder, transformers.AutoConfig.from_pretrained(folder)):
            with AllocatedBesideFiles() as allocated, allocated.peak("load"):
                model = hf.load(source, layout=layout)
            memory = hf.host_memory(model)
            assert memory.shards + memory.buffers <= allocated.peaks["load"]
            assert allocated.peaks["load"] <= memory.peak + 2048  # of what ranks tell each other
            assert memory.peak < memory.whole
            del model


@on_ranks(2)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_modules_are_moved_and_copied_before_they_have_values(family: str, folder: Path) -> None:
    class Around(nn.Module):
        """A module within another, and its copy, which has another dtype."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.copy = copy.deepcopy(inner).double()

        @property
        def weight(self) -> Tensor:
            return self.inner.weight

    def adapt(model: Any) -> Any:
        model.lm_head = Around(model.lm_head)
        return model

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = type(make(family))
    for source, drawn in ((folder, {}), (config, {"config": config, "state_dict": {}})):
        torch.manual_seed(5)
        expected = kind.from_pretrained(None if drawn else folder, **drawn)
        for layout in LAYOUTS:
            torch.manual_seed(5)
            model = hf.load(source, model_class=kind, layout=layout, adapt=adapt)
            copied = model.lm_head.copy.weight
            assert torch.equal(copied.full_tensor(), expected.lm_head.weight.double())
            model.lm_head = model.lm_head.inner
            assert_equal(model, expected)
