"""Code that asks torch for FSDP2, with shardwise in its place."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import shardwise
from ranks import on_ranks
from shardwise.adapters.pipelining import backward_of_stages

TORCHS = torch.distributed.fsdp.fully_shard
V_SHAPED = (pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV)
# Gradients of inputs first, of parameters later; of other schedules one layout each is trained.
RESHARD = {
    "ScheduleInterleavedZeroBubble": (False, None, True),
    "ScheduleZBVZeroBubble": (True,),
    "ScheduleDualPipeV": (True,),
}
LAYOUTS = ("interleaved", "contiguous")


@contextmanager
def installed(**defaults: Any) -> Iterator[None]:
    shardwise.install(**defaults)
    try:
        yield
    finally:
        shardwise.uninstall()


def test_names_are_replaced_where_modules_have_them_and_given_back() -> None:
    client = ModuleType("client")
    client.shard, client.Module = TORCHS, torch.distributed.fsdp.FSDPModule  # type: ignore[attr-defined]
    sys.modules["client"] = client
    sys.modules["no_module"] = object()  # type: ignore[assignment]  # as some packages put there
    torchs, inside = TORCHS, sys.modules["torch.distributed.fsdp._fully_shard"]
    try:
        with installed():
            assert inside.fully_shard is torchs is not TORCHS
            import torch.distributed._composable.fsdp as composable
            from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

            assert FSDPModule is shardwise.FSDPModule is composable.FSDPModule
            assert MixedPrecisionPolicy is shardwise.MixedPrecisionPolicy
            assert client.shard is torch.distributed.fsdp.fully_shard is composable.fully_shard
            assert sys.modules["torch.distributed._composable.fsdp.fully_shard"].fully_shard is client.shard
            assert client.Module is shardwise.FSDPModule
        assert client.shard is TORCHS is torch.distributed.fsdp.fully_shard
        assert client.Module is torch.distributed.fsdp.FSDPModule is not shardwise.FSDPModule
    finally:
        del sys.modules["client"], sys.modules["no_module"]


def test_a_default_that_fully_shard_does_not_take_is_refused() -> None:
    with pytest.raises(shardwise.ShardwiseError, match=r"does not take: \['layuot'\]; it takes"):
        shardwise.install(layuot="contiguous")
    assert torch.distributed.fsdp.fully_shard is TORCHS


@on_ranks(2)
def test_defaults_hold_where_a_call_says_nothing() -> None:
    with installed(layout="contiguous"):
        fully_shard: Any = torch.distributed.fsdp.fully_shard
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], layout="interleaved")
        fully_shard(model)
        assert isinstance(model, torch.distributed.fsdp.FSDPModule)
        assert fully_shard.state(model) is not None
        assert fully_shard.state(nn.Linear(2, 2)) is None
    assert not isinstance(model[0].weight, shardwise.ShardedParameter)
    assert isinstance(model[1].weight, shardwise.ShardedParameter)
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_a_module_that_the_contiguous_layout_refuses_gets_the_other_and_trains_with_the_rest() -> None:
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    with installed(layout="contiguous", strategy="zero2"):
        fully_shard: Any = torch.distributed.fsdp.fully_shard
        fully_shard(model[1], shard_placement_fn=lambda param: Shard(1))
        fully_shard(model)
        with pytest.raises(shardwise.ShardingError, match="-3 does not divide"):
            fully_shard(nn.Linear(4, 4), reshard_after_forward=-3)
    assert model[1].weight.placements == (Shard(1),)
    assert isinstance(model[0].weight, shardwise.ShardedParameter)
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), foreach=True)
        each(torch.ones(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)  # type: ignore[attr-defined]


class Block(nn.Linear):
    """A matrix for Muon."""


def trained_by_muon() -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(Block(4, 4, bias=False), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizers = [torch.optim.Muon([model[0].weight]), torch.optim.AdamW(model[1].parameters())]
    for _ in range(2):
        model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]


@on_ranks(2)
def test_an_optimizer_of_matrices_refuses_rows_when_it_is_made_and_takes_modules_left_interleaved() -> None:
    theirs, add = trained_by_muon(), torch.optim.Optimizer.add_param_group
    told = "Muon needs whole matrices.*--interleave CLASS"
    with installed(layout="contiguous"), pytest.raises(shardwise.ShardingError, match=told) as caught:
        trained_by_muon()
    assert [frame.name for frame in caught.traceback][1:3] == ["trained_by_muon", "__init__"]  # no step
    with installed(layout="contiguous", strategy="zero2", interleave=["Block"]):
        ours = trained_by_muon()
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert torch.optim.Optimizer.add_param_group is add


@on_ranks(4)
def test_objects_made_of_torchs_classes_are_understood() -> None:
    """Policies made before, and what code for experts returns from `shard_placement_fn`."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    infos = {
        "expert": _fsdp_common.FSDPMeshInfo(mesh["inner"], 0),
        "rest": _fsdp_common.FSDPMeshInfo(mesh["outer"], 0),
    }
    policies = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16), "offload_policy": CPUOffloadPolicy(False)}
    model = nn.Sequential(OrderedDict(expert=nn.Linear(4, 4), rest=nn.Linear(4, 4)))
    where = {param: infos[name.split(".")[0]] for name, param in model.named_parameters()}
    with installed():
        torch.distributed.fsdp.fully_shard(
            model,
            mesh=mesh["outer"],
            shard_placement_fn=lambda param: _fsdp_common.ShardPlacementResult(Shard(0), where[param]),
            **policies,
        )
    assert model.expert.weight.device_mesh == mesh["inner"]
    assert model.rest.weight.device_mesh == mesh["outer"]
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16


@on_ranks(4)
def test_under_every_pipeline_schedule_parameters_are_equal_to_fsdp2s() -> None:
    kinds = [kind for name, kind in vars(pipelining).items() if name.startswith("Schedule")]
    assert len(kinds) >= 7
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))
    for number, kind in enumerate(kinds):
        theirs, reshards = pipelined(kind, mesh), RESHARD.get(kind.__name__)
        for layout in LAYOUTS if reshards else [LAYOUTS[number % 2]]:
            with installed(layout=layout):
                for reshard in reshards or (False,):
                    ours = pipelined(kind, mesh, reshard)
                    assert all(map(torch.equal, theirs, ours)), (kind, layout, reshard)


@on_ranks(1)
def test_a_stage_is_sharded_itself_where_the_schedule_halves_backward() -> None:
    stage = SimpleNamespace(submod=nn.Sequential(shardwise.fully_shard(nn.Linear(2, 2))))
    backward = backward_of_stages(lambda stage, kind: kind)
    assert backward(stage, "full") == "full"
    with pytest.raises(
        shardwise.ShardingError, match="whose '0' is sharded but whose Sequential itself is not"
    ):
        backward(stage, "input")


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_forward_between_the_halves_of_a_backward_loses_no_gradient(layout: str) -> None:
    """That forward reshards what the first half gathered."""
    torch.manual_seed(0)
    module, reference = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    with installed(layout=layout):
        fully_shard: Any = torch.distributed.fsdp.fully_shard
        for part in (module[0], module):
            fully_shard(part, reshard_after_forward=True)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "stages"))
        group = mesh["data"].get_group()
        stage: Any = pipelining.PipelineStage(module, 0, 1, torch.device("cpu"), group=group)
        stage.has_backward = True

        def forward(batch: torch.Tensor) -> dict[str, Any]:
            if hasattr(stage, "start_gradient_reduction"):  # as stages of torch 2.15 begin a forward
                stage.submod.set_manual_backward_finalization(True)
            return {"stage_output": [module(batch)], "output_grads": None, "input_values": [batch]}

        def half(kind: str, of: dict[str, Any]) -> None:
            of["param_groups"] = stage.backward_maybe_with_nosync(kind, of)[1]

        batches = torch.randn(2, 4, 8).unbind()
        first = forward(batches[0].requires_grad_())
        half("input", first)
        second = forward(batches[1].requires_grad_())
        for kind, of in (("weight", first), ("input", second), ("weight", second)):
            half(kind, of)
        stage.perform_reduce_grad(1)
    for batch in batches:
        reference(batch.detach()).sum().backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[attr-defined]


def pipelined(kind: Any, mesh: DeviceMesh, reshard: bool | None = False) -> list[torch.Tensor]:
    """The parameters of this rank's stages after two steps of a schedule over as many stages as it takes."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    rank, data = mesh["stages"].get_local_rank(), mesh["data"].get_local_rank()
    single = issubclass(kind, PipelineScheduleSingle)
    places = [0, 1] if single else [0, 1, 1, 0] if kind in V_SHAPED else [0, 1, 0, 1]
    mine = [stage for stage, place in enumerate(places) if place == rank]
    torch.manual_seed(0)
    whole = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in places]
    group, stages = mesh["stages"].get_group(), []
    for stage in mine:
        module = whole[stage]
        for part in (module[0], module):
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=reshard)
        assert isinstance(module, FSDPModule)
        stages.append(pipelining.PipelineStage(module, stage, len(places), torch.device("cpu"), group=group))
    schedule = kind(stages[0] if single else stages, 4, loss_fn=nn.functional.mse_loss)
    params = [param for stage in mine for param in whole[stage].parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(2):
        batch = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(10 * step + data))
        inputs = (batch[0],) if 0 in mine else ()
        schedule.step(*inputs, **({"target": batch[1]} if len(places) - 1 in mine else {}))
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() for param in params]  # type: ignore[attr-defined]


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`shardwise run` of a script in this process, by its text."""
    from typer.testing import CliRunner

    from shardwise.cli import app

    def run(text: str, *arguments: str, options: Any = (), module: bool = False) -> Any:
        script = tmp_path / "train.py"
        script.write_text(text)
        target = ["-m", script.stem] if module else [str(script)]
        return CliRunner().invoke(app, ["run", "--layout", "contiguous", *options, *target, *arguments])

    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield run
    shardwise.uninstall()


def test_a_script_runs_unchanged(run_script: Any) -> None:
    result = run_script(
        "import sys\nfrom torch.distributed.fsdp import fully_shard\n"
        "print(__name__, sys.argv[1:], fully_shard.__module__, fully_shard.defaults)\n",
        *("--lr", "3", "-x"),
    )
    assert result.exit_code == 0, result.output
    assert "__main__ ['--lr', '3', '-x'] shardwise." in result.output
    assert "{'layout': 'contiguous'}" in result.output


def test_options_before_the_script_are_those_of_the_command(run_script: Any) -> None:
    result = run_script("", options=("--layuot", "contiguous"))
    assert result.exit_code == 2
    assert "No such option: --layuot" in result.stderr


def test_a_module_runs_unchanged(run_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_script("import sys\nprint(__name__, sys.argv, sys.path[0] == '')\n", "-x", module=True)
    assert result.exit_code == 0, result.output
    assert f"__main__ ['{tmp_path / 'train.py'}', '-x'] True" in result.output


SHARDS = """
import sys
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
fully_shard([model[0], model[1]])
fully_shard(model[2], shard_placement_fn=lambda param: Shard(1))  # which has the interleaved layout alone
fully_shard(model)
dist.destroy_process_group()
"""


def test_a_run_ends_with_how_many_modules_were_sharded_in_which_layout(run_script: Any) -> None:
    for ending in ("", "sys.exit()"):
        result = run_script(SHARDS + ending)
        assert result.exit_code == 0, result.output
        assert result.stderr == "shardwise: modules sharded: 3 contiguous, 1 interleaved\n"
    result = run_script(SHARDS, options=("--interleave", "Lineer", "--interleave", "Sequential"))
    warning = "WARNING: --interleave met none of class Lineer, only Linear, Sequential"
    assert result.stderr == f"shardwise: modules sharded: 2 contiguous, 2 interleaved; {warning}\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--layout", "interleaved", "--strategy", "zero2"), "strategy='zero2' needs layout=\"contiguous\""),
        (("--strategy", "hsdp"), "strategy='hsdp' needs a 2-D (replicate, shard) mesh"),
    ],
)
def test_a_run_with_a_strategy_that_layout_or_mesh_has_not_fails(
    run_script: Any, options: tuple[str, ...], told: str
) -> None:
    result = run_script(SHARDS, options=options)
    torch.distributed.destroy_process_group()
    assert told in str(result.exception)
    assert "using the interleaved layout" not in result.stderr


def test_a_run_that_sharded_nothing_ends_with_a_warning_unless_it_failed(run_script: Any) -> None:
    result = run_script("from torch.distributed.fsdp import fully_shard\n")
    assert result.exit_code == 0
    assert result.stderr.startswith("shardwise: WARNING: nothing was sharded")
    assert result.stderr.count("\n") == 1
    assert run_script("import sys; sys.exit(3)").stderr == ""
    assert run_script("1 / 0").stderr == ""


class CompilesItsStep(torch.optim.Optimizer):
    """As torchao's: what it does to a parameter is compiled, inside an eager step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            torch.compile(descend, backend="aot_eager", fullgraph=True)(param.detach(), param.grad)


def descend(param: torch.Tensor, grad: torch.Tensor) -> None:
    param.add_(grad.float(), alpha=-0.125)  # exact, whether it is fused with the sum or not


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@on_ranks(2)
def test_optimizers_of_others_may_compile_inside_their_step(layout: Any) -> None:
    def trained(make: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shardwise.fully_shard(model, layout=layout)
        optimizer = make(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]

    theirs = trained(CompilesItsStep)
    ours = trained(lambda params: torch.optim.SGD(params, lr=0.125))
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    torch.compiler.reset()
