"""Low-rank adapters on a frozen base that is sharded with them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf.families import make, write
from ranks import on_ranks
from shardwise import CheckpointError, FSDPModule, ShardingError, fully_shard, hf
from shardwise.comm.count import CommCounter
from shardwise.planner.storages import Storages

LAYOUTS = ("interleaved", "contiguous")


class Adapted(nn.Module):
    """A linear layer with an adapter, as PEFT has it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))

    def merge(self) -> None:
        self.base_layer.weight += self.up.weight @ self.down.weight


class Copied(nn.Module):
    """A copy in the place of a module, as PEFT trains whole modules."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.copy = copy.deepcopy(module).requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.copy(x)

    def unload_and_optionally_merge_module(self, **how: Any) -> nn.Module:
        assert how == {"merge": True, "safe_merge": False, "adapter_names": None}
        return self.copy


class Rows(nn.Module):
    """Some rows of a weight that are trained, as PEFT trains tokens."""

    def __init__(self, base: nn.Module, rows: nn.Parameter) -> None:
        super().__init__()
        self.base_layer, self.rows, self.token_indices = base, rows, [1, 3]

    def merge(self) -> None:
        weight: Any = self.base_layer.weight
        weight.data = weight.data.index_copy(0, torch.tensor(self.token_indices), self.rows)


class Prompted(nn.Module):
    """A model with more than it has, around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.prompt = model, nn.Embedding(3, 16)

    def get_base_model(self) -> nn.Module:
        return self.model


class Banked(nn.Module):
    """A linear layer whose adapter is made of vectors that all layers share, as in PEFT's VB-LoRA."""

    def __init__(self, base: nn.Linear, bank: nn.ParameterDict) -> None:
        super().__init__()
        self.base_layer, self.bank = base, bank
        self.mix = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ (self.mix @ self.bank["default"]).T

    def merge(self) -> None:
        self.base_layer.weight += self.mix @ self.bank["default"]


class Unmergeable(Adapted):
    def merge(self) -> None:
        self.base_layer.weight += 1
        raise NotImplementedError("no merge")


Copied.__module__ = "peft.stand_in"


def adapted(model: Any) -> Any:
    model.requires_grad_(False)
    for one in [one for one in model.modules() if hasattr(one, "q_proj")]:
        one.q_proj = Adapted(one.q_proj)
    return model


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_base_in_one_group_with_adapters_takes_no_memory_for_gradients(layout: Any) -> None:
    blocks = nn.Sequential(*(Adapted(nn.Linear(256, 256, bias=False)) for _ in range(3)))
    for block in blocks:
        fully_shard(block, layout=layout)
    fully_shard(blocks, layout=layout)
    base, adapter = 4 * 256 * 256, 4 * 2 * 2 * 256
    with Storages() as storages, CommCounter() as counter, storages.peak("step"):
        blocks(torch.ones(1, 256)).sum().backward()
    assert counter.bytes("reduce_scatter") == 3 * adapter
    assert all((param.grad is not None) == param.requires_grad for param in blocks.parameters())
    # Two blocks are gathered at a time; gradients of one are staged, those of all kept; then activations.
    shards = 3 * (base + adapter) // 2
    assert storages.peaks["step"] <= shards + 2 * (base + adapter) + 5 * adapter
    assert 5 * adapter < base / 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write("llama", tmp_path / "base")


@on_ranks(2)
def test_adapters_are_trained_merged_and_saved_as_a_plain_checkpoint(folder: Path) -> None:
    for layout in LAYOUTS:
        torch.manual_seed(0)
        model = hf.load(folder, layout=layout, adapt=adapted)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        ids = torch.arange(8)[None]
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = {name: param.full_tensor() for name, param in model.named_parameters()}
        expected = adapted(make("llama"))
        expected.load_state_dict(whole)
        for one in expected.modules():
            if isinstance(one, Adapted):
                with torch.no_grad():
                    one.merge()
        saved = hf.save(hf.merge(model), folder / layout)
        read = type(expected).from_pretrained(saved)
        assert torch.equal(read(input_ids=ids).logits, model(input_ids=ids).logits)
        for name, weight in expected.state_dict().items():
            if "up" not in name.split(".") and "down" not in name.split("."):
                assert torch.equal(weight, read.state_dict()[name.replace(".base_layer", "")]), name


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_are_merged_into_shards_where_an_evaluation_left_whole_weights(
    folder: Path, layout: Any
) -> None:
    def adapt(model: Any) -> Any:
        model.lm_head = Adapted(model.lm_head)
        return adapted(model)

    ids = torch.arange(8)[None]
    for reshard in (None, False):
        torch.manual_seed(0)
        model = hf.load(folder, layout=layout, adapt=adapt, reshard_after_forward=reshard)
        with torch.no_grad():
            before = model(input_ids=ids).logits
        saved = hf.save(hf.merge(model), folder / str(reshard))
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, before)
            torch.testing.assert_close(make("llama").from_pretrained(saved)(input_ids=ids).logits, before)


def with_bank(model: Any, *, beside: bool) -> Any:
    """Let all blocks share a bank, which the model has too or only they have."""
    model.requires_grad_(False)
    layers = [one for one in model.modules() if hasattr(one, "q_proj")]
    bank = nn.ParameterDict({"default": torch.randn(2, layers[0].q_proj.in_features)})
    if beside:
        model.bank = bank
    for one in layers:
        one.q_proj = Banked(one.q_proj, bank)
    return model


@on_ranks(2)
@pytest.mark.parametrize(("layout", "reshard"), [("interleaved", None), ("contiguous", True)])
def test_vectors_that_blocks_share_are_the_models(folder: Path, layout: Any, reshard: Any) -> None:
    ids = torch.arange(8)[None]
    for beside in (True, False):
        torch.manual_seed(0)
        model = hf.load(
            folder,
            layout=layout,
            adapt=lambda whole, beside=beside: with_bank(whole, beside=beside),
            reshard_after_forward=reshard,
        )
        blocks = [one for one in model.modules() if "DecoderLayer" in type(one).__name__]
        assert [isinstance(one, FSDPModule) for one in blocks] == [beside] * len(blocks)
        expected = with_bank(make("llama"), beside=beside)
        expected.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
        for one in (model, expected):
            optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=1.0)
            for _ in range(2):
                one(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, param in expected.named_parameters():
            torch.testing.assert_close(model.state_dict()[name].full_tensor(), param.detach())
        logits = expected(input_ids=ids).logits
        merged = hf.merge(model)
        torch.testing.assert_close(model(input_ids=ids).logits, logits)
        assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear


@on_ranks(2)
def test_copies_take_the_place_of_modules_and_rows_that_of_rows_in_every_tied_weight(tmp_path: Path) -> None:
    def with_copy(model: Any) -> Any:
        model.lm_head = Copied(model.lm_head)
        return model

    def with_rows(model: Any) -> Any:
        rows = nn.Parameter(torch.ones(2, 12))
        model.transformer.wte, model.lm_head = Rows(model.transformer.wte, rows), Rows(model.lm_head, rows)
        return model

    base = make("gpt2")
    base.save_pretrained(tmp_path / "base")
    for layout in LAYOUTS:
        model = hf.load(tmp_path / "base", layout=layout, adapt=with_copy)
        with torch.no_grad():
            model.lm_head.copy.weight.add_(1)
        merged = hf.merge(model)
        assert type(merged.lm_head) is nn.Linear
        assert not merged.config.tie_word_embeddings
        read = type(base).from_pretrained(hf.save(merged, tmp_path / f"copy-{layout}"))
        assert torch.equal(read.lm_head.weight, base.lm_head.weight + 1)
        assert torch.equal(read.transformer.wte.weight, base.lm_head.weight)

        merged = hf.merge(hf.load(tmp_path / "base", layout=layout, adapt=with_rows))
        assert merged.config.tie_word_embeddings
        read = type(base).from_pretrained(hf.save(merged, tmp_path / f"rows-{layout}"))
        assert torch.equal(read.lm_head.weight[[1, 3]], torch.ones(2, 12))
        assert torch.equal(read.transformer.wte.weight[4:], base.lm_head.weight[4:])


@on_ranks(2)
def test_adapters_that_cannot_be_merged_and_models_that_are_not_are_refused_by_name(folder: Path) -> None:
    model = hf.load(folder, adapt=lambda model: Prompted(adapted(model)))
    with pytest.raises(ShardingError, match=r"found prompt\.weight outside of the model"):
        hf.merge(model)
    with pytest.raises(CheckpointError, match=r"found model\.layers\.0\.self_attn\.q_proj, .*hf\.merge"):
        hf.save(model.get_base_model(), folder / "unmerged")
    make("gpt2").save_pretrained(folder / "tied")

    def on_the_head(kind: type[nn.Module]) -> Any:
        def adapt(model: Any) -> Any:
            model.lm_head = kind(model.lm_head)
            return model

        return adapt

    with pytest.raises(ShardingError, match="found lm_head with a weight tied to another module's"):
        hf.merge(hf.load(folder / "tied", adapt=on_the_head(Adapted)))
    model = hf.load(folder, adapt=on_the_head(Unmergeable))
    with pytest.raises(ShardingError, match=r"cannot merge lm_head \(Unmergeable\): no merge"):
        hf.merge(model)
    assert torch.equal(model.lm_head.base_layer.weight.full_tensor(), make("llama").lm_head.weight)
    kind = type("Stray", (nn.Sequential,), {"__module__": "peft.stand_in"})
    with pytest.raises(ShardingError, match=r"found lm_head \(Stray\), which PEFT cannot merge"):
        hf.merge(hf.load(folder, adapt=on_the_head(kind)))
