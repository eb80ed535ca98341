"""The files that a checkpoint may have read: those inside its folder.

A checkpoint from elsewhere names files: in a manifest, in an index, by being links. Wherever the library
follows such a name it does so by `inside`, so that no checkpoint can have anything else on the machine
read. What a user names, a folder or a file, is followed as it is.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, cast

from shardwise.errors import CheckpointError
from shardwise.files.stores import At


def inside(folder: At, name: Any) -> At:
    """Return the file `name` of `folder`, which may be missing.

    Raises:
        CheckpointError: a name that is no text or leaves the folder, by itself or through links.
    """
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{folder}: expected the name of a file in it, found {name!r}; not read")
    lexical = PurePosixPath(name)
    if lexical.is_absolute() or ".." in lexical.parts:
        raise CheckpointError(f"{folder}: {name!r} lies outside the folder; not read")
    if isinstance(folder, Path):
        _check_links(folder, name)
    return cast(At, folder / name)


def _check_links(folder: Path, name: str) -> None:
    try:
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise CheckpointError(f"{folder}: {name!r} cannot be a file in it ({error}); not read") from error
    if not real.is_relative_to(home):
        raise CheckpointError(
            f"{folder}: {name!r} is a link to {real}, outside the folder; not read. Copy the file to"
            " where the link is, or name the files themselves"
        )


def regular(file: At) -> At:
    """Return `file`, which must be there. Of anything else, a pipe say, reading might never end."""
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; expected a file. Copy it again, or use another checkpoint")
    return file
