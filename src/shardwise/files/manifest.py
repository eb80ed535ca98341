"""What a manifest says, checked: JSON of the expected types, and digests that fit the files.

A digest finds damage, not malice: it does not say who wrote a file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.files.paths import regular

Types = Mapping[str, tuple[Callable[[Any], bool], str]]


def digest(file: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file."""
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": sha256}


def sync(path: Path) -> None:
    """Return once a file's bytes, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(file: Path) -> Any:
    """What a file of JSON holds. Raises CheckpointError for one that is missing or damaged."""
    try:
        return json.loads(regular(file).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({type(error).__name__}: {error})") from error


def check_types(file: Path, manifest: Any, types: Types) -> None:
    """Raise CheckpointError for an entry of `manifest` that is missing or not what it should be.

    Args:
        types: for each entry, whether a value is one, and what it is to be in words.
    """
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file}: expected entries by name, found {manifest!r:.100}")
    for key, (fits, what) in types.items():
        if key not in manifest or not _fits(fits, manifest[key]):
            value = manifest.get(key, "nothing")
            raise CheckpointError(f"{file}: expected {key!r} to be {what}, found {value!r:.100}")


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def all_in(kind: Any, fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Is a value a list, or a dict by name, of values that fit?"""

    def fit(found: Any) -> bool:
        return isinstance(found, kind) and all(map(fits, found.values() if kind is dict else found))

    return fit


def _fits(fits: Callable[[Any], bool], value: Any) -> bool:
    try:
        return fits(value)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
