"""Sharded models saved as folders that transformers reads."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers.core_model_loading import Interleave, WeightConverter

from hf.families import assert_equal, make, write
from ranks import on_ranks
from shardwise import CheckpointError, RankMismatchError, ShardingError, hf

LAYOUTS = ("interleaved", "contiguous")


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    return write(family, tmp_path / "theirs")


def stored(folder: Path) -> dict[str, torch.Size]:
    """Names and shapes of a folder's tensors."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name).shape for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "t5", "bert"])
@on_ranks(3)
def test_a_folder_is_loaded_as_transformers_loads_it_and_saved_as_it_was(family: str, folder: Path) -> None:
    expected = type(make(family)).from_pretrained(folder)
    ids = torch.arange(8)[None]
    tokens = {"input_ids": ids, "decoder_input_ids": ids} if family == "t5" else {"input_ids": ids}
    for layout in LAYOUTS:
        model = hf.load(folder, layout=layout)
        assert_equal(model, expected)
        with torch.no_grad():
            assert torch.equal(model(**tokens).logits, expected(**tokens).logits)
        saved = hf.save(model, folder / layout, max_shard_size=12_000)
        assert (saved / "model.safetensors.index.json").is_file()
        assert stored(saved) == stored(folder)
        assert_equal(type(expected).from_pretrained(saved), expected)
    assert_equal(hf.load(saved), expected)


@on_ranks(2)
def test_a_model_of_a_config_is_saved_in_the_form_of_its_family(tmp_path: Path) -> None:
    config = make("mixtral").config
    model = hf.load(config, model_class=type(make("mixtral")), layout="contiguous")
    saved = hf.save(model, tmp_path / "new")
    assert "model.layers.1.block_sparse_moe.experts.2.w1.weight" in stored(saved)
    assert_equal(model, type(make("mixtral")).from_pretrained(saved))
    assert not (saved / "model.safetensors.index.json").exists()
    with pytest.raises(CheckpointError, match="is not empty"):
        hf.save(model, saved)
    with pytest.raises(RankMismatchError, match="what to save"):
        hf.save(model, tmp_path / str(torch.distributed.get_rank()))
    with pytest.raises(ShardingError, match=r"hf\.load has not made"):
        hf.host_memory(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="5 apples"):
        hf.save(model, tmp_path / "other", max_shard_size="5 apples")
    for wrong in ({"path_or_config": None}, {"path_or_config": config, "model_class": "MixtralForCausalLM"}):
        with pytest.raises(CheckpointError, match=r"expected a (folder|class)"):
            hf.load(**wrong)
    with pytest.raises(CheckpointError, match="File name too long"):
        hf.save(model, tmp_path / ("long" * 63), max_shard_size=1000)
    torch.distributed.barrier()
    assert [file.name for file in tmp_path.iterdir()] == ["new"]


@on_ranks(2)
def test_what_blocks_share_is_saved_under_each_of_its_names(tmp_path: Path) -> None:
    def sharing(whole: torch.nn.Module) -> torch.nn.Module:
        whole.model.layers[1].mlp = whole.model.layers[0].mlp
        return whole

    kind, config = type(make("llama")), make("llama").config
    for layout in LAYOUTS:
        model = hf.load(config, model_class=kind, adapt=sharing, layout=layout)
        read = kind.from_pretrained(hf.save(model, tmp_path / layout)).state_dict()
        ours = model.state_dict()
        assert ours.keys() == read.keys()
        assert all(torch.equal(one.full_tensor(), read[name]) for name, one in ours.items())


@on_ranks(2)
@pytest.mark.parametrize("family", ["llama"])
def test_what_a_conversion_computes_is_gathered_and_written_by_all(family: str, folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    for layout in LAYOUTS:
        model = hf.load(folder, layout=layout)
        model._weight_conversions = [WeightConverter("q_proj.weight", "q_proj.weight", [Interleave(dim=0)])]
        with safe_open(hf.save(model, folder / layout) / "model.safetensors", "pt") as opened:
            found = opened.get_tensor(name)
        expected = model.get_parameter(name).full_tensor()
        assert torch.equal(found, expected.view(2, 8, 16).transpose(0, 1).reshape(16, 16))
