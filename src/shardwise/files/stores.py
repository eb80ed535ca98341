"""Locations of checkpoints: a folder of the file system, or objects in a store that an `fsspec` URL names.

    a path, file://...      a `Path`: renames are atomic, files are synced
    s3://bucket/run, ...    a `StorePath`: a store has no rename, but an object is complete or absent

`StorePath` has the methods of `Path` that are needed. Functions handle what differs: how to write a file so
that it is complete or absent, how to confirm that it is written, how to remove a folder.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from shardwise.errors import CheckpointError, from_extra

_LOCAL = ("file", "local")
_SMALL_BYTES = 1 << 16  # the least to request when parts of a file are read


@dataclass(frozen=True)
class StorePath:
    """An object in a store, or a folder of objects. `str` and `os.fspath` give its URL."""

    path: PurePosixPath  # within the store, as fsspec names it
    system: Any = field(compare=False, repr=False)  # fsspec's file system

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(str(self.path)))

    __fspath__ = __str__

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.path / name, self.system)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> StorePath:
        return StorePath(self.path.parent, self.system)

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the entries of this folder, as the store lists them now; none if it is not a folder."""
        self.system.invalidate_cache()
        try:
            entries = self.system.ls(str(self.path), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        names = {PurePosixPath(str(entry)).name for entry in entries}
        yield from (self / name for name in sorted(names - {self.name, ""}))

    def is_dir(self) -> bool:
        return any(True for _ in self.iterdir())

    def is_file(self) -> bool:
        self.system.invalidate_cache()
        return bool(self.system.isfile(str(self.path)))

    def read_bytes(self) -> bytes:
        return bytes(self.system.cat_file(str(self.path)))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def open(self, mode: str = "rb") -> Any:
        """Open a stream: `rb` requests only the ranges read; `wb` creates the object when closed."""
        if mode == "rb":
            path, system = str(self.path), self.system
            size = int(system.size(path))
            ranges = Ranges(size, lambda at, end: system.cat_file(path, start=at, end=end), str(self))
            return io.BufferedReader(ranges, _SMALL_BYTES)
        return self.system.open(str(self.path), mode)

    def unlink(self) -> None:
        self.system.rm_file(str(self.path))


Location = Path | StorePath
At = TypeVar("At", bound=Location)
StrPath = str | os.PathLike[str]


def location(path: StrPath) -> Location:
    """Return the location of a path or `fsspec` URL; a store's client reads keys from the environment.

    Raises CheckpointError for an unknown protocol or missing client, ShardwiseError without `fsspec`.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or "://" not in text:
        return Path(os.path.expanduser(text))
    core = from_extra("stores", "fsspec.core", feature=text)
    try:
        system, inside = core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{text}: {error}. Expected a folder, or a URL whose fsspec client is installed: pip install"
            " 'shardwise[s3]' (for s3://), gcsfs (for gs://) or adlfs (for abfs://)"
        ) from error
    protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    at = PurePosixPath(inside or system.root_marker)
    return Path(inside) if set(_LOCAL) & set(protocols) else StorePath(at, system)


def on_disk(path: StrPath) -> Path:
    """Return a path of the file system, for code that cannot use a store: raises for the URL of one."""
    place = location(path)
    if isinstance(place, StorePath):
        raise CheckpointError(
            f"{path}: expected a path in the file system, found the URL of a store, which is for checkpoints"
            " only; use a local folder, and copy it from or to the store with fsspec's get or put"
        )
    return place


@contextmanager
def new_file(file: Location) -> Iterator[Any]:
    """Open an unbuffered stream into a new file, which is stored when the context ends without error."""
    if isinstance(file, StorePath):
        with file.open("wb") as stream:
            yield stream
        return
    with file.open("wb", buffering=0) as stream:
        yield stream
        os.fsync(stream.fileno())


def write_whole(file: Location, content: bytes) -> None:
    """Write a file atomically; return once it is on disk, or in the store."""
    if isinstance(file, StorePath):
        file.system.pipe_file(str(file.path), content)
        return
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(content)
    sync(new)
    new.rename(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Return once a file's bytes, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Location) -> None:
    """Remove a folder and everything in it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        with suppress(FileNotFoundError):
            folder.system.rm(str(folder.path), recursive=True)


class Ranges(io.RawIOBase):
    """A stream of `size` bytes, of which `fetch(begin, end)` returns a range; a read is one call of it."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes], name: str = "") -> None:
        self.name, self._size, self._fetch, self._at = name, size, fetch, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"seek to {at}")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        end = min(self._at + len(room), self._size)
        content = self._fetch(self._at, end) if self._at < end else b""
        room[: len(content)] = content
        self._at += len(content)
        return len(content)
