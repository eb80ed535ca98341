"""Published shapes have as many parameters as their models' cards say."""

from pathlib import Path

import pytest
import torch

from shardwise.errors import ShardingError
from shardwise.planner.models import model_of
from shardwise.planner.setup import Setup
from shardwise.planner.shapes import PUBLISHED, check_cut, check_source, config_of, undivided
from shardwise.planner.tensor import sizes_of

PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_its_models_parameters(name: str) -> None:
    model = model_of(name, sequence=1024)  # GPT-2's positions, which are learned
    with torch.device("meta"):
        few, more = (sum(p.numel() for p in model.build(layers).parameters()) for layers in (1, 2))
    assert few + (model.layers - 1) * (more - few) == PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_is_refused_over_as_many_ranks_as_its_module_is(name: str) -> None:
    model = model_of(name, sequence=8)
    with torch.device("meta"):
        sizes = sizes_of(model.build(1))

    def is_refused(degree: int) -> bool:
        try:
            check_cut(name, Setup(ranks=degree, tensor=degree))
        except ShardingError:
            return True
        return False

    assert all(is_refused(degree) == bool(undivided(sizes, degree)) for degree in range(1, 65))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("none.such:factory", "'none.such:factory' cannot be imported: no module named 'none'"),
        ("os:nope", "'os:nope' cannot be imported: module 'os' has no attribute 'nope'"),
        ("os:nope.path", "'os:nope.path' cannot be imported: module 'os' has no attribute 'nope'"),
        ("os:path.", "unknown model 'os:path.': give one of llama3-8b, .*, megatron-1008b, a transformers"),
        ("lama3-8b", "unknown model 'lama3-8b': give llama3-8b, .* or another published one, a transformers"),
    ],
)
def test_a_factory_that_is_not_there_is_named_before_anything_is_imported(source: str, told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        check_source(source)
    for found in ("os.path:join", "os:path.join", "__main__.other:factory"):
        check_source(found)


def test_a_config_is_a_file_or_in_a_folder_and_may_be_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config_of("~/config.json") == config
    assert config_of(str(tmp_path)) is None
    config.write_text('{"model_type": "gpt2"}')
    assert config_of(str(tmp_path)) == config_of("~") == config
    check_source("~")
    assert config_of("os:path.join") is None


def test_a_path_without_a_config_is_not_called_an_unknown_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for path, told in (
        ("none", "does not exist"),
        ("config.yaml", "is no .json file"),
        (".", "has no config.json"),
    ):
        with pytest.raises(ShardingError, match=f"^{tmp_path / path} {told}: give a published"):
            check_source(str(tmp_path / path))
