"""Ranks' programs: their state, from checkpoints, to a folder and back into a job."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import lockstep
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import OutputKind
from torch.nn import functional as F
from typer.testing import CliRunner

from ranks import on_ranks
from shardwise.cli import app
from shardwise.errors import CheckpointError, ShardingError
from shardwise.tensor_parallel import load_compiled, package
from shardwise.tensor_parallel.explain import counts, explain
from shardwise.tensor_parallel.materialize import materialize, missing_weights
from shardwise.tensor_parallel.state import record_of
from shardwise.tensor_parallel.styles import ColwiseParallel, RowwiseParallel
from shardwise.tensor_parallel.transform import tensor_parallel_transformation

# torch's own decompositions copy what it calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")

PLAN = {"embed": RowwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}


class Model(nn.Module):
    """A tied table, buffers of every kind, a lifted constant, and outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("shift", torch.randn(8), persistent=False)
        self.register_buffer("peak", torch.zeros(12))
        self.fixed = torch.arange(8.0)

    def forward(self, ids: Tensor, scale: Tensor) -> Any:
        self.calls.add_(1)
        x = self.embed(ids) + self.shift + self.fixed * torch.tensor([0.5])
        inner = F.gelu(self.up(x))
        self.peak.copy_(inner.flatten(0, -2).amax(0))
        logits = self.head(x + self.down(inner))
        scale.mul_(2)
        return logits * scale, None, 3, {"again": logits, "once more": logits}, ids.shape[0]


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randint(10, (3, 5)), torch.rand(())


def program_of(model: nn.Module, *, dynamic: bool = False) -> ExportedProgram:
    shapes = ({0: Dim("batch", min=2, max=64)}, {}) if dynamic else None
    return export(copy.deepcopy(model), inputs(), dynamic_shapes=shapes)


def parts(
    program: ExportedProgram, *, ranks: int = 2, plan: Any = PLAN, **options: Any
) -> list[ExportedProgram]:
    return [
        tensor_parallel_transformation(program, rank, ranks, "cpu", plan, **options) for rank in range(ranks)
    ]


def storage_bytes(program: ExportedProgram) -> int:
    tensors = [*program.state_dict.values(), *program.constants.values()]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def snapshot(program: ExportedProgram) -> Any:
    symbols = next(n.meta["val"].fake_mode.shape_env for n in program.graph.nodes if "val" in n.meta)
    values = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    text = str(program.graph), str(program.graph_signature), str(program.range_constraints)
    return text, [str(guard.expr) for guard in symbols.guards] if symbols else [], values


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_whole_program_stays_as_it_is(dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    program = program_of(model, dynamic=dynamic)
    before = snapshot(program)
    ids, scale = inputs()
    programs = parts(program, ranks=3)
    for outputs in lockstep.run(programs, ids, scale.clone()):
        torch.testing.assert_close(outputs[-6], copy.deepcopy(model)(ids, scale.clone())[0])
    after = snapshot(program)
    assert after[:2] == before[:2]
    for name, tensor in after[2].items():
        assert torch.equal(tensor, before[2][name]), name
    assert all(part.state_dict["calls"].sum() == 2 for part in programs)


def test_a_rank_holds_its_shards_and_no_memory_of_the_whole() -> None:
    torch.manual_seed(0)
    program = program_of(Model())
    programs = parts(program)
    assert (
        storage_bytes(programs[0]) == explain(programs[0]).bytes_here + 8 * 4 + 4
    )  # `fixed` and the lifted constant
    first, second = (part.state_dict["up.weight"] for part in programs)
    assert torch.equal(torch.cat([first, second]), program.state_dict["up.weight"])
    assert isinstance(first, nn.Parameter)
    assert programs[0].state_dict["head.weight"] is programs[0].state_dict["embed.weight"]
    storages = {tensor.untyped_storage().data_ptr() for tensor in program.state_dict.values()}
    tensors = [*programs[1].state_dict.values(), *programs[1].constants.values()]
    assert storages.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in tensors)


def test_outputs_of_every_kind_and_mutations_come_back_as_they_were_declared() -> None:
    torch.manual_seed(0)
    model = Model()
    programs = parts(program_of(model))
    ids, scale = inputs()
    expected = copy.deepcopy(model)
    whole = expected(ids, scale.clone())
    for part, outputs in zip(programs, lockstep.run(programs, ids, scale.clone()), strict=True):
        logits, none, three, again, more, count = outputs[-6:]
        torch.testing.assert_close((logits, again, more), (whole[0], *whole[3].values()))
        assert (none, three, count) == (None, 3, 3)
        torch.testing.assert_close(part.state_dict["peak"], expected.peak)
        kinds = [spec.kind for spec in part.graph_signature.output_specs]
        assert kinds.count(OutputKind.BUFFER_MUTATION) == 2
        assert kinds.count(OutputKind.USER_INPUT_MUTATION) == 1


class Plain(nn.Module):
    """What a checkpoint of safetensors can hold: no tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("shift", torch.randn(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + self.shift


PLAIN = {"up": ColwiseParallel, "down": RowwiseParallel}


def on_meta() -> ExportedProgram:
    with torch.device("meta"):
        return export(Plain(), (torch.randn(2, 8),))


def in_fake_mode() -> ExportedProgram:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = Plain(), torch.randn(2, 8)
        return export(model, (x,))


@pytest.mark.parametrize("make", [on_meta, in_fake_mode])
def test_a_program_without_weights_is_filled_from_a_checkpoint_slice_by_slice(
    make: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 8)
    whole = model.state_dict()
    save_file(whole, tmp_path / "one.safetensors")
    torch.save(whole, tmp_path / "one.pt")
    folder = tmp_path / "several"
    folder.mkdir()
    for index, names in enumerate((["up.weight", "down.bias"], ["up.bias", "down.weight"])):
        save_file({name: whole[name] for name in names}, folder / f"{index}.safetensors")
    entries = {"up.weight": "0", "down.bias": "0", "up.bias": "1", "down.weight": "1"}
    index_json = {"weight_map": {name: f"{number}.safetensors" for name, number in entries.items()}}
    program = make()
    programs = parts(program, plan=PLAIN)
    assert missing_weights(programs[0]) == ["up.weight", "up.bias", "down.weight", "down.bias", "shift"]
    assert programs[0].state_dict["up.weight"].shape == (6, 8)
    several = [folder / "0.safetensors", folder / "1.safetensors"]
    for source in (whole, tmp_path / "one.safetensors", tmp_path / "one.pt", folder, str(folder), several):
        filled = [
            materialize(part, source, values={"shift": model.shift}) for part in parts(program, plan=PLAIN)
        ]
        assert torch.equal(filled[1].state_dict["down.weight"], whole["down.weight"][:, 6:])
        assert filled[1].state_dict["down.weight"].untyped_storage().nbytes() == 8 * 6 * 4
        assert isinstance(filled[1].state_dict["down.weight"], nn.Parameter)
        if source is folder:
            for (result,) in lockstep.run(filled, x):
                torch.testing.assert_close(result, model(x))
            (folder / "model.safetensors.index.json").write_text(json.dumps(index_json))


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    program = on_meta()
    whole = Plain().state_dict()
    (part,) = parts(program, plan=PLAIN, ranks=1)
    cases: list[tuple[Any, str]] = [
        ({**whole, "up.bias": torch.ones(11)}, r"up.bias has shape \(11,\), expected \(12,\)"),
        (whole, "it lacks shift; pass buffers that it does not store as values="),
        ({}, "it lacks up.weight, up.bias, .* pass"),
        (tmp_path / "inner", r"expected \*.safetensors files"),
    ]
    inner = tmp_path / "inner"
    (inner / "linked").mkdir(parents=True)
    save_file(whole, tmp_path / "whole.safetensors")
    (inner / "linked" / "whole.safetensors").symlink_to(tmp_path / "whole.safetensors")
    (inner / "broken.pt").write_bytes(b"no pickle")
    (inner / "linked" / "broken").write_bytes(b"no header")
    cases += [
        (inner / "linked", r"'whole.safetensors' is a link to .*, outside the folder; refusing to read"),
        (inner / "broken.pt", "broken.pt is damaged, or not a state dict of tensors only"),
        (inner / "linked" / "broken", "not a safetensors file, or damaged"),
        (inner / "none.safetensors", "no such file or folder"),
    ]
    for number, (places, message) in enumerate(
        (
            (
                {"up.weight": "../../whole.safetensors"},
                r"whole.safetensors' is outside the folder; refusing to read",
            ),
            ({"up.weight": str(tmp_path / "whole.safetensors")}, r"is outside the folder; refusing to read"),
            ({"up.weight": 3}, r"expected a file name, found 3"),
            ({"up.weight": "none.safetensors"}, r"none.safetensors: missing"),
            ([], r"expected an index with a weight_map"),
        )
    ):
        folder = inner / str(number)
        folder.mkdir()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        cases.append((folder, message))
    for checkpoint, message in cases:
        with pytest.raises(CheckpointError, match=message):
            materialize(part, checkpoint)
    assert len(missing_weights(part)) == 5
    renamed = {f"model.{name}": tensor.double() for name, tensor in whole.items()}
    materialize(part, renamed, rename="model.{}".format, values={"shift": torch.zeros(8)})
    assert part.state_dict["up.weight"].dtype == torch.float32
    assert missing_weights(part) == []
    with pytest.raises(ShardingError, match="not one rank's part"):
        materialize(program, whole)


def test_tied_weights_are_filled_by_either_name() -> None:
    with torch.device("meta"):
        program = export(Model(), inputs())
    torch.manual_seed(0)
    model = Model()
    for lost in ("embed.weight", "head.weight"):
        source = {name: tensor for name, tensor in model.state_dict().items() if name != lost}
        rest = {"shift": model.shift, "peak": model.peak}
        (_, part) = (materialize(p, source, values=rest) for p in parts(program))
        assert part.state_dict["head.weight"] is part.state_dict["embed.weight"]
        assert torch.equal(part.state_dict["head.weight"], model.head.weight[5:])


# ---------------------------------------------------------------- folders


def test_a_folder_keeps_programs_and_what_is_known_of_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    programs = parts(program_of(model))
    package.save(programs, tmp_path / "a" / "parts")
    manifest = json.loads((tmp_path / "a" / "parts" / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["strategies"]["up"]) == (2, "ColwiseParallel")
    assert manifest["parameters"]["up.weight"]["placement"] == {"dim": 0, "ranges": [[[0, 6]], [[6, 12]]]}
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == ["parts"]
    loaded = [package.load(tmp_path / "a" / "parts", rank=rank) for rank in range(2)]
    for before, after in zip(programs, loaded, strict=True):
        assert record_of(before) == record_of(after)
        assert str(explain(before)) == str(explain(after))
        assert storage_bytes(before) == storage_bytes(after)
    ids, scale = inputs()
    for outputs in lockstep.run(loaded, ids, scale.clone()):
        torch.testing.assert_close(outputs[-6], copy.deepcopy(model)(ids, scale.clone())[0])


@pytest.mark.parametrize("make", [on_meta, in_fake_mode])
def test_programs_without_weights_are_saved_and_filled_once_they_are_loaded(
    make: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 8)
    package.save(parts(make(), plan=PLAIN, ranks=3), tmp_path / "parts")
    loaded = [package.load(tmp_path / "parts", rank=rank, world_size=3) for rank in range(3)]
    assert len(missing_weights(loaded[2])) == 5
    for part in loaded:
        materialize(part, {**model.state_dict(), "shift": model.shift})
    for (result,) in lockstep.run(loaded, x):
        torch.testing.assert_close(result, model(x))


def test_a_program_is_made_for_the_device_that_will_run_it() -> None:
    program = program_of(Model())
    part = tensor_parallel_transformation(program, 1, 2, "meta", PLAN)
    assert {tensor.device.type for tensor in part.state_dict.values()} == {"meta"}
    values = [node.meta["val"] for node in part.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert {value.device.type for value in values} == {"meta"}
    assert {tensor.device.type for tensor in program.state_dict.values()} == {"cpu"}
    assert record_of(part)["rank"] == 1


def test_folders_and_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    program = export(Plain(), (torch.randn(2, 8),))
    good, place = parts(program, plan=PLAIN), tmp_path / "parts"
    for programs, message in (
        (good[::-1], r"ranks 0 to 1 in order, got those of ranks \[1, 0\]"),
        (good[:1], "got those of ranks"),
        ([], "got those of ranks"),
        ([good[0], parts(program, plan={"up": "colwise"})[1]], "not parts of one: their strategies differ"),
        (good[0], "no process group to collect the others"),
        ([program], "not one rank's part"),
    ):
        with pytest.raises(ShardingError, match=message):
            package.save(programs, place)
    assert list(tmp_path.iterdir()) == []
    package.save(good, place)
    with pytest.raises(ShardingError, match="already exists"):
        package.save(good, place)
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ShardingError, match="not a folder of programs alone"):
        package.save(good, place, overwrite=True)
    (place / "notes.txt").unlink()
    package.save(good, place, overwrite=True)
    assert list(tmp_path.iterdir()) == [place]
    for options, message in (
        ({"rank": 2}, "ranks 0 to 1, got rank 2"),
        ({"rank": 0, "world_size": 3}, "for 2 ranks, but world_size is 3"),
        ({}, "cannot tell which program"),
    ):
        with pytest.raises(ShardingError, match=message):
            package.load(place, **options)
    with pytest.raises(CheckpointError, match=r"manifest.json: missing, [^;]*; copy the folder again[^;]*$"):
        package.load(tmp_path, rank=0)
    content = (place / "rank-1.pt2").read_bytes()
    (place / "rank-1.pt2").write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    package.load(place, rank=0)
    with pytest.raises(CheckpointError, match=r"rank-1.pt2: damaged \(expected .*; copy the folder again"):
        package.load(place, rank=1)
    (place / "rank-1.pt2").unlink()
    with pytest.raises(CheckpointError, match=r"rank-1.pt2: missing"):
        package.load(place, rank=1)
    shutil.move(place / "rank-0.pt2", tmp_path / "elsewhere.pt2")
    (place / "rank-0.pt2").symlink_to(tmp_path / "elsewhere.pt2")
    with pytest.raises(CheckpointError, match=r"is a link to .*, outside the folder; refusing to read"):
        package.load(place, rank=0)
    manifest = json.loads((place / "manifest.json").read_text())
    for written, message in (
        ("{", "cannot be read"),
        (json.dumps({**manifest, "world_size": 3}), "does not match its own sha256"),
        (json.dumps({"format": "shardwise.tensor_parallel", "version": 1}), "expected 'format' to be .* 2'"),
    ):
        (place / "manifest.json").write_text(written)
        with pytest.raises(CheckpointError, match=f"{message}.*save the programs again"):
            package.load(place, rank=0)


def test_the_command_cuts_a_file_by_words_in_a_file(tmp_path: Path) -> None:
    torch.export.save(export(Plain(), (torch.randn(2, 8),)), tmp_path / "model.pt2")
    (tmp_path / "plan.json").write_text(json.dumps({"up": "colwise", "down": "rowwise"}))
    printed = package.export_command(
        tmp_path / "model.pt2", tmp_path / "out", ranks=2, strategies=tmp_path / "plan.json"
    )
    for text in ("up.weight", "all_reduce", "down: row\n"):
        assert text in printed
    assert counts(package.load(tmp_path / "out", rank=1)) == {"all_reduce": 1}
    package.export_command(tmp_path / "model.pt2", tmp_path / "auto", ranks=2)
    assert counts(package.load(tmp_path / "auto", rank=0)) == {}  # so small a model is cheapest whole
    for model, plan, message in (
        ("none.pt2", "plan.json", "no such file"),
        ("plan.json", "plan.json", "cannot read .* as an exported program"),
        ("model.pt2", "model.pt2", "cannot read strategies"),
    ):
        with pytest.raises(ShardingError, match=message):
            package.export_command(tmp_path / model, tmp_path / "no", ranks=2, strategies=tmp_path / plan)


def test_the_url_of_a_store_is_refused_and_no_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.export.save(export(Plain(), (torch.randn(2, 8),)), "model.pt2")
    package.export_command("model.pt2", "out", ranks=2)
    url, before = "memory://bucket/out", sorted(tmp_path.rglob("*"))
    program = package.load("out", rank=0)
    for call in (
        lambda: package.save([program, package.load("out", rank=1)], url),
        lambda: package.load(url, rank=0),
        lambda: package.merge(url),
        lambda: load_compiled(url),
    ):
        with pytest.raises(CheckpointError, match=f"{url}: expected a path in the file system"):
            call()
    for command in (
        ["export", "model.pt2", "--out", url],
        ["export", url, "--out", "other"],
        ["merge", url, "--out", "model.safetensors"],
        ["merge", "out", "--out", url],
    ):
        result = CliRunner().invoke(app, ["tp", *command])
        assert (result.exit_code, f"Error: {url}: expected a path" in result.stderr) == (2, True), command
    assert sorted(tmp_path.rglob("*")) == before


@on_ranks(3)
def test_programs_made_in_one_process_run_in_a_group_of_some_ranks_of_a_job(tmp_path: Path) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    rank = dist.get_rank() - 1
    torch.manual_seed(0)
    model = Model()
    if rank == 0:  # offline: the group's name is none of this job's
        package.save(parts(program_of(model), group_name="elsewhere"), tmp_path / "all")
    dist.barrier(group)
    torch.manual_seed(1)
    ids, scale = inputs()
    expected = copy.deepcopy(model)(ids, scale.clone())[0]
    program = package.load(tmp_path / "all", group=group)
    assert record_of(program)["group"] == group.group_name
    mutated = scale.clone()
    with torch.no_grad():
        result = program.module()(ids, mutated)
    torch.testing.assert_close(result[0], expected)
    torch.testing.assert_close(mutated, 2 * scale)
    package.save(program, tmp_path / "together", group=group)
    again = package.load(tmp_path / "together", group=group, rank=rank, world_size=2)
    with torch.no_grad():
        torch.testing.assert_close(again.module()(ids, scale.clone())[0], expected)
    for options, message in (
        ({}, "for 2 ranks, but world_size is 3"),
        ({"group": group, "rank": 1 - rank}, f"got rank {1 - rank}, but it is {rank} in the group"),
    ):
        with pytest.raises(ShardingError, match=message):
            package.load(tmp_path / "all", **options)
    with pytest.raises(ShardingError, match="already exists"):
        package.save(program, tmp_path / "all", group=group)
    with pytest.raises(ShardingError, match=f"but this process is rank {rank + 1} of 3"):
        package.bind(program)
    full_disk = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with (
        mock.patch.object(package, "_write", full_disk if rank == 1 else package._write),
        pytest.raises(ShardingError, match=r"rank 2: OSError: \[Errno 28\] No space left"),
    ):
        package.save(program, tmp_path / "third", group=group)
    dist.barrier(group)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "together"]
