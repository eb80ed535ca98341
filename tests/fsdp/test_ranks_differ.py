"""Ranks that do different things: an error on every rank, by name and soon; never a hang, never silence."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp.models import EXACT, LAYOUTS, assert_same_gradients, shard_each
from ranks import RankFailure, RankPool, on_ranks
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, clip_grad_norm_
from shardwise._compat import timeout_of
from shardwise.checkpoint import save
from shardwise.comm import watch
from shardwise.comm.agree import together
from shardwise.comm.order import Event
from shardwise.comm.watch import order_of
from shardwise.fsdp.policy import GroupSettings, chosen

ODD = 1  # the rank that differs
SECONDS = 20.0  # on a busy machine; alone it takes under 1, and 2 where a rank has gone. The timeout is 180


class Net(nn.Module):
    """Blocks of equal size, so that gathers of different ones would match in silence."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.order: list[int] = list(range(blocks))
        self.before: Callable[[int], None] = lambda index: None

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            self.before(index)
            x = x + self.blocks[index](x)
        return x


def sharded(**how: Any) -> Any:
    torch.manual_seed(0)
    net = Net()
    return shard_each(*net.blocks, net, **how)


def step(net: Any) -> None:
    net(torch.ones(2, 4)).sum().backward()


def outcome(what: Callable[[], Any]) -> tuple[str, float]:
    """The message of what is raised, and after how many seconds."""
    begun = time.monotonic()
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "", time.monotonic() - begun


def difference(case: str, layout: str, steps: int) -> tuple[str, float]:
    """Train for `steps` steps, then differ on one rank."""
    mine = dist.get_rank() == ODD
    net = sharded(layout=layout, **(OPTIONS.get(case, {}) if mine else {}))
    for _ in range(steps):
        step(net)

    def differ() -> None:
        if mine and case in CHANGES:
            CHANGES[case](net)
        for _ in range(2):
            step(net)

    return outcome(differ)


def _raise(index: int) -> None:
    if index == 1:
        raise ValueError("no such expert")


def _fail_in_backward(module: Any) -> None:
    def fail(grad: Tensor) -> Tensor:
        raise ValueError("a hook's own error")

    module.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)


OPTIONS: dict[str, dict[str, Any]] = {
    "reduce_dtype": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "reshard": {"reshard_after_forward": False},
    "strategy": {"strategy": "zero2"},
    "dtype": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "divide factor": lambda net: net.blocks[1].set_gradient_divide_factor(7.0),
    "no sync": lambda net: net.set_requires_gradient_sync(False),
    "reshard later": lambda net: net.blocks[1].set_reshard_after_forward(False),
    "frozen later": lambda net: net.blocks[1].requires_grad_(False),
    "order": lambda net: setattr(net, "order", [0, 2, 1]),
    "skips": lambda net: setattr(net, "order", [0, 2]),
    "raises": lambda net: setattr(net, "before", _raise),
    "raises in backward": lambda net: _fail_in_backward(net.blocks[1]),
    "raises before backward reaches a module": _fail_in_backward,
    "one more unshard": lambda net: net.blocks[2].unshard(),
}


CASES = [
    ("reduce_dtype", 0, "reduce_dtype=torch.float64"),
    ("reshard", 0, "stays gathered"),
    ("strategy", 0, "strategy"),
    ("divide factor", 2, "divide_factor=7.0"),
    ("no sync", 0, "reduce_grads=False"),
    ("no sync", 2, "reduce_grads=False"),
    ("reshard later", 2, "stays gathered"),
    ("frozen later", 2, "blocks.1"),
    ("dtype", 0, "'blocks.1' with param_dtype=torch.bfloat16"),
    ("order", 0, "gather 'blocks.2'"),
    ("order", 2, "gather 'blocks.2'"),
    ("skips", 2, "gather 'blocks.2'"),
    ("raises", 0, "no such expert"),
    ("raises", 2, "no such expert"),
    ("raises in backward", 2, "a hook's own error"),
    ("raises before backward reaches a module", 2, "a hook's own error"),
    ("one more unshard", 2, "gather 'blocks.2'"),
]
# In turns, but for strategies of rows.
IN_LAYOUTS = [(case, LAYOUTS[at % 2 or case[0] == "strategy"]) for at, case in enumerate(CASES)]


def assert_told(heard: list[tuple[str, float]], *says: str) -> None:
    """What each rank heard, and when, is an error that says so."""
    for rank, (message, seconds) in enumerate(heard):
        assert seconds < SECONDS, (rank, seconds, message)
        assert message.startswith("RankMismatchError"), (rank, message)
        assert all(word in message for word in says), (rank, message)


@pytest.mark.parametrize(("case", "layout"), IN_LAYOUTS)
def test_a_difference_is_an_error_on_every_rank(
    ranks: RankPool, case: tuple[str, int, str], layout: str
) -> None:
    what, steps, says = case
    heard = ranks(difference, what, layout, steps, world_size=3)
    if what.startswith("raises"):
        message, seconds = heard.pop(ODD)
        assert message.startswith("ValueError")
        assert seconds < SECONDS
    assert_told(heard, says)


@on_ranks(4)
def test_ranks_of_other_groups_of_the_mesh_are_told_too() -> None:
    how = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)} if dist.get_rank() == 1 else {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = sharded(mesh=mesh, **how)
    message, seconds = outcome(lambda: step(net))
    assert {timeout_of(mesh.get_group(axis)) for axis in (0, 1)} == {timeout_of(dist.group.WORLD)}
    assert_told([(message, seconds)], "'blocks.1' with reduce_dtype=torch.float64", "rank 1")


def die(steps: int) -> list[tuple[str, float]]:
    """One rank ends without a word; what the others hear of it, in a group and then in another."""
    net, other = sharded(), dist.new_group()
    together("begin", lambda: None, group=other)
    for _ in range(steps):
        step(net)
    if dist.get_rank() == 1:
        del net, other
        gc.collect()
        dist.destroy_process_group()
        return []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_ROLL_CALL", 1.0)
        heard = [outcome(lambda: step(net))]
        patch.setattr(watch, "_ROLL_CALL", SECONDS)  # it is not waited for again
        return [*heard, outcome(lambda: together("go on", lambda: None, group=other))]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rank_that_has_gone_is_named(ranks: RankPool, steps: int) -> None:
    for rank, heard in enumerate(ranks(die, steps, world_size=3)):
        assert len(heard) == 2 * (rank != 1)
        assert_told(heard, "rank 1")


@on_ranks(2)
def test_a_late_rank_is_waited_for() -> None:
    net = sharded()
    torch.manual_seed(0)
    alone = Net()
    for late in (0, 1):
        if dist.get_rank() == late:
            time.sleep(0.5)
        step(net)
        step(alone)
    assert_same_gradients(net, alone, **EXACT)


@on_ranks(2)
def test_after_an_error_on_all_ranks_a_late_one_is_waited_for() -> None:
    net = sharded()
    for late in (0.0, 0.0, 0.8):  # what follows an error is known by the third time
        net.before = _raise
        with pytest.raises(ValueError, match="no such expert"):
            step(net)
        net.before = lambda index: None
        if dist.get_rank() == 1:
            time.sleep(late)
        step(net)


@on_ranks(3)
def test_a_step_like_the_last_one_compares_nothing() -> None:
    net = sharded()
    order = order_of(dist.group.WORLD)
    assert order is not None
    compared: list[str] = []
    agree = order._agree

    def spy(event: Event) -> None:
        compared.append(event.text.partition("\n")[0])
        agree(event)

    order._agree = spy  # type: ignore[method-assign]

    def newly(run: Callable[[], Any]) -> list[str]:
        del compared[:]
        run()
        return list(compared)

    def evaluate() -> None:
        with torch.no_grad():
            net(torch.ones(2, 4))

    assert newly(lambda: step(net)) == [
        "run the forward of Net",
        *[f"gather 'blocks.{index}'" for index in range(3)],
        "gather 'blocks.1'",
        "reduce the gradients of 'blocks.2'",
        "gather 'blocks.0'",
        "reduce the gradients of 'blocks.1'",
        "reduce the gradients of 'blocks.0'",
        "end the backward pass",
    ]
    assert newly(lambda: step(net)) == ["run the forward of Net"]  # it follows a pass for the first time
    assert newly(lambda: step(net)) == []
    assert newly(evaluate) == []
    # After a pass without backward; and a backward follows this forward again.
    assert newly(lambda: step(net)) == ["run the forward of Net", "gather 'blocks.1'"]
    assert newly(lambda: step(net)) == []


def ends_elsewhere(case: str) -> tuple[str, float]:
    """One rank runs a step less, and the library's own collectives after it."""
    net = sharded(layout="contiguous")
    mine = dist.get_rank() == 1
    for _ in range(2):
        step(net)

    def differ() -> None:
        if not mine:
            step(net)
        if case == "full_tensor":
            next(net.parameters()).full_tensor()
        elif case == "norm":
            clip_grad_norm_(net.parameters(), 1.0)
        else:
            save({"model": net}, str(dist.get_rank()), step=1)

    return outcome(differ)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("full_tensor", "gather a whole tensor"),
        ("norm", "reduce the 2.0-norm of 6 tensors"),
        ("save", "tell how saving went"),
    ],
)
def test_collectives_outside_of_steps_do_not_meet_those_inside(ranks: RankPool, case: str, says: str) -> None:
    assert_told(ranks(ends_elsewhere, case, world_size=2), says, "run the forward of Net")


def clips_otherwise(case: str, agreed_before: bool) -> tuple[str, float]:
    net = sharded(layout="contiguous" if case == "bound" else "interleaved")
    step(net)
    params, mine = list(net.parameters()), dist.get_rank() == 1
    if agreed_before:
        clip_grad_norm_(params, 1.0)
    options: dict[str, Any] = {"max_norm": 2.0 if mine and case == "bound" else 1.0}
    options["norm_type"] = float("inf") if mine and case == "norm" else 2.0
    return outcome(lambda: clip_grad_norm_(params[1:] if mine and case == "fewer" else params, **options))


@pytest.mark.parametrize("agreed_before", [False, True])
@pytest.mark.parametrize(
    ("case", "says"), [("norm", "inf-norm"), ("bound", "bound of 2"), ("fewer", "norm of 5 tensors")]
)
def test_clipping_compares_what_it_is_asked_for(
    ranks: RankPool, case: str, says: str, agreed_before: bool
) -> None:
    assert_told(ranks(clips_otherwise, case, agreed_before, world_size=2), says)


def raise_and_go(case: str) -> None:
    """One rank raises, and its process ends before anybody could ask."""
    net = sharded()
    step(net)
    if dist.get_rank() == 1 and case == "forward":
        net.before = _raise
    if dist.get_rank() == 1 and case == "backward":
        _fail_in_backward(net.blocks[1])
    try:
        step(net)
    except ValueError:
        os._exit(3)


@pytest.mark.parametrize("case", ["forward", "backward"])
def test_why_a_rank_raised_is_known_after_its_end(mortal_ranks: RankPool, case: str) -> None:
    with pytest.raises(RankFailure) as error:
        mortal_ranks(raise_and_go, case, world_size=2)
    message = str(error.value)
    assert re.search(rf"rank 1 will not come to .*: it raised ValueError in its {case}[:,]", message), message


def test_what_is_chosen_is_told_in_words_and_defaults_in_none() -> None:
    mixed = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    assert chosen(MixedPrecisionPolicy(), OffloadPolicy(), GroupSettings()) == []
    assert chosen(MixedPrecisionPolicy(), CPUOffloadPolicy(), GroupSettings()) == ["CPUOffloadPolicy"]
    (word,) = chosen(mixed, OffloadPolicy(), GroupSettings())
    assert "reduce_dtype" in word
    assert "float32" in word
