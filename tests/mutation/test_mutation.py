"""Changes are found, drawn and put in place; which blocks run is told; those called equivalent exist."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mutation.__main__ import FEWEST, SOURCE, drawn, equivalent
from mutation.blocks import HITS, instrument
from mutation.changes import Mutant, mutants
from mutation.trial import change, functions

CHANGED = '''
LIMIT = 0.5

def clip(values, *, low=0) -> int:
    """The docstring says 1 + 1."""
    if not values or len(values) <= low:
        values.append(low)
    return sum(
        values
    )
'''
EXPECTED = {
    "-: 0.5 -> 1.0",
    "clip: 0 -> 1",
    "clip: not values or len(values) <= low -> (not (not values or len(values) <= low))",
    "clip: not values or len(values) <= low -> (not values and len(values) <= low)",
    "clip: not values -> (values)",
    "clip: len(values) <= low -> (len(values) < low)",
    "clip: values.append(low) -> pass",
    "clip: return sum( values ) -> return (sum(values)) + 1",
}
LEFT_OUT = '''
"""Texts."""
from typing import TYPE_CHECKING, cast
if TYPE_CHECKING:
    SIZE = 1
__all__ = ["a"]
Pair = tuple[int, 1] | None

@dataclass(frozen=True)
class Box:
    numel: "Literal[1]"

    def __repr__(self):
        return "1" * 3

    def grow(self) -> int:
        raise NotImplementedError

def check(a, b):
    assert a == b, 1
    warnings.warn(f"{1 + 1}", stacklevel=2)
    a = cast("Literal[1]", a)
    for each in zip(a, b, strict=True):
        f"{each + 1}"
'''


def package(folder: Path, text: str) -> Path:
    (folder / "sample").mkdir()
    (folder / "sample" / "__init__.py").write_text(text)
    return folder / "sample"


def imported(source: Path) -> Any:
    spec = importlib.util.spec_from_file_location("sample", source / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_kind_of_change_is_found_and_no_other(tmp_path: Path) -> None:
    found = mutants(package(tmp_path, CHANGED))
    assert {str(one).partition(" ")[2] for one in found} == EXPECTED
    assert [one.line for one in found if one.kind == "constant"] == [2, 4]


def test_what_is_no_behaviour_is_left_out(tmp_path: Path) -> None:
    assert [str(one) for one in mutants(package(tmp_path, LEFT_OUT))] == []


def test_a_changed_file_has_its_lines_where_they_were(tmp_path: Path) -> None:
    source = package(tmp_path, CHANGED).joinpath("__init__.py").read_bytes()
    for one in mutants(tmp_path / "sample"):
        changed = one.applied(source)
        compile(changed, "sample", "exec")
        assert changed != source
        assert changed.count(b"\n") == source.count(b"\n")


def test_a_function_is_given_the_changed_code_and_those_beside_it_keep_theirs(tmp_path: Path) -> None:
    source = package(tmp_path, f"{CHANGED}\ndef other(values):\n    return clip(values)\n")
    module = imported(source)
    (one,) = [one for one in mutants(source) if one.kind == "return" and one.function == "clip"]
    before = module.other.__code__
    assert module.other([2, 3]) == 5
    assert change(one, source, functions(source)) == 1
    assert module.other([2, 3]) == 6
    assert module.other.__code__ is before


def test_blocks_tell_that_they_were_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = package(tmp_path, CHANGED)
    assert instrument(source) == [f"__init__.py:clip#{k}" for k in range(3)]
    (tmp_path / "hits").write_bytes(bytes(3))
    monkeypatch.setenv(HITS, str(tmp_path / "hits"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builtins, "_hit", None, raising=False)
    try:
        clip = importlib.import_module("sample").clip
    finally:
        sys.modules.pop("sample"), sys.modules.pop("sample._hit")
    assert clip.__doc__ == "The docstring says 1 + 1."
    assert (tmp_path / "hits").read_bytes() == bytes([0, 0, 0])
    clip([2])
    assert (tmp_path / "hits").read_bytes() == bytes([1, 1, 0])
    clip([])
    assert (tmp_path / "hits").read_bytes() == bytes([1, 1, 1])


def test_a_draw_has_of_each_package_and_stays_where_others_go() -> None:
    found = [
        Mutant(package, f"{package}.py", 1, "f", "constant", str(n), "0", 1, (), (), (0, 1))
        for package, count in (("large", 900), ("small", 30))
        for n in range(count)
    ]
    chosen = drawn(found, 93, 0)
    assert Counter(one.package for one in chosen) == {"large": 90, "small": FEWEST}
    gone = next(one for one in found if one not in chosen)
    assert drawn([one for one in found if one is not gone], 93, 0) == chosen
    assert drawn(found, 93, 1) != chosen


def test_what_is_called_equivalent_can_be_done_and_has_a_reason() -> None:
    same = equivalent()
    known = {str(one) for one in mutants(SOURCE, {name.partition(" ")[0] for name in same})}
    assert [name for name, reason in same.items() if name not in known or not reason] == []
