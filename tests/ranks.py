"""Run a function on every rank of a gloo process group, from a pytest process.

    @on_ranks(2, 3)
    def test_a_sum_adds_every_rank():
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()

Worker processes are forked once per session from a server that has imported torch, so a call
costs milliseconds. Each call gets a fresh default group over a FileStore, seed 0, one thread and
the warning filters of the calling test. What ranks print is printed by the test. After a failure
(a rank raises, hangs or dies) the workers are killed and the next call starts new ones.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import marshal
import os
import pickle
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from _pytest.assertion import rewrite

from savings import (
    COLLECTS_AT,
    collect_seldom,
    forget_meshes,
    look_often,
    remember_shapes,
    share_a_device,
    spend_less_in_torch,
)

PRELOADED = ["pytest", "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "shardwise.verify"]
SHARED = "SHARDWISE_TESTS_SERVER"
# 3 s, once or on each rank.
IN_A_RUN_OF_ALL = [
    "torch._decomp.decompositions_for_jvp",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    *(f"shardwise.{name}" for name in ("checkpoint", "fsdp", "graph", "nn", "optim", "planner.record")),
    "shardwise.tensor_parallel",
    "shardwise.verify.streams",
]
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes, which would import torch each
    "TORCHINDUCTOR_VEC_ISA_OK": "0",  # a few small kernels do not repay a program for each vector unit to try
}
GRACE_SECONDS = 3.0  # what the other ranks get to finish once one rank has failed
STARTUP_SECONDS = 120.0


class RankFailure(AssertionError):  # noqa: N818 - a failed check, shown as one
    """Some rank raised, hung or died; the message holds every such rank's traceback or stack."""


def on_ranks(
    *world_sizes: int, timeout: float = 120.0
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated module-level test on every rank, once for each of `world_sizes`.

    The body may use the default process group directly. Its parameters (from parametrize above or
    below this decorator, or picklable fixtures) reach it by keyword. `timeout` is in seconds.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        if "." in body.__qualname__:
            raise TypeError(f"on_ranks needs a module-level function, got {body.__qualname__}")

        @functools.wraps(body)
        def test(ranks: RankPool, world_size: int, **params: Any) -> None:
            try:
                ranks(test, world_size=world_size, timeout=timeout, **params)
                return
            except RankFailure as failure:
                message = str(failure)
            pytest.fail(message, pytrace=False)

        test.body_on_ranks = body  # type: ignore[attr-defined]
        keyword = inspect.Parameter.KEYWORD_ONLY
        names = ["ranks", "world_size", *inspect.signature(body).parameters]
        test.__signature__ = inspect.Signature([inspect.Parameter(n, keyword) for n in names])  # type: ignore[attr-defined]
        ids = [f"{n}rank" if n == 1 else f"{n}ranks" for n in world_sizes]
        return pytest.mark.parametrize("world_size", world_sizes, ids=ids)(test)

    return decorate


# ---------------------------------------------------------------- the pytest process


def start_server(*, shared: bool = False) -> None:
    """Start the server that ranks are forked from; `shardwise.verify` would start one with less in it.

    A run of all tests has one, with more in it, which the workers of xdist share: to start it takes 6 s.
    """
    everything = shared or "PYTEST_XDIST_WORKER" in os.environ
    address, parent = os.environ.get(SHARED, "-").rsplit("-", 1)
    if not shared and parent == str(os.getppid()):
        server = forkserver._forkserver  # type: ignore[attr-defined]
        if server._forkserver_address != address:
            server._forkserver_address = address
            server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # ends with the parent
            server.ensure_running = resource_tracker.ensure_running
        return
    forkserver.set_forkserver_preload([*PRELOADED, *(IN_A_RUN_OF_ALL if everything else [])])
    with mock.patch.dict(os.environ, WORKER_ENV):
        forkserver.ensure_running()
    if shared and sys.version_info < (3, 14):  # which asks who connects for a key
        os.environ[SHARED] = f"{forkserver._forkserver._forkserver_address}-{os.getpid()}"  # type: ignore[attr-defined]


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    output: Path  # stdout and stderr of the rank
    stack: Path  # what faulthandler wrote


@dataclass
class RankPool:
    """`pool(fn, *args, world_size=N, **kwargs)` is the list of `fn`'s return values by rank."""

    workers: list[_Worker] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ranks-")))
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(
        self, fn: Callable[..., Any], *args: Any, world_size: int, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call the module-level `fn` on `world_size` ranks; raises RankFailure after `timeout` seconds."""
        __tracebackhide__ = True
        if "<" in fn.__qualname__:
            raise TypeError(f"ranks need a module-level function, got {fn.__qualname__}")
        call = {
            "path": list(sys.path),
            "module": fn.__module__,
            "file": (file := getattr(sys.modules[fn.__module__], "__file__", None)),
            "code": _rewritten(file) if file and Path(file).name.startswith("test_") else None,
            "name": fn.__qualname__,
            "arguments": pickle.dumps((args, kwargs, list(warnings.filters))),
            "world_size": world_size,
            "store": str(self.folder / f"store{next(self._serial)}"),
            "timeout": timeout,
        }
        self._start(world_size)
        ranks = self.workers[:world_size]
        failed = True
        try:
            for rank, worker in enumerate(ranks):
                with contextlib.suppress(OSError):  # a dead rank is reported below
                    worker.pipe.send_bytes(pickle.dumps(call | {"rank": rank}))
            results = _collect(ranks, timeout=timeout)
            failed = False
        finally:
            _print_output(ranks)
            if failed:
                self._kill()
        for worker in ranks:  # only now may a rank close its group: no peer still needs it
            worker.pipe.send_bytes(pickle.dumps(None))
        return results

    def pids(self) -> list[int]:
        """Process ids of the workers alive now, by rank."""
        return [worker.process.pid for worker in self.workers]

    def close(self) -> None:
        """End the workers and remove their files."""
        self._kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, count: int) -> None:
        context = get_context("forkserver")
        start_server()
        new = []
        while len(self.workers) < count:
            ours, theirs = context.Pipe()
            name = next(self._serial)
            output, stack = self.folder / f"output{name}", self.folder / f"stack{name}"
            process = context.Process(target=_work, args=(theirs, str(output), str(stack)), daemon=True)
            process.start()
            theirs.close()
            new.append(_Worker(process=process, pipe=ours, output=output, stack=stack))
            self.workers.append(new[-1])
        for worker in new:
            if not worker.pipe.poll(STARTUP_SECONDS) or worker.pipe.recv_bytes() != b"ready":
                raise RuntimeError("a rank process did not start")

    def _kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()
        self.workers.clear()


_by_pytest: dict[str, types.CodeType] = {}


def keep_what_pytest_rewrites() -> None:
    """Keep the code of test modules with asserts rewritten: ranks run it, and making it again takes 30 ms."""
    rewrite_test, read = rewrite._rewrite_test, rewrite._read_pyc

    def keeping(path: Path, config: pytest.Config) -> Any:
        state, code = rewrite_test(path, config)
        _by_pytest[str(path)] = code
        return state, code

    def reading(path: Path, *others: Any) -> Any:
        code = read(path, *others)
        if code is not None:
            _by_pytest[str(path)] = code
        return code

    rewrite._rewrite_test, rewrite._read_pyc = keeping, reading


@functools.cache
def _rewritten(file: str) -> bytes:
    """The code of a test module, its asserts rewritten by pytest; made here, once for all ranks."""
    if file in _by_pytest:
        return marshal.dumps(_by_pytest[file])
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    rewrite.rewrite_asserts(tree, source, file)
    return marshal.dumps(compile(tree, file, "exec", dont_inherit=True))


def _collect(ranks: list[_Worker], *, timeout: float) -> list[Any]:
    """Results by rank, or RankFailure with one section for each rank that gave none."""
    __tracebackhide__ = True
    results: dict[int, Any] = {}
    problems: dict[int, str] = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(waiting), timeout=left):
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                ok, value = False, _death(ranks[rank])
            if ok:
                results[rank] = pickle.loads(value)
                continue
            problems[rank] = value
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if not waiting and not problems:
        return [results[rank] for rank in range(len(ranks))]
    if waiting:
        why = "still running when another rank had failed" if problems else f"hung for {timeout:g} s"
        for rank, stack in _stacks(ranks, sorted(waiting.values())).items():
            problems[rank] = f"{why}; its stack (innermost call first):\n{stack}"
    raise RankFailure(_report(problems, world_size=len(ranks)))


def _report(problems: dict[int, str], *, world_size: int) -> str:
    same: dict[str, list[int]] = {}
    for rank in sorted(problems):
        same.setdefault(problems[rank].rstrip(), []).append(rank)
    sections = [
        f"----- rank {', '.join(map(str, which))} of {world_size}: {text}" for text, which in same.items()
    ]
    return "\n\n".join(sections)


def _death(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    crash = worker.stack.read_text(errors="replace") if worker.stack.exists() else ""
    return f"died with exit code {code}\n{crash}"


def _stacks(ranks: list[_Worker], which: list[int]) -> dict[int, str]:
    for rank in which:
        os.kill(ranks[rank].process.pid, signal.SIGUSR1)
    end = time.monotonic() + 10.0  # of a machine that others use too
    while time.monotonic() < end and not all(ranks[r].stack.stat().st_size for r in which):
        time.sleep(0.05)
    time.sleep(0.1)  # a dump that has begun is a few short writes
    stacks = {}
    for rank in which:
        threads = ranks[rank].stack.read_text(errors="replace").split("\n\n")
        stacks[rank] = "\n".join(_without_pool(text) for text in threads if "in _listen\n" not in text)
    return stacks


def _without_pool(stack: str) -> str:
    return "\n".join(itertools.takewhile(lambda line: " in _call_body" not in line, stack.splitlines()))


def _print_output(ranks: list[_Worker]) -> None:
    for rank, worker in enumerate(ranks):
        text = worker.output.read_text(errors="replace")
        if text:
            print("".join(f"[rank {rank}] {line}" for line in text.splitlines(keepends=True)))
            os.truncate(worker.output, 0)


# ---------------------------------------------------------------- a rank's process


def _work(pipe: connection.Connection, output: str, stack: str) -> None:
    """Serve calls until the pytest process closes the pipe, even if it died."""
    import torch

    os.environ.update(WORKER_ENV)  # a test may have started the server, as a user's `verify` does
    log = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stack_file = open(stack, "w")  # noqa: SIM115 - faulthandler needs it as long as the process lives
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file)
    torch.set_num_threads(1)
    remember_shapes()
    spend_less_in_torch()
    share_a_device()
    look_often()
    gc.freeze()  # the collection after each call then visits only what calls made
    gc.set_threshold(*COLLECTS_AT)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, calls), daemon=True).start()
    pipe.send_bytes(b"ready")
    while True:
        call = pickle.loads(calls.get())
        if call is None:
            _clean_up()
            continue
        try:
            answer = pickle.dumps((True, pickle.dumps(_call(call))))
        except BaseException as error:
            answer = pickle.dumps((False, _describe(error)))
        pipe.send_bytes(answer)


def _listen(pipe: connection.Connection, calls: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            calls.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)


def _call(call: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = call["path"]
    fn: Any = _load(call["module"], call["file"], call["code"])
    for part in call["name"].split("."):
        fn = getattr(fn, part)
    args, kwargs, filters = pickle.loads(call["arguments"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(call["store"], call["world_size"]),
        rank=call["rank"],
        world_size=call["world_size"],
        timeout=timedelta(seconds=call["timeout"] + 60),  # the pool's timeout comes first
    )
    random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed also asks every accelerator: 1 ms
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters.extend(filters)  # type: ignore[attr-defined]
        return _call_body(getattr(fn, "body_on_ranks", fn), args, kwargs)


def _call_body(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return body(*args, **kwargs)


def _load(name: str, file: str | None, code: bytes | None) -> types.ModuleType:
    """The module, from `code` if it is a test module (two folders may share a name)."""
    if code is None:
        return importlib.import_module(name)
    known = sys.modules.get(name)
    if known is not None and known.__file__ == file:
        return known
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    exec(marshal.loads(code), module.__dict__)
    return module


def _clean_up() -> None:
    """Leave nothing to the next call that this one may have set."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    forget_meshes()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # type: ignore[attr-defined]
    collect_seldom()


def _describe(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    return f"raised {type(error).__name__}\n{''.join(lines)}"
