"""Which files a checkpoint may have read: those inside its folder.

A checkpoint from elsewhere names files: in a manifest, in an index, by being links. Wherever the library
follows such a name it does so by `inside`, so that no checkpoint can have anything else on the machine
read. What a user names, a folder or a file, is followed as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError


def inside(folder: Path, name: Any) -> Path:
    """The file `name` of `folder`, which may be missing.

    Raises:
        CheckpointError: a name that is no text or leaves the folder, by itself or through links.
    """
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{folder}: expected the name of a file in it, found {name!r}; not read")
    try:
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise CheckpointError(f"{folder}: {name!r} cannot be a file in it ({error}); not read") from error
    lexical = Path(name)
    if lexical.is_absolute() or ".." in lexical.parts:
        raise CheckpointError(f"{folder}: {name!r} lies outside the folder; not read")
    if not real.is_relative_to(home):
        raise CheckpointError(
            f"{folder}: {name!r} is a link to {real}, outside the folder; not read. Copy the file to"
            " where the link is, or name the files themselves"
        )
    return folder / name


def regular(file: Path) -> Path:
    """`file`, which must be there. Of anything else, a pipe say, reading might never end."""
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; expected a file. Copy it again, or use another checkpoint")
    return file
