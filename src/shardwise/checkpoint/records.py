"""Read a pickle as pure data: a few known records, and nothing else.

Python's own unpickler runs what a pickle names, and allocates the memory that it asks for. This one knows
only the instructions that build numbers, texts, tuples, lists, dicts and the given records; other
instructions or names end the reading. It is in Python, since the C unpickler allocates by numbers in the
pickle rather than by its length.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

from shardwise.errors import CheckpointError
from shardwise.files.manifest import refused_as

_KNOWN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.BINPERSID),
)
_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = {code[0]: _PythonUnpickler.dispatch[code[0]] for code in _KNOWN}

    find: Callable[[str, str], Any]
    records: tuple[type, ...]

    def find_class(self, module: str, name: str) -> Any:
        if (value := self.find(module, name)) is None:
            raise CheckpointError(f"names {module}.{name}, which a checkpoint has no use for; not read")
        return value

    def build_record(self) -> None:
        if type(self.stack[-2]) not in self.records:  # never anything that outlives this reading
            raise CheckpointError(f"changes a {type(self.stack[-2]).__name__}, which is no record; not read")
        _PythonUnpickler.load_build(self)

    dispatch[pickle.BUILD[0]] = build_record


def _refuse(reference: Any) -> Any:
    raise CheckpointError(f"refers to {reference!r:.100}, which is elsewhere; not read")


def read_records(
    content: bytes,
    *,
    find: Callable[[str, str], Any],
    records: tuple[type, ...] = (),
    persistent: Callable[[Any], Any] = _refuse,
) -> Any:
    """Read the pickle `content`; raises CheckpointError if it is damaged, or names or does anything else.

    Args:
        find: returns the object for a module and name, or None to refuse it.
        records: classes whose instances a pickle may fill with attributes.
        persistent: returns the object for a persistent id.
    """
    unpickler: Any = _Unpickler(io.BytesIO(content))
    unpickler.find, unpickler.records, unpickler.persistent_load = find, records, persistent
    with refused_as("damaged"):
        return unpickler.load()
