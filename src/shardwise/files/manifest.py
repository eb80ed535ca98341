"""Checks that the files of a checkpoint are inside its folder and intact.

A checkpoint from an untrusted source names files: in a manifest, in an index, or through links. The
library resolves such names only with `inside`, so no checkpoint can make it read other files of the machine.
A folder or file that the user names is used as given.

A manifest is JSON of the expected types, with digests that match the files:

    format     what the folder is, by name or number
    files      {name: {"bytes": int, "sha256" or "xxh3_128": hexadecimal digits}} of the other files
    sha256     of the manifest without this entry

and any other entries of the format. A digest detects damage, not malice: it does not say who wrote a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, cast

import xxhash

from shardwise.errors import CheckpointError
from shardwise.files.stores import At, Location, StorePath, write_whole


@contextmanager
def refused_as(problem: str, advice: str = "") -> Iterator[None]:
    """Raise whatever damaged content leads to as a CheckpointError that begins with `problem`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{problem} ({type(error).__name__}: {error}){advice}") from error


def inside(folder: At, name: Any) -> At:
    """Return the path of `name` in `folder`, which may be missing; raises for a name that leads elsewhere."""
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{folder}: expected a file name, found {name!r}; refusing to read it")
    lexical = PurePosixPath(name)
    if lexical.is_absolute() or ".." in lexical.parts:
        raise CheckpointError(f"{folder}: {name!r} is outside the folder; refusing to read it")
    if isinstance(folder, Path):
        _check_links(folder, name)
    return cast(At, folder / name)


def _check_links(folder: Path, name: str) -> None:
    try:
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise CheckpointError(f"{folder}: refusing to read {name!r}: {error}") from error
    if not real.is_relative_to(home):
        raise CheckpointError(
            f"{folder}: {name!r} is a link to {real}, outside the folder; refusing to read it."
            " Replace the link with a copy of the file, or pass the files themselves"
        )


def regular(file: At) -> At:
    """Return `file`, which must be a regular file: reading a pipe, for example, might never end."""
    if not file.is_file():
        raise CheckpointError(f"{file}: missing, or not a file; copy it again, or use another checkpoint")
    return file


MANIFEST = "manifest.json"
Types = Mapping[str, tuple[Callable[[Any], bool], str]]  # by entry: a check, and what is expected
HASHES: Mapping[str, Callable[..., Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}
_CHUNK_BYTES, _REQUEST_BYTES = 1 << 20, 16 << 20  # per read, of a file and of an object in a store


def write_manifest(folder: Location, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of `folder` atomically; return once it is on disk."""
    text = json.dumps({**manifest, "sha256": _own_digest(manifest)}, indent=1) + "\n"
    write_whole(folder / MANIFEST, text.encode())


def read_manifest(folder: Location, *, formats: tuple[int | str, ...], types: Types) -> dict[str, Any]:
    """Return the manifest of `folder` without its own digest; raises if its format or a type is another."""
    file = inside(folder, MANIFEST)
    manifest: dict[str, Any] = read_json(file)
    check_types(file, manifest, {"format": (formats.__contains__, " or ".join(map(repr, formats)))})
    expected = manifest.pop("sha256", None)
    if _own_digest(manifest) != expected:
        raise CheckpointError(f"{file}: its content does not match its own sha256")
    check_types(file, manifest, {"files": (all_in(dict, _is_file), "sizes and digests by name"), **types})
    return manifest


def whole_file(folder: At, name: str, expected: Mapping[str, Any]) -> At:
    """Return the path of `name`; raises unless it is inside `folder` and has the expected digest."""
    file = regular(inside(folder, name))
    if (actual := digest(file, _kind(expected))) != expected:
        raise CheckpointError(f"{file}: damaged (expected {expected}, found {actual})")
    return file


def _own_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _is_file(value: Any) -> bool:
    kind = _kind(value)
    return is_count(value["bytes"]) and isinstance(value[kind], str) and len(value) == 2


def _kind(entry: Mapping[str, Any]) -> str:
    return next((kind for kind in HASHES if kind in entry), "sha256")


def digest(file: Location, kind: str = "sha256") -> dict[str, Any]:
    """Return a file's size in bytes and its hash; `kind` is one of `HASHES`."""
    hasher, size = HASHES[kind](), 0
    chunk = bytearray(_REQUEST_BYTES if isinstance(file, StorePath) else _CHUNK_BYTES)
    with file.open("rb") as stream:
        while count := stream.readinto(chunk):
            hasher.update(memoryview(chunk)[:count])
            size += count
    return {"bytes": size, kind: hasher.hexdigest()}


def read_json(file: Location) -> Any:
    """Return the parsed content of a JSON file. Raises CheckpointError if it is missing or damaged."""
    with refused_as(f"{file}: cannot be read"):
        return json.loads(regular(file).read_text())


def check_types(file: Location, manifest: Any, types: Types) -> None:
    """Raise CheckpointError for an entry of `manifest` that is missing or fails its check."""
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {manifest!r:.100}")
    for key, (check, description) in types.items():
        valid = False
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            valid = key in manifest and check(manifest[key])
        if not valid:
            value = manifest.get(key, "nothing")
            raise CheckpointError(f"{file}: expected {key!r} to be {description}, found {value!r:.100}")


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def all_in(kind: Any, check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check that a value is a list, or a dict by name, whose items all pass `check`."""

    def check_all(value: Any) -> bool:
        return isinstance(value, kind) and all(map(check, value.values() if kind is dict else value))

    return check_all
