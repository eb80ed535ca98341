"""The index of errors: every message that the package raises on purpose, with its cause and what to do.

Messages, kinds and places are read from the code. A message mostly says what to do itself, after its last
semicolon; what the guide to fully_shard explains of it (its table of errors) is shown in place of that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sources import Source, cell, first_sentence, link

PAGE = "errors.md"
BASE = "ShardwiseError"


@dataclass(frozen=True)
class Raised:
    kind: str
    message: str  # what is filled in stands in braces
    path: str
    line: int


def kinds(sources: list[Source]) -> dict[str, tuple[str, str]]:
    """Every subclass of the base, wherever it is defined: (its docstring, the path of its file)."""
    classes = [
        (node, source.path)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    found: dict[str, tuple[str, str]] = {}
    while True:
        known = {BASE, *found}
        more = {
            node.name: (ast.get_docstring(node) or "", path)
            for node, path in classes
            if node.name not in found and known & {ast.unparse(base) for base in node.bases}
        }
        if not more:
            return found
        found.update(more)


def raised(sources: list[Source]) -> list[Raised]:
    """Every place that makes an error of these kinds with a message of its own."""
    known = {BASE, *kinds(sources)}
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                for message in _texts(node.args[0]) if node.args else ():
                    if re.search(r"[a-z]{3}", re.sub(r"\{[^}]*\}", "", message)):
                        found.append(Raised(node.func.id, message, source.path, node.lineno))
    return found


def _texts(node: ast.expr) -> Iterator[str]:
    """What an expression may give as text: both ways of a condition, expressions in braces."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for left in _texts(node.left):
            for right in _texts(node.right):
                yield left + right
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else _filled_in(part.value)
            for part in node.values
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        )
    else:
        yield _filled_in(node)


def _filled_in(node: ast.expr) -> str:
    """`{here()}` is a rank; of other expressions the last name says what stands there."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "here":
        return "rank R"
    names = [n.attr if isinstance(n, ast.Attribute) else n.id for n in _named(node)]
    return "{" + (names[0] if names else "...") + "}"


def _named(node: ast.expr) -> list[ast.Attribute | ast.Name]:
    """Names and attributes in an expression, the outermost first, without functions of formatting."""
    formatting = {
        "str",
        "list",
        "tuple",
        "type",
        "join",
        "repr",
        "len",
        "sorted",
        "dict",
        "__name__",
        "shape",
    }
    return [
        n
        for n in ast.walk(node)
        if (isinstance(n, ast.Attribute) and n.attr not in formatting)
        or (isinstance(n, ast.Name) and n.id not in formatting)
    ]


def explained(guide: str) -> list[tuple[str, str, str]]:
    """(what the message says, cause, remedy) of the guide's table of errors."""
    section = guide.split("\n## Errors\n")[1]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return [(says.removesuffix(" (a warning)"), cause, cure) for says, cause, cure in rows[1:]]


def page(sources: list[Source], guide: str) -> str:
    """The index, by kind and by the package that raises."""
    package = [source for source in sources if source.path.startswith("src/")]
    known, places, told = kinds(package), raised(package), explained(guide)
    lines = [
        "# Errors",
        "",
        "Every error that shardwise raises on purpose, made from the code. Words *{in braces}* are",
        "filled in. To find yours, search the page for a few words of it.",
        "",
        f"Every kind is a `{BASE}`. A message names the rank, the parameter or module, what was expected,",
        "what was found, and what to do.",
        "",
        "| kind | means | messages |",
        "|---|---|--:|",
    ]
    for kind, (about, _) in known.items():
        count = sum(one.kind == kind for one in places)
        lines.append(f"| [`{kind}`](#{kind.lower()}) | {cell(first_sentence(about))} | {count} |")
    lines += ["", "## The commonest", "", "| message says | cause | what to do |", "|---|---|---|"]
    lines += [f"| {says} | {site(cause)} | {site(cure)} |" for says, cause, cure in told]
    for kind, (about, path) in known.items():
        lines += ["", f"## {kind}", "", f"{about} Defined in {link(path, page=PAGE)}.", ""]
        own = [one for one in places if one.kind == kind]
        for folder in dict.fromkeys(_package(one.path) for one in own):
            lines += [
                f"### {kind}: {folder}",
                "",
                "| what went wrong | what to do | raised in |",
                "|---|---|---|",
            ]
            for one in own:
                if _package(one.path) == folder:
                    cause, cure = _parts(one.message, told)
                    where = link(one.path, page=PAGE, shown=one.path.removeprefix("src/shardwise/"))
                    anchored = where.replace(".md)", f".md#__codelineno-0-{one.line})")
                    lines.append(f"| {_shown(cause)} | {cure} | {anchored} |")
            lines.append("")
    return "\n".join([*lines, ""])


def _package(path: str) -> str:
    parts = path.removeprefix("src/shardwise/").split("/")
    return parts[0].removesuffix(".py")


def _parts(message: str, told: list[tuple[str, str, str]]) -> tuple[str, str]:
    """(what went wrong, what to do) of a message."""
    for says, _, cure in told:
        if says in message:
            return message, site(cure)
    cut = max(
        message.rfind("; "), message.rfind(": use "), message.rfind(": pass "), message.rfind(": call ")
    )
    if cut < 0:
        return message, ""
    return message[:cut], _shown(message[cut + 2 :])


def _shown(message: str) -> str:
    """As text of a table: no character of it is markup."""
    escaped = re.sub(r"([\\`*_|\[\]<>#])", r"\\\1", " ".join(message.split()))
    return re.sub(r"\{([^{}]*)\}", r"*{\1}*", escaped)


def site(text: str) -> str:
    """Links of the guide's table, from this page."""
    return re.sub(r"\]\(#", "](fsdp.md#", text)
