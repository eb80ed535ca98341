"""Start ranks on this machine and, if one fails, print the cause once and nothing else.

`launch` runs torchrun on one machine, without the traceback and log that torchrun prints around an error.
`report_errors` decides what a rank prints for an uncaught error:

    mistakes (`ShardwiseError`, an impossible mesh or rendezvous)   one line: where, what, remedy
    anything else                                                   its traceback

If several ranks of one machine would print the same text, but for their own numbers, one does; and of long
texts that begin differently and go on alike, others print the first line. After the first error, others get
one line each, as most say only that a peer is gone. SHARDWISE_TRACEBACK=1 shows everything, from every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from shardwise.errors import ShardwiseError

TRACEBACK = "SHARDWISE_TRACEBACK"
_MARK = "shardwise-said-"
_NOTE = "shardwise-note-"
_DETAILS = "shardwise-details-"
_WHOSE = re.compile(r"\brank \d+( \([^)]*\))?:$", re.MULTILINE)  # as in `Only on rank 1:`
_SETTING_UP = ("rendezvous.py", "device_mesh.py")  # files of torch.distributed whose errors are mistakes
_reporting: list[bool] = []  # [True] once `report_errors` was called
_REMEDIES = {
    "environment variable": "start it with `shardwise run --ranks N SCRIPT` or torchrun, which set it",
    "EADDRINUSE": "choose another --master-port, or use --standalone, which finds a free port",
}


def on_ranks(ranks: int) -> None:
    """Run this script in `ranks` processes, and return in each of them.

    Returns at once if a launcher started this process. Otherwise starts the processes with the same
    arguments, and exits with their status. From here on, `report_errors` shows uncaught errors.
    """
    report_errors()
    if "RANK" not in os.environ:
        sys.exit(launch(sys.argv, ranks=ranks))


def launch(command: Sequence[str], *, ranks: int) -> int:
    """Run `python *command` in `ranks` local processes under torchrun's agent.

    Returns the exit status of the first process to fail, or 0.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not shows_all():
        logging.disable(logging.ERROR)  # in this process, which does nothing else
    try:
        parser = run.get_args_parser()
        parser.allow_abbrev = False  # or it would take script arguments that are prefixes of its own
        run.run(parser.parse_args(["--standalone", f"--nproc-per-node={ranks}", *command]))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            if failure.exitcode != 1:  # with 1, the rank has said why
                print(f"rank {rank} exited with status {failure.exitcode}", file=sys.stderr)
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        print(f"rank {rank} was killed by {name}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as ended:
        return 128 + int(ended.sigval)
    return 0


def report_errors() -> None:
    """Show this process's uncaught errors as the module docstring describes, from now on."""
    sys.excepthook = _show
    _reporting[:] = [True]  # torch wraps the hook


def prints_errors_once() -> bool:
    """Return whether an uncaught error of this process is printed by one rank of those that have it."""
    return bool(_reporting) and not shows_all()


def shows_all() -> bool:
    """Return whether the user asked for every traceback."""
    return os.environ.get(TRACEBACK, "0") not in ("", "0")


def is_mistake(error: BaseException) -> bool:
    """Return whether the error's own text says what to fix, so that no traceback is needed."""
    if isinstance(error, ShardwiseError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return "EADDRINUSE" in _text_of(error) or (bool(frames) and Path(frames[-1].filename).name in _SETTING_UP)


def one_line(error: BaseException) -> str:
    """Return `train.py:12: ShardingError: what is wrong`, with the user's line that led to the error."""
    text = _text_of(error)
    if not isinstance(error, ShardwiseError):
        text = text.partition("\n")[0]
    text = "; ".join([text, *(remedy for sign, remedy in _REMEDIES.items() if sign in text)])
    kind = type(error).__name__
    return ": ".join(part for part in (place(error), kind, text) if part)


def _text_of(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # in `__str__`, which is the user's
        return "<exception str() failed>"  # as tracebacks say


def place(error: BaseException) -> str:
    """Return `train.py:12`: the innermost line outside installed packages; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(path := Path(frame.filename)):
            inside = path.resolve().is_relative_to(Path.cwd())
            return f"{os.path.relpath(path) if inside else path}:{frame.lineno}"
    return ""


def _is_users(path: Path) -> bool:
    """Return whether `path` is a user's file: not part of an installed package, the command or Python."""
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    own_folders = (Path(__file__).parent, Path(os.__file__).parent)
    if path.name == "shardwise" or installed:
        return False
    return path.is_file() and not any(path.is_relative_to(folder) for folder in own_folders)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if shows_all():
        sys.__excepthook__(kind, error, trace)
    elif not issubclass(kind, KeyboardInterrupt):
        tb: TracebackType | None = trace  # starts at the user's own code
        while tb is not None and not _is_users(Path(tb.tb_frame.f_code.co_filename)):
            tb = tb.tb_next
        if tb is None and not issubclass(kind, SyntaxError):  # a SyntaxError names its own line
            tb = trace
        whole = "".join(traceback.format_exception(kind, error, tb)).strip()
        message = one_line(error)
        with contextlib.redirect_stderr(sys.__stderr__):  # torch's own hook would add text
            say(message, whole="" if is_mistake(error) else whole)


def say(line: str, *, whole: str = "") -> None:
    """Print `line` on stderr once per machine, or `whole`, if given and no error was printed before.

    Of a `line` of several lines, the first is printed without the others if another rank has said these.
    """
    text, marks = whole or line, _marks()
    if whole and marks is not None and any(marks.glob(f"{_MARK}*")):
        text = line
    own_rank = rf"\brank {os.environ.get('RANK')}( \([^)]*\))?: "
    first, _, details = line.partition("\n")
    is_new = _is_first(_MARK, re.sub(own_rank, "", first, count=1))
    if details and not _is_first(_DETAILS, _WHOSE.sub("", details)):
        text = first
    elif details:
        is_new = True
    if is_new:
        if marks is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            text = f"rank {os.environ['RANK']}: {text}"
        print(text, file=sys.stderr, flush=True)


def note(line: str) -> None:
    """Print `line`, which reports no error, on stderr once per machine."""
    if _is_first(_NOTE, line):
        print(line, file=sys.stderr, flush=True)


def _is_first(mark: str, line: str) -> bool:
    """Return whether this rank is the first of its machine to ask; True if ranks cannot know."""
    if (marks := _marks()) is None:
        return True
    digest = hashlib.sha256(line.encode(errors="surrogatepass")).hexdigest()[:16]
    try:
        (marks / f"{mark}{digest}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _marks() -> Path | None:
    """Return the folder that torchrun made for this attempt's ranks on this machine, or None."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = Path(error_file).parent.parent if error_file else None
    return folder if folder is not None and folder.is_dir() and "RANK" in os.environ else None
