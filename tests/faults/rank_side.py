"""What a rank does in a trial: train a tiny GPT from the newest checkpoint on, and meet its fault."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import train_gpt
from torch.distributed.device_mesh import init_device_mesh

from shardwise.checkpoint import HostMemory, PerRank, StopSignals, latest_step, load, part, save, save_async
from shardwise.comm import order
from shardwise.optim import clip_grad_norm_

STEPS, SAVE_EVERY = 6, 2
TIMEOUT, LONG = 6.0, 60.0  # seconds, of the process group where a rank will stop, and elsewhere
SLOW = 0.6  # seconds
TEXT = torch.frombuffer(bytearray(b"the cat sat on the mat; " * 40), dtype=torch.uint8)


def train(folder: Path, case: dict[str, Any], attempt: int, fault: dict[str, Any] | None) -> int:
    """One attempt to reach STEPS; the step that it began from. What each rank saw is left in `folder`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that is still joining would fail if this one left
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / f"store-{attempt}"), size)
    seconds = timedelta(seconds=TIMEOUT if fault is not None and fault["kind"] == "stop" else LONG)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
    with pytest.MonkeyPatch.context() as patch, StopSignals() as stop:
        try:
            mine = fault if fault is not None and fault["rank"] == rank else None
            return _run(folder, case, attempt, stop, _Fault(mine, folder, patch))
        except Exception as error:
            _leave(folder / f"verdict-{attempt}-{rank}.json", {"says": str(error), "at": time.time()})
            raise


def _run(folder: Path, case: dict[str, Any], attempt: int, stop: StopSignals, fault: _Fault) -> int:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = train_gpt.GPT(width=16, depth=2, heads=2, seq=16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    train_gpt.shard(model, mesh, layout=case["layout"])
    optimizer = train_gpt.make_optimizer(model, over_flat_memory=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    progress = {"step": 0}
    torch.manual_seed(10 + rank)

    def state() -> dict[str, Any]:
        return train_gpt.training_state(model, optimizer, progress) | {"schedule": schedule.state_dict()}

    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    path = folder / "checkpoints"
    fault.arm_hooks(model, optimizer)
    copies = HostMemory(folder / f"host-{case['hosts'][rank]}") if case.get("hosts") else None
    found, stored = state(), latest_step(path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = copies.load(found, newer_than=(stored or 0) - 1) if copies else None
        if loaded is None and stored is not None:
            loaded = load(path, found)
    if said:
        _leave(folder / f"warned-{attempt}-{rank}.json", {"says": "\n".join(str(w.message) for w in said)})
    if loaded is not None:
        train_gpt.set_model_state_dict(model, found["model"])
        train_gpt.set_optimizer_state_dict(model, optimizer, found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        own: PerRank = found["own"]
        torch.set_rng_state(own.value["rng"])
    begun = progress["step"]
    for step in range(begun, STEPS):
        fault.step = step
        batch = train_gpt.training_batch(TEXT, position=12 * step, batch=12, seq=16, seed=0)
        inputs, targets = train_gpt.my_rows(batch, torch.device("cpu"))
        noise = (torch.rand(inputs.shape) < 0.1).long()  # what depends on this rank's random state
        loss = train_gpt.next_byte_loss(model, (inputs * (1 - noise), targets))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress["step"] = step + 1
        with (folder / f"losses-{rank}.jsonl").open("a") as log:
            log.write(json.dumps([step, loss.item().hex()]) + "\n")
        if (step + 1) % SAVE_EVERY == 0:
            (save_async if case["asynchronous"] else save)(path, state(), step=step + 1, keep=3)
            if not case["asynchronous"] and rank == 0:
                _leave(folder / "committed.json", {"step": step + 1, "at": time.time()})
        if copies is not None:
            copies.save(state(), step=step + 1)
        stop.asked()
    if copies is not None:
        copies.wait()
    if case["asynchronous"]:
        save(path, state(), step=STEPS, keep=3)  # waits for the one in flight
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.local
        digest.update(local.detach().numpy().tobytes())
    _leave(folder / f"final-{rank}.json", {"parameters": digest.hexdigest()})
    return begun


def _leave(file: Path, content: dict[str, Any]) -> None:
    file.with_suffix(".new").write_text(json.dumps(content))
    os.replace(file.with_suffix(".new"), file)


def disconnect() -> None:
    """Break this process's connections to other ranks, as a failing network does; not that to the store."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if connection.getpeername()[1] != getattr(store, "port", None):
                connection.shutdown(socket.SHUT_RDWR)


class _Fault:
    """What goes wrong on this rank, at the given step and place; nothing for None."""

    def __init__(self, fault: dict[str, Any] | None, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.fault, self.folder, self.patch = fault, folder, patch
        self.step = -1
        self.calls = 0

    def strike(self) -> None:
        assert self.fault is not None
        kind, self.fault = self.fault["kind"], None
        _leave(self.folder / "struck.json", {"at": time.time()})
        if kind == "slow":
            time.sleep(SLOW)
        elif kind == "full":
            raise OSError(28, "No space left on device")
        elif kind == "disconnect":
            disconnect()
        elif kind == "host":  # this rank's and the next
            beside = (dist.get_rank() + 1) % dist.get_world_size()
            os.kill(int((self.folder / f"pid-{beside}").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), {"stop": signal.SIGSTOP}.get(kind, signal.SIGKILL))

    def at(self, place: str) -> None:
        if self.fault is not None and self.fault["place"] == place and self.step >= self.fault["step"]:
            self.strike()

    def arm_hooks(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.fault is None:
            return
        block = model.blocks[1]
        block.register_forward_pre_hook(lambda *_: self.at("forward"))
        block.mlp_out.register_full_backward_hook(lambda *_: self.at("backward"))
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        advance = order.Order.advance

        def announced(this: Any, event: Any) -> None:
            if event.text.startswith("reduce the gradients"):
                self.at("reduction")
            advance(this, event)

        self.patch.setattr(order.Order, "advance", announced)
        if self.fault["place"] == "load":
            from shardwise.checkpoint import read

            check = read._check_files

            def checked(*args: Any) -> None:
                if self.fault is not None:
                    self.strike()
                check(*args)

            self.patch.setattr(read, "_check_files", checked)
        if self.fault["place"] == "save":
            self._arm_system_calls()

    def _arm_system_calls(self) -> None:
        """The fault's `call`-th of what a save asks the system for strikes, in part if it is torn."""

        def counted(function: Callable[..., Any], *, torn: bool = False) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                fault = self.fault
                if fault is not None and self.step >= fault["step"] and "step-" in _told(args):
                    self.calls += 1
                    if self.calls > fault["call"]:
                        if torn and fault["kind"] == "torn":
                            function(args[0], bytes(args[1])[: len(args[1]) // 2])
                        self.strike()
                return function(*args, **options)

            return call

        def _told(args: tuple[Any, ...]) -> str:
            raw = getattr(args[0], "_raw", args[0]) if args else ""
            name = getattr(raw, "name", raw)
            return os.readlink(f"/proc/self/fd/{name}") if isinstance(name, int) else str(name)

        self.patch.setattr(part._Hashed, "write", counted(part._Hashed.write, torn=True))
        for owner, name in (
            (os, "fsync"),
            (os, "rename"),
            (Path, "rename"),
            (Path, "mkdir"),
            (Path, "write_bytes"),
        ):
            self.patch.setattr(owner, name, counted(getattr(owner, name)))
