"""The host-cost benchmark runs, counts what it says, and keeps the results file in order."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


def test_a_small_run_reports_that_sharding_with_the_peer_costs_calls_and_ops(
    run_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import host_cost
    from llama import SMALL, Llama

    def small_llama() -> tuple[nn.Module, list[nn.Module]]:
        model = Llama(SMALL)
        return model, list(model.blocks)

    monkeypatch.setattr(host_cost, "llama_70b", small_llama)
    monkeypatch.setattr(host_cost, "IMPLEMENTATIONS", ["bare", "torch", "interleaved", "contiguous+flat"])
    for rounds in ("WARM_UP", "STARTUP_ROUNDS"):
        monkeypatch.setattr(host_cost, rounds, 1)
    arguments = ["--vs", "torch", "--world", "4", "--blocks", "1", "--steps", "1", "--modules", "2"]
    figures, results = run_program(host_cost, *arguments)

    phase = figures["worlds"]["4"]["forward+backward"]
    assert phase["torch"]["calls"] > phase["bare"]["calls"] > 0
    assert phase["torch"]["ops"] > phase["bare"]["ops"] > 0
    linear, llama = figures["startup"].values()
    assert llama["torch"]["calls"] > linear["torch"]["calls"] > 0
    assert llama["torch"]["heap_bytes"] > linear["torch"]["heap_bytes"] > 0
    assert "4 ranks, 1 blocks" in results


def test_calls_made_by_python_code_inside_backward_are_counted() -> None:
    from host_cost import count_calls

    class ManyCalls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            for _ in range(500):
                abs(-1)
            return gradient

    x = torch.ones(2, requires_grad=True)
    assert count_calls(lambda: ManyCalls.apply(x).sum().backward()) >= 500
    assert count_calls(lambda: x.clone().sum().backward()) < 500


@pytest.mark.parametrize(
    ("layout", "calls", "heap"), [("interleaved", 370, 8_500), ("contiguous", 323, 9_900)]
)
def test_sharding_a_module_costs_the_same_few_calls_and_bytes_on_any_number_of_ranks(
    layout: str, calls: int, heap: int
) -> None:
    from host_cost import count_calls, heap_bytes
    from subjects import linear_layers, startup

    from shardwise.planner.noop_group import noop_world

    spent = []
    for world in (8, 4096):
        with noop_world(world) as mesh:
            startup(
                layout, mesh, lambda: linear_layers(2)
            )()  # what is imported, and found once for all alike
            few, many = (startup(layout, mesh, lambda n=n: linear_layers(n)) for n in (10, 60))
            spent.append((count_calls(many) - count_calls(few)) / 50)
            assert heap_bytes(startup(layout, mesh, lambda: linear_layers(300))) / 300 <= heap
    assert max(spent) <= calls + (torch.torch_version.TorchVersion(torch.__version__) < "2.13")
    assert abs(spent[0] - spent[1]) < 1  # what the collector ends meanwhile is counted, too


@pytest.mark.parametrize(
    ("layout", "most", "most_of_clipping"), [("interleaved", 155, 24), ("contiguous", 72, 9)]
)
def test_a_block_of_12_parameters_makes_so_many_calls_more(
    layout: str, most: int, most_of_clipping: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from host_cost import count_calls
    from subjects import build

    from shardwise import _compat
    from shardwise.fsdp.fast import process
    from shardwise.planner.noop_group import noop_world
    from shardwise.sharded_tensor.rows import ShardedRows

    monkeypatch.setattr(process, "compiler", False)  # earlier tests may have compiled,
    monkeypatch.setattr(_compat, "compiler_in_use", lambda: False)
    monkeypatch.setattr(ShardedRows, "any_hooked", False)  # or hooked parameters

    made = {}
    with noop_world(8) as mesh:
        for name in ("bare", layout):
            spent = []
            for blocks in (3, 5):
                subject = build(name, mesh, blocks=blocks)
                for _ in range(2):
                    subject.forward_backward()
                    subject.clip_by_library()
                    subject.step_fused()
                    subject.zero_grad()
                gc.collect()  # what it ends in the middle would be counted
                spent.append([count_calls(subject.forward_backward), count_calls(subject.clip_by_library)])
            made[name] = [(many - few) / 2 for few, many in zip(*spent, strict=True)]
    more = [ours - bare for ours, bare in zip(made[layout], made["bare"], strict=True)]
    assert more[0] <= most
    assert more[1] <= most_of_clipping


def test_a_section_is_replaced_where_it_stands_and_the_others_are_kept(tmp_path: Path) -> None:
    from results import write_section

    path = tmp_path / "RESULTS.md"
    write_section("first", "old", path=path)
    write_section("second", "kept", path=path)
    write_section("first", "new", path=path)

    text = path.read_text()
    assert "old" not in text
    assert text.index("new") < text.index("kept")


def test_the_heap_is_what_work_leaves_behind_and_not_what_it_freed() -> None:
    from host_cost import heap_bytes

    kept, freed = 1_000_000, 8_000_000

    def work() -> bytearray:
        bytearray(freed)
        return bytearray(kept)

    assert kept <= heap_bytes(work) < kept + 50_000
