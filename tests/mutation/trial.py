"""Tests run with one change of the source, in a fork of a process that has imported and collected them all.

The fork gives the functions concerned other code, forks a server that ranks are forked from, and runs tests
that come to the change until one fails. What an import has run already is not run again there: such changes
are tried on a copy of the package, in a new process.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.connection
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from mutation.changes import Mutant
from ranks import WORKER_ENV

SECONDS, TIMES = 60.0, 10  # a trial's limit: so long, and so many times what its tests took unchanged


@dataclass
class Trial:
    """A change with the tests that come to it; what came of it."""

    mutant: Mutant | None  # none: how the tests do by themselves
    tests: list[str]
    seconds: float
    imported: bool = False  # does an import run it?
    passed: list[list[str]] = field(default_factory=list)  # of an earlier trial, tests and their files
    verdict: str = ""  # killed, hung, survived, uncovered
    by: str = ""
    why: str = ""


@dataclass
class _Running:
    trial: Trial
    pid: int
    pipe: int
    folder: str
    deadline: float


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes(const)


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_qualname


def functions(source: Path) -> dict[tuple[str, int, str], list[FunctionType]]:
    """All functions of the package, by where they are defined."""
    found: dict[tuple[str, int, str], list[FunctionType]] = {}
    gc.unfreeze()  # frozen objects are not shown
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(str(source)):
            found.setdefault(_place(each.__code__), []).append(each)
    gc.freeze()
    return found


def change(mutant: Mutant, source: Path, known: dict[tuple[str, int, str], list[FunctionType]]) -> int:
    """Give functions the changed code; how many, 0 where it cannot be done so."""
    path, changed = source / mutant.file, 0
    text = path.read_bytes()
    old = {_place(code): code for code in _codes(compile(text, str(path), "exec", dont_inherit=True))}
    for code in _codes(compile(mutant.applied(text), str(path), "exec", dont_inherit=True)):
        if code != old[_place(code)]:
            for function in known.get(_place(code), ()):
                if function.__code__.co_freevars != code.co_freevars:
                    return 0
                function.__code__ = code
                changed += 1
    return changed


def fork_server(not_held: int) -> None:
    """Make `multiprocessing`'s server of forks a fork of this process, which has what tests import."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive_read, alive_write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(alive_write)
            os.close(not_held)
            os.environ.update(WORKER_ENV)
            try:
                forkserver.main(listener.fileno(), alive_read, [])
            finally:
                os._exit(1)
    os.close(alive_read)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = (
        address,
        alive_write,
        pid,
    )


class Trials:
    """Runs trials inside pytest, in place of the tests it collected."""

    def __init__(
        self, source: Path, batches: Iterable[list[Trial]], done: Callable[[Trial], None], workers: int
    ) -> None:
        self.source, self.batches, self.done, self.workers = source, batches, done, workers
        self.running: list[_Running] = []

    def pytest_configure(self) -> None:
        """Hypothesis neither remembers nor shrinks, and no load of the machine fails a test."""
        from hypothesis import HealthCheck, Phase, settings

        how = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
        settings.register_profile("trials", phases=[Phase.explicit, Phase.generate], **how)  # type: ignore[arg-type]
        settings.load_profile("trials")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.session = session
        self.functions = functions(self.source)
        resource_tracker.ensure_running()
        for batch in self.batches:
            for trial in batch:
                while len(self.running) >= self.workers:
                    self._wait()
                self.running.append(self._start(trial))
            while self.running:
                self._wait()
        return True

    def _start(self, trial: Trial) -> _Running:
        read, write = os.pipe()
        folder = tempfile.mkdtemp(prefix="trial-")
        pid = os.fork()
        if not pid:
            os.setsid()
            try:
                said = self._in_child(trial, folder, write)
            except (KeyboardInterrupt, SystemExit) as error:
                said = ["killed", "", repr(error)]
            except BaseException:
                said = ["error", "", traceback.format_exc()[-2000:]]
            os.write(write, json.dumps(said).encode())
            os._exit(0)
        os.close(write)
        return _Running(trial, pid, read, folder, time.monotonic() + SECONDS + TIMES * trial.seconds)

    def _in_child(self, trial: Trial, folder: str, pipe: int) -> list[str]:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        tempfile.tempdir = None
        plugins = self.session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        seen: list[pytest.TestReport] = []

        class Reports:
            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                if report.failed:
                    seen.append(report)

        plugins.register(Reports())
        items = [self.items[name] for name in trial.tests if name in self.items]
        if not items:
            return ["uncovered", "", ""]
        if trial.mutant and (trial.imported or not change(trial.mutant, self.source, self.functions)):
            return fresh(trial.mutant, [item.nodeid for item in items], self.source)
        fork_server(not_held=pipe)
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if seen:
                return ["killed", item.nodeid, (seen[0].longreprtext.splitlines() or [""])[-1][:300]]
        return ["survived", "", ""]

    def _wait(self) -> None:
        """Until one has ended."""
        while True:
            left = min(each.deadline for each in self.running) - time.monotonic()
            ready = multiprocessing.connection.wait(
                [each.pipe for each in self.running], timeout=max(0.0, left)
            )
            for each in list(self.running):
                if each.pipe in ready or time.monotonic() > each.deadline:
                    said = os.read(each.pipe, 4096) if each.pipe in ready else b'["hung", "", ""]'
                    self._end(each, json.loads(said or b'["killed", "", "died"]'))
                    return

    def _end(self, each: _Running, said: list[str]) -> None:
        os.killpg(each.pid, signal.SIGKILL)
        os.waitpid(each.pid, 0)
        os.close(each.pipe)
        shutil.rmtree(each.folder, ignore_errors=True)
        self.running.remove(each)
        trial = each.trial
        trial.verdict, trial.by, trial.why = said
        if trial.verdict == "error":
            raise RuntimeError(f"could not try {trial.mutant}: {trial.why}")
        self.done(trial)


def fresh(mutant: Mutant, tests: list[str], source: Path) -> list[str]:
    """Try it in a process that imports the changed package; what `Trials` tells."""
    package = Path(tempfile.mkdtemp()) / source.name
    shutil.copytree(source, package)
    changed = package / mutant.file
    changed.write_bytes(mutant.applied(changed.read_bytes()))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(package.parent), "tests", "."])}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not run.returncode:
        return ["survived", "", ""]
    lines = run.stdout.splitlines() or ["died"]
    failed = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    by, _, why = failed[0].partition(" - ") if failed else ("", "", lines[-1])
    return ["killed", by, why[:300]]
