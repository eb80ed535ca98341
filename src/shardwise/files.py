"""Which files a checkpoint may have read: those inside its folder.

A checkpoint from elsewhere names files: in a manifest, in an index, by being links. Wherever the library
follows such a name it does so by `inside`, so that no checkpoint can have anything else on the machine
read. What a user names, a folder or a file, is followed as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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


def tensor_files(path: Path) -> Iterator[tuple[list[str], Path]]:
    """Names of tensors, and the safetensors file that has them; a file may come several times.

    Args:
        path: a file, an index (`*.safetensors.index.json`), or a folder with one or files. Files that an
        index
            names may be missing.

    Raises:
        CheckpointError: no such file or folder, a damaged file or index, files outside the folder.
    """
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            raise CheckpointError(
                f"{path}: expected one index, found {[f.name for f in indexes]}; name one of them"
            )
        files = indexes or sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{path} is no folder of safetensors: expected *.safetensors files or their index, found none"
            )
        for file in files:
            yield from tensor_files(inside(path, file.name))
    elif path.suffix == ".json":
        yield from _of_index(path)
    elif not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    else:
        with open_tensors(path) as opened:
            names = list(opened.keys())
        yield names, path


def open_tensors(file: Path) -> Any:
    """A safetensors file, opened: a context manager.

    Raises:
        CheckpointError: a missing or damaged file; no safetensors package.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError("reading safetensors files needs `pip install safetensors`") from error
    opened: Any = safe_open
    try:
        return opened(regular(file), framework="pt")
    except CheckpointError:
        raise
    except Exception as error:  # SafetensorError, which is an Exception only, and what reading raises
        raise CheckpointError(
            f"{file}: no safetensors file, or damaged ({type(error).__name__}: {error}). Copy it again"
        ) from error


def _of_index(path: Path) -> Iterator[tuple[list[str], Path]]:
    try:
        places = json.loads(regular(path).read_text())["weight_map"]
        named = list(places.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected an index with a weight_map ({error!r})") from error
    files: dict[str, Path] = {}
    for name, file_name in named:
        if not isinstance(file_name, str) or file_name not in files:
            files[file_name] = inside(path.parent, file_name)
        yield [name], files[file_name]
