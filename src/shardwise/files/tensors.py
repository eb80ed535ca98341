"""The reader of tensors in safetensors files, by name; each rank reads only its own parts.

    a file, an index (`*.safetensors.index.json`), or a folder with an index or files

Files are opened when needed. An index or a folder cannot cause files outside its folder to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.files.manifest import inside, read_json, refused_as, regular
from shardwise.files.stores import StrPath, on_disk

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,  # a torch element packs two values; files count each value
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open safetensors file: its whole shape, and its dtype as stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    _stored: Any

    def read(self, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Read elements from `begins` to `ends`, one index per dim; may return a view of the mapped file."""
        tensor: Tensor = self._stored[tuple(map(slice, begins, ends)) or ...]
        return tensor


class TensorFiles:
    """The tensors of several files, by name; a context manager, within which found tensors can be read.

    Args:
        paths: files, indexes or folders; if several have a name, the first is used.

    Attributes:
        known: the names listed so far, with their files; complete once `find` has returned None.
    """

    def __init__(self, paths: Iterable[StrPath]) -> None:
        self.known: dict[str, Path] = {}
        self._names = self._list(paths)
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _list(self, paths: Iterable[StrPath]) -> Iterator[str]:
        for path in paths:
            for name, file in _tensor_files(on_disk(path)):
                self.known.setdefault(name, file)
                yield name

    def names(self) -> list[str]:
        """List all tensors' names. Raises CheckpointError as `find` does."""
        return list(dict.fromkeys((*self.known, *self._names)))

    def find(self, name: str) -> StoredTensor | None:
        """Return the tensor `name`; None if no file has it.

        Raises:
            CheckpointError: a missing file or folder, a damaged file or index, a file outside the folder, or
                a dtype that torch does not have.
        """
        if name not in self.known and name not in self._names:  # lists as far as needed
            return None
        path = self.known[name]
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(_open(path))
        file = self._opened[path]
        if name not in list(file.keys()):
            raise CheckpointError(
                f"{path} does not contain {name}, though the index says so; copy both again"
            )
        tensor = file.get_slice(name)
        shape, dtype = list(tensor.get_shape()), DTYPES.get(tensor.get_dtype())
        if dtype is None:
            raise CheckpointError(f"{name}: torch has no dtype {tensor.get_dtype()}; convert the file")
        if dtype == torch.float4_e2m1fn_x2:  # safetensors would slice by the file's count
            shape[-1] //= 2
            tensor = file.get_tensor(name)
        return StoredTensor(tuple(shape), dtype, tensor)


def _tensor_files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield names of tensors and their files, which may be missing; a file may come several times."""
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            raise CheckpointError(
                f"{path}: expected one index, found {[f.name for f in indexes]}; pass one of them"
            )
        files = indexes or sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path}: expected *.safetensors files or their index, found none")
        for file in files:
            yield from _tensor_files(inside(path, file.name))
    elif path.suffix == ".json":
        yield from _index_entries(path)
    elif not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    else:
        with _open(path) as opened:
            names = list(opened.keys())
        yield from ((name, path) for name in names)


def _open(file: Path) -> Any:
    """Open a safetensors file, as a context manager."""
    opened: Any = safe_open
    with refused_as(f"{file}: not a safetensors file, or damaged", ". Copy it again"):
        return opened(regular(file), framework="pt")


def _index_entries(path: Path) -> Iterator[tuple[str, Path]]:
    try:
        entries = list(read_json(path)["weight_map"].items())
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: expected an index with a weight_map ({error!r})") from error
    files: dict[str, Path] = {}
    for name, file_name in entries:
        if not isinstance(file_name, str) or file_name not in files:
            files[file_name] = inside(path.parent, file_name)
        yield name, files[file_name]
