"""Every small change of the source: `mutants` finds them in the syntax, and says which block each is in.

    compare       `<` for `<=`, `==` for `!=`, `in` for `not in`
    arithmetic    `+` for `-`, `*` for `//`, and their like
    logic         `and` for `or`; without `not`
    condition     of `if`, `while` and comprehensions, negated
    constant      a number and its double or next; True for False
    statement     a call, a store into something, `raise`, `break` left out
    return        None, or what is not so: another truth, the next number

Left out is what no user relies on: texts (and the arguments of what is raised or warned), `__repr__`, types,
`__all__`, what is declared and has no body, assertions (`strict` of `zip` too), numbers in drawings,
`picture.py`, whose matplotlib is an extra, and the two modules that do nothing but start the command.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mutation.blocks import FUNCTIONS, numbered

OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
REMOVED = (ast.AugAssign, ast.Delete, ast.Raise, ast.Break, ast.Continue)
TYPES = {"cast", "TypeVar", "ParamSpec", "NewType", "isinstance", "issubclass"}
TEXTS = {
    "dataclass",
    "warn",
    "warning",
    "info",
    "debug",
    "print",
    "print_exception",
    "help",
    "Option",
    "Argument",
}
DRAWINGS, NOT_RUN = ("planner/page.py",), ("planner/picture.py", "run.py", "__main__.py")
NOT_SEEN = ("stacklevel", "help", "strict", "repr")  # keywords


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    package: str
    file: str  # below the package
    line: int
    function: str
    kind: str
    before: str
    after: str
    occurrence: int  # among those that read alike, in this function
    blocks: tuple[str, ...]  # that come to it; empty where an import does
    names: tuple[str, ...]  # that an import binds to it
    span: tuple[int, int]  # bytes of the file

    def __str__(self) -> str:
        which = f" ({self.occurrence})" if self.occurrence > 1 else ""
        return f"{self.file} {self.function or '-'}{which}: {one_line(self.before)} -> {one_line(self.after)}"

    def key(self, text: bytes) -> str:
        """Of what it is a change of, wherever that stands."""
        return hashlib.sha1(f"{self}\n".encode() + text).hexdigest()[:16]

    def applied(self, source: bytes) -> bytes:
        """The file with it, lines where they were."""
        begin, end = self.span
        lines = "\n" * (self.before.count("\n") - self.after.count("\n"))
        after = f"{self.after[:-1]}{lines})" if self.after.endswith(")") else self.after + lines
        return source[:begin] + after.encode() + source[end:]


def one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < 100 else f"{text[:70]}...{text[-27:]}"


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _bound(statement: ast.stmt) -> list[str]:
    """Names by which the rest of the program gets at what an import makes here."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return [statement.name]
    return [
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


class _Finder:
    def __init__(self, package: str, file: str, source: bytes) -> None:
        self.package, self.file, self.source = package, file, source
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.block_of = {id(each): name for name, run in numbered(file, self.tree).items() for each in run}
        self.function, self.block, self.names = "", "", ("",)
        self.returns = ""
        self.found: list[Mutant] = []
        self.alike: Counter[tuple[str, ...]] = Counter()

    def add(self, kind: str, node: ast.AST, after: str) -> None:
        span = (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )
        before = self.source[slice(*span)].decode()
        reads = (self.function, one_line(before), one_line(after))
        self.alike[reads] += 1
        self.found.append(
            Mutant(
                self.package, self.file, node.lineno, self.function, kind, before, after, self.alike[reads],  # type: ignore[attr-defined]
                (self.block,) if self.block else (), self.names, span,
            )
        )  # fmt: skip

    def changed(self, kind: str, node: ast.AST, attribute: str, value: object) -> None:
        """`node` with another value of an attribute."""
        old = getattr(node, attribute)
        setattr(node, attribute, value)
        text = ast.unparse(ast.fix_missing_locations(node))
        setattr(node, attribute, old)
        self.add(kind, node, text if isinstance(node, ast.stmt) else f"({text})")

    def negate(self, test: ast.expr) -> None:
        is_negated_elsewhere = (
            isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and not isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
        )
        if not is_negated_elsewhere and not isinstance(test, (ast.UnaryOp, ast.Constant)):
            self.add("condition", test, f"(not ({ast.unparse(test)}))")

    # ------------------------------------------------------------ walking

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement(node)
        elif isinstance(node, ast.expr):
            self.expression(node)
        else:
            if isinstance(node, ast.comprehension):
                for test in node.ifs:
                    self.negate(test)
            self.children(node)

    def children(self, node: ast.AST, *, but: tuple[object, ...] = ()) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "pattern", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not any(child is each for each in but):
                    self.visit(child)

    def statement(self, node: ast.stmt) -> None:
        kept = self.function, self.block, self.names, self.returns
        self.block = self.block_of.get(id(node), self.block)
        if not self.block and not self.function:
            self.names = tuple(_bound(node))
        self._statement(node)
        self.function, self.block, self.names, self.returns = kept

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case (
                ast.FunctionDef(name="__repr__" | "__str__") | ast.Assert() | ast.Import() | ast.ImportFrom()
            ):
                return
            case ast.FunctionDef() | ast.ClassDef():
                self.function = f"{self.function}.{node.name}".lstrip(".")
                if isinstance(node, ast.FunctionDef):
                    self.returns = ast.unparse(node.returns) if node.returns else ""
            case ast.If(test=test):
                if "TYPE_CHECKING" in ast.unparse(test):
                    return
                self.negate(test)
            case ast.While(test=test):
                self.negate(test)
            case ast.Expr(value=ast.Constant()) | ast.Raise(exc=ast.Name(id="NotImplementedError")):
                return
            case ast.Expr(value=ast.Call(func=func)) if _name(func) in TEXTS:
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                is_type = (
                    not self.function
                    and isinstance(value, (ast.BinOp, ast.Subscript))
                    and name[:1].isupper()
                    and not name.isupper()
                )
                if name == "__all__" or is_type:
                    return
            case ast.AugAssign(op=op):
                if type(op) in OTHER:
                    self.changed("arithmetic", node, "op", OTHER[type(op)]())
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                text = ast.unparse(value)
                what = {"bool": f"not ({text})", "int": f"({text}) + 1"}.get(self.returns, "None")
                if not (self.returns == "bool" and isinstance(value, ast.Compare)):
                    self.add("return", node, f"return {what}")
        is_store = isinstance(node, ast.Assign) and not any(
            isinstance(t, (ast.Name, ast.Tuple)) for t in node.targets
        )
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if self.function and (is_store or is_call or isinstance(node, REMOVED)):
            self.add("statement", node, "pass")
        self.children(node, but=(getattr(node, "exc", None), getattr(node, "cause", None)))

    def expression(self, node: ast.expr) -> None:
        match node:
            case ast.JoinedStr() | ast.Lambda(body=ast.Constant(value=None)):
                return
            case ast.Call(func=func, args=args) if _name(func) in TYPES:
                self.children(node, but=tuple(args[:1] if _name(func) == "cast" else args[1:]))
                return
            case ast.Call(func=func) if _name(func) in TEXTS or _name(func).endswith(
                ("Error", "Failure", "Warning")
            ):
                return
            case ast.Compare(ops=[op]):
                self.changed("compare", node, "ops", [OTHER[type(op)]()])
            case ast.BinOp(left=left, op=op) if type(op) in OTHER:
                is_text = any(
                    isinstance(side, ast.JoinedStr)
                    or (isinstance(side, ast.Constant) and isinstance(side.value, str))
                    for side in (left, node.right)
                )
                is_path = isinstance(op, ast.Div) and isinstance(node.right, (ast.Constant, ast.JoinedStr))
                if is_text or (is_path and not isinstance(getattr(node.right, "value", None), (int, float))):
                    return
                self.changed("arithmetic", node, "op", OTHER[type(op)]())
            case ast.BoolOp(op=op):
                self.changed("logic", node, "op", OTHER[type(op)]())
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                self.add("logic", node, f"({ast.unparse(operand)})")
            case ast.IfExp(test=test):
                self.negate(test)
            case ast.Constant(value=bool() as value):
                self.add("constant", node, str(not value))
            case ast.Constant(value=int() | float() as value) if not self.file.startswith(DRAWINGS):
                self.add(
                    "constant",
                    node,
                    repr(value + 1 if value in (0, 1) or isinstance(value, int) else value * 2),
                )
        self.children(node, but=tuple(k for k in getattr(node, "keywords", ()) if k.arg in NOT_SEEN))


def mutants(source: Path, files: Collection[str] = ()) -> list[Mutant]:
    """All of the package in the folder `source`, or of some files in it."""
    found = []
    for path in sorted(source.rglob("*.py")):
        file = path.relative_to(source).as_posix()
        if file in NOT_RUN or (files and file not in files):
            continue
        finder = _Finder(file.split("/")[0].removesuffix(".py"), file, path.read_bytes())
        finder.children(finder.tree)
        found += finder.found
    return found
