"""Copies of a run's state in its hosts' memory: if a host is lost, ranks continue without storage.

A copy is an ordinary checkpoint, in a folder that each host has in its own memory (tmpfs):

    /dev/shm/run on host A     step-00000050/   __0_0.distcp  __1_0.distcp    its own ranks' parts
                                                __2_0.distcp  __3_0.distcp    those of the host before it
                                                .metadata  manifest.json      of all
    /dev/shm/run on host B     step-00000050/   __2_0.distcp  __3_0.distcp  __0_0.distcp  __1_0.distcp  ...

A host's memory outlives the processes of its ranks. The previous copy is removed once all hosts have the new
one, so the other hosts have whatever any one host loses.

    write     each rank writes its part into its own host's folder; the run waits only for this
    send      to the next host, from file to file: in a thread, over a separate gloo group
    commit    on each host (`commit.py`); then remove the previous copy
    load      the newest copy of which every file is on some host. Each host gets the files that its ranks
              read and it lacks; then as from storage (`read.py`)
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch

from shardwise.checkpoint import commit
from shardwise.checkpoint.commit import check_count, checkpoints, rank_and_size
from shardwise.checkpoint.index import INDEX
from shardwise.checkpoint.part import Part, write_part
from shardwise.checkpoint.plan import Plan, bytes_of
from shardwise.checkpoint.read import Checkpoint, files_for, fill, open_checkpoint
from shardwise.checkpoint.write import Job, prepare_save
from shardwise.comm.agree import each_its_own, merge_or_raise, together
from shardwise.comm.watch import announced, group_of_all
from shardwise.errors import CheckpointError
from shardwise.files.manifest import MANIFEST, digest, whole_file
from shardwise.files.stores import StrPath, on_disk

_TAG = 0x7B100000
_CHUNK_BYTES = 4096  # the most that a chunk in a file takes besides its numbers
_COPY = "copying to memory"
_T = TypeVar("_T")


class Message(NamedTuple):
    """A file that one rank sends to another."""

    sender: int
    receiver: int
    name: str
    bytes: int


class _Copy(NamedTuple):
    """A copy that the hosts have together."""

    step: int
    folders: dict[int, str]  # by host
    files: dict[int, dict[str, int]]  # names and bytes, by host


class HostMemory:
    """Copies of a state in the memory of hosts: the newest, and the previous one until that is complete.

    Making one and every call are collective over the default process group; without one, only this process
    takes part.

    Args:
        path: a folder in memory that only a host's ranks of this run share: `/dev/shm/NAME`. Its content
            outlives the ranks; end a run with `clear`.
        limit_bytes: the most that this host's files may take. A copy takes what the host's own ranks write,
            plus what the previous host's ranks write; while a new copy is made, the old one exists too.
    """

    def __init__(self, path: StrPath, *, limit_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._rank, size = rank_and_size()
        self._group = group_of_all("make a HostMemory") if size > 1 else None
        hosts = together("sharing memory", lambda: f"{socket.gethostname()}:{on_disk(path).absolute()}")
        self._path = on_disk(path)
        self._hosts = [hosts.index(host) for host in hosts]
        self._host = self._hosts[self._rank]
        self._sending: threading.Thread | None = None
        self._problem: str | None = None
        _memories.add(self)

    def save(self, state: dict[str, Any], *, step: int) -> None:
        """Copy `state`, as for `checkpoint.save`; return once this rank's part is in its host's memory.

        The part is sent to the next host while the run continues. One copy is made at a time: the next waits.

        Raises:
            CheckpointError: on every rank, if any fails or has no room, or the previous copy failed; the
                newest complete copy is untouched.
        """
        self.wait()
        job = prepare_save(
            "HostMemory.save of", self._path, state, step=step, hosts=self._hosts, check_room=self._check_room
        )
        with job.cleaning():
            parts = together(job.operation, lambda: write_part(job.staging, self._rank, job.local_chunks()))
        self._sending = threading.Thread(
            target=self._send, args=(job, parts), name="shardwise-memory", daemon=True
        )
        self._sending.start()

    def wait(self) -> None:
        """Return once the current copy is complete on all hosts. Raises the errors of `save`."""
        together("waiting for a copy", self._end_sending)

    def load(self, state: dict[str, Any], *, newer_than: int | None = None) -> int | None:
        """Fill `state` from the newest whole copy, as `checkpoint.load` does; return its step.

        Returns None, with the state untouched, if for no copy every file is on some host, or no copy is of a
        later step than `newer_than`, such as the newest in storage. A warning names damaged copies.

        Raises:
            CheckpointError: on every rank, if the names, shapes or dtypes of state and copy differ, or ranks
                differ in `newer_than`.
        """
        self.wait()
        operation = "HostMemory.load"

        def tell() -> dict[str, Any]:
            check_count("newer_than", newer_than, 0, optional=True)
            copies = self._list_copies() if self._rank == self._host else {}
            return {"call": {"newer_than": newer_than}, "listed": copies}

        by_rank = together(operation, tell)
        fix = "Give the same on every rank, such as what rank 0 broadcasts"
        merge_or_raise(operation, by_rank, {"call": fix})
        for copy in _complete([answer["listed"] for answer in by_rank]):
            if newer_than is not None and copy.step <= newer_than:
                break
            checkpoint = self._fetch(copy, state)
            if checkpoint is not None:
                return fill(checkpoint, state)
        return None

    def clear(self) -> None:
        """Remove all copies, at the end of a run."""
        self.wait()
        together("HostMemory.clear", lambda: self.keep_only(None))

    # Saving

    def _check_room(self, plan: Plan) -> None:
        if self._limit is None:
            return
        host_ranks = {rank for rank, host in enumerate(self._hosts) if host == self._host}
        copied_ranks = {rank for rank, keeper in enumerate(neighbours(self._hosts)) if keeper in host_ranks}
        chunks = [chunk for rank in host_ranks | copied_ranks for chunk in plan.of(rank)]
        present_bytes = sum(
            file.stat().st_size for *_, folder in checkpoints(self._path) for file in folder.iterdir()
        )
        needed_bytes = present_bytes + sum(bytes_of(chunk) + _CHUNK_BYTES for chunk in chunks)
        if needed_bytes > self._limit:
            raise CheckpointError(
                f"{self._path}: with a copy this host would use {needed_bytes} bytes of memory, more than"
                f" limit_bytes={self._limit}; raise limit_bytes, or spread the state over more ranks"
            )

    def _send(self, job: Job, parts: list[Part]) -> None:
        """Send the parts of a copy to other hosts and publish it. Runs in a thread."""
        try:
            sizes = {name: file["bytes"] for part in parts for name, file in part["files"].items()}
            requests: list[list[str]] = [[] for _ in self._hosts]
            files: dict[int, dict[str, int]] = {host: {} for host in self._hosts}
            for rank, keeper in enumerate(neighbours(self._hosts)):
                files[self._hosts[rank]] |= {name: sizes[name] for name in parts[rank]["files"]}
                if keeper is not None:
                    requests[keeper] += parts[rank]["files"]
            self._carry(Path(job.staging), messages(requests, files=files, hosts=self._hosts))
            index = together(_COPY, lambda: job.index(parts) if self._rank == 0 else {}, group=self._group)[0]
            size = index[INDEX]["bytes"]
            requests = [[INDEX] if rank == host else [] for rank, host in enumerate(self._hosts)]
            self._carry(Path(job.staging), messages(requests, files={0: {INDEX: size}}, hosts=self._hosts))
            is_first = self._rank == self._host
            folders = together(
                _COPY, lambda: str(job.publish(parts, index)) if is_first else "", group=self._group
            )
            together(_COPY, lambda: self.keep_only(folders[self._rank]), group=self._group)
        except Exception as error:
            self._problem = str(error)

    def keep_only(self, newest: str | None) -> None:
        """Remove this host's other copies. Local."""
        for *_, folder in checkpoints(self._path):
            if self._rank == self._host and str(folder) != newest:
                commit.remove(folder)

    def _end_sending(self) -> None:
        if self._sending is not None:
            self._sending.join()
        problem, self._problem, self._sending = self._problem, None, None
        if problem is not None:
            raise CheckpointError(problem)

    # Loading

    def _list_copies(self) -> dict[str, dict[str, Any]]:
        """List this host's copies, or parts of them: by digest, the existing and the expected files."""
        copies = {}
        for step, version, folder in checkpoints(self._path):
            with suppress(CheckpointError, OSError):
                sha256 = digest(folder / MANIFEST)["sha256"]
                names = {*commit.manifest_of(folder)["files"], MANIFEST}
                sizes = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
                entry = {"step": step, "version": version, "folder": str(folder)}
                copies[sha256] = {**entry, "files": sizes, "names": sorted(names)}
        return copies

    def _fetch(self, copy: _Copy, state: dict[str, Any]) -> Checkpoint | None:
        """Fetch into this host's folder all files of the copy that its ranks read; return None if damaged."""
        operation = f"HostMemory.load of step {copy.step} from {self._path}"
        lacks = self._rank == self._host and self._host not in copy.folders
        opened = together(operation, lambda: str(commit.open_staging(self._path, copy.step)) if lacks else "")
        folder = Path(copy.folders.get(self._host) or opened[self._host])
        requests = [[INDEX, MANIFEST] if rank == host else [] for rank, host in enumerate(self._hosts)]
        self._carry(folder, messages(requests, files=copy.files, hosts=self._hosts))

        def open_copy() -> Checkpoint:
            return open_checkpoint(folder, lambda _, files: whole_file(folder, INDEX, files[INDEX]))

        checkpoint = _if_sound(operation, open_copy)
        if checkpoint is None:
            return None
        requests = together(operation, lambda: files_for(checkpoint, state))
        self._carry(folder, messages(requests, files=copy.files, hosts=self._hosts))
        files, names = checkpoint.manifest["files"], requests[self._rank]
        sound = _if_sound(operation, lambda: all(whole_file(folder, name, files[name]) for name in names))
        return checkpoint if sound else None

    # Both

    def _carry(self, folder: Path, all_messages: Sequence[Message]) -> None:
        """Send files of `folder` to other hosts, and receive theirs. Collective."""
        if not all_messages:
            return
        local = [message for message in all_messages if self._rank in (message.sender, message.receiver)]
        received = [message for message in local if message.receiver == self._rank]
        together(_COPY, lambda: _reserve(folder, received), group=self._group)
        works = []
        assert self._group is not None
        with announced(self._group, "send copies"):
            for message in local:
                if message.bytes and message.sender == self._rank:
                    numbers = _map_file(folder / message.name, message.bytes)
                    works.append(self._group.send([numbers], message.receiver, _TAG))
                elif message.bytes:
                    numbers = _map_file(folder / f"{message.name}.new", message.bytes)
                    works.append(self._group.recv([numbers], message.sender, _TAG))
            for work in works:
                work.wait()
        for message in received:
            (folder / f"{message.name}.new").rename(folder / message.name)
        together(_COPY, lambda: None, group=self._group)


def neighbours(hosts: Sequence[int]) -> list[int | None]:
    """Return, by rank, the rank on the next host that keeps a copy of its part; None with a single host."""
    ranks = {host: [rank for rank, each in enumerate(hosts) if each == host] for host in hosts}
    if len(ranks) == 1:
        return [None] * len(hosts)
    by_host = list(ranks.values())
    following = dict(zip(ranks, [*by_host[1:], by_host[0]], strict=True))
    positions = [ranks[host].index(rank) for rank, host in enumerate(hosts)]
    return [following[host][i % len(following[host])] for host, i in zip(hosts, positions, strict=True)]


def messages(
    requests: Sequence[Sequence[str]], *, files: Mapping[int, Mapping[str, int]], hosts: Sequence[int]
) -> list[Message]:
    """Return the messages that give every host the files that its ranks request: equal on every rank.

    `files` has names and bytes by host, `hosts` the first rank of each rank's host.
    """
    sent_bytes, pairs, planned = [0] * len(hosts), set(), []
    for receiver, names in enumerate(requests):
        for name in names:
            if name in files.get(hosts[receiver], ()) or (hosts[receiver], name) in pairs:
                continue
            pairs.add((hosts[receiver], name))
            holders = [rank for rank, host in enumerate(hosts) if name in files.get(host, ())]
            sender = min(holders, key=lambda rank: (sent_bytes[rank], rank))
            size = files[hosts[sender]][name]
            sent_bytes[sender] += size
            planned.append(Message(sender, receiver, name, size))
    return planned


def _complete(listed: Sequence[Mapping[str, Any]]) -> Iterator[_Copy]:
    """Yield the copies of which every file is on some host, newest first."""
    entries: dict[str, dict[int, Any]] = {}
    for host, copies in enumerate(listed):
        for key, entry in copies.items():
            entries.setdefault(key, {})[host] = entry
    newest = {key: max((e["step"], e["version"]) for e in hosts.values()) for key, hosts in entries.items()}
    for key in sorted(entries, key=lambda key: (newest[key], key), reverse=True):
        hosts = entries[key]
        files = {host: entry["files"] for host, entry in hosts.items()}
        names = next(iter(hosts.values()))["names"]
        if {*names} <= {name for sizes in files.values() for name in sizes}:
            folders = {host: entry["folder"] for host, entry in hosts.items()}
            yield _Copy(newest[key][0], folders, files)


def _if_sound(operation: str, read: Callable[[], _T]) -> _T | None:
    """Return the result of `read`; None if a rank finds damage, which causes a warning. Collective."""
    try:
        return each_its_own(operation, read)
    except CheckpointError as error:
        warnings.warn(f"{error}\nContinuing from an older copy, if there is one", stacklevel=4)
        return None


def _reserve(folder: Path, received: Sequence[Message]) -> None:
    """Reserve memory for files: writing to mapped memory that does not exist would end the process."""
    for message in received:
        with (folder / f"{message.name}.new").open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, message.bytes))
                file.truncate(message.bytes)
            except OSError as error:
                raise CheckpointError(f"{folder}: {error}; no room for {message.bytes} bytes") from error


def _map_file(file: Path, size: int) -> torch.Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)


_memories: WeakSet[HostMemory] = WeakSet()


def _finish() -> None:
    """Wait for the current copy when a process ends without error."""
    if getattr(sys, "last_value", None) is None:
        for memory in list(_memories):
            if memory._sending is not None:
                memory._sending.join()


atexit.register(_finish)
